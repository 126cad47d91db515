"""Formats that an output must have: fields of a request -> the setting of `generate` for its grammar.

OpenAI's `response_format`, which is `text.format` in the Responses API, and vLLM's `structured_outputs` and `guided_...`. At
most one of them may be given. xgrammar's own refusals come later, from a trial (trials.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from foreword.files import BadJSON, parse_json
from foreword.serve.errors import Refusal
from foreword.serve.fields import GenerationFields, Object
from foreword.text.grammar import ANY_OBJECT, MOST_WHITESPACE

MOST_CHOICES = 1024
KINDS = ("text", "json_object", "json_schema", "structural_tag")  # of a response_format


def format_settings(fields: GenerationFields, response_format: Any = None, its_name: str = "response_format") -> Object:
    """Return the setting that the format of an output is, or nothing. `its_name`: the field of `response_format`."""
    given: dict[str, Object] = {}
    if response_format is not None:
        given[its_name] = _of_response_format(response_format, its_name)
    if fields.structured_outputs is not None:
        given["structured_outputs"] = _of_structured_outputs(fields.structured_outputs)
    for name in OUTPUTS:
        value = getattr(fields, f"guided_{name}", None)
        if value is not None:
            given[f"guided_{name}"] = _one(name, value, f"guided_{name}")
    found = {name: setting for name, setting in given.items() if setting}
    if len(found) > 1:
        *_, last = found
        raise _refused(f"{' and '.join(found)} are given; an output has one format, so give one of them", last)
    return next(iter(found.values()), {})


def as_part(setting: Object) -> Object:
    """Return a format of `format_settings` as a part of a structural tag."""
    ((kind, value),) = setting.items()
    if kind == "json_schema":
        return schema_part(parse_json(ANY_OBJECT) if value is True else value)
    if kind == "structural_tag":
        part: Object = value["format"]
        return part
    return {"type": kind, {"regex": "pattern", "grammar": "grammar"}[kind]: value}


def schema_part(schema: Object) -> Object:
    """Return a JSON schema as a part of a structural tag."""
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MOST_WHITESPACE}


def _of_response_format(given: Any, field: str) -> Object:
    kind = given.get("type") if isinstance(given, dict) else None
    if kind not in KINDS:
        raise _refused(f"{field} must be an object whose type is one of {', '.join(KINDS)}", field)
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": True}
    if kind == "structural_tag":
        return {"structural_tag": _structural_tag(given, field)}
    about = _object(given.get("json_schema"), f"{field}.json_schema")
    return {"json_schema": _object(about.get("schema"), f"{field}.json_schema.schema")}


def _of_structured_outputs(given: Object) -> Object:
    """Return the setting of vLLM's `structured_outputs`."""
    field = "structured_outputs"
    named = {name: value for name, value in given.items() if value is not None and value is not False}
    if len(named) != 1 or not named.keys() <= OUTPUTS.keys():
        raise _refused(f"{field} must have exactly one of {', '.join(OUTPUTS)}", field)
    ((name, value),) = named.items()
    return _one(name, value, field)


def _one(name: str, value: Any, field: str) -> Object:
    setting, read = OUTPUTS[name]
    return {setting: read(value, field)}


def _object(value: Any, what: str) -> Object:
    if not isinstance(value, dict):
        raise _refused(f"{what} must be an object", what)
    return value


def _schema(value: Any, field: str) -> Object:
    """Return a JSON schema, which may be given as its text."""
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except BadJSON as error:
            raise _refused(f"{field} holds a JSON schema that is no JSON", field) from error
    return _object(value, field)


def _structural_tag(value: Any, field: str) -> Object:
    found = _object(value, field)
    return {"type": "structural_tag", "format": _object(found.get("format"), f"{field}.format")}


def _string(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise _refused(f"{field} must hold a string", field)
    return value


def _choices(value: Any, field: str) -> str:
    """Return rules that allow some texts."""
    texts = value if isinstance(value, list) else []
    if not 1 <= len(texts) <= MOST_CHOICES or not all(isinstance(text, str) and text for text in texts):
        raise _refused(f"{field} must have 1 to {MOST_CHOICES} texts to choose from, none of them empty", field)
    return "root ::= " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)


def _yes(value: Any, field: str) -> bool:
    if value is not True:
        raise _refused(f"{field} must have json_object: true", field)
    return True


def _refused(message: str, place: str) -> Refusal:
    """Return a refusal that names the field which a place is in."""
    return Refusal(400, message, param=place.partition(".")[0])


# name in vLLM: (setting, what reads its value)
OUTPUTS: dict[str, tuple[str, Callable[[Any, str], Any]]] = {
    "json": ("json_schema", _schema),
    "json_object": ("json_schema", _yes),
    "regex": ("regex", _string),
    "choice": ("grammar", _choices),
    "grammar": ("grammar", _string),
    "structural_tag": ("structural_tag", _structural_tag),
}

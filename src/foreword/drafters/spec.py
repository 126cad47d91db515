"""Method specs: a method as one string, NAME, NAME=FOLDER or FOLDER, optionally with options, as in gsd:repeat=0:width=4.

In: a spec, or several separated by commas, from a command line or a call. Out: its parts; numbers, tuples, true and false
are parsed. This file knows no method and does not import torch; `resolve.py` interprets the parts.
"""

from __future__ import annotations

import ast
import os
import re
from typing import Any, NamedTuple

_OPTION = re.compile(r":(?=[a-z_]+=)")  # a folder may contain a colon, but hardly one before `name=`
# Specs are separated by a comma before a name or a folder. A comma before a number is part of an option, as in taps=8,16.
_SEPARATOR = re.compile(r",(?=\s*(?:[A-Za-z~/]|\.{1,2}/))")
_FROM_FOLDER = "auto"  # the method of a folder alone: its config names the method


class MethodSpec(NamedTuple):
    name: str
    folder: str | None
    options: dict[str, Any]


def split_specs(text: str) -> list[str]:
    """Split a comma-separated list of specs."""
    return [spec.strip() for spec in _SEPARATOR.split(text)]


def parse_spec(text: str) -> MethodSpec:
    """Parse one spec into the method's name, the folder of a drafter if there is one, and options."""
    method, *options = _OPTION.split(text)
    pairs = (option.partition("=") for option in options)
    values = {key: parse_value(value) for key, _, value in pairs}
    name, separator, folder = method.partition("=")
    if os.sep in name or name.startswith("~"):
        return MethodSpec(_FROM_FOLDER, method, values)
    return MethodSpec(name, folder if separator else None, values)


def parse_value(text: str) -> Any:
    """Parse the value of an option: true, false, a Python literal, or otherwise a string."""
    if text in ("true", "false"):
        return text == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text

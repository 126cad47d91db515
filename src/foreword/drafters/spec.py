"""How a method is asked for in one word: NAME, NAME=FOLDER or FOLDER, each perhaps with options, as in gsd:repeat=0:width=4.

In: the word, or several with commas between them, from a command line or a call. Out: its parts, with numbers, tuples, true
and false read as such. Knows no method and imports no torch; what the parts mean is for `resolve.py` to say.
"""

from __future__ import annotations

import ast
import os
import re
from typing import Any, NamedTuple

_OPTION = re.compile(r":(?=[a-z_]+=)")  # a folder may have a colon in it, but hardly one before such a thing
# VocabularyHead: a comma before a name or a folder, and not one before a number, as in taps=8,16
_BETWEEN = re.compile(r",(?=\s*(?:[A-Za-z~/]|\.{1,2}/))")
_ITSELF = "auto"  # a folder alone says itself of which method it is


class MethodSpec(NamedTuple):
    name: str
    folder: str | None
    options: dict[str, Any]


def split_specs(text: str) -> list[str]:
    return [word.strip() for word in _BETWEEN.split(text)]


def parse_spec(text: str) -> MethodSpec:
    what, *texts = _OPTION.split(text)
    pairs = (option.partition("=") for option in texts)
    options = {key: parse_value(value) for key, _, value in pairs}
    name, both, folder = what.partition("=")
    if os.sep in name or name.startswith("~"):
        return MethodSpec(_ITSELF, what, options)
    return MethodSpec(name, folder if both else None, options)


def parse_value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):  # a word
        return text

"""JSON from untrusted files: parsed, or refused with one kind of error.

`json.loads` alone raises RecursionError for deep nesting, and accepts values that fail later, far from their cause: NaN and
Infinity, halves of a surrogate pair, nesting too deep for `repr`.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

DEEPEST = 64  # levels of nesting; nothing that Foreword reads has ten
LARGEST = 1 << 28  # bytes of a file that is read at once
TOO_DEEP = f"brackets nest deeper than {DEEPEST} levels"


class BadJSON(ValueError):
    """The input is no usable JSON. The message says why; the caller adds where."""


def read_json(file: Path, strict: bool = True) -> Any:
    """Parse a whole file. OSError is left to the caller."""
    with file.open("rb") as stream:
        return parse_json(read_all(stream), strict)


def read_all(stream: IO[bytes]) -> bytes:
    """Read the rest of a stream, up to a limit: some streams never end, such as /dev/zero."""
    found = stream.read(LARGEST + 1)
    if len(found) > LARGEST:
        raise BadJSON(f"it has more than {LARGEST} bytes")
    return found


def lines_of(stream: IO[bytes], longest: int) -> Iterator[bytes]:
    """Yield lines with their ends, of at most `longest` bytes: in a file that is no text, a line may never end."""
    while line := stream.readline(longest + 1):
        if len(line) > longest:
            raise BadJSON(f"a line has more than {longest} bytes")
        yield line


def parse_json(text: str | bytes, strict: bool = True) -> Any:
    """Parse one value; raise BadJSON, never RecursionError or UnicodeDecodeError.

    Without `strict`, NaN and halves of surrogate pairs are accepted: files of others may hold them in fields that are not
    used.
    """
    try:
        whole = text if isinstance(text, str) else text.decode("utf-8")
        value = json.loads(whole, parse_constant=_refuse if strict else None)
    except RecursionError as error:
        raise BadJSON(TOO_DEEP) from error
    except ValueError as error:  # no JSON, no UTF-8, or an integer with more digits than Python reads
        raise BadJSON(str(error)) from error
    _check(value, strict)
    return value


def _refuse(constant: str) -> None:
    raise BadJSON(f"{constant} is no number of JSON")


def _check(value: Any, strict: bool) -> None:
    """Check everything inside a value, level by level."""
    level = [value]
    for _ in range(DEEPEST):
        for one in level if strict else ():
            _check_one(one)
        level = [inner for one in level if isinstance(one, dict | list) for inner in _inside(one)]
        if not level:
            return
    raise BadJSON(TOO_DEEP)


def _inside(container: dict[str, Any] | list[Any]) -> list[Any]:
    return [*container, *container.values()] if isinstance(container, dict) else container


def _check_one(value: Any) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise BadJSON("a number is too large")
    try:
        if isinstance(value, str):
            value.encode()
    except UnicodeEncodeError as error:
        raise BadJSON("a string holds half of a surrogate pair, which is no character") from error

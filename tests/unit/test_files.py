"""JSON from untrusted files: parsed, or refused with one kind of error."""

import io
import math
from pathlib import Path

import pytest

from foreword import files
from foreword.files import DEEPEST, BadJSON, lines_of, parse_json, read_json


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ("[" * 100_000, "deeper than"),
        ('{"a":' * 100_000, "deeper than"),
        ("[" * 500 + "]" * 500, "deeper than"),
        ("1" * 5000, "4300 digits"),
        ("[1, NaN]", "NaN"),
        ("-Infinity", "Infinity"),
        ("[1e999]", "too large"),
        (r'{"a": ["\ud800"]}', "surrogate"),
        (r'{"\udc00": 1}', "surrogate"),
        (b'"\xff"', "can't decode"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_bad_json_is_refused_with_the_reason(text: str | bytes, reason: str) -> None:
    with pytest.raises(BadJSON, match=reason):
        parse_json(text)


def test_good_json_is_read(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('{"a": [1, 2.5, null, true, "é \\ud83d\\ude00"]}', encoding="utf-8")
    assert read_json(file) == {"a": [1, 2.5, None, True, "é 😀"]}
    assert parse_json("[" * DEEPEST + "]" * DEEPEST)


def test_files_of_others_are_read_less_strictly() -> None:
    assert parse_json('["\\ud800", 1e999]', strict=False) == ["\ud800", math.inf]
    assert math.isnan(parse_json("NaN", strict=False))
    for text in ("[" * 500 + "]" * 500, "9" * 5000, "{"):
        with pytest.raises(BadJSON):
            parse_json(text, strict=False)


def test_a_stream_that_does_not_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LARGEST", 100)
    with pytest.raises(BadJSON, match="more than 100 bytes"):
        read_json(Path("/dev/zero"))
    with Path("/dev/zero").open("rb") as stream, pytest.raises(BadJSON, match="a line has more than 50 bytes"):
        next(lines_of(stream, 50))
    assert [*lines_of(io.BytesIO(b"a\n\n" + b"b" * 50), 50)] == [b"a\n", b"\n", b"b" * 50]


def test_a_missing_file_is_left_to_the_caller(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "a.json")

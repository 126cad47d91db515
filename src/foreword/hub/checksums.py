"""Sizes and sha256 of a converted model's files, in a file next to them: what was written is compared with what is there.

In: the folder of a model that `hub` made. Out: what is wrong with it. Sizes are compared whenever the model is loaded, which
costs nothing; hashes, for which all bytes are read, by `foreword doctor --full`.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from foreword.files import BadJSON, read_json

NAME = "checksums.json"


def write_checksums(folder: Path) -> None:
    """Of all files that are in the folder now."""
    found = {file.name: {"bytes": file.stat().st_size, "sha256": _sha256(file)} for file in sorted(folder.iterdir())}
    (folder / NAME).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def check_sizes(folder: Path) -> list[str]:
    """What is wrong, file by file, as far as sizes tell. A folder without checksums has nothing to compare with."""
    return _compared(folder, hashes=False) or []


def verify_model(folder: Path) -> list[str] | None:
    """The same with every byte read; None where no checksums were kept, as in a folder of the user's own."""
    return _compared(folder, hashes=True)


def _compared(folder: Path, hashes: bool) -> list[str] | None:
    try:
        kept = read_json(folder / NAME)
        return [wrong for name, file in kept.items() if (wrong := _fault(folder / name, file, hashes))]
    except FileNotFoundError:
        return None
    except (OSError, BadJSON, LookupError, TypeError, AttributeError) as error:
        return [f"{NAME} cannot be read ({error})"]


def _fault(file: Path, kept: dict[str, Any], hashes: bool) -> str | None:
    if not file.is_file():
        return f"{file.name} is missing"
    if (size := file.stat().st_size) != kept["bytes"]:
        return f"{file.name} has {size} bytes, {kept['bytes']} were written"
    if hashes and _sha256(file) != kept["sha256"]:
        return f"{file.name} holds other bytes than were written (its sha256 differs)"
    return None


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()

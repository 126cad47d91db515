"""Sizes and sha256 of a converted model's files, stored next to them, to find damaged files.

In: the folder of a model that `hub` made. Out: what is wrong with it. Sizes are compared whenever the model is loaded, which
costs nothing. Hashes need all bytes to be read; `foreword doctor --full` compares them.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from foreword.files import BadJSON, read_json

NAME = "checksums.json"


def write_checksums(folder: Path) -> None:
    """Write the checksums of all files in a folder."""
    found = {file.name: {"bytes": file.stat().st_size, "sha256": _sha256(file)} for file in sorted(folder.iterdir())}
    (folder / NAME).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def check_sizes(folder: Path) -> list[str]:
    """Return what is wrong, file by file, as far as sizes show it. A folder without checksums has no faults."""
    return _compared(folder, hashes=False) or []


def verify_model(folder: Path) -> list[str] | None:
    """Return the same with every byte read; None if there are no checksums, as in a user's own folder."""
    return _compared(folder, hashes=True)


def _compared(folder: Path, hashes: bool) -> list[str] | None:
    try:
        stored = read_json(folder / NAME)
        return [wrong for name, file in stored.items() if (wrong := _fault(folder / name, file, hashes))]
    except FileNotFoundError:
        return None
    except (OSError, BadJSON, LookupError, TypeError, AttributeError) as error:
        return [f"{NAME} cannot be read ({error})"]


def _fault(file: Path, stored: dict[str, Any], hashes: bool) -> str | None:
    if not file.is_file():
        return f"{file.name} is missing"
    if (size := file.stat().st_size) != stored["bytes"]:
        return f"{file.name} has {size} bytes, {stored['bytes']} were written"
    if hashes and _sha256(file) != stored["sha256"]:
        return f"{file.name} holds other bytes than were written (its sha256 differs)"
    return None


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()

"""Trained drafters and plans that ship with Foreword: one folder each, `weights/<method>/`, as `train` or `search` wrote it.

Read without torch, so that `foreword methods` answers at once. `auto.shipped_for` finds those that were trained for a
target, by its fingerprint.
"""

from __future__ import annotations

from pathlib import Path

from foreword.errors import DrafterError
from foreword.files import read_json
from foreword.methods import METHODS, trained_as

WEIGHTS = Path(__file__).parents[1] / "weights"


def shipped() -> dict[str, Path]:
    """Return the folder of each method that ships with a trained drafter."""
    folders = {name: WEIGHTS / trained_as(name) for name, method in METHODS.items() if method.fitted}
    return {name: folder for name, folder in folders.items() if (folder / "config.json").is_file()}


def model_of(folder: Path) -> str:
    """Return the name of the model that a drafter was trained for."""
    try:
        return str(read_json(folder / "config.json")["target"]["name"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DrafterError(f"{folder / 'config.json'} cannot be read ({error}); install Foreword again") from error

"""Trained drafters that come with Foreword: `weights/<method>/`, a folder each, as training left them.

Read without torch, so that a listing of the methods answers at once. Whether one serves a target at hand is for
its fingerprint to say: `auto.shipped_for`.
"""

from __future__ import annotations

from pathlib import Path

from foreword.errors import DrafterError
from foreword.files import read_json
from foreword.methods import METHODS, trained_as

WEIGHTS = Path(__file__).parents[1] / "weights"


def shipped() -> dict[str, Path]:
    """Method -> folder."""
    folders = {name: WEIGHTS / trained_as(name) for name, method in METHODS.items() if method.trained}
    return {name: folder for name, folder in folders.items() if (folder / "config.json").is_file()}


def model_of(folder: Path) -> str:
    """The name of the model that a drafter was trained for."""
    try:
        return str(read_json(folder / "config.json")["target"]["name"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DrafterError(f"{folder / 'config.json'} cannot be read ({error}); install Foreword again") from error

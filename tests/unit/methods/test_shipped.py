"""Drafters that ship: complete folders for the default model; one that cannot be read is named."""

from collections.abc import Callable
from pathlib import Path

import pytest

from foreword.errors import DrafterError
from foreword.methods import trained_as
from foreword.methods.auto import recorded
from foreword.methods.saved import outline
from foreword.methods.shipped import WEIGHTS, model_of, shipped
from foreword.model.hub import DEFAULT


def test_the_folder_is_there() -> None:
    assert (WEIGHTS / "README.md").is_file()
    assert {one.name for one in WEIGHTS.iterdir() if one.is_dir()} == set(map(trained_as, shipped()))


def test_what_ships_is_complete() -> None:
    for method, folder in shipped().items():
        assert {"config.json", "model.safetensors", "record.json", "README.md"} <= {file.name for file in folder.iterdir()}
        assert model_of(folder) == DEFAULT.name
        assert type(outline(folder, method=method)).__module__ == f"foreword.methods.{method}"
        assert recorded(folder)[-1].tokens > 1


def test_what_ships_is_found_by_its_folder(trained: dict[str, Path], ship: Callable[[Path], Path]) -> None:
    assert shipped() == {}
    folders = {method: ship(trained[method]) for method in ("clover", "medusa")}
    assert shipped() == folders and list(shipped()) == ["medusa", "clover"]  # in the order of the table


def test_a_damaged_one_is_named(trained: dict[str, Path], ship: Callable[[Path], Path]) -> None:
    folder = ship(trained["medusa"])
    for text in ("{", "{}", '{"target": {}}', '{"target": 3}'):
        (folder / "config.json").write_text(text)
        with pytest.raises(DrafterError, match="medusa/config.json cannot be read"):
            model_of(folder)

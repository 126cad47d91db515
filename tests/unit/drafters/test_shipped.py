"""Drafters that ship: complete folders for the default model; one that cannot be read is named."""

from collections.abc import Callable
from pathlib import Path

import pytest

from foreword.drafters.auto import recorded_tokens
from foreword.drafters.checkpoint import read_weights
from foreword.drafters.saved import outline
from foreword.drafters.shipped import WEIGHTS, model_of, shipped
from foreword.errors import DrafterError
from foreword.hub.resolve import DEFAULT
from foreword.methods import trained_as


def test_the_folder_is_there() -> None:
    assert (WEIGHTS / "README.md").is_file()
    assert {one.name for one in WEIGHTS.iterdir() if one.is_dir()} == set(map(trained_as, shipped()))


def test_what_ships_is_complete() -> None:
    for method, folder in shipped().items():
        assert {"config.json", "model.safetensors", "record.json", "README.md"} <= {file.name for file in folder.iterdir()}
        assert model_of(folder) == DEFAULT.name
        assert type(outline(folder, method=method)).__module__.split(".")[:3] == ["foreword", "methods", method]
        assert recorded_tokens(folder)[-1].tokens > 1


def test_the_weights_that_ship_can_be_read() -> None:
    """Scales that are not above 0, for example, are refused."""
    for folder in set(shipped().values()):
        weights = read_weights(folder / "model.safetensors")
        assert weights and all(one.isfinite().all() for one in weights.values())


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

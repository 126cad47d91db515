"""Export a trained drafter of draft_model as a standalone model, in a folder that transformers can load.

In: the drafter's folder, or none for the one that ships, and the model it was trained for, whose embedding and head it uses.
Out: config.json, model.safetensors and the tokenizer's files. `draft_model`, `gsd` and `amusd` take this folder in place of
a drafter, and other programs take it as a draft model. The folder is written completely or not at all.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from foreword.drafters.saved import as_model, check_draft_model
from foreword.drafters.shipped import shipped
from foreword.errors import DrafterError
from foreword.hub.resolve import resolve
from foreword.hub.storage import check_empty, fill_empty
from foreword.model.adapters import tokenizer_folder
from foreword.model.loading import choose_dtype, load_stock, without_progress_bars
from foreword.model.model import Model
from foreword.text import Tokenizer


@dataclass(frozen=True)
class Exported:
    """What was exported: where to, for which target, and its size."""

    out: str
    target: str
    layers: int
    parameters: int
    bytes: int
    dtype: str


def export(
    out: str | os.PathLike[str],
    drafter: str | os.PathLike[str] | None = None,
    model: str | os.PathLike[str] | None = None,
    dtype: str = "bfloat16",
) -> Exported:
    """Write the drafter as a model to the folder `out`. `drafter` and `model` are as in `foreword.load`; None takes the
    shipped drafter and the default model. Whatever can be refused without the model is refused before it is loaded."""
    folder, source = Path(os.path.expanduser(out)), _drafter(drafter)
    cpu = torch.device("cpu")
    precision = choose_dtype(dtype, cpu)
    check_empty(folder)
    check_draft_model(source)
    place = resolve(model)
    tokenizer = Tokenizer.load(tokenizer_folder(place))
    target = Model(load_stock(place, cpu, precision), str(model) if model is not None else place.name)
    small = as_model(source, target)
    small.generation_config.eos_token_id = target.ends.tolist() or None  # a draft model needs no other generation setting

    def fill(building: Path) -> None:
        with without_progress_bars():
            small.save_pretrained(building)
            tokenizer.hf.save_pretrained(building)

    fill_empty(folder, fill)
    size = sum(file.stat().st_size for file in folder.iterdir())
    parameters = sum(weight.numel() for weight in small.parameters())
    return Exported(str(out), target.name, len(small.model.layers), parameters, size, str(small.dtype).partition(".")[2])


def _drafter(given: str | os.PathLike[str] | None) -> Path:
    if given is not None:
        return Path(os.path.expanduser(given))
    if "draft_model" not in shipped():
        raise DrafterError("no drafter of draft_model ships; name the folder that `foreword train draft_model` wrote")
    return shipped()["draft_model"]

"""Trained drafters as folders: config.json, model.safetensors, and what `train` writes beside them.

In: a drafter that is bound to its target. Out: a folder that only the same method, on the same target, takes in again, or on
that target grown, which has the same function: then the weights are widened as the target was.
Loading is strict: another target, another method, other sizes or a damaged file are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foreword.core.trainable import Trainable
from foreword.core.widening import widened
from foreword.errors import DrafterError
from foreword.model.checkpoint import Stored, read_weights, write_weights
from foreword.model.fingerprint import Fingerprint
from foreword.model.model import Model

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def method_of(drafter: Trainable) -> str:
    """A method is called as its file is."""
    return type(drafter).__module__.rsplit(".", 1)[-1]


def save(drafter: Trainable, folder: str | Path, target: Model, dtype: Stored = "bfloat16") -> None:
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_weights(drafter.module.state_dict(), folder / WEIGHTS, dtype)
    write_config(drafter, folder, target, dtype)


def write_config(drafter: Trainable, folder: Path, target: Model, dtype: Stored) -> None:
    about = {"method": method_of(drafter), "config": drafter.config, "dtype": dtype}
    about |= {"target": Fingerprint.of(target).to_dict()}
    (folder / CONFIG).write_text(json.dumps(about, indent=1) + "\n")


def read_config(folder: str | Path) -> dict[str, Any]:
    """`method`, `config`, `dtype` and `target` of a saved drafter."""
    file = Path(folder) / CONFIG
    try:
        about = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise DrafterError(f"{file} is missing; name the folder of a trained drafter") from error
    except (OSError, ValueError) as error:
        raise DrafterError(f"{file} cannot be read ({error}); copy or train the drafter again") from error
    if not isinstance(about, dict) or not {"method", "config", "target"} <= set(about):
        raise DrafterError(f"{file} does not describe a drafter: it needs method, config and target")
    return about


@torch.no_grad()
def load_into(drafter: Trainable, folder: str | Path, target: Model) -> None:
    """Put saved weights into a bound drafter's module."""
    about, method = read_config(folder), method_of(drafter)
    if about["method"] != method:
        raise DrafterError(f"{folder} holds a drafter of {about['method']}, not of {method}; choose that method")
    try:
        trained_for, found = Fingerprint.from_dict(about["target"]), Fingerprint.of_function(target)
    except TypeError as error:
        raise DrafterError(
            f"{folder}/{CONFIG} does not say which model it was trained for ({error}); train again"
        ) from error
    if not trained_for.matches(found):
        raise DrafterError(
            f"{method}: trained for {trained_for}, but the target is {found}; load the matching drafter or train one"
        )
    own = json.loads(json.dumps(drafter.config))
    if own != about["config"]:
        raise DrafterError(f"{method}: made with {own}, but {folder} was trained with {about['config']}; use those options")
    weights, places = read_weights(Path(folder) / WEIGHTS), drafter.module.state_dict()
    _check_names(Path(folder) / WEIGHTS, weights, places)
    if grown := target.grown:
        wide, times, hidden = drafter.wide, grown.times, target.hidden_size // grown.times
        weights = {name: widened(name, one.to(target.device), wide, times, hidden) for name, one in weights.items()}
    _check_shapes(Path(folder) / WEIGHTS, weights, places)
    for name, place in places.items():
        place.copy_(weights[name])


def _check_names(file: Path, weights: Mapping[str, Tensor], places: Mapping[str, Tensor]) -> None:
    wrong = sorted(set(weights) ^ set(places))
    if wrong:
        where = "lacks" if wrong[0] in places else "has an unknown"
        raise DrafterError(f"{file} {where} tensor {wrong[0]!r}; copy or train the drafter again")


def _check_shapes(file: Path, weights: Mapping[str, Tensor], places: Mapping[str, Tensor]) -> None:
    for name, place in places.items():
        if weights[name].shape != place.shape:
            raise DrafterError(f"{file}: {name} has shape {tuple(weights[name].shape)}, needed is {tuple(place.shape)}")

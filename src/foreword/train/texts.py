"""Folders of `foreword distill` as the training loop reads them: sequences by number, and those kept apart.

In: shards of one or several folders, all written by the target. Out: Texts to learn from and Texts kept apart. A prompt's
answers all fall on one side, in every folder; a sequence in which nothing that counts lies within reach is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foreword.errors import DataError
from foreword.model.fingerprint import Fingerprint
from foreword.train.shards import Array, Shards

HELD_OUT = 0.01  # the share of the prompts that is kept apart, where nothing else is asked for
LEAST_APART = 4  # prompts, then, where that leaves at least as many to learn from
HEARD = 2  # tokens that stand before the first that a head guesses: the row it reads, and the root


class Sequences:
    """Some sequences of some folders, memory-mapped. Satisfies `Texts`."""

    def __init__(self, parts: Sequence[tuple[Shards, Array]]) -> None:
        self.shards = [shards for shards, _ in parts]
        self.places = np.concatenate([np.stack([np.full_like(some, i), some], 1) for i, (_, some) in enumerate(parts)])
        lengths = [shards.lengths[some] for shards, some in parts]
        self.lengths: Tensor = torch.from_numpy(np.concatenate(lengths))

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        folder, place = self.places[index]
        tokens, mask = self.shards[folder][int(place)]
        return torch.from_numpy(tokens.astype(np.int64)), torch.from_numpy(mask.astype(np.bool_))


def open_data(folders: Sequence[str | Path], model: Fingerprint, verify: bool = True) -> list[Shards]:
    """The folders, each written by this model and not empty."""
    found = [Shards.open(folder, verify) for folder in folders]
    for shards in found:
        shards.check_model(model)
        if not len(shards):
            raise DataError(f"{shards.folder} holds no sequence yet; let `foreword distill` write some first")
    return found


def share_apart(data: Sequence[Shards]) -> float:
    """The share of the prompts to keep apart where nobody says: `HELD_OUT`, or more where that would be too few prompts."""
    keys = np.unique(np.concatenate([shards.keys for shards in data]))  # in rising order, as `Shards.split` takes them
    least = min(LEAST_APART, len(keys) // 2)
    return max(HELD_OUT, math.nextafter(int(keys[least - 1]) / 2**64, 1)) if least else HELD_OUT


def split_data(data: Sequence[Shards], held_out: float, max_length: int) -> tuple[Sequences, Sequences]:
    """To learn from, and kept apart: a share of the prompts."""
    sides: tuple[list[tuple[Shards, Array]], list[tuple[Shards, Array]]] = [], []
    for shards in data:
        for side, some in zip(sides, shards.split(held_out), strict=True):
            side.append((shards, _that_teach(shards, some, max_length)))
    learn, apart = map(Sequences, sides)
    if not len(apart.lengths):
        raise DataError(
            f"none of {len(learn.lengths)} sequences is kept apart at {held_out}; raise --held-out, or distil more"
        )
    return learn, apart


def _that_teach(shards: Shards, some: Array, max_length: int) -> Array:
    return np.array([i for i in some if shards[int(i)][1][HEARD:max_length].any()], dtype=np.int64)


def about_data(data: Sequence[Shards]) -> list[dict[str, Any]]:
    """What the manifests say, but for the shards themselves; a hash stands for those. Where a folder lies is not part."""
    kept = "settings", "counts", "complete", "command", "versions"
    return [{name: one.manifest[name] for name in kept} | {"sha256": one.digest} for one in data]

"""What a step of training is, as a function of its number alone: which texts it reads and how far it moves the weights.

Nothing here is state, so a run that was cut goes on exactly by knowing how many steps it made.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from foreword.errors import ForewordWarning, InputError

SHAPES = 64  # on CUDA texts are padded to a multiple of this: attention is planned there for every length that is new
BATCH = 64  # texts of a step, where nothing else is asked for and there are enough of them
LEAST_STEPS = 16  # of an epoch, then
MOST_SEED = 1 << 31  # what is made of it, step by step, fits 64 bits
POOL = 64  # batches whose texts are sorted by length together: little padding, and still an order at random


class Texts(Protocol):
    """Texts by number, and how long each is."""

    @property
    def lengths(self) -> Tensor: ...  # [count]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """tokens [n] and mask [n]: written by the target."""


@dataclass(frozen=True)
class TrainingSettings:
    """Everything that decides what is learned, and which weights are kept. A run has so many `steps`, or about so many
    `tokens`; with neither, it reads every text once. `batch` texts make a step; `at_once` of them a pass on one device."""

    steps: int | None = None
    tokens: int | None = None
    batch: int = BATCH
    at_once: int | None = None
    max_length: int = 1024
    learning_rate: float = 2e-3
    warm_up: int = 100
    floor: float = 0.05  # of the learning rate, where the cosine ends
    weight_decay: float = 0.0
    clip: float = 1.0
    evaluate_every: int = 500
    checkpoint_every: int = 200
    new_tokens: int = 128  # of an answer, when tokens per round are measured
    rows: int = 64  # of a pass, then
    texts_apart: int = 512  # of those kept apart, that an evaluation reads
    seed: int = 0
    cover: float = 0.98  # of what the target wrote: the words that a drafter guesses among

    def __post_init__(self) -> None:
        counts = "batch", "max_length", "evaluate_every", "checkpoint_every", "new_tokens", "texts_apart", "rows"
        for name in (*counts, "steps", "tokens", "at_once"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if not 0 < self.learning_rate < math.inf or self.clip <= 0:
            raise InputError(f"learning_rate is {self.learning_rate} and clip {self.clip}; both must be above 0")
        if self.steps is not None and self.tokens is not None:
            raise InputError(f"steps is {self.steps} and tokens {self.tokens}; give one of them")
        check_cover(self.cover)
        if not -MOST_SEED <= self.seed < MOST_SEED:
            raise InputError(f"seed is {self.seed}; it must be from {-MOST_SEED} to {MOST_SEED - 1}")
        if self.warm_up < 0:
            raise InputError(f"warm_up is {self.warm_up}; it is a number of steps, 0 or more")

    def rate(self, step: int, steps: int) -> float:
        """Up in a line, then down along a cosine."""
        warm_up = self.warm_up_of(steps)
        if step < warm_up:
            return self.learning_rate * (step + 1) / warm_up
        gone = (step - warm_up) / max(1, steps - 1 - warm_up)
        return self.learning_rate * (self.floor + (1 - self.floor) * (1 + math.cos(math.pi * min(gone, 1.0))) / 2)

    def warm_up_of(self, steps: int) -> int:
        """At most half of the run."""
        return min(self.warm_up, steps // 2)

    def warn_of_warm_up(self, steps: int) -> None:
        """Say so where the warm-up that was asked for does not fit into the run."""
        if self.warm_up > (fits := self.warm_up_of(steps)):
            warnings.warn(
                f"warm_up is {self.warm_up} steps, but the run has {steps}: it is cut to {fits}. Train longer (more data, "
                f"or --steps or --tokens for several epochs), or set --warm-up {steps // 10}",
                ForewordWarning,
                stacklevel=3,
            )


def batch_for(texts: int, at_once: int | None = None, processes: int = 1) -> int:
    """How many texts a step reads where nobody says: `BATCH`, or fewer where that would leave an epoch of a few steps. It
    divides into passes of `at_once` on every process."""
    share = (at_once or 1) * processes
    return max(share, min(BATCH, texts // LEAST_STEPS) // share * share)


def check_cover(cover: float) -> None:
    if not 0 < cover <= 1:
        raise InputError(
            f"cover is {cover}; it is a share of what the model writes, above 0 and up to 1, which is all of it"
        )


class Order:
    """Which texts each step reads: all of them once an epoch, those of a step about equally long."""

    def __init__(self, lengths: Tensor, settings: TrainingSettings) -> None:
        self.lengths, self.batch, self.seed = lengths, settings.batch, settings.seed
        self.per_epoch = len(lengths) // self.batch
        if not self.per_epoch:
            raise InputError(f"the data holds {len(lengths)} texts to train on, a step reads {self.batch}; lower the batch")
        self.steps = settings.steps or self._steps_of(settings) or self.per_epoch
        self._epoch, self._batches = -1, torch.empty(0)

    def _steps_of(self, settings: TrainingSettings) -> int | None:
        """How many read about `tokens` tokens."""
        if settings.tokens is None:
            return None
        read = self.lengths.clamp(max=settings.max_length).double().mean().item() * self.batch
        return max(1, round(settings.tokens / read))

    def texts(self, step: int) -> list[int]:
        epoch, place = divmod(step, self.per_epoch)
        if epoch != self._epoch:
            self._epoch, self._batches = epoch, self._drawn(epoch)
        return self._batches[place].tolist()

    def _drawn(self, epoch: int) -> Tensor:
        """[batches, batch]"""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.lengths), generator=generator)[: self.per_epoch * self.batch]
        pools = [pool[self.lengths[pool].argsort(stable=True)] for pool in order.split(POOL * self.batch)]
        batches = torch.cat(pools).view(self.per_epoch, self.batch)
        return batches[torch.randperm(self.per_epoch, generator=generator)]


def length_on(device: torch.device, length: int, most: int) -> int:
    """That texts have which are read together there, the longest of them having `length`."""
    return min(-(-length // SHAPES) * SHAPES, most) if device.type == "cuda" else length


def padded(texts: Texts, indices: list[int], max_length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """tokens [b, n] on the device and mask [b, n] on the host, of some texts cut to `max_length`; behind a text's end 0."""
    rows = [texts[index] for index in indices]
    rows = [(tokens[:max_length].long(), mask[:max_length].bool()) for tokens, mask in rows]
    tokens, mask = (torch.nn.utils.rnn.pad_sequence(list(part), batch_first=True) for part in zip(*rows, strict=True))
    more = length_on(device, tokens.shape[1], max_length) - tokens.shape[1]
    tokens, mask = (functional.pad(part, (0, more)) for part in (tokens, mask))
    if device.type == "cuda":  # from pinned memory a copy does not wait for what the device is doing
        tokens = tokens.pin_memory().to(device, non_blocking=True)
    return tokens, mask

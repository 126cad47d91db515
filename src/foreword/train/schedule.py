"""Training steps as a function of their number alone: which sequences a step reads, and its learning rate.

There is no state here, so an interrupted run resumes exactly if it knows how many steps it made.
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

SHAPES = 64  # on CUDA, sequences are padded to a multiple of this: attention is planned again for every new length
BATCH = 64  # sequences per step by default, if there are enough of them
LEAST_STEPS = 16  # per epoch, with the default batch
MOST_SEED = 1 << 31  # so that the seeds derived for each step fit 64 bits
POOL = 64  # batches that are sorted by length together: little padding, and still a random order


class TrainingData(Protocol):
    """Sequences by index, and their lengths."""

    @property
    def lengths(self) -> Tensor: ...  # [count]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return tokens [n], and mask [n]: which of them the target generated."""


@dataclass(frozen=True)
class TrainingSettings:
    """Everything that decides what is learned, and which weights are kept. A run has `steps` steps or reads about `tokens`
    tokens; with neither, it reads every sequence once. A step has `batch` sequences; a pass on one device has `at_once`."""

    steps: int | None = None
    tokens: int | None = None
    batch: int = BATCH
    at_once: int | None = None
    max_length: int = 1024
    learning_rate: float = 2e-3
    warm_up: int = 100
    floor: float = 0.0  # share of the learning rate at the end of the cosine
    average: float = 0.0  # decay of a moving average of the weights, which is what is kept; 0: the last weights
    weight_decay: float = 0.0
    clip: float = 1.0
    evaluate_every: int = 500
    checkpoint_every: int = 200
    new_tokens: int = 128  # per answer in an evaluation
    rows: int = 64  # per pass in an evaluation
    texts_apart: int = 512  # held-out sequences that an evaluation reads
    seed: int = 0
    cover: float = 0.98  # share of the target's tokens that the draft vocabulary covers

    def __post_init__(self) -> None:
        counts = "batch", "max_length", "evaluate_every", "checkpoint_every", "new_tokens", "texts_apart", "rows"
        for name in (*counts, "steps", "tokens", "at_once"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if not 0 < self.learning_rate < math.inf or self.clip <= 0:
            raise InputError(f"learning_rate is {self.learning_rate} and clip {self.clip}; both must be above 0")
        if self.steps is not None and self.tokens is not None:
            raise InputError(f"steps is {self.steps} and tokens {self.tokens}; give one of them")
        if not 0 <= self.average < 1:
            raise InputError(f"average is {self.average}; it must be at least 0 and below 1, such as 0.998")
        check_cover(self.cover)
        if not -MOST_SEED <= self.seed < MOST_SEED:
            raise InputError(f"seed is {self.seed}; it must be from {-MOST_SEED} to {MOST_SEED - 1}")
        if self.warm_up < 0:
            raise InputError(f"warm_up is {self.warm_up}; it is a number of steps, 0 or more")

    def rate(self, step: int, steps: int) -> float:
        """Return the learning rate of a step: it rises linearly, then falls along a cosine."""
        warm_up = self.warm_up_of(steps)
        if step < warm_up:
            return self.learning_rate * (step + 1) / warm_up
        gone = (step - warm_up) / max(1, steps - 1 - warm_up)
        return self.learning_rate * (self.floor + (1 - self.floor) * (1 + math.cos(math.pi * min(gone, 1.0))) / 2)

    def warm_up_of(self, steps: int) -> int:
        """Return the steps of the warm-up: at most half of the run."""
        return min(self.warm_up, steps // 2)

    def warn_of_warm_up(self, steps: int) -> None:
        """Warn if the requested warm-up does not fit into the run."""
        if self.warm_up > (fits := self.warm_up_of(steps)):
            warnings.warn(
                f"warm_up is {self.warm_up} steps, but the run has {steps}: it is shortened to {fits}. Train longer (more "
                f"data, or --steps or --tokens for several epochs), or set --warm-up {steps // 10}",
                ForewordWarning,
                stacklevel=4,
            )


def batch_for(sequences: int, at_once: int | None = None, processes: int = 1) -> int:
    """Return the default batch: `BATCH`, or less if an epoch would have too few steps. It divides into passes of `at_once`
    on every process."""
    share = (at_once or 1) * processes
    return max(share, min(BATCH, sequences // LEAST_STEPS) // share * share)


def check_cover(cover: float) -> None:
    if not 0 < cover <= 1:
        raise InputError(
            f"cover is {cover}; it is a share of what the model generates, above 0 and at most 1, which takes all tokens"
        )


class Order:
    """Which sequences each step reads: every one once per epoch, with similar lengths in a step."""

    def __init__(self, lengths: Tensor, settings: TrainingSettings) -> None:
        self.lengths, self.batch, self.seed = lengths, settings.batch, settings.seed
        self.per_epoch = len(lengths) // self.batch
        if not self.per_epoch:
            raise InputError(f"the data has {len(lengths)} sequences to train on, a step reads {self.batch}; lower --batch")
        self.steps = settings.steps or self._steps_of(settings) or self.per_epoch
        self._epoch, self._batches = -1, torch.empty(0)

    def _steps_of(self, settings: TrainingSettings) -> int | None:
        """Return how many steps read about `settings.tokens` tokens."""
        if settings.tokens is None:
            return None
        read = self.lengths.clamp(max=settings.max_length).double().mean().item() * self.batch
        return max(1, round(settings.tokens / read))

    def batch_at(self, step: int) -> list[int]:
        """Return the indices of the sequences that a step reads."""
        epoch, place = divmod(step, self.per_epoch)
        if epoch != self._epoch:
            self._epoch, self._batches = epoch, self._batches_of(epoch)
        return self._batches[place].tolist()

    def _batches_of(self, epoch: int) -> Tensor:
        """Return the indices of an epoch: [batches, batch]."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.lengths), generator=generator)[: self.per_epoch * self.batch]
        pools = [pool[self.lengths[pool].argsort(stable=True)] for pool in order.split(POOL * self.batch)]
        batches = torch.cat(pools).view(self.per_epoch, self.batch)
        return batches[torch.randperm(self.per_epoch, generator=generator)]


def length_on(device: torch.device, length: int, most: int) -> int:
    """Return the padded length of a batch whose longest sequence has `length` tokens."""
    return min(-(-length // SHAPES) * SHAPES, most) if device.type == "cuda" else length


def padded(data: TrainingData, indices: list[int], max_length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return tokens [b, n] on the device and mask [b, n] on the host, cut to `max_length` and padded with 0."""
    rows = [data[index] for index in indices]
    rows = [(tokens[:max_length].long(), mask[:max_length].bool()) for tokens, mask in rows]
    tokens, mask = (torch.nn.utils.rnn.pad_sequence(list(column), batch_first=True) for column in zip(*rows, strict=True))
    more = length_on(device, tokens.shape[1], max_length) - tokens.shape[1]
    tokens, mask = (functional.pad(column, (0, more)) for column in (tokens, mask))
    if device.type == "cuda":  # a copy from pinned memory does not wait for the device
        tokens = tokens.pin_memory().to(device, non_blocking=True)
    return tokens, mask

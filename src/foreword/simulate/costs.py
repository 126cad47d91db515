"""What serving costs: the seconds of rounds and of prompts, and how many tokens a round decides, by batch size.

In: measurements, from `measure.py` or `bench_costs.py`, or a file that has them. Out: `MethodCosts`, which the simulator
reads, and `ServingCosts`, those of several methods with the model and machine they are of. What was not measured is refused
by its name; between two measured batch sizes lie straight lines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from foreword.errors import InputError
from foreword.model.cost import CostCurve
from foreword.ops.device import joins_prompts, prefill_chunk, reads_late, replays_graphs

Table = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Scheduling:
    """How the engine schedules on a device."""

    chunk: int  # the most rows of a prompt that a pass reads
    joins_prompts: bool  # several prompts are read in one pass
    captured: bool  # rounds are padded to a captured batch size, and two chunks of a prompt are read before a round
    late: bool  # a round is read while the next one runs
    reuses: bool  # a session starts from its cached rows

    @staticmethod
    def on(device: torch.device, dtype: str) -> Scheduling:
        return Scheduling(
            prefill_chunk(device),
            joins_prompts(device),
            replays_graphs(device),
            reads_late(device),
            dtype in ("float32", "float64"),
        )


@dataclass(frozen=True)
class RoundCost:
    """Rounds of one batch size."""

    batch: int
    seconds: float
    rows: float  # of the pass, all sequences together
    decided: tuple[float, ...]  # entry i: the share of rounds in which a sequence gets i + 1 tokens

    def __post_init__(self) -> None:
        if self.batch < 1 or not self.seconds > 0 or not self.decided or abs(sum(self.decided) - 1) > 1e-6:
            raise ValueError(f"no costs of a round: {self}")

    @property
    def tokens(self) -> float:
        """The mean number of tokens that a round decides for a sequence."""
        return sum(share * count for count, share in enumerate(self.decided, start=1))


@dataclass(frozen=True)
class MethodCosts:
    """What one method costs and brings."""

    method: str
    rounds: tuple[RoundCost, ...]  # in rising order of batch sizes, the first of which is 1
    prompts: CostCurve  # the seconds of a pass over a prompt, by its rows
    source: str  # where the figures come from
    steady: bool = True
    suspect: str = ""

    def __post_init__(self) -> None:
        if not self.rounds or self.rounds[0].batch != 1:
            raise InputError(
                f"{self.source} has no rounds of {self.method} at batch size 1, so smaller batches than "
                f"{self.rounds[0].batch if self.rounds else 'any'} are unknown; add results that have them"
            )
        if not all(fewer.batch < more.batch for fewer, more in pairwise(self.rounds)):
            raise ValueError(f"batch sizes do not rise: {[one.batch for one in self.rounds]}")

    @property
    def largest(self) -> int:
        """The largest batch size that was measured."""
        return self.rounds[-1].batch

    def check_slots(self, slots: int) -> None:
        """Refuse batch sizes that nothing is known of."""
        if slots > self.largest:
            raise InputError(
                f"{self.source} has rounds of {self.method} up to batch size {self.largest}, and --slots is {slots}; "
                f"give --slots {self.largest}, or --costs with rounds of larger batches"
            )

    def seconds_by_batch(self, slots: int) -> Table:
        """Return the seconds of a round [slots + 1], by the number of sequences."""
        known = [one.batch for one in self.rounds]
        return np.interp(np.arange(slots + 1), known, [one.seconds for one in self.rounds])

    def chances_by_batch(self, slots: int) -> Table:
        """Return the probability that a round decides at most so many tokens for a sequence: [slots + 1, tokens]."""
        most = max(len(one.decided) for one in self.rounds)
        shares = np.array([[*one.decided, *[0.0] * (most - len(one.decided))] for one in self.rounds])
        known, wanted = [one.batch for one in self.rounds], np.arange(slots + 1)
        table = np.stack([np.interp(wanted, known, shares[:, count]) for count in range(most)], axis=1).cumsum(1)
        table[:, -1] = 1.0
        return table

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {**asdict(self), "prompts": self.prompts.to_dict()}

    @staticmethod
    def read(kept: Mapping[str, Any]) -> MethodCosts:
        """Read what `to_dict` made, from JSON."""
        rounds = tuple(RoundCost(**{**one, "decided": tuple(one["decided"])}) for one in kept["rounds"])
        prompts = CostCurve.read(kept["prompts"])
        return MethodCosts(kept["method"], rounds, prompts, kept["source"], bool(kept["steady"]), str(kept["suspect"]))


@dataclass(frozen=True)
class ServingCosts:
    """What methods cost on one model and machine."""

    model: str
    machine: str
    dtype: str
    temperature: float  # that drafts were accepted at
    scheduling: Scheduling
    methods: dict[str, MethodCosts]
    reading_share: float | None = None  # of a round: reading weights, which tensor parallelism divides; None: not measured
    notes: list[str] = field(default_factory=list)  # what to know of the figures

    def of(self, method: str) -> MethodCosts:
        if method not in self.methods:
            raise InputError(f"the costs have no {method!r}; they have: {', '.join(self.methods)}")
        return self.methods[method]

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {**asdict(self), "methods": {name: one.to_dict() for name, one in self.methods.items()}}

    @staticmethod
    def read(kept: Mapping[str, Any]) -> ServingCosts:
        """Read what `to_dict` made, from JSON."""
        methods = {name: MethodCosts.read(one) for name, one in kept["methods"].items()}
        return ServingCosts(**{**kept, "scheduling": Scheduling(**kept["scheduling"]), "methods": methods})

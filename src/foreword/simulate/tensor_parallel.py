"""What rounds cost if one replica runs on several devices: a prediction from the costs on one.

Reading weights is divided by the number of devices; the rest of a round, such as launches, is not. Every layer adds two
all-reduces. Drafting is taken to be divided as the pass is, though drafters may be replicated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from foreword.errors import InputError
from foreword.model.cost import CostCurve
from foreword.simulate.costs import MethodCosts

MOST_ROWS = 1 << 20
PER_LAYER = 2  # all-reduces: after attention and after the MLP


@dataclass(frozen=True)
class TensorParallel:
    """One replica on several devices."""

    degree: int
    layers: int
    share: float  # of a round on one device that is divided
    all_reduce: CostCurve  # the seconds of one, by the rows of the pass

    def __post_init__(self) -> None:
        if self.degree < 2 or self.layers < 1 or not 0 <= self.share <= 1:
            raise InputError(f"tensor parallelism needs a degree above 1, layers, and a share up to 1; given: {self}")

    def seconds(self, seconds: float, rows: float) -> float:
        """Return the seconds of a pass that takes `seconds` on one device."""
        divided = seconds * (self.share / self.degree + 1 - self.share)
        return divided + PER_LAYER * self.layers * self.all_reduce.at(max(round(rows), 1))

    def of(self, costs: MethodCosts) -> MethodCosts:
        """Return the costs of a method on these devices."""
        rounds = tuple(replace(one, seconds=self.seconds(one.seconds, one.rows)) for one in costs.rounds)
        prompts = costs.prompts
        seconds = tuple(self.seconds(one, rows) for rows, one in zip(prompts.rows, prompts.seconds, strict=True))
        return replace(costs, rounds=rounds, prompts=CostCurve(prompts.rows, seconds))


def all_reduce_curve(points: Sequence[tuple[int, float]]) -> CostCurve:
    """Return the seconds of an all-reduce by the rows of a pass. A single point holds for all rows."""
    if len(points) == 1:
        points = [(1, points[0][1]), (MOST_ROWS, points[0][1])]
    try:
        return CostCurve(*map(tuple, zip(*sorted(points), strict=True)))  # type: ignore[arg-type]
    except ValueError as error:
        raise InputError(
            f"no costs of all-reduces: {error}; give TIME, or ROWS:TIME,ROWS:TIME with different rows"
        ) from error

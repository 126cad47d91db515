"""The row policy: how many rows and levels of a tree pay off on this machine.

In: the cost of a pass by its rows, as the target measured it, and the cost of drafting. Out: a number of rows and levels,
decided while a tree grows (`RowCosts`, on a CPU) or before anything is drafted (`FixedRows`, where rounds are captured).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from foreword.core.draft import Shape
from foreword.core.target import Target

MOST_NODES = 64
USUAL_GAIN = 1.5  # draft tokens per round that a tree of MOST_NODES gets accepted
DRAFTING = 0.15  # passes over one row: the cost of drafting besides its levels, such as two layers of thirty that read along
LEVEL_KERNELS = 8  # per level: the state, the head, the best candidates, and the choice of those to continue
NEXT_LEVEL = 0.45  # of the trees that are right at one level, the share that is right at the next one too
CHAIN_GAIN = 0.75  # tokens per round that an endless chain of lookups adds to a tree: results/bench_cuda_7b, both tables
CHAIN_LEFT = 0.87  # the share of this gain that each row leaves to later ones: between these results and results/trees_cpu
TRAINED_BEND = 0.67  # `bend` of `share_of_gain` for trained drafters: results/trees_cpu, rows_*.json


class RowCosts:
    """The cost of 1 to `nodes` rows per sequence on this machine, and of one level of drafting. A pass over one row per
    sequence costs 1."""

    def __init__(self, target: Target, nodes: int, level: float = 0.0) -> None:
        self.target, self.nodes, self.level = target, nodes, level
        self._known: dict[int, Tensor] = {}

    def of(self, batch: int) -> Tensor:
        """Return the cost of a pass by its rows [nodes]. The target is asked once per batch size."""
        if batch not in self._known:
            cost = [self.target.cost(batch * rows, batch) for rows in range(1, self.nodes + 1)]
            self._known[batch] = torch.tensor(cost, device=self.target.device)
        return self._known[batch]

    def after(self, batch: int, levels: int) -> Tensor:
        """Return the cost of a pass by its rows, plus that of the levels drafted so far: [nodes]."""
        return self.of(batch) + self.level * levels

    def go_on(self, batch: int, chances: Tensor, live: Tensor, sure: Tensor, levels: int) -> bool:
        """Return whether one more level is expected to pay off: whether tokens per cost rise with it.

        chances [b, M]: log-probabilities of the paths to all nodes so far. live [b, w]: the same, for nodes that may go on.
        sure: the share of their probability that first candidates are expected to hold, as in the last level.
        """
        found = chances.exp()
        more = torch.cat([found, live.exp() * sure], dim=1)
        return bool(self._worth(batch, more, levels + 1) > self._worth(batch, found, levels))

    def _worth(self, batch: int, found: Tensor, levels: int) -> Tensor:
        """Return tokens per cost at the best number of rows, averaged over the batch."""
        best = found.sort(1, descending=True).values[:, : self.nodes].cumsum(1)
        return (best / self.after(batch, levels)[: best.shape[1]]).amax(1).mean()


def paying_rows(target: Target, batch: int, expected: Sequence[float]) -> int:
    """Return the number of rows per sequence with the most tokens per cost. expected: tokens per round by rows, from 1."""
    gain = [tokens / target.cost(batch * rows, batch) for rows, tokens in enumerate(expected, start=1)]
    return 1 + gain.index(max(gain))


def share_of_gain(rows: int, most: int, bend: float) -> float:
    """Return the share of the gain of a tree of `most` rows that a tree of `rows` rows keeps.

    The gain is the number of accepted draft tokens per round. It grows about with the logarithm of the rows, bent upwards by
    `bend`: the better the candidates, the more of the gain the first few rows hold.
    """
    straight = math.log(rows) / math.log(most)
    return straight * (1 + bend * (1 - straight))


def chain_lengths(most: int) -> list[int]:
    """Return the lengths that a chain next to a tree may have: no rows, a few, or all of them."""
    return sorted({0, most, *(rows for rows in (3, 7) if rows < most)})


def share_of_levels(depth: int, usual: int) -> float:
    """Return the share of the gain that a tree keeps with fewer levels than usual. At each level fewer paths are right."""
    return (1 - NEXT_LEVEL ** min(depth, usual)) / (1 - NEXT_LEVEL**usual)


class FixedRows:
    """The size of trees by batch size, where it is decided before anything is drafted, as in a captured round.

    Every row and level of a tree brings tokens, each fewer than the one before. A row costs what the target measured. A
    level costs what the drafter needs for it. Drafting at all has a fixed cost (`drafting`). The larger the batch, the more
    expensive rows are, until none pays off. Rows that another drafter adds next to the tree (`chain`) are dropped first.
    """

    def __init__(
        self,
        target: Target,
        most: Shape,
        gain: float = USUAL_GAIN,
        bend: float = TRAINED_BEND,
        drafting: float = DRAFTING,
        level: float = 0.0,
        chain: int = 0,
    ) -> None:
        self.target, self.most, self.gain, self.bend = target, most, gain, bend
        self.drafting, self.level, self.chain = drafting, level, chain
        self._known: dict[int, tuple[Shape, int]] = {}

    def shape(self, batch: int) -> Shape:
        return self._choice(batch)[0]

    def chain_rows(self, batch: int) -> int:
        """Return how many rows of the other drafter pay off too."""
        return self._choice(batch)[1]

    def _choice(self, batch: int) -> tuple[Shape, int]:
        """Return the shape of the tree, and the rows next to it."""
        if batch not in self._known:
            counts = [*(1 << power for power in range((self.most.nodes - 1).bit_length())), self.most.nodes]
            shapes = [Shape(rows, depth) for rows in counts for depth in range(min(self.most.depth, rows - 1) + 1)]
            pairs = [(one, chain) for one in shapes for chain in chain_lengths(self.chain)]
            valid = [(one, chain) for one, chain in pairs if one.depth or (one.nodes, chain) == (1, 0)]
            self._known[batch] = max(valid, key=lambda pair: (self._speed(batch, *pair), pair[0].depth))
        return self._known[batch]

    def _speed(self, batch: int, shape: Shape, chain: int) -> float:
        """Return tokens per cost. Levels of a large batch are more expensive, as its passes are."""
        if shape.nodes == 1:
            return 1 / self.target.cost(batch, batch)
        usual = min((shape.nodes - 1).bit_length(), self.most.depth)  # levels that a tree of this size can use
        rows, levels = share_of_gain(shape.nodes, MOST_NODES, self.bend), share_of_levels(shape.depth, usual)
        gain = self.gain * rows * levels + CHAIN_GAIN * (1 - CHAIN_LEFT**chain)
        drafting = self.drafting + self.level * shape.depth * self.target.cost(batch, batch)
        return (1 + gain) / (self.target.cost(batch * (shape.nodes + chain), batch) + drafting)

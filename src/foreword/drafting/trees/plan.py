"""From a drafter's options to the trees that it drafts for one target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from torch import Tensor

from foreword.core.draft import Draft, Shape
from foreword.core.state import State
from foreword.core.target import Target
from foreword.drafting.trees.growth import BestFirst, Budgeted, Chain, NextCandidates
from foreword.drafting.trees.rows import MOST_NODES, USUAL_GAIN, FixedRows, RowCosts
from foreword.drafting.trees.templates import Rates, StaticTree, greedy_paths
from foreword.errors import InputError
from foreword.ops.device import fixes_shapes

TreeKind = Literal["static", "best", "budget", "chain"]
BRANCH = 10


class Growth(Protocol):
    """A way to grow trees for one target."""

    @property
    def shape(self) -> Shape: ...

    @property
    def branch(self) -> int:
        """How many candidates are drafted after each live node."""

    def depth(self, batch: int) -> int:
        """Return how many levels are drafted at this batch size; 0 if no row pays off."""

    def chain_rows(self, batch: int, most: int) -> int:
        """Return how many of the `most` rows that another drafter adds to the tree pay off at this batch size."""

    def draft(self, state: State, guess: NextCandidates) -> Draft: ...


@dataclass(frozen=True)
class TreePlan:
    """The options of a drafter's trees. `rows` None: as many as pay off on this machine."""

    kind: TreeKind
    rows: int | None
    width: int
    rates: Rates
    paths: Sequence[Sequence[int]] | None = None  # a template given by the user
    top_p: float = 0.8
    floor: float = 0.25
    stop: float = 0.0  # a chain ends before a candidate that is less likely than this
    levels: int | None = None  # at most, even if the drafter could draft more
    chain: int = 0  # how many of `rows` another drafter adds in the same pass
    gain: float = USUAL_GAIN

    def check(self, method: str) -> None:
        if self.kind not in get_args(TreeKind):
            raise InputError(f"{method}: tree is {self.kind!r}; choose from {', '.join(get_args(TreeKind))}")
        if self.width < 1:
            raise InputError(f"{method}: width is {self.width}; at least 1 node of a level is continued")
        listed = all(isinstance(row, list | tuple) for row in (self.rates, *self.rates))
        if not listed or not all(0 <= rate <= 1 for row in self.rates for rate in row):
            raise InputError(f"{method}: rates is {self.rates!r}; each is how often a candidate is right, from 0 to 1")
        if not 0 <= self.stop < 1:
            raise InputError(f"{method}: stop is {self.stop}; it is how likely a candidate has to be, from 0 to below 1")
        known = {tuple(path) for path in self.paths or ()}
        orphans = [path for path in sorted(known) if not path or min(path) < 0 or (path[1:] and path[:-1] not in known)]
        if orphans:
            raise InputError(
                f"{method}: paths has {orphans[0]}; a path lists ranks from 0 on, and the path it continues must be one too"
            )

    def on(self, target: Target, depth: int, level: float = 0.0, kernels: int = 0) -> Growth:
        """Plan trees of at most `depth` levels after the root.

        level: what a level costs, where a pass over one row costs 1. On a GPU it costs at least `kernels` launches. There
        the rows of a round are fixed beforehand, and empty rows save nothing. So the batch size alone decides how many rows
        and levels a tree has.
        """
        nodes, is_fixed = (self.rows or MOST_NODES) - self.chain, fixes_shapes(target.device)
        depth, branch = min(depth, self.levels or depth, nodes - 1), min(BRANCH, target.vocab_size)
        if self.kind == "static":
            return self._template(target, nodes, depth, branch)
        costs = None if self.rows or is_fixed else RowCosts(target, nodes, level)
        if self.kind == "chain":
            return Chain(Shape(depth + 1, depth), costs, self.stop)
        fixed = None
        if is_fixed and not self.rows:
            level = max(level, target.launch_cost(kernels))
            fixed = FixedRows(target, Shape(nodes, depth), self.gain, level=level, chain=self.chain)
        if self.kind == "best":
            return BestFirst(Shape(nodes, depth), self.width, branch, costs, fixed)
        return Budgeted(Shape(nodes, depth), self.width, branch, costs, fixed, self.top_p, self.floor)

    def _template(self, target: Target, nodes: int, depth: int, branch: int) -> StaticTree:
        if self.paths is not None:
            known = sorted({tuple(path) for path in self.paths if len(path) <= depth}, key=lambda path: (len(path), path))
            return StaticTree(target, known[: self.rows and nodes - 1])
        rates = [row[:branch] for row in self.rates[:depth]]
        return StaticTree(target, greedy_paths(rates, nodes - 1), None if self.rows else rates)


def unconditional(growth: Growth, state: State, candidates: Tensor, log_probs: Tensor) -> Draft:
    """Draft from candidates and log-probabilities [b, depth or more, k] that do not depend on the tokens before them: all
    nodes of a level share them."""
    if isinstance(growth, StaticTree):
        return growth.filled(state, candidates)

    def guess(level: int, live: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
        shape = (-1, live.shape[1], -1)
        return candidates[:, level - 1 : level].expand(shape), log_probs[:, level - 1 : level].expand(shape)

    return growth.draft(state, guess)

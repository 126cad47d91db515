"""Trees that grow with their candidates, level by level.

In: a `NextCandidates`, which returns the likeliest tokens after some live nodes. Out: a `Draft` of fixed shape. Three rules
choose nodes: the likeliest of all levels (`BestFirst`), Clover's running budget (`Budgeted`), and a single path while it is
likely (`Chain`). A node is never likelier than its parent, so the chosen nodes form a tree again.
Paper: Clover (arXiv 2405.00263) for the budget.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from foreword.core.draft import Draft, Shape, Tree
from foreword.core.state import State
from foreword.drafting.trees.rows import FixedRows, RowCosts
from foreword.ops.growth import Budget, GrowingTrees, TorchTrees, growing_trees, sureness

NextCandidates = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(level, tokens [b, w], origin [b, w]) -> candidate tokens and their log-probabilities, each [b, w, k], best first.

`tokens`: of the live nodes, one level above `level`. `origin`: which live node of the previous call each of them follows.
The first call has the root alone, with origin 0.
"""


def once_read(state: State, draft: Draft) -> Draft:
    """Return the draft, or the root alone before the second token of a sequence, when no row has been read yet."""
    return Draft(draft.tokens, draft.tree, draft.size.where(state.length > 0, 1))


@dataclass(frozen=True)
class GrownTree:
    """What rules that grow trees share. In every level the best `width` nodes are continued, with `branch` candidates each.

    costs: the cost of rows, if their number is decided while a tree grows. fixed: the shape for each batch size, if it is
    decided beforehand.
    """

    shape: Shape
    width: int
    branch: int
    costs: RowCosts | None
    fixed: FixedRows | None = None

    def budget(self, shape: Shape) -> Budget | None:
        """Return the rule by which levels share the rows of a tree; None: every level adds all its candidates."""
        return None

    def shape_at(self, batch: int) -> Shape:
        """Return the shape of the trees at this batch size."""
        return self.shape if self.fixed is None else self.fixed.shape(batch)

    def depth(self, batch: int) -> int:
        return self.shape_at(batch).depth

    def chain_rows(self, batch: int, most: int) -> int:
        return most if self.fixed is None else self.fixed.chain_rows(batch)

    def cost(self, batch: int) -> Tensor | None:
        """Return the cost of a pass by its rows [rows], if rows that do not pay off are cut; else None."""
        return None if self.costs is None else self.costs.of(batch)

    def draft(self, state: State, guess: NextCandidates) -> Draft:
        shape = self.shape_at(len(state.batch.ids))
        return self.grow(state, guess, shape) if shape.depth else Draft.nothing(state.root)

    def grow(self, state: State, guess: NextCandidates, shape: Shape, trees: GrowingTrees | None = None) -> Draft:
        """Grow all levels of the shape, on `trees` that were started already or on new ones."""
        trees = trees or growing_trees(state, shape.depth, self.width, self.branch, self.budget(shape))
        tokens, origin = _root(state)
        for level in range(1, shape.depth + 1):
            tokens, origin = trees.add(*guess(level, tokens, origin))
        tokens, parent, size = trees.chosen(shape.nodes, self.cost(len(state.batch.ids)))
        return Draft(tokens, Tree(parent), size)


@dataclass(frozen=True)
class BestFirst(GrownTree):
    """The likeliest nodes of all levels. If neither rows nor levels are fixed beforehand, a level is drafted only if it is
    expected to pay off."""

    def grow(self, state: State, guess: NextCandidates, shape: Shape, trees: GrowingTrees | None = None) -> Draft:
        if trees is None and self.costs is not None and self.costs.level:
            return self._grow_while_it_pays(state, guess, shape, self.costs)
        return super().grow(state, guess, shape, trees)

    def _grow_while_it_pays(self, state: State, guess: NextCandidates, shape: Shape, costs: RowCosts) -> Draft:
        """Grow levels while they are expected to pay off. It reads values before every level, so it is for the CPU only."""
        trees, batch = TorchTrees(state, self.width), len(state.batch.ids)
        tokens, origin = _root(state)
        sure = torch.ones(())
        for level in range(1, shape.depth + 1):
            if level > 1 and not costs.go_on(batch, trees.found, trees.chance, sure, level - 1):
                break
            candidates, log_probs = guess(level, tokens, origin)
            sure = sureness(trees.chance, log_probs)
            tokens, origin = trees.add(candidates, log_probs)
        tokens, parent, size = trees.chosen(shape.nodes, costs.after(batch, trees.levels))
        return Draft(tokens, Tree(parent), size)


@dataclass(frozen=True)
class Budgeted(GrownTree):
    """Clover's rule: likely candidates are taken level by level until a budget of nodes is spent.

    `ops.growth.Budget` defines likely. A wide first level leaves little for the next. A confident one leaves room for a deep
    chain.
    """

    top_p: float = 0.8
    floor: float = 0.25

    def budget(self, shape: Shape) -> Budget:
        return Budget(shape.nodes - 1, self.top_p, self.floor)


@dataclass(frozen=True)
class Chain:
    """A path of first candidates, until one is less likely than `stop`. That one and all later ones are masked, since every
    level is drafted in any case."""

    shape: Shape
    costs: RowCosts | None
    stop: float
    branch: int = 1

    def depth(self, batch: int) -> int:
        return self.shape.depth

    def chain_rows(self, batch: int, most: int) -> int:
        return most

    def draft(self, state: State, guess: NextCandidates) -> Draft:
        tokens, chances = [state.root.unsqueeze(1)], [torch.zeros(state.root.shape[0], 1, device=state.root.device)]
        origin = torch.zeros_like(tokens[0])
        for level in range(1, self.shape.depth + 1):
            candidates, log_probs = guess(level, tokens[-1], origin)  # [b, 1, 1]
            tokens.append(candidates[..., 0])
            chances.append(log_probs[..., 0])
        chance = torch.cat(chances, 1).exp()
        reached = (chance * (chance >= self.stop)).nan_to_num(0).cumprod(1)  # [b, depth + 1], falls from 1, the root
        size = (reached > 0).sum(1)
        if self.costs is not None:
            cost = self.costs.of(len(state.batch.ids))
            size = torch.minimum(size, (reached.cumsum(1) / cost[: len(tokens)]).argmax(1) + 1)
        return once_read(state, Draft(torch.cat(tokens, 1), Tree.chain(len(tokens), origin.device), size))


def _root(state: State) -> tuple[Tensor, Tensor]:
    """Return the first live node: its token and its origin, [b, 1] each."""
    tokens = state.root.unsqueeze(1)
    return tokens, _at_the_root(tokens.shape[0], tokens.device)


@cache
def _at_the_root(batch: int, device: torch.device) -> Tensor:
    """Return the origin of the root [b, 1]. It is made once and keeps its address, which captured rounds read."""
    return torch.zeros(batch, 1, dtype=torch.long, device=device)

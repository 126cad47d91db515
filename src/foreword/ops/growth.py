"""Trees that follow the candidates, as torch operations: nodes are added level by level, then the likeliest are drafted.

In: the candidate tokens after the live nodes of a level and their log-probabilities, [b, w, k] each. Out: the nodes to
continue from, and in the end tokens, parents and size of a draft. Ties go to the earlier node. On CUDA,
ops/drafting/growth.py takes the place of `growing_trees` and `filled`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from foreword.ops.dispatch import accelerated

if TYPE_CHECKING:
    from foreword.ops.round.settle import Columns


class Budget(NamedTuple):
    """Clover's rule: how many nodes may follow the root, and which candidates are likely enough.

    After each live node, the candidates that together hold `top_p` may stand if they have at least `floor` times the
    probability of the first. The first may always stand.
    """

    nodes: int
    top_p: float
    floor: float


class GrowingTrees(Protocol):
    """Trees of a round's sequences while they grow: `add` for each level, then `chosen`."""

    def add(self, guessed: Tensor, likely: Tensor) -> tuple[Tensor, Tensor]:
        """Add the candidates [b, w, k] after the live nodes, with their log-probabilities.

        Returns the tokens of the nodes to continue from and which of the w live nodes each follows: [b, w'] twice.
        """

    def chosen(self, nodes: int, cost: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """The likeliest `nodes` of all: tokens and parents [b, nodes], and the size [b].

        cost [nodes or more]: of a pass by its rows. With it only as many nodes are taken as pay off. Where rows are fixed
        there is none.
        """


@accelerated("drafting.growth:KernelTrees")
def growing_trees(state: Columns, depth: int, width: int, branch: int, budget: Budget | None = None) -> GrowingTrees:
    """Start trees of up to `depth` levels at the roots of a round's sequences.

    Each live node gets `branch` candidates, and the best `width` nodes of a level are continued. With a `budget`, a level
    takes the likeliest candidates that the budget has room for; without one it takes all of them.
    """
    return TorchTrees(state, width, budget)


class TorchTrees:
    """Growing trees as torch operations."""

    def __init__(self, state: Columns, width: int, budget: Budget | None = None) -> None:
        root = state.roots[state.slots].unsqueeze(1)
        self.width, self.budget, self.known = width, budget, state.lengths[state.slots] > 0
        self.tokens, self.parents = [root], [torch.zeros_like(root)]
        self.chances = [torch.zeros(root.shape, device=root.device)]  # log-probability of the whole path, by level
        self.count = 1
        self.nodes, self.chance = self.parents[0], self.chances[0]  # the live nodes [b, w]: their numbers and `chances`
        self.left = torch.full_like(root, 0 if budget is None else budget.nodes)  # [b, 1]

    @property
    def found(self) -> Tensor:
        """[b, M]: log-probabilities of the paths to all nodes, the root first."""
        return torch.cat(self.chances, 1)

    @property
    def levels(self) -> int:
        """How many levels were added."""
        return len(self.chances) - 1

    def add(self, guessed: Tensor, likely: Tensor) -> tuple[Tensor, Tensor]:
        whole = _finite(self.chance.unsqueeze(2) + likely)
        if self.budget is not None:
            return self._spend(self.budget, guessed, whole.masked_fill(~_likely_enough(likely, self.budget), -math.inf))
        tokens, chance = guessed.flatten(1), whole.flatten(1)
        nodes = self._append(tokens, self.nodes.unsqueeze(2).expand_as(guessed).flatten(1), chance)
        self.chance, best = _largest(chance, self.width)
        self.nodes = nodes.gather(1, best)
        return tokens.gather(1, best), best // guessed.shape[2]

    def _spend(self, budget: Budget, guessed: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
        """Add the likeliest candidates that the budget has room for. Once it is spent, later levels are masked."""
        chance, best = _largest(whole.flatten(1), budget.nodes)
        place = torch.arange(best.shape[1], device=best.device)
        chance = chance.masked_fill(place >= self.left, -math.inf)
        self.left = self.left - (chance > -math.inf).sum(1, keepdim=True)
        tokens, origin = guessed.flatten(1).gather(1, best), best // guessed.shape[2]
        nodes = self._append(tokens, self.nodes.gather(1, origin), chance)
        self.nodes, self.chance = nodes[:, : self.width], chance[:, : self.width]
        return tokens[:, : self.width], origin[:, : self.width]

    def _append(self, tokens: Tensor, parent: Tensor, chance: Tensor) -> Tensor:
        """The numbers [b, m] of new nodes."""
        numbers = torch.arange(self.count, self.count + tokens.shape[1], device=tokens.device).expand_as(tokens)
        self.tokens.append(tokens)
        self.parents.append(parent)
        self.chances.append(chance)
        self.count += tokens.shape[1]
        return numbers

    def chosen(self, nodes: int, cost: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Before the second token of a sequence no row has been read, so nothing can be drafted."""
        tokens, parent, size = likeliest(torch.cat(self.tokens, 1), torch.cat(self.parents, 1), self.found, nodes, cost)
        return tokens, parent, size.where(self.known, 1)


def likeliest(
    tokens: Tensor, parent: Tensor, chance: Tensor, nodes: int, cost: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The nodes likeliest to be reached, `nodes` at most: tokens and parents [b, nodes], and the size [b].

    tokens [b, M]: the root first and every parent before its children. parent [b or 1, M]. chance [b, M]: log-probability
    of the whole path to a node, so that no child is above its parent. cost [nodes or more]: of a pass by its rows; with it
    only as many nodes are taken as pay off.
    """
    count = tokens.shape[1]
    nodes = min(nodes, count)
    order = chance.argsort(dim=1, descending=True, stable=True)[:, :nodes]
    likely = chance.gather(1, order)  # falls from 0, the root
    size = (likely > -math.inf).sum(1)
    if cost is not None:
        likely = likely.exp()
        size = torch.minimum(size, (likely.cumsum(1) / cost[:nodes]).argmax(1) + 1)
    rows = torch.arange(nodes, device=tokens.device)
    kept = rows < size.unsqueeze(1)
    # Back in the given order, so that parents come first; dropped nodes go to the end.
    chosen = torch.where(kept, order, count).sort(1).values
    place = torch.zeros(tokens.shape[0], count + 1, dtype=torch.long, device=tokens.device)
    place.scatter_(1, chosen, rows.expand_as(chosen))
    chosen = chosen.where(kept, 0)
    above = parent.expand_as(tokens).gather(1, chosen)
    return tokens.gather(1, chosen), place.gather(1, above), size


@accelerated("drafting.growth:filled")
def filled(state: Columns, guessed: Tensor, ranks: Tensor) -> tuple[Tensor, Tensor]:
    """Fill a template with candidates that do not depend on the tokens before them: tokens [b, N] and size [b].

    guessed [b, depth or more, k]: the candidates of each level. ranks [N - 1, 2]: level and rank of every node but the root.
    Before the second token of a sequence only the root counts.
    """
    level, rank = ranks.unbind(1)
    tokens = torch.cat([state.roots[state.slots].unsqueeze(1), guessed[:, level, rank]], dim=1)
    size = torch.full_like(state.slots, tokens.shape[1]).where(state.lengths[state.slots] > 0, 1)
    return tokens, size


def sureness(chance: Tensor, likely: Tensor) -> Tensor:
    """How much of the probability of live nodes [b, w] their first candidates [b, w, k] hold, given log-probabilities."""
    return (likely[..., 0] + chance).exp().sum() / chance.exp().sum()


def _likely_enough(likely: Tensor, budget: Budget) -> Tensor:
    chance = likely.exp()
    inside = chance.cumsum(-1) <= budget.top_p + 1e-6  # a sum that is exactly top_p may be rounded up
    first = torch.arange(likely.shape[-1], device=likely.device) == 0
    return (inside & (chance >= budget.floor * chance[..., :1])) | first


def _finite(chance: Tensor) -> Tensor:
    """Replace NaN and infinities by -inf. A NaN would be drafted before everything else."""
    return chance.where(chance.isfinite(), -math.inf)


def _largest(chance: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of [b, m] and where they are. Ties go to the first, which `topk` does not promise."""
    values, places = chance.sort(dim=1, descending=True, stable=True)
    return values[:, :count], places[:, :count]

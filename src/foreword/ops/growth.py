"""Trees that follow the candidates, as torch operations: nodes are added level by level, then the likeliest are drafted.

In: the candidate tokens after the live nodes of a level and their log-probabilities, [b, w, k] each. Out: the nodes to
continue from, and in the end tokens, parents and size of a draft. Ties go to the earlier node. On CUDA,
ops/drafting/growth.py takes the place of `growing_trees`, `filled` and `likeliest_paths`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from foreword.ops.dispatch import accelerated

if TYPE_CHECKING:
    from foreword.ops.round.settle import Columns


class Budget(NamedTuple):
    """Clover's rule: how many nodes may follow the root, and which candidates are likely enough.

    After each live node, the candidates that together hold `top_p` are allowed if they have at least `floor` times the
    probability of the first. The first is always allowed.
    """

    nodes: int
    top_p: float
    floor: float


class GrowingTrees(Protocol):
    """Trees of a round's sequences while they grow: `add` for each level, then `chosen`."""

    @property
    def chance(self) -> Tensor:
        """[b, w]: log-probabilities of the paths to the live nodes, those to continue from."""

    def add(self, candidates: Tensor, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        """Add the candidates [b, w, k] after the live nodes, with their log-probabilities.

        Returns the tokens of the nodes to continue from and which of the w live nodes each follows: [b, w'] twice.
        """

    def chosen(self, nodes: int, cost: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the likeliest `nodes` of all: tokens and parents [b, nodes], and the size [b].

        cost [nodes or more]: of a pass by its rows. With it only as many nodes are taken as pay off. It is None where rows
        are fixed.
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
        self.chances = [torch.zeros(root.shape, device=root.device)]  # log-probabilities of the whole paths, by level
        self.count = 1
        self.nodes, self.chance = self.parents[0], self.chances[0]  # of the live nodes [b, w]: their numbers and `chances`
        self.left = torch.full_like(root, 0 if budget is None else budget.nodes)  # [b, 1]

    @property
    def found(self) -> Tensor:
        """[b, M]: log-probabilities of the paths to all nodes, the root first."""
        return torch.cat(self.chances, 1)

    @property
    def levels(self) -> int:
        """The number of levels added so far."""
        return len(self.chances) - 1

    def add(self, candidates: Tensor, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        whole = _finite(self.chance.unsqueeze(2) + log_probs)
        if self.budget is not None:
            return self._spend(
                self.budget, candidates, whole.masked_fill(~_likely_enough(log_probs, self.budget), -math.inf)
            )
        tokens, chance = candidates.flatten(1), whole.flatten(1)
        nodes = self._append(tokens, self.nodes.unsqueeze(2).expand_as(candidates).flatten(1), chance)
        self.chance, best = _largest(chance, self.width)
        self.nodes = nodes.gather(1, best)
        return tokens.gather(1, best), best // candidates.shape[2]

    def _spend(self, budget: Budget, candidates: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
        """Add the likeliest candidates that the budget has room for. Once it is spent, later levels are masked."""
        chance, best = _largest(whole.flatten(1), budget.nodes)
        place = torch.arange(best.shape[1], device=best.device)
        chance = chance.masked_fill(place >= self.left, -math.inf)
        self.left = self.left - (chance > -math.inf).sum(1, keepdim=True)
        tokens, origin = candidates.flatten(1).gather(1, best), best // candidates.shape[2]
        nodes = self._append(tokens, self.nodes.gather(1, origin), chance)
        self.nodes, self.chance = nodes[:, : self.width], chance[:, : self.width]
        return tokens[:, : self.width], origin[:, : self.width]

    def _append(self, tokens: Tensor, parent: Tensor, chance: Tensor) -> Tensor:
        """Append nodes and return their numbers [b, m]."""
        numbers = torch.arange(self.count, self.count + tokens.shape[1], device=tokens.device).expand_as(tokens)
        self.tokens.append(tokens)
        self.parents.append(parent)
        self.chances.append(chance)
        self.count += tokens.shape[1]
        return numbers

    def chosen(self, nodes: int, cost: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Choose the likeliest. Before the second token of a sequence no row has been read, so only the root counts."""
        tokens, parent, size = likeliest(torch.cat(self.tokens, 1), torch.cat(self.parents, 1), self.found, nodes, cost)
        return tokens, parent, size.where(self.known, 1)


def likeliest(
    tokens: Tensor, parent: Tensor, chance: Tensor, nodes: int, cost: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the nodes likeliest to be reached, `nodes` at most: tokens and parents [b, nodes], and the size [b].

    tokens [b, M]: the root first and every parent before its children. parent [b or 1, M]. chance [b, M]: log-probability
    of the whole path to a node, so that no child is above its parent. cost [nodes or more]: of a pass by its rows; with it
    only as many nodes are taken as pay off.
    """
    count = tokens.shape[1]
    nodes = min(nodes, count)
    order = chance.argsort(dim=1, descending=True, stable=True)[:, :nodes]
    best = chance.gather(1, order)  # falls from 0, the root
    size = (best > -math.inf).sum(1)
    if cost is not None:
        best = best.exp()
        size = torch.minimum(size, (best.cumsum(1) / cost[:nodes]).argmax(1) + 1)
    rows = torch.arange(nodes, device=tokens.device)
    kept = rows < size.unsqueeze(1)
    # Restore the given order, so that parents come first. Dropped nodes go to the end.
    chosen = torch.where(kept, order, count).sort(1).values
    place = torch.zeros(tokens.shape[0], count + 1, dtype=torch.long, device=tokens.device)
    place.scatter_(1, chosen, rows.expand_as(chosen))
    chosen = chosen.where(kept, 0)
    above = parent.expand_as(tokens).gather(1, chosen)
    return tokens.gather(1, chosen), place.gather(1, above), size


@accelerated("drafting.growth:filled")
def filled(state: Columns, candidates: Tensor, ranks: Tensor) -> tuple[Tensor, Tensor]:
    """Fill a template with candidates that do not depend on the tokens before them. Return tokens [b, N] and size [b].

    candidates [b, depth or more, k]: of each level. ranks [N - 1, 2]: level and rank of every node but the root. Before the
    second token of a sequence only the root counts.
    """
    level, rank = ranks.unbind(1)
    tokens = torch.cat([state.roots[state.slots].unsqueeze(1), candidates[:, level, rank]], dim=1)
    size = torch.full_like(state.slots, tokens.shape[1]).where(state.lengths[state.slots] > 0, 1)
    return tokens, size


class RankPaths(NamedTuple):
    """Paths of ranks through candidates, where each step has the same k candidates whatever was chosen before."""

    ways: Tensor  # [C, steps]: step * k + rank along each path; steps * k past its end
    parents: Tensor  # [1, C]: the path that each continues
    lengths: Tensor  # [C]
    last: Tensor  # [C - 1]: step * k + rank of the last candidate of each path but the root


@accelerated("drafting.growth:likeliest_paths")
def likeliest_paths(
    state: Columns, candidates: Tensor, log_probs: Tensor, paths: RankPaths, have: Tensor, nodes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the likeliest paths through candidates [b, steps, k], as `likeliest` does.

    log_probs [b or 1, steps, k]: log-probabilities. Paths longer than a slot's `have` [B] are left out.
    """
    whole = functional.pad(log_probs.expand(candidates.shape).flatten(1), (0, 1))[:, paths.ways].sum(-1)  # [b, C]
    reached = (paths.lengths <= have[state.slots].unsqueeze(1)) & (whole == whole)
    tokens = torch.cat([state.roots[state.slots].unsqueeze(1), candidates.flatten(1)[:, paths.last]], dim=1)
    return likeliest(tokens, paths.parents, whole.masked_fill(~reached, -math.inf), nodes)


def sureness(chance: Tensor, log_probs: Tensor) -> Tensor:
    """Return the share of the probability of live nodes [b, w] that their first candidates hold, given log-probabilities."""
    return (log_probs[..., 0] + chance).exp().sum() / chance.exp().sum()


def _likely_enough(log_probs: Tensor, budget: Budget) -> Tensor:
    chance = log_probs.exp()
    inside = chance.cumsum(-1) <= budget.top_p + 1e-6  # a sum that is exactly top_p may be rounded up
    first = torch.arange(log_probs.shape[-1], device=log_probs.device) == 0
    return (inside & (chance >= budget.floor * chance[..., :1])) | first


def _finite(chance: Tensor) -> Tensor:
    """Replace NaN and infinities by -inf. A NaN would be drafted before everything else."""
    return chance.where(chance.isfinite(), -math.inf)


def _largest(chance: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest of [b, m] and where they are. Ties go to the first, which `topk` does not promise."""
    values, places = chance.sort(dim=1, descending=True, stable=True)
    return values[:, :count], places[:, :count]

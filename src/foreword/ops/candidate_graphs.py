"""Graphs of candidates, as torch operations: a continuation that occurs again is drafted once and shared.

In: candidates after the nodes that were read last. Out: the nodes to read next, and in the end a tree. A candidate that ends
in the same few tokens as an older node is not read again: the node before it gets an alias, an edge to the older node. No
edge closes a loop, so every walk ends. Shapes are fixed: a candidate that is dropped or merged leaves its place empty.
On CUDA, ops/drafting/candidate_graphs.py takes the place of `growing_graph`. Paper: GSD (arXiv 2407.16207).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from foreword.ops.dispatch import accelerated
from foreword.ops.growth import growing_trees, sureness

if TYPE_CHECKING:
    from foreword.ops.round.settle import Columns

_MIX = 0x5851F42D4C957F2D  # odd, so that multiplying loses no bits of a token
NOWHERE = -1
MOST_LIVE = 64  # nodes of a level that the kernel has bits for


@dataclass(frozen=True)
class Rule:
    """How a graph grows.

    branch: candidates after each node that is read. repeat: how many tokens before its own must be equal for a candidate to
    be merged; -1 merges none. siblings: a candidate counts if it has this share of its best sibling's probability. sure: a
    candidate less likely than this has nothing after it. width: nodes of a level that are read.
    """

    branch: int
    repeat: int
    siblings: float
    sure: float
    width: int

    @property
    def log_siblings(self) -> float:
        return _log(self.siblings)

    @property
    def log_sure(self) -> float:
        return _log(self.sure)


class GraphCandidates(NamedTuple):
    """All candidates of a graph, [b, M] each. Those of the node that was read as number x start at x * branch."""

    tokens: Tensor
    chances: Tensor  # log-probabilities, each given its own node; -inf: the candidate does not count
    keys: Tensor  # equal where the last tokens are equal
    goal: Tensor  # the candidate that it leads to: itself if it is a node, an older one if it was merged, or NOWHERE
    read: Tensor  # the number it was read as, or NOWHERE

    @property
    def is_node(self) -> Tensor:
        return self.goal == torch.arange(self.goal.shape[1], device=self.goal.device)


class GrowingGraph(Protocol):
    """Graphs of a round's sequences while they grow: `add` for each level, then `unrolled`."""

    @property
    def candidates(self) -> GraphCandidates: ...

    @property
    def counts(self) -> Tensor:
        """[2, b]: rows that were read so far, and rows that were saved by merging."""

    def add(self, candidates: Tensor, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        """Add candidates [b, w, n] after the nodes that were read last, best first, with their log-probabilities.

        Returns the tokens of the nodes to read next and which of the w nodes each follows: [b, w'] twice. If there are
        fewer nodes, the rest is padding.
        """

    def unrolled(
        self, state: Columns, depth: int, width: int, nodes: int, cost: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Unroll the likeliest walks into a tree: tokens and parents [b, nodes], and the size [b].

        A node that several edges lead to appears once for each of them. The tree has `depth` levels and `nodes` rows at
        most, and `width` nodes of a level are continued. cost [nodes or more]: of a pass by its rows, where rows may be cut.
        """


def _has_bits(root: Tensor, rule: Rule, depth: int) -> bool:
    return rule.width <= MOST_LIVE


@accelerated("drafting.candidate_graphs:KernelGraph", when=_has_bits)
def growing_graph(root: Tensor, rule: Rule, depth: int) -> GrowingGraph:
    """Start graphs at roots [b], to which at most `depth` levels will be added."""
    return TorchGraph(root, rule)


class TorchGraph:
    """Growing graphs as torch operations."""

    def __init__(self, root: Tensor, rule: Rule) -> None:
        self.rule = rule
        size, device = root.shape[0], root.device
        none = torch.zeros(size, 0, dtype=torch.long, device=device)
        self.candidates = GraphCandidates(none, torch.zeros(size, 0, device=device), none, none, none)
        # For the w nodes read last: the log-probability of the whole path, -inf for padding [b, w]; which of all nodes that
        # were read lead to them [b, X, w]; and their last tokens [b, w, k].
        self.chance = torch.zeros(size, 1, device=device)
        self.reach = torch.ones(size, 1, 1, dtype=torch.bool, device=device)
        before = torch.full((size, 1, max(rule.repeat, 0)), NOWHERE, device=device)
        self.recent = torch.cat([before, root.view(-1, 1, 1)], dim=2)[..., 1:]
        self.found = self.chance  # [b, 1 + M] log-probabilities of the paths to the root and to all candidates
        self.sure = torch.ones((), device=device)  # `sureness` of the level that was read last
        self.counts = torch.zeros(2, size, dtype=torch.long, device=device)
        self.saved = torch.zeros_like(root)  # [b] candidates of the last level that merging keeps from being read

    def add(self, candidates: Tensor, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        (live, branch), count = candidates.shape[1:], self.candidates.tokens.shape[1]
        log_probs, keys = self._counting(log_probs), self._key(candidates).flatten(1)
        counts = (log_probs > -math.inf).flatten(1)
        number = torch.arange(count, count + live * branch, device=keys.device).expand_as(keys)
        goal, leads = self._merged(keys, counts, live) if self.rule.repeat >= 0 else (number, None)
        goal = goal.where(counts, NOWHERE)
        is_node, sure = goal == number, (log_probs >= self.rule.log_sure).flatten(1)
        self.counts = self.counts + torch.stack([(self.chance > -math.inf).sum(1), self.saved])
        self.saved = (counts & ~is_node & sure).sum(1)
        paths = self.chance.unsqueeze(2) + log_probs
        self.found = torch.cat([self.found, paths.flatten(1)], dim=1)
        self.sure = sureness(self.chance, log_probs)
        whole = paths.flatten(1).masked_fill(~(is_node & sure), -math.inf)
        chance, best = (values[:, : self.rule.width] for values in whole.sort(dim=1, descending=True, stable=True))
        numbers = torch.arange(best.shape[1], device=best.device) + (count // branch + live)
        read = torch.full_like(goal, NOWHERE).scatter(1, best, numbers.where(chance > -math.inf, NOWHERE))
        new = GraphCandidates(candidates.flatten(1), log_probs.flatten(1), keys, goal, read)
        self.candidates = GraphCandidates(*(torch.cat(pair, dim=1) for pair in zip(self.candidates, new, strict=True)))
        if leads is not None:
            self.reach = self._reached(leads, goal, count + best, live)
        tokens, origin = new.tokens.gather(1, best), best // branch
        self.chance, self.recent = chance, torch.cat([_rows(self.recent, origin), tokens.unsqueeze(2)], dim=2)[..., 1:]
        return tokens, origin

    def _counting(self, log_probs: Tensor) -> Tensor:
        """Set candidates that do not count to -inf: those after padding, and those far below their best sibling."""
        log_probs = log_probs.where(log_probs.isfinite(), -math.inf)
        near = log_probs >= log_probs[..., :1] + self.rule.log_siblings
        return log_probs.masked_fill(~near | (self.chance == -math.inf).unsqueeze(2), -math.inf)

    def _key(self, candidates: Tensor) -> Tensor:
        """Return a hash of the last tokens of every candidate [b, w, n]. A collision is next to impossible, and would only
        cost a candidate."""
        before = torch.zeros_like(candidates[..., 0])
        for token in self.recent.unbind(2):
            before = before * _MIX + token + 1
        return before.unsqueeze(2) * _MIX + candidates + 1

    def _merged(self, keys: Tensor, counts: Tensor, live: int) -> tuple[Tensor, Tensor]:
        """Return what every candidate [b, P] leads to: the first older node with the same last tokens that does not lead
        back, the first such candidate of this level, or a node of its own. And which nodes of this level an older node
        leads to [b, P, w]."""
        known, branch = self.candidates, self.rule.branch
        count = known.tokens.shape[1]
        from_node = functional.pad(self.reach, (0, 0, 0, 1))  # the last row is that of nodes not read
        from_node = _rows(from_node, known.read.where(known.read >= 0, self.reach.shape[1]))  # [b, M, w]
        back = from_node.transpose(1, 2).repeat_interleave(branch, 1)  # [b, P, M]
        same = (keys.unsqueeze(2) == known.keys.unsqueeze(1)) & (known.is_node.unsqueeze(1) & ~back)
        older = _first(same)
        found = (older < count) & counts
        leads = _rows(functional.pad(from_node, (0, 0, 0, 1)), older) & found.unsqueeze(2)
        found = found & ~self._closes_a_loop(leads, live)
        leads = leads & found.unsqueeze(2)
        free = counts & ~found
        twin = _first((keys.unsqueeze(2) == keys.unsqueeze(1)) & free.unsqueeze(1))
        return torch.where(found, older, count + twin), leads

    def _closes_a_loop(self, leads: Tensor, live: int) -> Tensor:
        """Return which aliases must be dropped [b, P]. All aliases of a level are made at once, and two of them could close
        a loop that neither closes alone. Of those, only aliases to a later node of the level stay, so no loop remains."""
        step = leads.unflatten(1, (live, -1)).any(2)  # [b, w, w]
        returns = _closed(step).transpose(1, 2)  # from which nodes a node of this level would be reached again
        place = torch.arange(live, device=leads.device)
        refused = returns & (place <= place.unsqueeze(1))
        return (leads & refused.repeat_interleave(self.rule.branch, 1)).any(2)

    def _reached(self, leads: Tensor, goal: Tensor, nodes: Tensor, live: int) -> Tensor:
        """Return which read nodes lead to the nodes to read next, new aliases included: [b, X, w']."""
        step = _closed(leads.unflatten(1, (live, -1)).any(2)) | _itself(live, leads)
        edge = (goal.unsqueeze(2) == nodes.unsqueeze(1)).unflatten(1, (live, -1)).any(2)  # [b, w, w']
        before = _joined(_joined(self.reach, step), edge)
        return torch.cat([before, _itself(nodes.shape[1], leads).expand(nodes.shape[0], -1, -1)], dim=1)

    def unrolled(
        self, state: Columns, depth: int, width: int, nodes: int, cost: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        trees, guess = growing_trees(state, depth, width, self.rule.branch), self.walks()
        tokens = state.roots[state.slots].unsqueeze(1)
        origin = torch.zeros_like(tokens)
        for level in range(1, depth + 1):
            tokens, origin = trees.add(*guess(level, tokens, origin))
        return trees.chosen(nodes, cost)

    def walks(self) -> Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Return the graph as a function that gives the candidates after live nodes, for a tree to grow on."""
        known, shape = self.candidates, (-1, self.rule.branch)
        nowhere = known.tokens.shape[1] // self.rule.branch  # the number of a node with nothing after it
        onward = known.read.gather(1, known.goal.clamp(min=0)).where(known.goal >= 0, NOWHERE)
        onward = onward.clamp(max=nowhere).where(onward >= 0, nowhere)  # nodes chosen last were never read
        tokens = functional.pad(known.tokens.unflatten(1, shape), (0, 0, 0, 1))
        chances = functional.pad(known.chances.unflatten(1, shape), (0, 0, 0, 1), value=-math.inf)
        onward = functional.pad(onward.unflatten(1, shape), (0, 0, 0, 1), value=nowhere)
        at = torch.zeros_like(known.tokens[:, :1])

        def guess(level: int, live: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal at
            if level > 1:  # siblings have different tokens, so the token tells which edge was taken
                above = at.gather(1, origin)
                rank = (_rows(tokens, above) == live.unsqueeze(2)).to(torch.uint8).argmax(2, keepdim=True)
                at = _rows(onward, above).gather(2, rank).squeeze(2)
            return _rows(tokens, at), _rows(chances, at)

        return guess


def _rows(values: Tensor, places: Tensor) -> Tensor:
    """Return the rows of [b, m, c] at places [b, n]: [b, n, c]."""
    return values.gather(1, places.unsqueeze(2).expand(-1, -1, values.shape[2]))


def _first(true: Tensor) -> Tensor:
    """Return the first place along the last axis that is true, or the axis length."""
    place = torch.arange(true.shape[-1], device=true.device)
    return functional.pad(place.where(true, true.shape[-1]), (0, 1), value=true.shape[-1]).amin(-1)


def _joined(one: Tensor, other: Tensor) -> Tensor:
    """Compose two relations of what leads to what, [b, x, y] and [b, y, z]: [b, x, z]."""
    return (one.float() @ other.float()) > 0


def _closed(step: Tensor) -> Tensor:
    """Return the transitive closure of a relation [b, w, w]."""
    for _ in range((step.shape[1] - 1).bit_length()):
        step = step | _joined(step, step)
    return step


def _itself(count: int, like: Tensor) -> Tensor:
    place = torch.arange(count, device=like.device)
    return place == place.unsqueeze(1)


def _log(share: float) -> float:
    return math.log(share) if share > 0 else -math.inf

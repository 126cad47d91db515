"""DRAFT: a graph of guesses, grown level by level, in which a continuation that comes back is drafted once.

In: guesses behind the nodes that were read last. Out: the nodes to read next, and in the end what may follow what, for a
tree to be unrolled from. A guess that ends in the same few tokens as an older node is not read again: the node it hangs on
gets an alias, an edge to the older node. No edge leads back, so every walk ends. Shapes are fixed: a node is a guess of a
node that was read, and a guess that is dropped or merged leaves its place empty.
Paper: GSD (arXiv 2407.16207).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from foreword.core.draft import Draft, Tree
from foreword.core.state import State
from foreword.core.trees import BestFirst, Guess, RowCosts, shape_at, sureness

_MIX = 0x5851F42D4C957F2D  # odd, so that no token is lost in a product
NOWHERE = -1
MOST_LIVE = 64  # nodes of a level that the kernel has bits for


@dataclass(frozen=True)
class Rule:
    """How a graph grows. `repeat`: how many tokens before its own have to be the same for a guess to be merged; -1: none is.
    `siblings`: a guess counts if it has this share of its best sibling's chance. `sure`: a guess less likely than this has
    nothing behind it. `width`: nodes of a level that are read."""

    branch: int
    repeat: int
    siblings: float
    sure: float
    width: int


class Guesses(NamedTuple):
    """All [b, M]. Those of the node that was read as number x are the `branch` ones from x * branch on."""

    tokens: Tensor
    chances: Tensor  # logarithms, each for itself; -inf: it does not count
    keys: Tensor  # equal where the last tokens are
    goal: Tensor  # the guess that it leads to: itself where it is a node, an older one where it is merged, or NOWHERE
    read: Tensor  # as which number it was read, or NOWHERE

    @property
    def is_node(self) -> Tensor:
        return self.goal == torch.arange(self.goal.shape[1], device=self.goal.device)


class Drafted(Protocol):
    """A graph while it grows."""

    @property
    def guesses(self) -> Guesses: ...

    @property
    def counts(self) -> Tensor:
        """[2, b]: rows that were read so far, and rows that were not because they were merged."""

    def add(self, guessed: Tensor, likely: Tensor) -> tuple[Tensor, Tensor]:
        """Guesses [b, w, n] behind the nodes that were read last, best first, with their log-chances. Tokens of the nodes to
        read next, and which of the w each hangs on: twice [b, w']. Where there are fewer the rest is padding."""

    def draft(self, state: State, growth: BestFirst) -> Draft:
        """The likeliest walks, as a tree: a node that several edges lead to comes once for each of them."""


def graph_of(rule: Rule, root: Tensor, depth: int) -> Drafted:
    """The graph behind roots [b], for `depth` levels to be added to."""
    return ByKernel(rule, root, depth) if root.is_cuda and rule.width <= MOST_LIVE else Graph(rule, root)


class ByKernel:
    """The graph on CUDA."""

    def __init__(self, rule: Rule, root: Tensor, depth: int) -> None:
        from foreword.kernels.merge import Merged, Merging  # noqa: PLC0415  Triton is there only where CUDA is

        logarithms = _log(rule.siblings), _log(rule.sure)
        self.merged = Merged(Merging(rule.branch, rule.repeat, *logarithms, rule.width), root, depth)

    @property
    def guesses(self) -> Guesses:
        return Guesses(*self.merged.guesses)

    @property
    def counts(self) -> Tensor:
        return self.merged.tally[:2]

    def add(self, guessed: Tensor, likely: Tensor) -> tuple[Tensor, Tensor]:
        return self.merged.add(guessed, likely)

    def draft(self, state: State, growth: BestFirst) -> Draft:
        shape = shape_at(growth, len(state.lanes.ids))
        tokens, parent, size = self.merged.unrolled(state, shape.depth, growth.width, shape.nodes)
        return Draft(tokens, Tree(parent), size)


class Graph:
    def __init__(self, rule: Rule, root: Tensor) -> None:
        self.rule = rule
        size, device = root.shape[0], root.device
        none = torch.zeros(size, 0, dtype=torch.long, device=device)
        self.guesses = Guesses(none, torch.zeros(size, 0, device=device), none, none, none)
        # Of the w nodes that are read last: the log-chance of the whole way there, -inf for padding [b, w]; which of all
        # nodes that were read lead there [b, X, w]; and their last tokens [b, w, k].
        self.chance = torch.zeros(size, 1, device=device)
        self.reach = torch.ones(size, 1, 1, dtype=torch.bool, device=device)
        before = torch.full((size, 1, max(rule.repeat, 0)), NOWHERE, device=device)
        self.recent = torch.cat([before, root.view(-1, 1, 1)], dim=2)[..., 1:]
        self.found = self.chance  # [b, 1 + M] the same of the root and of all guesses
        self.sure = torch.ones((), device=device)  # how much of what was read last its first guesses hold
        self.counts = torch.zeros(2, size, dtype=torch.long, device=device)
        self.saved = torch.zeros_like(root)  # [b] guesses of the last level that would be read next if none were merged

    def add(self, guessed: Tensor, likely: Tensor) -> tuple[Tensor, Tensor]:
        (live, branch), count = guessed.shape[1:], self.guesses.tokens.shape[1]
        likely, keys = self._counting(likely), self._key(guessed).flatten(1)
        counts = (likely > -math.inf).flatten(1)
        number = torch.arange(count, count + live * branch, device=keys.device).expand_as(keys)
        goal, leads = self._merged(keys, counts, live) if self.rule.repeat >= 0 else (number, None)
        goal = goal.where(counts, NOWHERE)
        is_node, sure = goal == number, (likely >= _log(self.rule.sure)).flatten(1)
        self.counts = self.counts + torch.stack([(self.chance > -math.inf).sum(1), self.saved])
        self.saved = (counts & ~is_node & sure).sum(1)
        ways = self.chance.unsqueeze(2) + likely
        self.found = torch.cat([self.found, ways.flatten(1)], dim=1)
        self.sure = sureness(self.chance, likely)
        whole = ways.flatten(1).masked_fill(~(is_node & sure), -math.inf)
        chance, best = (part[:, : self.rule.width] for part in whole.sort(dim=1, descending=True, stable=True))
        numbers = torch.arange(best.shape[1], device=best.device) + (count // branch + live)
        read = torch.full_like(goal, NOWHERE).scatter(1, best, numbers.where(chance > -math.inf, NOWHERE))
        new = Guesses(guessed.flatten(1), likely.flatten(1), keys, goal, read)
        self.guesses = Guesses(*(torch.cat(pair, dim=1) for pair in zip(self.guesses, new, strict=True)))
        if leads is not None:
            self.reach = self._reached(leads, goal, count + best, live)
        tokens, origin = new.tokens.gather(1, best), best // branch
        self.chance, self.recent = chance, torch.cat([_rows(self.recent, origin), tokens.unsqueeze(2)], dim=2)[..., 1:]
        return tokens, origin

    def pays(self, costs: RowCosts, levels: int) -> bool:
        """Whether it is expected to pay that a level more is read, behind so many. Asks the device: for the CPU."""
        return costs.go_on(len(self.found), self.found, self.chance, self.sure, levels)

    def _counting(self, likely: Tensor) -> Tensor:
        """Log-chances, -inf where a guess does not count: behind padding, or far behind its best sibling."""
        likely = likely.where(likely.isfinite(), -math.inf)
        near = likely >= likely[..., :1] + _log(self.rule.siblings)
        return likely.masked_fill(~near | (self.chance == -math.inf).unsqueeze(2), -math.inf)

    def _key(self, guessed: Tensor) -> Tensor:
        """[b, w, n]: a number for the last tokens of every guess. That others have the same is next to impossible, and would
        cost a guess, not the text."""
        before = torch.zeros_like(guessed[..., 0])
        for token in self.recent.unbind(2):
            before = before * _MIX + token + 1
        return before.unsqueeze(2) * _MIX + guessed + 1

    def _merged(self, keys: Tensor, counts: Tensor, live: int) -> tuple[Tensor, Tensor]:
        """What every guess [b, P] leads to: the first older node with the same last tokens from which no way leads back, the
        first such guess of this level, or a node of its own. And to which nodes of this level that leads on [b, P, w]."""
        known, branch = self.guesses, self.rule.branch
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
        """[b, P]: the aliases of a level are made at once, and two of them could close a loop that neither closes alone. Of
        such a loop those stay that lead to a later node of the level, so that there is none."""
        step = leads.unflatten(1, (live, -1)).any(2)  # [b, w, w]
        returns = _closed(step).transpose(1, 2)  # from where a node of this level would be reached again
        place = torch.arange(live, device=leads.device)
        refused = returns & (place <= place.unsqueeze(1))
        return (leads & refused.repeat_interleave(self.rule.branch, 1)).any(2)

    def _reached(self, leads: Tensor, goal: Tensor, nodes: Tensor, live: int) -> Tensor:
        """[b, X, w']: who leads to the nodes to read next. Whoever leads to one with an edge there, by new aliases too."""
        step = _closed(leads.unflatten(1, (live, -1)).any(2)) | _itself(live, leads)
        edge = (goal.unsqueeze(2) == nodes.unsqueeze(1)).unflatten(1, (live, -1)).any(2)  # [b, w, w']
        before = _joined(_joined(self.reach, step), edge)
        return torch.cat([before, _itself(nodes.shape[1], leads).expand(nodes.shape[0], -1, -1)], dim=1)

    def draft(self, state: State, growth: BestFirst) -> Draft:
        return growth.draft(state, self.walks())

    def walks(self) -> Guess:
        """What may follow what, for a tree to grow on."""
        known, shape = self.guesses, (-1, self.rule.branch)
        nowhere = known.tokens.shape[1] // self.rule.branch  # the number of a node with nothing behind it
        onward = known.read.gather(1, known.goal.clamp(min=0)).where(known.goal >= 0, NOWHERE)
        onward = onward.clamp(max=nowhere).where(onward >= 0, nowhere)  # those chosen last are not read any more
        tokens = functional.pad(known.tokens.unflatten(1, shape), (0, 0, 0, 1))
        chances = functional.pad(known.chances.unflatten(1, shape), (0, 0, 0, 1), value=-math.inf)
        onward = functional.pad(onward.unflatten(1, shape), (0, 0, 0, 1), value=nowhere)
        at = torch.zeros_like(known.tokens[:, :1])

        def guess(level: int, live: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal at
            if level > 1:  # siblings have tokens of their own, so the token says which of the edges was taken
                above = at.gather(1, origin)
                rank = (_rows(tokens, above) == live.unsqueeze(2)).to(torch.uint8).argmax(2, keepdim=True)
                at = _rows(onward, above).gather(2, rank).squeeze(2)
            return _rows(tokens, at), _rows(chances, at)

        return guess


def sketch(guesses: Guesses, branch: int, root: int, lane: int) -> dict[str, Any]:
    """`Drafter.sketch` of a sequence: its nodes numbered as they were found, the root 0."""
    tokens, chances, _, goal, read = (part[lane].tolist() for part in guesses)
    nodes = [guess for guess, to in enumerate(goal) if to == guess]
    number = {guess: place for place, guess in enumerate(nodes, start=1)}
    reader = {read[guess]: place for guess, place in number.items()} | {0: 0}
    edges = [
        {"start": reader[guess // branch], "goal": number[to], "chance": math.exp(chances[guess]), "alias": to != guess}
        for guess, to in enumerate(goal)
        if to != NOWHERE
    ]
    return {"nodes": [{"token": root}, *({"token": tokens[guess]} for guess in nodes)], "edges": edges}


def _rows(values: Tensor, places: Tensor) -> Tensor:
    """Of [b, m, c] the rows at places [b, n]: [b, n, c]."""
    return values.gather(1, places.unsqueeze(2).expand(-1, -1, values.shape[2]))


def _first(true: Tensor) -> Tensor:
    """The first place along the last axis that is true, or its length."""
    place = torch.arange(true.shape[-1], device=true.device)
    return functional.pad(place.where(true, true.shape[-1]), (0, 1), value=true.shape[-1]).amin(-1)


def _joined(one: Tensor, other: Tensor) -> Tensor:
    """[b, x, y] and [b, y, z], each who leads to whom: one after the other."""
    return (one.float() @ other.float()) > 0


def _closed(step: Tensor) -> Tensor:
    """Who leads to whom [b, w, w] in one step or more."""
    for _ in range((step.shape[1] - 1).bit_length()):
        step = step | _joined(step, step)
    return step


def _itself(count: int, like: Tensor) -> Tensor:
    place = torch.arange(count, device=like.device)
    return place == place.unsqueeze(1)


def _log(share: float) -> float:
    return math.log(share) if share > 0 else -math.inf

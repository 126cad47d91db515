"""DRAFT: how the rows of a pass are divided between nodes of a tree and pseudo rows that the nodes carry for the next round.

A node is worth how often it is right; its i-th pseudo row what step i brings, as often as the node is the last right one.
How many steps the last right node carried decides the next tree, so rounds form a chain of states: what a division brings is
its mean over that chain. In: how often guesses are right, by step and rank. Out: an `Allotment`, nodes likeliest first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from foreword.core.trees import Path, Rates, greedy_paths, promise

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # that are tried where their number is free
ROUNDS = 64  # after so many a chain of rounds has forgotten where it began


@dataclass(frozen=True)
class Allotment:
    carries: tuple[int, ...]  # steps that each node carries, the root first, then the likeliest paths
    tokens: float  # a round decides

    @property
    def nodes(self) -> int:
        return len(self.carries)

    @property
    def rows(self) -> int:
        return self.nodes + sum(self.carries)

    @property
    def depth(self) -> int:
        return min(max(self.carries), self.nodes - 1)


class Ways:
    """The likeliest trees by how many steps there are to guess with, 0 to `steps`."""

    def __init__(self, rates: Rates, steps: int, most: int) -> None:
        self.steps = min(steps, len(rates))
        self.paths = [greedy_paths(rates[:count], most - 1) for count in range(self.steps + 1)]
        self.promise: list[list[float]] = [[1.0, *(promise(path, rates) for path in paths)] for paths in self.paths]
        self.parent = [_parents(paths) for paths in self.paths]

    def tokens(self, steps: int, nodes: int) -> float:
        """That a round decides with a tree of so many nodes at most."""
        return sum(self.promise[steps][:nodes])

    def ends(self, steps: int, nodes: int) -> list[float]:
        """How often the way to each node is right and leads no further."""
        found = self.promise[steps][:nodes]
        for node, parent in enumerate(self.parent[steps][:nodes]):
            if node:
                found[parent] = max(found[parent] - self.promise[steps][node], 0.0)
        return found

    def allot(self, nodes: int, rows: int) -> Allotment:
        """The rows that `nodes` of them leave, where they bring most."""
        gains, least = [0.0], 1.0
        for step in range(1, self.steps + 1):  # a step needs those before it, so none may count for more than they
            least = min(least, self.tokens(step, nodes) - self.tokens(step - 1, nodes))
            gains.append(least)
        ends = self.ends(self.steps, nodes)
        worth = [(-end * gains[step], step, node) for node, end in enumerate(ends) for step in range(1, self.steps + 1)]
        carries = [0] * len(ends)
        for value, _, node in sorted(worth)[: rows - nodes]:
            carries[node] += value < 0
        return Allotment(tuple(carries), self._mean(carries))

    def all_carry(self, nodes: int) -> Allotment:
        carries = (self.steps,) * min(nodes, len(self.promise[self.steps]))
        return Allotment(carries, self.tokens(self.steps, len(carries)))

    def _mean(self, carries: Sequence[int]) -> float:
        """Tokens a round, over a long text."""
        ends = [self.ends(steps, len(carries)) for steps in range(self.steps + 1)]
        state = [0.0] * self.steps + [1.0]
        for _ in range(ROUNDS):
            after = [0.0] * (self.steps + 1)
            for steps, share in enumerate(state):
                for node, end in enumerate(ends[steps]):
                    after[carries[node]] += share * end
            state = [share / sum(after) for share in after]
        return sum(share * self.tokens(steps, len(carries)) for steps, share in enumerate(state))


def _parents(paths: Sequence[Path]) -> list[int]:
    index = {path: node for node, path in enumerate([(), *paths])}
    return [index[path[:-1]] for path in [(), *paths]]


def best_allotment(rates: Rates, steps: int, rows: int) -> Allotment:
    """The division of `rows` rows that brings the most tokens a round."""
    ways = Ways(rates, steps, rows)
    return max((ways.allot(nodes, rows) for nodes in range(1, rows + 1)), key=lambda one: one.tokens)


def paying_allotment(rates: Rates, steps: int, cost: Callable[[Allotment], float]) -> Allotment:
    """That of any number of rows which brings most for what it costs."""
    found = [best_allotment(rates, steps, rows) for rows in ROWS]
    return max(found, key=lambda one: one.tokens / cost(one))

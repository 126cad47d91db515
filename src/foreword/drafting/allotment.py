"""DRAFT: divide the rows of a pass between nodes of a tree and pseudo rows that the nodes carry for the next round.

The value of a node is how often it is accepted. The value of its i-th pseudo row is the gain of step i, times how often the
node is the last accepted one. The steps that the last accepted node carried decide the next tree, so rounds form a Markov
chain. The value of a division is its mean tokens per round over that chain. In: how often candidates are right, by step and
rank. Out: an `Allotment`, likeliest nodes first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from foreword.drafting.trees import Path, Rates, greedy_paths, path_rate

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # the numbers of rows that are tried
ROUNDS = 64  # after this many rounds the chain has forgotten its start


@dataclass(frozen=True)
class Allotment:
    """How the rows of a pass are divided, and the tokens per round that this is expected to bring."""

    carries: tuple[int, ...]  # steps that each node carries: the root first, then the likeliest paths
    tokens: float  # per round

    @property
    def nodes(self) -> int:
        return len(self.carries)

    @property
    def rows(self) -> int:
        return self.nodes + sum(self.carries)

    @property
    def depth(self) -> int:
        return min(max(self.carries), self.nodes - 1)


class LikelyTrees:
    """The likeliest trees for each number of steps that candidates come from, 0 to `steps`."""

    def __init__(self, rates: Rates, steps: int, most: int) -> None:
        self.steps = min(steps, len(rates))
        self.paths = [greedy_paths(rates[:count], most - 1) for count in range(self.steps + 1)]
        self.accepted: list[list[float]] = [[1.0, *(path_rate(path, rates) for path in paths)] for paths in self.paths]
        self.parent = [_parents(paths) for paths in self.paths]

    def tokens(self, steps: int, nodes: int) -> float:
        """Return the expected tokens per round with a tree of at most `nodes` nodes."""
        return sum(self.accepted[steps][:nodes])

    def ends(self, steps: int, nodes: int) -> list[float]:
        """Return how often each node is the last accepted one."""
        found = self.accepted[steps][:nodes]
        for node, parent in enumerate(self.parent[steps][:nodes]):
            if node:
                found[parent] = max(found[parent] - self.accepted[steps][node], 0.0)
        return found

    def allot(self, nodes: int, rows: int) -> Allotment:
        """Give `nodes` of the rows to nodes, and the others to the most valuable pseudo rows."""
        gains, least = [0.0], 1.0
        for step in range(1, self.steps + 1):  # a step needs all before it, so it may not count more than they do
            least = min(least, self.tokens(step, nodes) - self.tokens(step - 1, nodes))
            gains.append(least)
        ends = self.ends(self.steps, nodes)
        values = [(-end * gains[step], step, node) for node, end in enumerate(ends) for step in range(1, self.steps + 1)]
        carries = [0] * len(ends)
        for value, _, node in sorted(values)[: rows - nodes]:
            carries[node] += value < 0
        return Allotment(tuple(carries), self._mean(carries))

    def all_carry(self, nodes: int) -> Allotment:
        """Let each of `nodes` nodes carry all steps."""
        carries = (self.steps,) * min(nodes, len(self.accepted[self.steps]))
        return Allotment(carries, self.tokens(self.steps, len(carries)))

    def _mean(self, carries: Sequence[int]) -> float:
        """Return the expected tokens per round over a long sequence."""
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
    """Return the division of `rows` rows with the most expected tokens per round."""
    trees = LikelyTrees(rates, steps, rows)
    return max((trees.allot(nodes, rows) for nodes in range(1, rows + 1)), key=lambda one: one.tokens)


def paying_allotment(rates: Rates, steps: int, cost: Callable[[Allotment], float]) -> Allotment:
    """Return the division, over any number of rows, with the most expected tokens per cost."""
    found = [best_allotment(rates, steps, rows) for rows in ROWS]
    return max(found, key=lambda one: one.tokens / cost(one))

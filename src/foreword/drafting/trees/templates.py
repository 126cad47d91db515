"""Templates: trees that are fixed before anything is drafted.

In: how often candidates are right, by depth and rank, or a list of paths. Out: a tree of ranks, which each round fills with
its candidates. Paper: Medusa (arXiv 2401.10774).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from foreword.core.draft import Draft, Shape, Tree
from foreword.core.state import State
from foreword.core.target import Target
from foreword.drafting.trees.growth import NextCandidates, once_read
from foreword.drafting.trees.rows import paying_rows
from foreword.ops.growth import filled

Path = tuple[int, ...]
Rates = Sequence[Sequence[float]]
"""How often a candidate is right if everything before it was, by depth and then by rank."""

# For drafters that have not been calibrated: measured on heads 1, 2, ... of an early Medusa of ours.
USUAL_RATES: Rates = (
    (0.40, 0.10, 0.065, 0.045, 0.035, 0.028, 0.023, 0.019, 0.016, 0.014),
    (0.24, 0.09, 0.055, 0.042, 0.033, 0.027, 0.022, 0.019, 0.016, 0.014),
    (0.17, 0.08, 0.055, 0.042, 0.033, 0.027, 0.022, 0.019, 0.016, 0.014),
    (0.13, 0.075, 0.053, 0.041, 0.033, 0.027, 0.022, 0.019, 0.016, 0.014),
    (0.11, 0.07, 0.052, 0.040, 0.032, 0.026, 0.022, 0.019, 0.016, 0.014),
)

EAGLE_COUNTS = (4, 8, 8, 3, 2)  # nodes at each depth of EAGLE's static tree, which other papers use as well


def greedy_paths(rates: Rates, count: int) -> list[Path]:
    """Return the `count` likeliest paths of ranks, each after its parent and its elder sibling: Medusa's construction.

    Start with the path (0), and repeatedly add the best of all next siblings and first children.
    """
    if not rates or not rates[0] or count < 1:
        return []
    paths: list[Path] = []
    waiting: list[tuple[float, Path]] = [(-rates[0][0], (0,))]
    while waiting and len(paths) < count:
        _, path = heapq.heappop(waiting)
        paths.append(path)
        near = [(*path[:-1], path[-1] + 1), (*path, 0)]
        for one in near:
            if len(one) <= len(rates) and one[-1] < len(rates[len(one) - 1]):
                heapq.heappush(waiting, (-path_rate(one, rates), one))
    return paths


def level_paths(counts: Sequence[int], rates: Rates) -> list[Path]:
    """Return the likeliest paths with `counts` nodes at each depth. Published templates are described this way."""
    paths: list[Path] = []
    above: list[Path] = [()]
    for count, ranks in zip(counts, rates, strict=False):
        below = [(*path, rank) for path in above for rank in range(len(ranks))]
        above = sorted(below, key=lambda path: (-path_rate(path, rates), path))[:count]
        paths += above
    return paths


def path_rate(path: Path, rates: Rates) -> float:
    """Return how often a whole path is right."""
    return math.prod(rates[depth][rank] for depth, rank in enumerate(path))


@dataclass(frozen=True)
class TemplateLevel:
    """One level of a template: which nodes above it are live, and where its own nodes get their tokens."""

    live: Tensor  # [w] nodes of the level above that have children
    origin: Tensor  # [w] which live node of the level before each follows
    nodes: Tensor  # [m]
    place: Tensor  # [m] which live node each follows
    rank: Tensor  # [m] which candidate of that node it takes


class Template:
    """A tree of paths of ranks."""

    def __init__(self, paths: Sequence[Path], device: torch.device) -> None:
        self.paths: list[Path] = [(), *paths]
        self.device = device
        self.index = {path: node for node, path in enumerate(self.paths)}
        self.depth = max(map(len, self.paths))
        self.tree = Tree.of(tuple(self.index[path[:-1]] for path in self.paths), device)

    @cached_property
    def levels(self) -> list[TemplateLevel]:
        levels: list[TemplateLevel] = []
        above: list[Path] = []
        for depth in range(1, self.depth + 1):
            own = [path for path in self.paths if len(path) == depth]
            live = sorted({path[:-1] for path in own}, key=self.index.__getitem__)
            columns = (
                [self.index[path] for path in live],
                [above.index(path[:-1]) if above else 0 for path in live],
                [self.index[path] for path in own],
                [live.index(path[:-1]) for path in own],
                [path[-1] for path in own],
            )
            levels.append(TemplateLevel(*(torch.tensor(column, device=self.device) for column in columns)))
            above = live
        return levels

    @cached_property
    def ranks(self) -> Tensor:
        """[N - 1, 2]: level, from 0, and rank of every node but the root."""
        pairs = [(len(path) - 1, path[-1]) for path in self.paths[1:]]
        return torch.tensor(pairs, dtype=torch.long, device=self.device).view(-1, 2)  # also for a root alone

    def tokens(self, root: Tensor, guess: NextCandidates) -> Tensor:
        """Return the tokens of the template's nodes [b, N], level by level."""
        tokens = root.unsqueeze(1).repeat(1, len(self.paths))
        for depth, level in enumerate(self.levels, start=1):
            candidates, _ = guess(depth, tokens[:, level.live], level.origin.expand(root.shape[0], -1))
            tokens.index_copy_(1, level.nodes, candidates[:, level.place, level.rank])
        return tokens


class StaticTree:
    """A template. With `rates`, its paths come likeliest first, and as many as pay off at this batch size are drafted."""

    def __init__(self, target: Target, paths: Sequence[Path], rates: Rates | None = None) -> None:
        self.target, self.paths = target, list(paths)
        self.expected = None if rates is None else list(accumulate((path_rate(one, rates) for one in paths), initial=1.0))
        self.shape = Shape(len(self.paths) + 1, max(map(len, self.paths), default=0))
        self.branch = 1 + max((max(path) for path in self.paths), default=0)
        self._templates: dict[int, Template] = {}

    def template(self, batch: int) -> Template:
        if batch not in self._templates:
            self._templates[batch] = Template(self.paths[: self._paying_paths(batch)], self.target.device)
        return self._templates[batch]

    def _paying_paths(self, batch: int) -> int:
        """Return how many paths pay off."""
        if self.expected is None:
            return len(self.paths)
        return paying_rows(self.target, batch, self.expected) - 1

    def depth(self, batch: int) -> int:
        return self.template(batch).depth

    def chain_rows(self, batch: int, most: int) -> int:
        return most

    def draft(self, state: State, guess: NextCandidates) -> Draft:
        template = self.template(len(state.batch.ids))
        tokens = template.tokens(state.root, guess)
        return once_read(state, Draft(tokens, template.tree, torch.full_like(state.root, tokens.shape[1])))

    def filled(self, state: State, candidates: Tensor) -> Draft:
        """Draft from candidates [b, depth or more, k] that do not depend on the tokens before them."""
        template = self.template(len(state.batch.ids))
        tokens, size = filled(state, candidates, template.ranks)
        return Draft(tokens, template.tree, size)

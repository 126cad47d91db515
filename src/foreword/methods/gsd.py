"""DRAFT: a draft model whose guesses form a graph. A continuation that comes back, behind other words, is drafted once and
shared; for the target the graph is unrolled into a tree, the likeliest paths first.

The small model and its weights are those of `draft_model`. Each round it reads the root, then `width` nodes of a level at a
time, whose keys and values stay behind the text until the round is over; a guess that ends like an older node is not read.
The target checks every path by itself, so a merged guess that does not fit costs acceptance and never the text.
Paper: GSD (arXiv 2407.16207).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from foreword.core.draft import Draft
from foreword.core.drafter import Drafter
from foreword.core.needs import Needs
from foreword.core.scores import Scores
from foreword.core.state import State
from foreword.core.target import Target
from foreword.drafting.draft_vocabulary import VocabularyHead
from foreword.drafting.graphs import DraftGraph, sketch
from foreword.drafting.guesser import Branches, FirstLayers, Guesser
from foreword.drafting.trees import USUAL_RATES, BestFirst, RowCosts, TreePlan
from foreword.errors import InputError
from foreword.model.model import Model
from foreword.model.widening import NORM, layers_at
from foreword.ops.graphs import Rule

FURTHER = 2  # levels that a path may be longer than the graph is deep: an alias may lead to a node further up
UNROLLED = 16  # nodes of a level that a tree goes on from, at least: a shared node comes several times


class Gsd(Drafter):
    paper = "GSD, arXiv 2407.16207"
    needs = Needs(prompt="all")
    wide = {"norm": NORM, **layers_at("layers")}
    module: FirstLayers
    vocabulary: VocabularyHead

    def __init__(
        self,
        rows: int | None = None,
        layers: int = 2,
        depth: int = 5,
        width: int = 8,
        branch: int = 8,
        repeat: int = 0,
        siblings: float = 0.01,
        sure: float = 0.005,
        model: Model | None = None,
    ) -> None:
        """`layers` and `model`: as of draft_model. The graph has `depth` levels, of which `width` nodes each are read, and
        `branch` guesses behind each of these. `repeat`: merged is what has the same token and as many before it; -1: nothing
        is. `siblings`: a guess counts if it has this share of its best sibling's chance. `sure`: one less likely than this
        is drafted, but has nothing behind it."""
        if depth < 1 or width < 1 or branch < 1:
            raise InputError(f"gsd: depth, width and branch are 1 at least, got {depth}, {width} and {branch}")
        if repeat < -1:
            raise InputError(f"gsd: repeat is {repeat}; it counts tokens from 0 on, and -1 merges nothing")
        if not (0 <= siblings <= 1 and 0 <= sure < 1):
            raise InputError(f"gsd: siblings is {siblings} and sure is {sure}; both are shares, from 0 to 1")
        self.wants_cost = rows is None
        self.depth, self.rule = depth, Rule(branch, repeat, siblings, sure, width)
        self.guesser = Guesser("gsd", layers, model)
        self.vocabulary = self.guesser.vocabulary
        self.plan = TreePlan("best", rows, max(width, UNROLLED), USUAL_RATES)
        self.config: dict[str, Any] = {"layers": layers}

    def build(self, target: Target) -> None:
        self.guesser.build(target)
        if self.guesser.other is None:
            self.module = self.guesser.module

    def bind(self, target: Target, slots: int) -> None:
        level, kernels = self.guesser.level_part(target), self.guesser.level_kernels
        on_cpu = target.device.type == "cpu"
        # On a CPU levels are settled while they are read, and what is unrolled of them costs nothing more.
        growth = cast(BestFirst, self.plan.on(target, self.depth + FURTHER, 0.0 if on_cpu else level, kernels))
        self.costs = RowCosts(target, growth.shape.nodes, level) if on_cpu and self.wants_cost else None
        self.shape = growth.shape
        self.guesser.bind(target, slots, self.shape.depth, 1 + self.depth * self.rule.width + FURTHER)
        self.growth = replace(growth, branch=min(self.rule.branch, self.vocabulary.count, target.vocab_size))
        self.last: tuple[DraftGraph, Tensor] | None = None  # for `sketch` alone
        self.counts = torch.zeros(2, dtype=torch.long, device=target.device)

    def begin(self, state: State) -> None:
        self.guesser.begin(state)

    def read(self, state: State, chunk: Draft, scores: Scores) -> None:
        self.guesser.read(state, chunk.nodes)

    def propose(self, state: State) -> Draft:
        depth = min(self.depth, self.growth.depth(len(state.batch.ids)))
        if depth == 0:
            self.last = None
            self.guesser.follow(state)
            return Draft.nothing(state.root)
        branches, root = self.guesser.root(state), state.root
        graph = DraftGraph(replace(self.rule, branch=self.growth.branch), root, depth)
        self._drafted(graph, state, branches, depth)
        self.last = graph, root
        return graph.draft(state, self.growth)

    def _drafted(self, graph: DraftGraph, state: State, branches: Branches, depth: int) -> None:
        """The graph, read level by level; what the last level guesses is not read."""
        rows = branches.rows
        for level in range(1, depth + 1):
            nodes = graph.add(*self.guesser.guesses(rows, state.ahead(level), state.sampling, self.growth.branch))
            if level == depth or not self._goes_on(graph, level):
                break
            rows = branches.read(*nodes)
        self.counts += (graph.counts * state.alive).sum(1)

    def _goes_on(self, graph: DraftGraph, levels: int) -> bool:
        """Whether one level more is expected to pay, where that is not settled beforehand."""
        return self.costs is None or graph.pays(self.costs, levels)

    def sketch(self, row: int) -> dict[str, Any]:
        if self.last is None:
            return {}
        graph, roots = self.last
        return sketch(graph.guesses, self.growth.branch, int(roots[row]), row)

    def counters(self) -> dict[str, int]:
        """Since it was bound: rows that the small model read of roots and guesses, and those that it did not have to read,
        since they were merged. Asks the device, so not for the loop."""
        return dict(zip(("rows_read", "rows_saved"), self.counts.tolist(), strict=True))

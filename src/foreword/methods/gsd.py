"""DRAFT: a draft model whose candidates form a graph. A continuation that comes up again after other tokens is drafted once
and shared. For the target, the graph is unrolled into a tree, likeliest paths first.

The small model and its weights are those of `draft_model`, or it is the target by a plan of `self_speculative`. Each round
it reads the root, then `width` nodes per level. Their keys and values stay after the sequence in the cache until the round
ends. A candidate whose last tokens equal those of an older node is not read again. The target verifies every path, so a
wrong merge costs acceptance and never the output.
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
from foreword.drafting.self_drafting import expected_tokens
from foreword.drafting.skipped_target import SkippedBranches, SkippedTarget, SkipPlan
from foreword.drafting.small_model import Branches, FirstLayers, SmallModel
from foreword.drafting.trees import USUAL_GAIN, USUAL_RATES, BestFirst, RowCosts, TreePlan
from foreword.errors import InputError
from foreword.model.model import Model
from foreword.model.widening import NORM, layers_at
from foreword.ops.candidate_graphs import Rule
from foreword.ops.device import fixes_shapes

FURTHER = 2  # how many levels a path may be longer than the graph is deep: an alias may lead to a node further up
UNROLLED = 16  # at least this many nodes of a level are continued in the tree: a shared node occurs several times


class Gsd(Drafter):
    paper = "GSD, arXiv 2407.16207"
    copies = True
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
        plan: SkipPlan | None = None,
    ) -> None:
        """`layers` and `model`: as in draft_model. `plan`: the target drafts, without some half-layers. The graph has
        `depth` levels. Of each level `width` nodes are read, and each gets `branch` candidates. `repeat`: nodes are merged
        if their tokens and this many tokens before are equal; -1 merges nothing. `siblings`: a candidate counts if it has at
        least this share of its best sibling's probability. `sure`: a candidate less likely than this is drafted, but not
        continued."""
        if depth < 1 or width < 1 or branch < 1:
            raise InputError(f"gsd: depth, width and branch are 1 at least, got {depth}, {width} and {branch}")
        if repeat < -1:
            raise InputError(f"gsd: repeat is {repeat}; it counts tokens from 0 on, and -1 merges nothing")
        if not (0 <= siblings <= 1 and 0 <= sure < 1):
            raise InputError(f"gsd: siblings is {siblings} and sure is {sure}; both are shares, from 0 to 1")
        self.wants_cost = rows is None
        self.depth, self.rule = depth, Rule(branch, repeat, siblings, sure, width)
        self.small_model = SmallModel("gsd", layers, model) if plan is None else SkippedTarget("gsd", plan)
        self.vocabulary = self.small_model.vocabulary
        self.plan = TreePlan("best", rows, max(width, UNROLLED), USUAL_RATES, gain=_gain(plan, depth))
        if plan is not None:
            self.needs = Needs(scratch=1 + depth * width)
        self.config: dict[str, Any] = {"layers": layers}

    def build(self, target: Target) -> None:
        self.small_model.build(target)
        if isinstance(self.small_model, SmallModel) and self.small_model.other is None:
            self.module = self.small_model.module

    def bind(self, target: Target, slots: int) -> None:
        level, kernels = self.small_model.level_cost(target), self.small_model.level_kernels(target)
        adapts = not fixes_shapes(target.device)
        # Where shapes adapt, the number of levels is decided while they are read, and unrolling them costs nothing more.
        growth = cast(BestFirst, self.plan.on(target, self.depth + FURTHER, 0.0 if adapts else level, kernels))
        self.costs = RowCosts(target, growth.shape.nodes, level) if adapts and self.wants_cost else None
        self.shape = growth.shape
        self.small_model.bind(target, slots, self.shape.depth, 1 + self.depth * self.rule.width + FURTHER)
        self.growth = replace(growth, branch=min(self.rule.branch, self.vocabulary.count, target.vocab_size))
        self.last: tuple[DraftGraph, Tensor] | None = None  # only for `sketch`
        self.counts = torch.zeros(2, dtype=torch.long, device=target.device)

    def copy(self, source: int, slot: int, rows: int) -> None:
        self.small_model.copy(source, slot, rows)

    def begin(self, state: State) -> None:
        self.small_model.begin(state)

    def read(self, state: State, chunk: Draft, scores: Scores) -> None:
        self.small_model.read(state, chunk.nodes)

    def propose(self, state: State) -> Draft:
        depth = min(self.depth, self.growth.depth(len(state.batch.ids)))
        if depth == 0:
            self.last = None
            self.small_model.follow(state)
            return Draft.nothing(state.root)
        branches, root = self.small_model.root(state), state.root
        graph = DraftGraph(replace(self.rule, branch=self.growth.branch), root, depth)
        self._drafted(graph, state, branches, depth)
        self.last = graph, root
        return graph.draft(state, self.growth)

    def _drafted(self, graph: DraftGraph, state: State, branches: Branches | SkippedBranches, depth: int) -> None:
        """Read the graph level by level. The candidates of the last level are not read."""
        rows = branches.rows
        for level in range(1, depth + 1):
            nodes = graph.add(*self.small_model.candidates(rows, state.ahead(level), state.sampling, self.growth.branch))
            if level == depth or not self._goes_on(graph, level):
                break
            rows = branches.read(*nodes)
        self.counts += (graph.counts * state.alive).sum(1)

    def _goes_on(self, graph: DraftGraph, levels: int) -> bool:
        """Whether one more level is expected to pay off, where that was not decided before."""
        return self.costs is None or graph.pays(self.costs, levels)

    def sketch(self, row: int) -> dict[str, Any]:
        if self.last is None:
            return {}
        graph, roots = self.last
        return sketch(graph.candidates, self.growth.branch, int(roots[row]), row)

    def counters(self) -> dict[str, int]:
        """Since it was bound: how many rows the small model read, roots included, and how many merging saved. It reads from
        the device, so it must not be called in the loop."""
        return dict(zip(("rows_read", "rows_saved"), self.counts.tolist(), strict=True))


def _gain(plan: SkipPlan | None, depth: int) -> float:
    """Return how many draft tokens a round is expected to get accepted: by the plan's agreement, if it was measured."""
    return USUAL_GAIN if plan is None or not plan.agreement else expected_tokens(plan.agreement, depth) - 1

"""DRAFT: what a second, smaller model generates: a tree of its likeliest paths, or a chain that ends where it is no longer
sure.

The small model is a copy of the target's first layers, trained on what the target generates, between the target's embedding
and head, both frozen. Or it is any other model with the same vocabulary. It has a cache of its own and reads every committed
token. The levels of a tree are read one after the other into scratch rows.
Papers: Leviathan et al. (arXiv 2211.17192), Chen et al. (arXiv 2302.01318).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from foreword.core.draft import Draft
from foreword.core.drafter import Drafter
from foreword.core.needs import Needs
from foreword.core.scores import Scores
from foreword.core.state import State
from foreword.core.target import Target
from foreword.drafting.draft_vocabulary import VocabularyHead
from foreword.drafting.lessons import HeadLosses, Labels, Lesson, check_labels
from foreword.drafting.small_model import FirstLayers, SmallModel
from foreword.drafting.trees import USUAL_RATES, TreeKind, TreePlan
from foreword.errors import InputError
from foreword.model.model import Model
from foreword.model.widening import NORM, layers_at


class DraftModel(Drafter):
    paper = "Speculative decoding, arXiv 2211.17192; sampling, arXiv 2302.01318"
    copies = True
    needs = Needs(hidden=True, prompt="all")
    wide = {"norm": NORM, **layers_at("layers")}
    module: FirstLayers
    vocabulary: VocabularyHead

    def __init__(
        self,
        rows: int | None = None,
        layers: int = 2,
        depth: int = 5,
        tree: TreeKind = "best",
        width: int = 8,
        paths: Sequence[Sequence[int]] | None = None,
        stop: float = 0.3,
        labels: Labels = "soft",
        model: Model | None = None,
    ) -> None:
        """The first `layers` of the target are the small model. It drafts `depth` tokens ahead. `tree`: the likeliest paths
        ("best"); "chain", one candidate after the other, which ends before one that is less likely than `stop`; "static",
        a template; or Clover's "budget". `labels`: learn the target's distribution ("soft") or its tokens ("hard").
        `model`: another model to draft with, in place of the target's first layers."""
        if depth < 1:
            raise InputError(f"draft_model: depth is {depth}; it must be at least 1")
        check_labels("draft_model", labels)
        self.wants_cost = rows is None
        self.depth, self.labels = depth, labels
        self.small_model = SmallModel("draft_model", layers, model)
        self.vocabulary = self.small_model.vocabulary
        self.plan = TreePlan(tree, rows, width, USUAL_RATES, paths, stop=stop)
        self.plan.check("draft_model")
        self.config: dict[str, Any] = {"layers": layers}

    def build(self, target: Target) -> None:
        self.small_model.build(target)
        if self.small_model.other is None:
            self.module = self.small_model.module

    def bind(self, target: Target, slots: int) -> None:
        level, kernels = self.small_model.level_cost(target), self.small_model.level_kernels(target)
        self.growth = self.plan.on(target, self.depth, level, kernels)
        self.shape = self.growth.shape
        scratch = max(self.shape.nodes, 2 + self.shape.depth * self.plan.width)
        self.small_model.bind(target, slots, self.shape.depth, scratch)

    def copy(self, source: int, slot: int, rows: int) -> None:
        self.small_model.copy(source, slot, rows)

    def begin(self, state: State) -> None:
        self.small_model.begin(state)

    def read(self, state: State, chunk: Draft, scores: Scores) -> None:
        self.small_model.read(state, chunk.nodes)

    def propose(self, state: State) -> Draft:
        if self.growth.depth(len(state.batch.ids)) == 0:
            self.small_model.follow(state)
            return Draft.nothing(state.root)
        branches = self.small_model.root(state)

        def guess(level: int, tokens: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
            rows = branches.rows if level == 1 else branches.read(tokens, origin)
            return self.small_model.candidates(rows, state.ahead(level), state.sampling, self.growth.branch)

        return self.growth.draft(state, guess)

    def loss(self, tokens: Tensor, mask: Tensor, scores: Scores, target: Target) -> tuple[Tensor, dict[str, Tensor]]:
        marks = HeadLosses(Lesson.of(tokens, mask, 1), target, self.vocabulary, self.labels, scores.require_hidden())
        # It has read the root, so its rows align with the target's: one row later than a head on the target's state.
        marks.add(1, self.module.norm(marks.lesson.teacher(self.small_model.over(tokens))), 1.0)
        return marks.result

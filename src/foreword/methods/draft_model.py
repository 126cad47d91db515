"""DRAFT: a second, smaller model writes on, and its guesses are the draft: a tree of the likeliest, or a chain that ends
where it is no longer sure.

The small model is the target's own first layers, copied and trained on what the target writes, between the target's
embedding and its head, both frozen; or any other model with the same vocabulary. It reads the text along with the target
into a cache of its own; a tree's levels are read one after the other into scratch rows.
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
from foreword.drafting.guesser import FirstLayers, Guesser
from foreword.drafting.lessons import HeadLosses, Labels, Lesson, check_labels
from foreword.drafting.trees import USUAL_RATES, TreeKind, TreePlan
from foreword.errors import InputError
from foreword.model.model import Model
from foreword.model.widening import NORM, layers_at


class DraftModel(Drafter):
    paper = "Speculative decoding, arXiv 2211.17192; sampling, arXiv 2302.01318"
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
        """`layers` of the target, from its first on, are the small model. It guesses `depth` tokens ahead. `tree`: the
        likeliest paths; "chain", one guess behind the other, which ends before one that is less likely than `stop`;
        "static", a template; or Clover's budget. `labels`: learn the target's distribution or its tokens. `model`: another
        model to guess with, in place of layers of the target."""
        if depth < 1:
            raise InputError(f"draft_model: depth is {depth}; at least 1 token is guessed")
        check_labels("draft_model", labels)
        self.wants_cost = rows is None
        self.depth, self.labels = depth, labels
        self.guesser = Guesser("draft_model", layers, model)
        self.vocabulary = self.guesser.vocabulary
        self.plan = TreePlan(tree, rows, width, USUAL_RATES, paths, stop=stop)
        self.plan.check("draft_model")
        self.config: dict[str, Any] = {"layers": layers}

    def build(self, target: Target) -> None:
        self.guesser.build(target)
        if self.guesser.other is None:
            self.module = self.guesser.module

    def bind(self, target: Target, slots: int) -> None:
        self.growth = self.plan.on(target, self.depth, self.guesser.level_part(target), self.guesser.level_kernels)
        self.shape = self.growth.shape
        scratch = max(self.shape.nodes, 2 + self.shape.depth * self.plan.width)
        self.guesser.bind(target, slots, self.shape.depth, scratch)

    def begin(self, state: State) -> None:
        self.guesser.begin(state)

    def read(self, state: State, chunk: Draft, scores: Scores) -> None:
        self.guesser.read(state, chunk.nodes)

    def propose(self, state: State) -> Draft:
        if self.growth.depth(len(state.batch.ids)) == 0:
            self.guesser.follow(state)
            return Draft.nothing(state.root)
        branches = self.guesser.root(state)

        def guess(level: int, tokens: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
            rows = branches.rows if level == 1 else branches.read(tokens, origin)
            return self.guesser.guesses(rows, state.ahead(level), state.sampling, self.growth.branch)

        return self.growth.draft(state, guess)

    def loss(self, tokens: Tensor, mask: Tensor, scores: Scores, target: Target) -> tuple[Tensor, dict[str, Tensor]]:
        marks = HeadLosses(Lesson.of(tokens, mask, 1), target, self.labels, scores.require_hidden())
        # It knows the root, so it stands where its teacher does: one row later than a head on the target's state.
        marks.add(1, self.module.norm(marks.lesson.teacher(self.guesser.over(tokens))), 1.0)
        return marks.result

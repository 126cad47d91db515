"""DRAFT: a second, smaller model writes on, and its guesses are the draft: a tree of the likeliest, or a chain that ends
where it is no longer sure.

The small model is the target's own first layers, copied and trained on what the target writes, between the target's
embedding and its head, both frozen. It reads the text along with the target into a cache of its own; a tree's levels are
read one after the other into scratch rows, and what was accepted of them is read again with the next root.
Papers: Leviathan et al. (arXiv 2211.17192), Chen et al. (arXiv 2302.01318).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from foreword.core.draft import Draft
from foreword.core.drafter import Drafter
from foreword.core.heads import norm_like
from foreword.core.lessons import Labels, Lesson, Marks, check_labels
from foreword.core.needs import Needs
from foreword.core.sampling import guesses
from foreword.core.scores import Scores
from foreword.core.state import State
from foreword.core.target import Target
from foreword.core.trees import USUAL_RATES, TreeKind, TreePlan
from foreword.core.widening import NORM, layers_at
from foreword.errors import DrafterError, InputError
from foreword.model.guesser import Guesser


class Weights(nn.Module):
    def __init__(self, target: Target, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers, self.norm = layers, norm_like(target)


class DraftModel(Drafter):
    paper = "Speculative decoding, arXiv 2211.17192; speculative sampling, arXiv 2302.01318"
    needs = Needs(hidden=True, prompt="all")
    wide = {"norm": NORM, **layers_at("layers")}
    module: Weights

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
    ) -> None:
        """`layers` of the target, from its first on, are the small model. It guesses `depth` tokens ahead. `tree`: the
        likeliest paths; "chain", one guess behind the other, which ends before one that is less likely than `stop`;
        "static", a template; or Clover's budget. `labels`: learn the target's distribution or its tokens."""
        if layers < 1 or depth < 1:
            raise InputError(f"draft_model: needs a layer and a guess at least, got layers={layers} and depth={depth}")
        check_labels("draft_model", labels)
        self.wants_cost = rows is None
        self.layers, self.depth, self.labels = layers, depth, labels
        self.plan = TreePlan(tree, rows, width, USUAL_RATES, paths, stop=stop)
        self.plan.check("draft_model")
        self.config: dict[str, Any] = {"layers": layers}

    def bind(self, target: Target, slots: int) -> None:
        self.target = target
        self.growth = self.plan.on(target, self.depth)
        self.shape = self.growth.shape
        scratch = max(self.shape.nodes, 2 + self.shape.depth * self.plan.width)
        if not hasattr(self, "module"):  # bound again, as by another engine, it keeps what it learned
            check_layers("draft_model", self.layers, target)
            self.stack = target.stack(slots, self.layers, init=range(self.layers), scratch=scratch)
            self.module = Weights(target, self.stack.layers)
        else:
            self.stack.allocate(slots, target.context, scratch)
        self.guesser = Guesser(self.stack, target.embed, self.module.norm, self.shape.depth)

    def begin(self, state: State) -> None:
        self.guesser.begin(state)

    def read(self, state: State, chunk: Draft, scores: Scores) -> None:
        self.guesser.read(state, chunk.nodes)

    def propose(self, state: State) -> Draft:
        branches = self.guesser.root(state)

        def guess(level: int, tokens: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
            rows = branches.rows if level == 1 else branches.read(tokens, origin)
            return guesses(self.target.head(rows), state.ahead(level), state.sampling, self.growth.branch)

        return self.growth.draft(state, guess)

    def loss(self, tokens: Tensor, mask: Tensor, scores: Scores, target: Target) -> tuple[Tensor, dict[str, Tensor]]:
        marks = Marks(Lesson.of(tokens, mask, 1), target, self.labels, scores.require_hidden())
        # It knows the root, so it stands where its teacher does: one row later than a head on the target's state.
        marks.add(1, self.module.norm(marks.lesson.teacher(self.guesser.over(tokens))), 1.0)
        return marks.result


def check_layers(method: str, layers: int, target: Target) -> None:
    if layers > target.layers:
        raise DrafterError(f"{method}: layers is {layers}, but {target.name} has {target.layers}; ask for no more")

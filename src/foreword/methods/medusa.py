"""DRAFT: K heads on the target's last state. From the row before the root, head k drafts the token k places after the root.

The heads are independent of each other, so they all run at once, and all nodes of a level share their candidates. Each head
is one residual block or a few; the target's own head, frozen, makes the logits (Medusa-1). An untrained head proposes what
the target's head says. Only one hidden state is kept per sequence.
Paper: Medusa (arXiv 2401.10774).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from foreword.core.draft import Draft
from foreword.core.drafter import Drafter
from foreword.core.needs import Needs
from foreword.core.scores import Accepted, Scores
from foreword.core.state import State
from foreword.core.target import Target
from foreword.drafting.draft_vocabulary import VocabularyHead
from foreword.drafting.heads import ResBlock, remember
from foreword.drafting.lessons import HeadLosses, Labels, LearnedHead, Lesson, check_labels, losses, rank_rates
from foreword.drafting.trees import BRANCH, USUAL_RATES, Rates, TreeKind, TreePlan, unconditional
from foreword.errors import InputError
from foreword.model.widening import WITHIN

DECAY = 0.8


class Medusa(Drafter):
    paper = "Medusa, arXiv 2401.10774"
    copies = True
    needs = Needs(hidden=True, prompt="last")
    wide = {"*.linear": WITHIN}
    module: nn.ModuleList
    vocabulary: VocabularyHead

    def __init__(
        self,
        rows: int | None = None,
        heads: int = 4,
        layers: int = 1,
        tree: TreeKind = "static",
        width: int = 8,
        paths: Sequence[Sequence[int]] | None = None,
        rates: Rates = USUAL_RATES,
        labels: Labels = "hard",
    ) -> None:
        """`heads` of `layers` residual blocks each. `tree`: "static", a template built from `rates`, which `calibrate`
        measures, or made of `paths`; the likeliest paths ("best"); or Clover's "budget". `labels`: learn the target's
        tokens ("hard") or its distribution ("soft")."""
        if heads < 1 or layers < 1:
            raise InputError(f"medusa: needs at least one head of one layer, got heads={heads} and layers={layers}")
        check_labels("medusa", labels)
        self.wants_cost = rows is None
        self.vocabulary = VocabularyHead()
        self.heads, self.layers, self.labels = heads, layers, labels
        self.plan = TreePlan(tree, rows, width, rates, paths)
        self.plan.check("medusa")
        self.config: dict[str, Any] = {"heads": heads, "layers": layers, "rates": [list(row) for row in rates]}

    def build(self, target: Target) -> None:
        self.module = nn.ModuleList(
            nn.Sequential(*(ResBlock(target) for _ in range(self.layers))) for _ in range(self.heads)
        )

    def bind(self, target: Target, slots: int) -> None:
        self.target = target
        self.vocabulary.bind(target)
        self.growth = self.plan.on(target, self.heads)
        self.shape = self.growth.shape
        self.number = torch.arange(1, self.heads + 1, device=target.device)
        self.hidden = torch.zeros(slots, target.hidden_size, dtype=target.dtype, device=target.device)

    def read(self, state: State, chunk: Draft, scores: Scores) -> None:
        self.hidden.index_copy_(0, state.slots, scores.require_hidden()[:, -1])

    def propose(self, state: State) -> Draft:
        if self.growth.depth(len(state.batch.ids)) == 0:
            return Draft.nothing(state.root)
        rows = self._heads(self.target.norm(state.batch.take(self.hidden)))  # [b, K, H]
        position = state.ahead(self.number)
        tokens, chances = self.vocabulary.candidates(rows, position, state.sampling, self.growth.branch)
        return unconditional(self.growth, state, tokens, chances)

    def observe(self, state: State, draft: Draft, scores: Scores, accepted: Accepted) -> None:
        remember(self.hidden, state.slots, scores.require_hidden(), accepted.count, accepted.path)

    def loss(self, tokens: Tensor, mask: Tensor, scores: Scores, target: Target) -> tuple[Tensor, dict[str, Tensor]]:
        hidden = scores.require_hidden()
        marks = HeadLosses(Lesson.of(tokens, mask, self.heads), target, self.vocabulary, self.labels, hidden)
        state = target.norm(marks.lesson.of_rows(hidden))
        for number, head in enumerate(self.module, start=1):
            marks.add(number, head(state), DECAY**number)
        return marks.result

    @torch.no_grad()
    def calibrate(self, tokens: Tensor, mask: Tensor, scores: Scores, target: Target) -> Rates:
        """How often the candidates of each head are right, by rank, on held-out sequences: `rates` for a better template."""
        lesson = Lesson.of(tokens, mask, self.heads)
        rows = self._heads(target.norm(lesson.of_rows(scores.require_hidden())))
        outputs = [lesson.outputs(number, rows[:, number - 1]) for number in range(1, self.heads + 1)]
        found = losses(outputs, LearnedHead.of(target, self.vocabulary.tokens))
        return [rank_rates(ranks, one.counts, BRANCH) for one, (_, ranks) in zip(outputs, found, strict=True)]

    def _heads(self, state: Tensor) -> Tensor:
        """[b, H] -> [b, K, H]."""
        return torch.stack([head(state) for head in self.module], dim=1)

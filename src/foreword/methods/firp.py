"""DRAFT: predict middle states of coming tokens, and run them through the target's upper layers before each round. The
middle states of each sequence's last row are kept; one small matrix per step projects them ahead.

The projected rows attend to the whole sequence and to the steps before them; the target's own head turns them into
candidates. They are scratch rows, which the verifying pass overwrites. The price is a second pass through the upper layers,
over few rows. The matrices are those of `hidden_transfer`, which runs the same rows inside the verifying pass.
Paper: FIRP (arXiv 2410.20488).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
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
from foreword.drafting.heads import remember
from foreword.drafting.transfer import Source, Transfer, conditioned_steps, steps_after
from foreword.drafting.trees import USUAL_RATES, Rates, TreeKind, TreePlan, unconditional


class Firp(Drafter):
    paper = "FIRP, arXiv 2410.20488"
    copies = True
    module: nn.ModuleList
    vocabulary: VocabularyHead

    def __init__(
        self,
        rows: int | None = None,
        steps: int = 3,
        layers: Sequence[int] | None = None,
        source: Source = "anchor",
        bias: bool = True,
        squeeze: int = 1,
        norm: bool = True,
        told: bool = True,
        tree: TreeKind = "static",
        width: int = 8,
        paths: Sequence[Sequence[int]] | None = None,
        rates: Rates = USUAL_RATES,
    ) -> None:
        """`steps`: how many tokens ahead it drafts, each from a row that joins after one of `layers`. `source`: a step is
        projected from the last row's state ("anchor") or from the step before ("chain"). `squeeze`: divides the rank of
        the matrices. `told`: rows are conditioned on the token before them once it is decided. `tree`: "static", a template
        built from `rates` or made of `paths`; the likeliest paths ("best"); or Clover's "budget"."""
        layers = None if layers is None else tuple(layers)
        self.options = Transfer(steps, layers, source, bias, squeeze, norm, told)
        self.options.check("firp")
        self.wants_cost = rows is None
        self.vocabulary = VocabularyHead()
        self.plan = TreePlan(tree, rows, width, rates, paths)
        self.plan.check("firp")
        self.wide = self.options.wide

    @property
    def config(self) -> dict[str, Any]:
        return {**self.options.config, "rates": [list(row) for row in self.plan.rates]}

    def build(self, target: Target) -> None:
        self.layers = self.options.layers_of(target, "firp")
        self.options = replace(self.options, layers=self.layers)
        self.module = self.options.module(target)

    def bind(self, target: Target, slots: int) -> None:
        self.target = target
        self.vocabulary.bind(target)
        self.growth = self.plan.on(target, self.options.steps)
        self.shape = self.growth.shape
        self.needs = Needs(taps=tuple(sorted(set(self.layers))), prompt="last")
        self.embedding = target.head_weight()
        self.number = torch.arange(1, self.shape.depth + 1, device=target.device)
        size = slots, self.options.steps, target.hidden_size
        self.known = torch.zeros(size, dtype=target.dtype, device=target.device)

    def read(self, state: State, chunk: Draft, scores: Scores) -> None:
        self.known.index_copy_(0, state.slots, self._taps(scores)[:, -1])

    def propose(self, state: State) -> Draft:
        depth = self.growth.depth(len(state.batch.ids))
        if depth == 0:
            return Draft.nothing(state.root)
        layers = self.layers[:depth]
        first, later = steps_after(self.module, layers, self.options.source, state.batch.take(self.known))
        walked = self.target.norm(self.target.onward(state.batch, first, layers[0], later))  # [b, depth, H]
        rows = conditioned_steps(self.module, walked, state.root, self.embedding)
        position = state.ahead(self.number[:depth])
        tokens, chances = self.vocabulary.candidates(rows, position, state.sampling, self.growth.branch)
        return unconditional(self.growth, state, tokens, chances)

    def observe(self, state: State, draft: Draft, scores: Scores, accepted: Accepted) -> None:
        remember(self.known.flatten(1), state.slots, self._taps(scores).flatten(2), accepted.count, accepted.path)

    def _taps(self, scores: Scores) -> Tensor:
        """[b, n, steps, H]: each row's states after the layers that the steps join."""
        return torch.stack([scores.taps[layer] for layer in self.layers], dim=2)

"""DRAFT: the target itself, with some of its half-layers left out, continues the sequence token by token.

Which attention and which MLP halves are left out is a plan, found once per model by `foreword search`. A chain ends with the
first token that is less likely than a threshold. The threshold of each slot follows what is accepted there: it rises while
too little is, and falls otherwise. The next sequence in a slot begins with its threshold. It has no weights, and no cache
but the target's.
Paper: Self-Speculative Decoding, Draft & Verify (arXiv 2309.08168).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foreword.core.draft import Draft, Shape
from foreword.core.drafter import Drafter
from foreword.core.needs import Skip
from foreword.core.scores import Accepted, Scores
from foreword.core.state import State
from foreword.core.target import Target
from foreword.drafting.skipped_target import SkippedTarget, SkipPlan, confident_chain
from foreword.errors import InputError
from foreword.ops.device import fixes_shapes

# The paper's constants: how much of the rate of acceptance, and of the threshold, a round keeps, and the threshold's steps.
KEPT_RATE, KEPT_THRESHOLD, STEP = 0.5, 0.9, 0.01


class SelfSpeculative(Drafter):
    paper = "Self-Speculative Decoding, arXiv 2309.08168"
    copies = True
    learns = True

    def __init__(
        self,
        rows: int | None = None,
        attention: Sequence[int] = (),
        mlp: Sequence[int] = (),
        agreement: float = 0.0,
        depth: int = 12,
        threshold: float = 0.6,
        goal: float = 0.9,
    ) -> None:
        """`attention` and `mlp`: the layers, counted from 0, whose halves are left out while drafting. `agreement`: how
        often the target's own token is then first; 0: not measured. A chain has at most `depth` tokens. `threshold`: a chain
        ends with a token that is less likely; it adapts, so that the share `goal` of the draft tokens is accepted."""
        if depth < 1:
            raise InputError(f"self_speculative: depth is {depth}; it must be at least 1")
        if not (0 <= threshold <= 1 and 0 <= goal <= 1):
            raise InputError(f"self_speculative: threshold is {threshold} and goal is {goal}; both are shares, from 0 to 1")
        self.wants_cost = rows is None
        self.rows, self.depth, self.first_threshold, self.goal = rows, depth, threshold, goal
        self.skip_plan = SkipPlan(Skip(frozenset(attention), frozenset(mlp)), agreement)
        self.small_model = SkippedTarget("self_speculative", self.skip_plan)
        self.config: dict[str, Any] = {"attention": sorted(attention), "mlp": sorted(mlp), "agreement": agreement}

    def build(self, target: Target) -> None:
        self.small_model.build(target)

    def bind(self, target: Target, slots: int) -> None:
        levels = self.depth if self.rows is None else min(self.depth, self.rows - 1)
        self.shape = Shape(levels + 1, levels)
        self.small_model.bind(target, slots, levels, self.shape.nodes)
        self.fixed = fixes_shapes(target.device)
        self.stops = self.rows is None and not self.fixed
        self.threshold = AdaptiveThreshold.of(slots, self.first_threshold, self.goal, target.device)
        self._levels: dict[int, int] = {}

    def levels(self, batch: int) -> int:
        """How many tokens are drafted at most. Where a round always drafts as many, the plan's agreement decides."""
        if batch not in self._levels:
            chosen = self.rows is None and self.fixed and self.skip_plan.agreement > 0
            most = self.shape.depth
            self._levels[batch] = self.small_model.paying_levels(batch, self.skip_plan.agreement, most) if chosen else most
        return self._levels[batch]

    def propose(self, state: State) -> Draft:
        levels = self.levels(len(state.batch.ids))
        return confident_chain(state, self.small_model, levels, self.threshold.of_batch(state), stops=self.stops)

    def observe(self, state: State, draft: Draft, scores: Scores, accepted: Accepted) -> None:
        self.threshold.learn(state, draft.size - 1, accepted.count, self.levels(len(state.batch.ids)))


@dataclass(frozen=True, eq=False)
class AdaptiveThreshold:
    """The probability below which the chain of a slot ends, and the running share of its draft tokens that is accepted."""

    values: Tensor  # [B]
    rates: Tensor  # [B]
    goal: float

    @staticmethod
    def of(slots: int, first: float, goal: float, device: torch.device) -> AdaptiveThreshold:
        values, rates = (torch.full((slots,), start, device=device) for start in (first, goal))
        return AdaptiveThreshold(values, rates, goal)

    def of_batch(self, state: State) -> Tensor:
        return state.batch.take(self.values)

    def learn(self, state: State, drafted: Tensor, decided: Tensor, most: int) -> None:
        """Follow a round that decided [b] tokens, of which one is the target's own, after [b] drafted ones of `most`."""
        counts = (drafted > 0) & (decided > 0)  # not a frozen sequence, nor one without a draft
        value, rate = state.batch.take(self.values), state.batch.take(self.rates)
        share = (decided - 1) / drafted.clamp(min=1)
        rate = torch.where(counts, KEPT_RATE * rate + (1 - KEPT_RATE) * share, rate)
        step = torch.where(rate < self.goal, STEP, torch.where(drafted < most, -STEP, 0.0))
        value = torch.where(counts, value + (1 - KEPT_THRESHOLD) * step, value)
        self.rates.index_copy_(0, state.slots, rate)
        self.values.index_copy_(0, state.slots, value)

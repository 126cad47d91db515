"""DRAFT: the target itself, with some of its half-layers left out. Which ones is found from the output, without a search
beforehand.

The number of half-layers is fixed; the first and the last layer stay whole. When a request ends, a few other plans run once
over the last tokens of its output. A plan that predicts more of them replaces the current one, for later requests. A draft
is a chain with some siblings at each level, and ends with the first level that is not sure.
Paper: SWIFT (arXiv 2410.06916).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import torch

from foreword.core.draft import Draft, Shape
from foreword.core.drafter import Drafter
from foreword.core.needs import Half, Needs, Skip
from foreword.core.scores import Accepted, Scores
from foreword.core.state import Batch, State
from foreword.core.target import Target
from foreword.drafting.skipped_target import SkippedTarget, SkipPlan, WindowAgreement, confident_chain
from foreword.errors import DrafterError, InputError
from foreword.ops.device import fixes_shapes

# The paper's stop rules: an agreement that is good enough, tries without a better plan, and tries in all.
ENOUGH, TRIES_WITHOUT_GAIN, MOST_TRIES = 0.93, 300, 1000
ASSUMED = 0.8  # agreement of a plan that was not measured yet, where it decides how many levels a round drafts
MOST_SWAPPED = 3  # half-layers in which a plan that is tried differs from the current one


class Swift(Drafter):
    paper = "SWIFT, arXiv 2410.06916"
    copies = True
    learns = True

    def __init__(
        self,
        rows: int | None = None,
        ratio: float = 0.45,
        depth: int = 25,
        branch: int = 3,
        threshold: float = 0.8,
        window: int = 32,
        tries: int = 8,
    ) -> None:
        """The share `ratio` of the inner half-layers is left out. A draft has at most `depth` levels of `branch` candidates,
        of which the first is continued; it ends with a level whose first candidate is less likely than `threshold`. When a
        request ends, `tries` other plans are scored on the last `window` tokens of its output."""
        if min(depth, branch, window) < 1 or tries < 0:
            given = f"depth is {depth}, branch {branch}, window {window} and tries {tries}"
            raise InputError(f"swift: {given}; the first three are 1 at least, and tries 0")
        if not (0 < ratio < 1 and 0 <= threshold <= 1):
            raise InputError(f"swift: ratio is {ratio} and threshold is {threshold}; both are shares, from 0 to 1")
        self.wants_cost = rows is None
        self.rows, self.ratio, self.depth, self.branch = rows, ratio, depth, branch
        self.threshold, self.window, self.tries = threshold, window, tries
        self.needs = Needs(scratch=window)

    def bind(self, target: Target, slots: int) -> None:
        self.search = PlanSearch(target.layers, self.ratio, target.name)
        levels = self.depth if self.rows is None else min(self.depth, (self.rows - 1) // self.branch)
        self.shape = Shape(levels * self.branch + 1, levels)
        self.target, self.fixed = target, fixes_shapes(target.device)
        self.stops = self.rows is None and not self.fixed
        self.written = torch.zeros(slots, dtype=torch.long, device=target.device)
        self.agreement = ASSUMED
        self._use(self.search.plan)

    def _use(self, skip: Skip) -> None:
        """Draft by this plan from now on."""
        self.small_model = SkippedTarget("swift", SkipPlan(skip, self.agreement))
        self.small_model.bind(self.target, len(self.written), self.shape.depth, self.shape.nodes)
        self._levels: dict[int, int] = {}

    def levels(self, batch: int) -> int:
        """How many levels are drafted at most. Where a round always drafts as many, the plan's agreement decides."""
        if batch not in self._levels:
            most = self.shape.depth
            by_cost = self.rows is None and self.fixed
            self._levels[batch] = (
                self.small_model.paying_levels(batch, self.agreement, most, self.branch) if by_cost else most
            )
        return self._levels[batch]

    def begin(self, state: State) -> None:
        # For `end`. A plain tuple, since these are the engine's: `engine.warm_up.snapshot` must not restore them.
        self.columns = state.tokens, state.lengths
        self.written.index_fill_(0, state.slots, 0)

    def propose(self, state: State) -> Draft:
        levels = self.levels(len(state.batch.ids))
        return confident_chain(state, self.small_model, levels, self.threshold, self.branch, self.stops)

    def observe(self, state: State, draft: Draft, scores: Scores, accepted: Accepted) -> None:
        self.written.index_add_(0, state.slots, accepted.count)

    @torch.inference_mode()
    def end(self, slots: Sequence[int]) -> bool:
        """Try other plans on a sequence that leaves, if its output is long enough. Return whether drafts change."""
        written = self.written[list(slots)].tolist()
        long = [slot for slot, tokens in zip(slots, written, strict=True) if tokens > self.window]
        if not long or self.search.done:
            return False
        plan, levels = self.search.plan, dict(self._levels)
        try:
            self.agreement = self.search.improve(self._agreement_on(long[-1]), self.tries)
        except torch.OutOfMemoryError:
            self.search.done = True  # drafts go on with the plan so far
        self._use(self.search.plan)
        return self.search.plan != plan or any(self.levels(batch) != before for batch, before in levels.items())

    def _agreement_on(self, slot: int) -> WindowAgreement:
        """Return how plans are scored on the last tokens of a slot."""
        tokens, lengths = self.columns
        length = int(lengths[slot])
        window = tokens[slot, length - self.window : length + 1].unsqueeze(0)
        return WindowAgreement(self.target, Batch.of([slot], length, self.target.device), window)


class PlanSearch:
    """The best plan so far. A plan that is tried differs from it in a few half-layers, chosen at random."""

    def __init__(self, layers: int, ratio: float, name: str) -> None:
        inner = [*range(1, layers - 1, 2), *range(2, layers - 1, 2)]  # every second layer first
        self.halves: list[Half] = [half for layer in inner for half in Skip.of((layer,), (layer,)).halves]
        count = int(len(self.halves) * ratio)
        if count < 1:
            found = f"the share {ratio} of the {len(self.halves)} half-layers between the first and the last layer of {name}"
            raise DrafterError(f"swift: {found} is none; raise ratio, or use a deeper model")
        self.plan = Skip.of_halves(self.halves[:count])
        self.random, self.tries, self.without_gain, self.done = Random(0), 0, 0, False

    def improve(self, agreement: Callable[[Skip], float], tries: int) -> float:
        """Try plans on one output, and keep the best. Return its agreement there."""
        best = agreement(self.plan)
        for _ in range(tries):
            self.done = best > ENOUGH or self.without_gain >= TRIES_WITHOUT_GAIN or self.tries >= MOST_TRIES
            if self.done:
                break
            other = self._varied()
            found = agreement(other)
            self.tries, self.without_gain = self.tries + 1, 0 if found > best else self.without_gain + 1
            if found > best:
                self.plan, best = other, found
        return best

    def _varied(self) -> Skip:
        """Return the current plan with a few half-layers exchanged for others."""
        chosen = self.plan.halves
        others = [half for half in self.halves if half not in chosen]
        count = self.random.randint(1, min(MOST_SWAPPED, len(others), len(chosen)))
        gone, new = self.random.sample(chosen, count), self.random.sample(others, count)
        return Skip.of_halves([*(half for half in chosen if half not in gone), *new])

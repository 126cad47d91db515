"""The target without some half-layers, as the small model that drafts for it. It has no weights and no cache of its own.

In: the sequence's root, and candidates with the rows that they follow. Out: rows for the draft head. The rows before the
root are those of the whole target, in its own cache. The root and the candidates that are read are its scratch rows; the
pass that verifies writes them again, in all layers. A half-layer that is left out neither reads nor writes rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from foreword.core.draft import Draft, Tree
from foreword.core.needs import Needs, Skip
from foreword.core.sampling_table import SamplingRows
from foreword.core.state import Batch, State
from foreword.core.target import Target
from foreword.drafting.draft_vocabulary import VocabularyHead
from foreword.drafting.self_drafting import best_length
from foreword.drafting.trees import LEVEL_KERNELS, none_goes_on
from foreword.errors import DrafterError, InputError
from foreword.ops.top import first_largest

KERNELS = 3  # per half-layer: two matrix products, and for attention its own
HIDDEN = Needs(hidden=True)


@dataclass(frozen=True)
class SkipPlan:
    """The half-layers that the target leaves out while it drafts. `agreement`: the share of tokens at which it then still
    has the target's own token first; 0 if that was not measured."""

    skip: Skip
    agreement: float = 0.0

    def check(self, method: str) -> None:
        """Refuse what is no plan for any model."""
        if any(type(layer) is not int or layer < 0 for layer in (*self.skip.attention, *self.skip.mlp)):
            given = f"attention is {sorted(self.skip.attention, key=str)} and mlp is {sorted(self.skip.mlp, key=str)}"
            raise InputError(f"{method}: {given}; both list layers, counted from 0")
        if not 0 <= self.agreement <= 1:
            raise InputError(f"{method}: agreement is {self.agreement}; it is a share, from 0 to 1")

    def check_layers(self, method: str, target: Target) -> None:
        """Refuse a plan that does not fit the target."""
        listed = (*self.skip.attention, *self.skip.mlp)
        if not listed:
            raise DrafterError(
                f"{method}: no half-layer is left out; name the folder of a plan, which `foreword search self_speculative` "
                "finds, or list layers in the options attention and mlp"
            )
        if max(listed) >= target.layers:
            found = f"the plan leaves out a half of layer {max(listed)}, but {target.name} has {target.layers} layers"
            raise DrafterError(f"{method}: {found}, counted from 0; take a plan for this model")


class SkippedTarget:
    """The target without the half-layers of a plan. For `gsd` it takes the place of a `SmallModel`, which reads prompts and
    decided tokens into a cache of its own; here the target has read them already."""

    def __init__(self, method: str, plan: SkipPlan) -> None:
        """method: the name in error messages."""
        plan.check(method)
        self.method, self.plan, self.vocabulary = method, plan, VocabularyHead()

    def build(self, target: Target) -> None:
        """Make no weights, but refuse a plan that does not fit."""
        self.plan.check_layers(self.method, target)

    def bind(self, target: Target, slots: int, ahead: int, scratch: int) -> None:
        """Allocate nothing: the drafter's `Needs.scratch` says how many rows are read in a round."""
        self.target = target
        self.vocabulary.bind(target)

    def level_cost(self, target: Target) -> float:
        """Return what reading the weights of one level costs; a one-row pass of the whole target costs 1."""
        return target.skip_cost(self.plan.skip)

    def level_kernels(self, target: Target) -> int:
        """Return how many kernels one level launches on CUDA."""
        return LEVEL_KERNELS + KERNELS * (2 * target.layers - len(self.plan.skip.halves))

    def paying_levels(self, batch: int, agreement: float, most: int, branch: int = 1) -> int:
        """Return how many levels of `branch` candidates to draft for `batch` sequences, if every round drafts as many: 0 if
        none pays off."""
        alone = self.target.cost(batch, batch)
        level = max(self.level_cost(self.target), self.target.launch_cost(self.level_kernels(self.target)) / alone)

        def verify_cost(rows: int) -> float:
            return self.target.cost(batch * (1 + branch * (rows - 1)), batch) / alone

        return best_length(agreement, level, verify_cost, most).tokens

    def copy(self, source: int, slot: int, rows: int) -> None:
        """Copy nothing: the target copies its own rows."""

    def begin(self, state: State) -> None:
        """Keep nothing of a sequence."""

    def read(self, state: State, count: int) -> None:
        """Read no prompt."""

    def follow(self, state: State) -> None:
        """Read nothing in a round without drafts."""

    def candidates(self, rows: Tensor, position: Tensor | None, sampling: SamplingRows, k: int) -> tuple[Tensor, Tensor]:
        """Return `VocabularyHead.candidates`."""
        return self.vocabulary.candidates(rows, position, sampling, k)

    def root(self, state: State) -> SkippedBranches:
        """Read the root."""
        return SkippedBranches(self, state.batch, Draft.nothing(state.root))

    def run(self, batch: Batch, draft: Draft, rows: range) -> Tensor:
        """Run some rows of a draft, after those before them: [b, rows, H], after the final norm."""
        scores = self.target.score(batch, draft, HIDDEN, skip=self.plan.skip, rows=rows, logits="none")
        return self.target.norm(scores.require_hidden())


class SkippedBranches:
    """The rows of one round that the skipped target has read: the root, and candidates level by level."""

    def __init__(self, model: SkippedTarget, batch: Batch, draft: Draft) -> None:
        self.model, self.batch, self.draft = model, batch, draft
        self.rows = model.run(batch, draft, range(1))  # [b, w, H] of the level that was read last, after the norm

    def read(self, tokens: Tensor, parent: Tensor) -> Tensor:
        """Read candidates [b, w] that follow rows `parent` [b, w] of the level that was read last: [b, w, H]."""
        before, width = self.draft.nodes, tokens.shape[1]
        tree = self._grown(width, before - self.rows.shape[1] + parent)
        self.draft = Draft(torch.cat([self.draft.tokens, tokens], 1), tree, self.draft.size + width)
        self.rows = self.model.run(self.batch, self.draft, range(before, before + width))
        return self.rows

    def _grown(self, width: int, parent: Tensor) -> Tree:
        """Return the tree with one more level, whose rows follow the rows `parent` [b, w]."""
        tree = self.draft.tree
        if tree.is_chain and width == 1:
            return Tree.chain(tree.nodes + 1, parent.device)
        return Tree(torch.cat([tree.parent.expand(parent.shape[0], -1), parent], 1))


def confident_chain(
    state: State, model: SkippedTarget, levels: int, threshold: Tensor | float, branch: int = 1, stops: bool = False
) -> Draft:
    """Draft the first candidate of each level after the one before it, and its `branch` - 1 best siblings as leaves.

    threshold, of all or [b]: a sequence's draft ends with the first level whose first candidate is less likely. `stops`: no
    level is read once all drafts have ended. That reads values, so it is for a CPU. Elsewhere all levels are read, because a
    captured round always does the same, and `size` leaves out those after the end.
    """
    going = state.alive & state.batch.take(state.speculates)
    tokens, size = [state.root.unsqueeze(1)], torch.ones_like(state.root)
    branches: SkippedBranches | None = None
    for level in range(1, levels + 1):
        if stops and none_goes_on(going):
            break
        if branches is None:
            branches = model.root(state)
        else:
            branches.read(tokens[-1][:, :1], torch.zeros_like(size).unsqueeze(1))
        candidates, log_probs = model.candidates(branches.rows, state.ahead(level), state.sampling, branch)
        tokens.append(candidates[:, 0])
        size = size + branch * going
        going = going & (log_probs[:, 0, 0].exp() >= threshold)
    return Draft(torch.cat(tokens, 1), chain_with_leaves(len(tokens) - 1, branch, size.device), size)


class WindowAgreement:
    """How well the target drafts for one output without some half-layers: measured on its last tokens, in one pass."""

    def __init__(self, target: Target, batch: Batch, window: Tensor) -> None:
        """window [1, n + 1]: the last n committed tokens, and the root after them."""
        self.target, self.batch, self.window = target, batch, window

    def __call__(self, skip: Skip) -> float:
        """Return the share of tokens that it has first. It reads values, so the loop must not call it."""
        hidden = self.target.rerun(self.batch, self.window[:, :-1], skip)
        return float(firsts(self.target, hidden).eq(self.window[:, 1:]).float().mean())


def firsts(target: Target, hidden: Tensor) -> Tensor:
    """Return the first candidates of rows [b, n, H], before the final norm, as a draft would have them: [b, n]."""
    return first_largest(target.draft_head(target.norm(hidden)))


@cache
def chain_with_leaves(levels: int, branch: int, device: torch.device) -> Tree:
    """Return a tree of levels with `branch` nodes each, all of them children of the first node of the level before."""
    if branch == 1:
        return Tree.chain(levels + 1, device)
    first = [0, *(1 + level * branch for level in range(levels))]
    return Tree.of((0, *(first[level] for level in range(levels) for _ in range(branch))), device)

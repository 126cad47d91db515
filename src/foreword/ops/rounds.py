"""The decisions of a round around the pass: `fit` before it, `decide` and `write` after it.

In: the engine's columns, one entry per slot, and a draft, both as protocols, so that `ops` imports no other package.
Out: new tensors, or entries written in place. A slot that is not alive gets nothing, and no row past a draft's size is ever
accepted. On CUDA each function is one kernel launch.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from foreword.ops.dispatch import accelerated


class Columns(Protocol):
    """The columns of the engine's `State` for its B slots, and the b slots that the round is about."""

    @property
    def slots(self) -> Tensor: ...  # [b]
    @property
    def roots(self) -> Tensor: ...  # [B]
    @property
    def lengths(self) -> Tensor: ...  # [B]
    @property
    def limits(self) -> Tensor: ...  # [B]
    @property
    def tokens(self) -> Tensor: ...  # [B, L + 1]
    @property
    def alive_slots(self) -> Tensor: ...  # [B] bool
    @property
    def heeds_ends(self) -> Tensor: ...  # [B] bool
    @property
    def speculates(self) -> Tensor: ...  # [B] bool
    @property
    def ends(self) -> Tensor: ...  # [E] ids of the end tokens


class CandidateTree(Protocol):
    """The tree of a draft's rows; the first axis is b, or 1 if all sequences share one tree."""

    @property
    def parent(self) -> Tensor: ...  # [b or 1, N]
    @property
    def ancestors(self) -> Tensor: ...  # [b or 1, N, N] bool
    @property
    def depth(self) -> Tensor: ...  # [b or 1, N]


class CandidateRows(Protocol):
    """A draft: its tokens, its tree, and how many rows count."""

    @property
    def tokens(self) -> Tensor: ...  # [b, N]
    @property
    def tree(self) -> CandidateTree: ...
    @property
    def size(self) -> Tensor: ...  # [b]


class Decision(Protocol):
    """The buffers that `decide` writes the outcome of a round into."""

    @property
    def tokens(self) -> Tensor: ...  # [b, places]
    @property
    def count(self) -> Tensor: ...  # [b]
    @property
    def drafted(self) -> Tensor: ...  # [b]
    @property
    def ended(self) -> Tensor: ...  # [b] bool
    @property
    def broken(self) -> Tensor: ...  # [b] bool


def rows_that_count(state: Columns, size: Tensor) -> Tensor:
    """Return the size of each draft [b], or 1, the root alone, for a sequence that has ended or does not speculate."""
    return torch.where(state.speculates[state.slots] & state.alive_slots[state.slots], size, 1)


@accelerated("round.settle:fitted")
def fit(state: Columns, tokens: Tensor, depth: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    """Return a draft's tokens [b, N] with the root in every row that is not a candidate, and the rows that count [b].

    Padding goes through the target too. It repeats the root, which the target has to answer anyway. The engine sets the
    root itself: a drafter that got it wrong costs speed, and changes no output.
    """
    size = rows_that_count(state, size)
    counts = torch.arange(tokens.shape[1], device=size.device) < size.unsqueeze(1)
    root = state.roots[state.slots]
    return tokens.where(counts & (depth > 0), root.unsqueeze(1)), size


@accelerated("round.settle:decided")
def decide(state: Columns, draft: CandidateRows, choice: Tensor, peak: Tensor, decision: Decision) -> tuple[Tensor, Tensor]:
    """Write to `decision` what a round decides if the target chose `choice` [b, N]. Return the accepted path [b, places] and
    the new roots [b].

    peak [b, N, V]: scores in which a NaN shows at the chosen token, or [b, N, 1] if all tokens of a row share one. A
    sequence with a NaN on its path decides nothing.
    """
    path, count = longest_path(draft, choice, decision.tokens.shape[1])
    tokens = choice.gather(1, path)
    count, ended = cut(state, tokens, count)
    broken = _has_nan(peak, choice, path, count)
    count = count.where(~broken, 0)
    decision.tokens.copy_(tokens)
    decision.count.copy_(count)
    decision.drafted.copy_((draft.size - 1) * state.alive_slots[state.slots])
    decision.ended.copy_(ended & ~broken)
    decision.broken.copy_(broken)
    last = (count - 1).clamp(min=0).unsqueeze(1)
    return path, tokens.gather(1, last).squeeze(1)


def longest_path(draft: CandidateRows, choice: Tensor, places: int) -> tuple[Tensor, Tensor]:
    """Return the path from the root to the deepest row that the choices agree with: rows [b, places], and its length [b]."""
    batch, nodes = choice.shape
    if nodes == 1:  # a root alone has no candidates
        return torch.zeros_like(choice), torch.ones_like(choice[:, 0])
    tree, rows = draft.tree, torch.arange(nodes, device=choice.device)
    counts = rows < draft.size.unsqueeze(1)
    matches = ((draft.tokens == choice.gather(1, tree.parent.expand(batch, -1))) & counts) | (rows == 0)
    alive = (matches.unsqueeze(1) | ~tree.ancestors).all(-1)
    depth = tree.depth.expand_as(choice)
    best = depth.where(alive, -1).argmax(1)  # [b]
    ancestors = tree.ancestors.expand(batch, -1, -1)
    on_path = ancestors.gather(1, best.view(-1, 1, 1).expand(-1, 1, nodes)).squeeze(1)
    # Rows off the path are written to one place too many, which is then cut off.
    path = torch.zeros(batch, places + 1, dtype=torch.long, device=choice.device)
    path.scatter_(1, depth.where(on_path, places).clamp(max=places), rows.expand_as(choice))
    return path[:, :places], on_path.sum(1)


def cut(state: Columns, tokens: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many of a round's tokens [b, places] are kept, and whether the sequence ends with them: at an end token, or
    at the length limit. A frozen slot keeps none."""
    slots, order = state.slots, torch.arange(tokens.shape[1], device=tokens.device)
    is_end = torch.isin(tokens, state.ends) & state.heeds_ends[slots].unsqueeze(1)
    before_end = torch.where(is_end, order, tokens.shape[1]).amin(1) + 1
    room = state.limits[slots] - state.lengths[slots] - 1
    count = torch.minimum(torch.minimum(count, before_end), room)
    ended = (count == before_end) | (count == room)
    alive = state.alive_slots[slots]
    return count.where(alive, 0), ended & alive


def _has_nan(peak: Tensor, choice: Tensor, path: Tensor, count: Tensor) -> Tensor:
    """Return whether the target answered NaN in a row that would be kept: [b] bool."""
    shown = peak.gather(2, choice.clamp(max=peak.shape[2] - 1).unsqueeze(2)).squeeze(2)
    kept = torch.arange(path.shape[1], device=path.device) < count.unsqueeze(1)
    return (shown.gather(1, path).isnan() & kept).any(1)


@accelerated("round.settle:written")
def write(state: Columns, tokens: Tensor, count: Tensor, last: Tensor, ended: Tensor) -> None:
    """Append a round's first `count` [b] tokens [b, places] to the sequences, set the new roots `last` [b], and freeze the
    sequences that have `ended` [b]."""
    slots, order = state.slots, torch.arange(tokens.shape[1], device=tokens.device)
    waste = state.tokens.shape[1] - 1
    kept = order < count.unsqueeze(1)
    column = torch.where(kept, state.lengths[slots].unsqueeze(1) + 1 + order, waste)
    state.tokens.index_put_((slots.unsqueeze(1).expand_as(column), column), tokens)
    state.roots.index_copy_(0, slots, torch.where(count > 0, last, state.roots[slots]))
    state.alive_slots.index_copy_(0, slots, state.alive_slots[slots] & ~ended)

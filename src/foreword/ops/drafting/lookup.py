"""Prompt lookup: find the longest earlier match of a sequence's end, and continue after it, with one program per sequence.

In: the sequences by slot, and their lengths; for `looked_up_in_both` also the predictions of their requests. Out: the root
and its continuation, and how many rows count. Among equally long matches the latest counts, in a prediction the closest to
the end of the sequence. The torch reference is in ops/lookup.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.ops.layer.overlap import launched, take_turn

if TYPE_CHECKING:
    from foreword.ops.lookup import Predictions


@triton.jit
def _matched(text, line, end, column, counts, MATCH: tl.constexpr, BLOCK: tl.constexpr):
    """Count how many tokens of `text` up to each column equal the last tokens of `line`, whose root stands at `end`."""
    run = counts
    matched = tl.zeros([BLOCK], tl.int64)
    for back in tl.static_range(MATCH):
        last = tl.load(line + tl.maximum(end - back, 0))
        there = counts & (column >= back)  # all loads are issued at once, whatever earlier ones return
        run = run & there & (end >= back) & (tl.load(text + column - back, mask=there, other=-1) == last)
        matched += run.to(tl.int64)
    return matched


@triton.jit
def _longest(line, end, t_slot, MATCH: tl.constexpr, BLOCK: tl.constexpr):
    """Return how many tokens match earlier in a sequence, and where the match ends."""
    best = tl.zeros([BLOCK], tl.int64) - 1
    for start in range(0, end, BLOCK):
        column = start + tl.arange(0, BLOCK).to(tl.int64)
        matched = _matched(line, line, end, column, column < end, MATCH, BLOCK)  # a match ends before the root
        best = tl.maximum(best, tl.where(column < end, matched * t_slot + column, -1))
    longest = tl.max(best, 0)
    place = tl.where(longest < 0, -1, longest % t_slot)  # with nothing before the root there is no match
    return tl.maximum(longest, 0) // t_slot, place


@triton.jit
def _closest(text, line, end, first, last, furthest, MATCH: tl.constexpr, BLOCK: tl.constexpr):
    """Return how many tokens match in a prediction, and where the match ends: after `first` or at it, and before `last`."""
    best = tl.zeros([BLOCK], tl.int64)
    for start in range(first, last, BLOCK):
        column = start + tl.arange(0, BLOCK).to(tl.int64)
        matched = _matched(text, line, end, column, column < last, MATCH, BLOCK)
        beyond = column - end
        distance = tl.where(beyond > 0, 2 * beyond - 1, -2 * beyond)  # different at all places
        best = tl.maximum(best, tl.where(matched > 0, matched * furthest + furthest - 1 - distance, 0))
    longest = tl.max(best, 0)
    distance = furthest - 1 - longest % furthest
    place = tl.where(distance % 2 == 1, end + (distance + 1) // 2, end - distance // 2)
    return longest // furthest, tl.where(longest > 0, place, first)


@triton.jit
def _look_up(
    tokens, slots, lengths, sizes, out, size, t_slot,
    NODES: tl.constexpr, MATCH: tl.constexpr, AHEAD: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Draft for one sequence."""
    take_turn(EARLY)
    seq = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + seq)
    end = tl.load(lengths + slot)
    line = tokens + slot * t_slot
    found, place = _longest(line, end, t_slot, MATCH, BLOCK)
    ahead = tl.arange(0, AHEAD)
    source = place + 1 + (ahead - 1) % (end - place)
    token = tl.load(line + tl.where(ahead == 0, end, source), mask=ahead < NODES, other=0)
    tl.store(out + seq * NODES + ahead, token, mask=ahead < NODES)
    tl.store(size + seq, tl.load(sizes + found))


@triton.jit
def _look_up_in_both(
    tokens, slots, lengths, sizes, predicted, spans, predicted_sizes, out, size, is_predicted, t_slot, p_slot,
    NODES: tl.constexpr, MATCH: tl.constexpr, AHEAD: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Draft for one sequence, from it or from its prediction."""
    take_turn(EARLY)
    seq = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + seq)
    end = tl.load(lengths + slot)
    first, last = tl.load(spans + slot * 2), tl.load(spans + slot * 2 + 1)
    line, text = tokens + slot * t_slot, predicted + slot * p_slot
    matched, place = _longest(line, end, t_slot, MATCH, BLOCK)
    found, at = _closest(text, line, end, first, last, 2 * (t_slot + p_slot), MATCH, BLOCK)
    use = (found > 0) & (found >= matched)
    ahead = tl.arange(0, AHEAD)
    repeated = place + 1 + (ahead - 1) % (end - place)
    own = tl.load(line + tl.where(ahead == 0, end, repeated), mask=ahead < NODES, other=0)
    following = tl.load(text + tl.minimum(at + ahead, last), mask=ahead < NODES, other=0)
    token = tl.where(use & (ahead > 0), following, own)
    tl.store(out + seq * NODES + ahead, token, mask=ahead < NODES)
    rows = tl.minimum(tl.load(predicted_sizes + found), 1 + last - at)
    tl.store(size + seq, tl.where(use, rows, tl.load(sizes + matched)))
    tl.store(is_predicted + seq, use.to(tl.uint8))


def looked_up(tokens: Tensor, slots: Tensor, lengths: Tensor, sizes: Tensor, nodes: int, span: int) -> tuple[Tensor, Tensor]:
    """`looked_up` of ops/lookup.py. Each program stops at the length of its sequence, so `span` is not used."""
    batch, device = slots.shape[0], slots.device
    out = torch.empty(batch, nodes, dtype=torch.long, device=device)
    size = torch.empty(batch, dtype=torch.long, device=device)
    _look_up[(batch,)](
        tokens, slots, lengths, sizes, out, size, tokens.stride(0),
        NODES=nodes, MATCH=sizes.shape[0] - 1, AHEAD=triton.next_power_of_2(nodes), BLOCK=1024, **launched(device, 8),
    )  # fmt: skip
    return out, size


def looked_up_in_both(
    tokens: Tensor, slots: Tensor, lengths: Tensor, sizes: Tensor, nodes: int, span: int, predictions: Predictions
) -> tuple[Tensor, Tensor, Tensor]:
    """`looked_up_in_both` of ops/lookup.py. Each program stops at the end of its prediction, so its width is not used."""
    batch, device, predicted = slots.shape[0], slots.device, predictions.tokens
    out = torch.empty(batch, nodes, dtype=torch.long, device=device)
    size = torch.empty(batch, dtype=torch.long, device=device)
    is_predicted = torch.empty(batch, dtype=torch.bool, device=device)
    _look_up_in_both[(batch,)](
        tokens, slots, lengths, sizes, predicted, predictions.span, predictions.sizes, out, size, is_predicted,
        tokens.stride(0), predicted.stride(0),
        NODES=nodes, MATCH=sizes.shape[0] - 1, AHEAD=triton.next_power_of_2(nodes), BLOCK=1024, **launched(device, 8),
    )  # fmt: skip
    return out, size, is_predicted

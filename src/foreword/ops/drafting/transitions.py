"""Candidates that depend on the candidate before them: one launch for all pairs of neighbours in a block, and one per level
of a tree for the candidates after its live nodes.

The torch references are in ops/transitions.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from foreword.ops.layer.overlap import launched, take_turn
from foreword.ops.transitions import FULL

_FULL = tl.constexpr(FULL)
_NEVER = tl.constexpr(float("-inf"))


@triton.jit
def _transitions(
    changes, candidates, log_probs, temperature, next_tokens, next_log_probs,
    K: tl.constexpr, KEPT: tl.constexpr, SAMPLED: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Rank the candidates of one place, from the second on, after each candidate of the place before."""
    take_turn(EARLY)
    place, seq, places = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    node, own = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)
    real = own < K
    at = (seq * (places + 1) + place + 1) * K + own
    log_prob = tl.load(log_probs + at, mask=real, other=_NEVER).to(tl.float32)
    pair = (seq * places + place) * K + node
    change = tl.load(changes + pair * K + own[None, :], mask=(node < K) & real[None, :], other=0.0).to(tl.float32)
    if SAMPLED:
        heat = tl.load(temperature + seq)
        change /= tl.where(heat > 0, heat, 1.0)
    changed = log_prob[None, :] + change
    others = tl.log(1 - tl.minimum(tl.sum(tl.exp(log_prob), 0), _FULL))
    peak = tl.maximum(tl.max(changed, 1), others)
    mass = peak + tl.log(tl.sum(tl.exp(changed - peak[:, None]), 1) + tl.exp(others - peak))
    found = changed - mass[:, None]
    found = tl.where(found == found, found, _NEVER)
    theirs, ours = found[:, None, :], found[:, :, None]  # [node, own, other]
    before = (theirs > ours) | ((theirs == ours) & (own[None, None, :] < own[None, :, None]))
    rank = tl.sum(before.to(tl.int32), 2)
    token = tl.load(candidates + at, mask=real, other=0)
    kept = (node < K) & real[None, :] & (rank < KEPT)
    tl.store(next_tokens + pair * KEPT + rank, token[None, :] + tl.zeros_like(rank), mask=kept)
    tl.store(next_log_probs + pair * KEPT + rank, found, mask=kept)


def likeliest_transitions(
    changes: Tensor, candidates: Tensor, log_probs: Tensor, temperature: Tensor | None, k: int
) -> tuple[Tensor, Tensor]:
    """`likeliest_transitions` of ops/transitions.py."""
    batch, places, count, _ = changes.shape
    next_tokens = candidates.new_empty(batch, places, count, k)
    next_log_probs = log_probs.new_empty(batch, places, count, k)
    block = triton.next_power_of_2(count)
    _transitions[(places, batch)](
        changes.contiguous(), candidates.contiguous(), log_probs.contiguous(),
        changes if temperature is None else temperature, next_tokens, next_log_probs,
        K=count, KEPT=k, SAMPLED=temperature is not None, BLOCK=block, **launched(changes.device, block * block // 64),
    )  # fmt: skip
    return next_tokens, next_log_probs


@triton.jit
def _after_live_node(
    live, before, tokens, log_probs, next_tokens, next_log_probs, b_seq, t_seq, t_row, l_seq, l_row,
    P: tl.constexpr, K: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Copy the candidates after one live node."""
    take_turn(EARLY)
    node, seq = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = seq * tl.num_programs(0) + node
    place, rank = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_K)
    known = tl.load(before + seq * b_seq + place, mask=place < P, other=-1)
    found = tl.sum(tl.where(known == tl.load(live + at), place, 0), 0)
    here = rank < K
    token = tl.load(tokens + seq * t_seq + found * t_row + rank, mask=here)
    log_prob = tl.load(log_probs + seq * l_seq + found * l_row + rank, mask=here)
    tl.store(next_tokens + at * K + rank, token, mask=here)
    tl.store(next_log_probs + at * K + rank, log_prob, mask=here)


def after_live_nodes(live: Tensor, before: Tensor, tokens: Tensor, log_probs: Tensor) -> tuple[Tensor, Tensor]:
    """`after_live_nodes` of ops/transitions.py."""
    (batch, width), (_, places, k) = live.shape, tokens.shape
    assert before.stride(1) == tokens.stride(2) == log_probs.stride(2) == 1
    next_tokens, next_log_probs = tokens.new_empty(batch, width, k), log_probs.new_empty(batch, width, k)
    _after_live_node[(width, batch)](
        live.contiguous(), before, tokens, log_probs, next_tokens, next_log_probs,
        before.stride(0), *tokens.stride()[:2], *log_probs.stride()[:2],
        P=places, K=k, BLOCK_P=triton.next_power_of_2(places), BLOCK_K=triton.next_power_of_2(k),
        **launched(live.device, 1),
    )  # fmt: skip
    return next_tokens, next_log_probs

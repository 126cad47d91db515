"""Candidates that depend on the candidate before them: a kernel that finds them for the live nodes of a level.

The torch reference is in ops/transitions.py. A program handles one node.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from foreword.ops.layer.overlap import launched, take_turn


@triton.jit
def _after_live_node(
    live, before, tokens, log_probs, next_tokens, next_log_probs, b_seq, t_seq, l_seq,
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
    token = tl.load(tokens + seq * t_seq + found * K + rank, mask=here)
    log_prob = tl.load(log_probs + seq * l_seq + found * K + rank, mask=here)
    tl.store(next_tokens + at * K + rank, token, mask=here)
    tl.store(next_log_probs + at * K + rank, log_prob, mask=here)


def after_live_nodes(live: Tensor, before: Tensor, tokens: Tensor, log_probs: Tensor) -> tuple[Tensor, Tensor]:
    """`after_live_nodes` of ops/transitions.py."""
    (batch, width), (_, places, k) = live.shape, tokens.shape
    assert before.stride(1) == 1 and tokens.stride()[1:] == log_probs.stride()[1:] == (k, 1)
    next_tokens, next_log_probs = tokens.new_empty(batch, width, k), log_probs.new_empty(batch, width, k)
    _after_live_node[(width, batch)](
        live.contiguous(), before, tokens, log_probs, next_tokens, next_log_probs,
        before.stride(0), tokens.stride(0), log_probs.stride(0),
        P=places, K=k, BLOCK_P=triton.next_power_of_2(places), BLOCK_K=triton.next_power_of_2(k),
        **launched(live.device, 1),
    )  # fmt: skip
    return next_tokens, next_log_probs

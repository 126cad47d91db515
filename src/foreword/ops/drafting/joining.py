"""Attach a chain of candidates to a tree of others, with one program per sequence.

In: the rows of a tree and of a chain after the same root, and how many of each count. Out: the rows of both as one tree.
The torch reference is in ops/chains.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.ops.layer.overlap import launched, take_turn


@triton.jit
def _attach_chain(
    tokens, parents, sizes, chain, lengths, out, above, size, p_seq,
    NODES: tl.constexpr, LINKS: tl.constexpr, LEVELS: tl.constexpr,
    BLOCK: tl.constexpr, CHAIN: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Attach the chain of one sequence."""
    take_turn(EARLY)
    seq = tl.program_id(0).to(tl.int64)
    row, link = tl.arange(0, BLOCK), tl.arange(0, CHAIN)
    held, length = tl.load(sizes + seq).to(tl.int32), tl.load(lengths + seq).to(tl.int32)
    of_tree = row < held
    token = tl.load(tokens + seq * NODES + row, mask=row < NODES, other=0).to(tl.int32)
    parent = tl.load(parents + seq * p_seq + row, mask=row < NODES, other=0).to(tl.int32)
    candidate = tl.load(chain + seq * LINKS + link, mask=link < LINKS, other=0).to(tl.int32)
    root = tl.sum(tl.where(row == 0, token, 0), 0)

    at, shared, on = 0, 0, 1
    for step in tl.static_range(1, min(LEVELS + 1, LINKS)):
        next_token = tl.sum(tl.where(link == step, candidate, 0), 0)
        found = tl.min(tl.where(of_tree & (row > 0) & (parent == at) & (token == next_token), row, BLOCK), 0)
        on = on & ((found < BLOCK) & (step < length)).to(tl.int32)
        at = tl.where(on > 0, found, at)
        shared += on

    after, left = row - held, length - 1 - shared
    is_attached = (after >= 0) & (after < left)
    rest = tl.gather(candidate, tl.minimum(tl.maximum(1 + shared + after, 0), CHAIN - 1), 0)
    token = tl.where(is_attached, rest, tl.where(of_tree, token, root))
    parent = tl.where(is_attached, tl.where(after > 0, row - 1, at), tl.where(of_tree, parent, 0))
    rows: tl.constexpr = NODES + LINKS - 1
    tl.store(out + seq * rows + row, token.to(tl.int64), mask=row < rows)
    tl.store(above + seq * rows + row, parent.to(tl.int64), mask=row < rows)
    tl.store(size + seq, (held + left).to(tl.int64))


def with_chain(
    tree: tuple[Tensor, Tensor, Tensor], chain: tuple[Tensor, Tensor], levels: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`with_chain` of ops/chains.py."""
    (tokens, parents, sizes), (candidates, lengths) = tree, chain
    (batch, nodes), links, device = tokens.shape, candidates.shape[1], tokens.device
    assert tokens.is_contiguous() and candidates.is_contiguous() and parents.stride(1) == 1
    out = torch.empty(batch, nodes + links - 1, dtype=torch.long, device=device)
    above, size = torch.empty_like(out), torch.empty_like(sizes)
    block = triton.next_power_of_2(nodes + links - 1)
    _attach_chain[(batch,)](
        tokens, parents, sizes, candidates, lengths, out, above, size, parents.stride(0) if len(parents) > 1 else 0,
        NODES=nodes, LINKS=links, LEVELS=levels, BLOCK=block, CHAIN=triton.next_power_of_2(links), **launched(device, 1),
    )  # fmt: skip
    return out, above, size

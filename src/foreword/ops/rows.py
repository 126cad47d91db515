"""Hidden rows on their way into and out of draft heads, as torch operations: gathered, normalised, kept in slots.

In: rows [b, n, H] of a pass or of a draft head, where to look in them, and a table of embeddings [V, H]. Out: new rows. On
CUDA, ops/round/gather.py and ops/drafting/look.py take the place of the decorated functions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from foreword.ops.dispatch import accelerated

TINY = 1e-12  # keeps a row of zeros what it is
Norm = tuple[Tensor, float]  # weight and epsilon of an RMSNorm


def at_one(rows: Tensor) -> Tensor:
    """Normalise rows [.., H] to a root mean square of 1.

    Embeddings may be a thousand times smaller than the residual stream that they join. Weights of a usual size, learning at
    a usual rate, would not notice them.
    """
    return functional.rms_norm(rows, rows.shape[-1:], eps=TINY)


def size_of(rows: Tensor) -> Tensor:
    """[.., 1]: the root mean square of rows [.., H], which `at_one` divides by."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=wide)
    return (length * rows.shape[-1] ** -0.5).to(rows.dtype)


def carried(rows: Tensor, origin: Tensor) -> Tensor:
    """Rows of the live nodes [b, w, H] for the nodes that follow them, by `origin` [b, w']: [b, w', H]."""
    if rows.shape[1] == origin.shape[1] == 1:
        return rows  # one node follows the only one
    return _along(rows, origin)


@accelerated("round.gather:carried_and_embedded")
def carried_and_embedded(known: Tensor, origin: Tensor, table: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """What draft heads read of tokens [b, w]: [b, w, H] twice.

    First the rows of the live nodes that they follow: `origin` [b, w] of `known` [b, n, H]. Then their own embeddings from a
    table [V, H], normalised to a root mean square of 1.
    """
    return carried(known, origin), at_one(table[tokens])


def _one_per_sequence(table: Tensor, tokens: Tensor) -> bool:
    return tokens.dim() == 1


@accelerated("round.gather:embedded_at_one", when=_one_per_sequence)
def embedded_at_one(table: Tensor, tokens: Tensor) -> Tensor:
    """Embeddings of tokens [..] from a table [V, H], normalised to a root mean square of 1: [.., H]."""
    return at_one(table[tokens])


@accelerated("round.gather:counted")
def counted(rows: Tensor, count: Tensor, path: Tensor | None = None) -> Tensor:
    """Rows [b, n, H], or those along a path [b, m], with 0 past the first `count` [b]. Rows that were not accepted may be
    NaN, which must not reach a cache."""
    rows = rows if path is None else _along(rows, path)
    order = torch.arange(rows.shape[1], device=rows.device)
    return rows.where((order < count.unsqueeze(1)).unsqueeze(-1), 0)


@accelerated("round.gather:remember")
def remember(
    held: Tensor, slots: Tensor, rows: Tensor, count: Tensor, path: Tensor | None = None, norm: Norm | None = None
) -> None:
    """Store each slot's last accepted row; slots with count 0 are unchanged.

    held [B, H], written at `slots` [b]. rows [b, n, H], or those along a path [b, m], of which the first `count` [b] are
    accepted. norm: an RMSNorm that the row goes through first.
    """
    last = (count - 1).clamp(min=0).unsqueeze(1)
    row = _along(rows, last if path is None else path.gather(1, last)).squeeze(1)
    row = row if norm is None else functional.rms_norm(row, row.shape[-1:], *norm)
    held.index_copy_(0, slots, torch.where((count > 0).unsqueeze(1), row, held[slots]))


def _without_gradients(*given: Any) -> bool:
    return not torch.is_grad_enabled()


@accelerated("drafting.look:looked", when=_without_gradients)
def looked(state: Tensor, parts: Tensor, heads: int, silu: bool) -> Tensor:
    """Cosine attention to one key, head by head: state [.., H] + v * cos(q, k), or + SiLU(v * cos(q, k)).

    parts [.., 3 H]: query, key and value.
    """
    seen = cosine_attention(parts, heads)
    return state + (functional.silu(seen) if silu else seen)


def cosine_attention(parts: Tensor, heads: int) -> Tensor:
    """v * cos(q, k) [.., H] of query, key and value [.., 3 H], head by head."""
    query, key, value = (part.unflatten(-1, (heads, -1)) for part in parts.chunk(3, dim=-1))
    return (functional.cosine_similarity(query, key, dim=-1).unsqueeze(-1) * value).flatten(-2)


def _along(rows: Tensor, path: Tensor) -> Tensor:
    """Rows [b, n, H] at the places [b, m]: [b, m, H]."""
    return rows.gather(1, path.unsqueeze(-1).expand(-1, -1, rows.shape[2]))

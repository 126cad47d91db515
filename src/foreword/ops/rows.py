"""Hidden rows on their way into and out of draft heads, as torch operations: gather, normalise, keep in slots.

In: rows [b, n, H] of a pass or of a draft head, indices into them, and a table of embeddings [V, H]. Out: new rows. On
CUDA, ops/round/gather.py and ops/drafting/cosine_attention.py take the place of the decorated functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from foreword.ops.dispatch import accelerated

if TYPE_CHECKING:
    from foreword.ops.rounds import Columns

TINY = 1e-12  # so that a row of zeros stays one
Norm = tuple[Tensor, float]  # weight and epsilon of an RMSNorm


def unit_rms(rows: Tensor) -> Tensor:
    """Normalise rows [.., H] to a root mean square of 1.

    Embeddings may be a thousand times smaller than the residual stream that they join. Weights of a usual size, at a usual
    learning rate, would not pick them up.
    """
    return functional.rms_norm(rows, rows.shape[-1:], eps=TINY)


def rms_of(rows: Tensor) -> Tensor:
    """Return the root mean square of rows [.., H], which `unit_rms` divides by: [.., 1]."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=wide)
    return (length * rows.shape[-1] ** -0.5).to(rows.dtype)


def carried(rows: Tensor, origin: Tensor) -> Tensor:
    """Return the rows of live nodes [b, w, H] that new nodes follow, by `origin` [b, w']: [b, w', H]."""
    if rows.shape[1] == origin.shape[1] == 1:
        return rows  # one node follows the only one
    return along(rows, origin)


@accelerated("round.gather:carried_and_embedded")
def carried_and_embedded(known: Tensor, origin: Tensor, table: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two inputs of draft heads for tokens [b, w]: [b, w, H] twice.

    First the rows of the live nodes that the tokens follow: `origin` [b, w] of `known` [b, n, H]. Then the tokens'
    embeddings from a table [V, H], normalised to a root mean square of 1.
    """
    return carried(known, origin), unit_rms(table[tokens])


def _one_per_sequence(table: Tensor, tokens: Tensor) -> bool:
    return tokens.dim() == 1


@accelerated("round.gather:unit_rms_embeddings", when=_one_per_sequence)
def unit_rms_embeddings(table: Tensor, tokens: Tensor) -> Tensor:
    """Return embeddings of tokens [..] from a table [V, H], normalised to a root mean square of 1: [.., H]."""
    return unit_rms(table[tokens])


@accelerated("round.gather:counted")
def counted(rows: Tensor, count: Tensor, path: Tensor | None = None) -> Tensor:
    """Return rows [b, n, H], or those along a path [b, m], with 0 past the first `count` [b]. Rows that were not accepted
    may be NaN, which must not reach a cache."""
    rows = rows if path is None else along(rows, path)
    order = torch.arange(rows.shape[1], device=rows.device)
    return rows.where((order < count.unsqueeze(1)).unsqueeze(-1), 0)


@accelerated("round.gather:remember")
def remember(
    buffer: Tensor, slots: Tensor, rows: Tensor, count: Tensor, path: Tensor | None = None, norm: Norm | None = None
) -> None:
    """Store each slot's last accepted row; slots with count 0 are unchanged.

    buffer [B, H], written at `slots` [b]. rows [b, n, H], or those along a path [b, m]: the first `count` [b] are accepted.
    norm: an RMSNorm that the row goes through first.
    """
    last = (count - 1).clamp(min=0).unsqueeze(1)
    row = along(rows, last if path is None else path.gather(1, last)).squeeze(1)
    row = row if norm is None else functional.rms_norm(row, row.shape[-1:], *norm)
    buffer.index_copy_(0, slots, torch.where((count > 0).unsqueeze(1), row, buffer[slots]))


def conditioned(hidden: Tensor, taps: Sequence[Tensor], following: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalise what a drafter mixes: rows, states of lower layers, and embeddings of the tokens that follow the rows.

    hidden [.., H], taps: each [.., H], following [.., H]. Returns the taps side by side [.., T H], rows and embeddings
    [.., H], all with a root mean square of 1, and the root mean square that the rows had [.., 1].
    """
    lower = torch.cat([unit_rms(tap) for tap in taps], dim=-1) if taps else hidden[..., :0]
    return lower, unit_rms(hidden), unit_rms(following), rms_of(hidden)


@accelerated("round.gather:conditioned_on_next")
def conditioned_on_next(
    hidden: Tensor,
    taps: Sequence[Tensor],
    path: Tensor | None,
    count: Tensor,
    table: Tensor,
    state: Columns,
    cached: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`conditioned` for rows that were committed just now, each with the token that follows it.

    Of hidden [b, N, H] and the taps, the rows along a `path` [b, n] or all, with 0 past the first `count` [b]. Their tokens
    stand after the `cached` [B] ones in the sequences of `state`; table [V, H]: embeddings.
    """
    rows, *lower = (counted(one, count, path) for one in (hidden, *taps))
    column = cached[state.slots].unsqueeze(1) + 1 + torch.arange(rows.shape[1], device=rows.device)
    following = state.tokens[state.slots.unsqueeze(1), column.clamp(max=state.tokens.shape[1] - 1)]
    return conditioned(rows, lower, table[following])


def _without_gradients(*given: Any) -> bool:
    return not torch.is_grad_enabled()


@accelerated("drafting.cosine_attention:add_cosine_attention", when=_without_gradients)
def add_cosine_attention(state: Tensor, qkv: Tensor, heads: int, silu: bool) -> Tensor:
    """Return state [.., H] + v * cos(q, k), or state + SiLU(v * cos(q, k)): cosine attention to one key, head by head.

    qkv [.., 3 H]: query, key and value.
    """
    attended = cosine_attention(qkv, heads)
    return state + (functional.silu(attended) if silu else attended)


def cosine_attention(qkv: Tensor, heads: int) -> Tensor:
    """Return v * cos(q, k) [.., H] of query, key and value [.., 3 H], head by head."""
    query, key, value = (one.unflatten(-1, (heads, -1)) for one in qkv.chunk(3, dim=-1))
    return (functional.cosine_similarity(query, key, dim=-1).unsqueeze(-1) * value).flatten(-2)


def along(rows: Tensor, path: Tensor) -> Tensor:
    """Return rows [b, n, H] at places [b, m]: [b, m, H]."""
    return rows.gather(1, path.unsqueeze(-1).expand(-1, -1, rows.shape[2]))

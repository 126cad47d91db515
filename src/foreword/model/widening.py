"""How weights for hidden size H become weights for r H that compute the same: those of a target, and those of its drafters.

A wide row is r copies of a narrow one, end to end, in one of two sizes: what a norm gives is copied as it is; the stream
that layers add to, which the embedding begins, is divided by r, so that a head tied to the embedding sums r copies to what
it was. A weight says what it reads and writes, and the rest follows. With r a power of two nothing is rounded, so that a
weight made wide can be made narrow again, to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor

from foreword.errors import InputError

Size = Literal["normed", "stream"]


@dataclass(frozen=True)
class Wide:
    """What a linear, its bias included, or the weight of a norm, which reads whatever it is given, has to do with rows.

    `reads` is a row of any width, or several of hidden size side by side; where there are more, they are like the last.
    """

    writes: Size
    reads: Size | tuple[Size, ...] = "normed"

    def widened(self, weight: Tensor, times: int, hidden: int) -> Tensor:
        """A weight [out, in], bias or norm for rows `times` as wide; `hidden` is the narrow hidden size."""
        if weight.dim() == 1:
            return (weight * _size(self.writes, times)).repeat(times)
        scaled = [part * scale for part, scale in self._parts(weight, times, hidden)]
        return torch.cat([part.repeat(1, times) for part in scaled], dim=1).repeat(times, 1)

    def narrowed(self, weight: Tensor, times: int, hidden: int) -> Tensor:
        """What `widened` made such a weight of: of each row that it reads or writes the first copy, in its own size."""
        written = weight[: weight.shape[0] // times]
        if weight.dim() == 1:
            return written / _size(self.writes, times)
        parts = self._parts(written, times, hidden * times)
        return torch.cat([part[:, : part.shape[1] // times] / scale for part, scale in parts], dim=1)

    def _parts(self, weight: Tensor, times: int, hidden: int) -> list[tuple[Tensor, float]]:
        """What of a weight [out, in] reads a row each, and what widening multiplies it by."""
        reads = (self.reads,) if isinstance(self.reads, str) else self.reads
        parts = [weight] if isinstance(self.reads, str) else weight.split(hidden, dim=1)
        sizes = [_size(reads[min(place, len(reads) - 1)], times) for place in range(len(parts))]
        return [(part, _size(self.writes, times) / read / times) for part, read in zip(parts, sizes, strict=True)]


def _size(of: Size, times: int) -> float:
    return 1 / times if of == "stream" else 1.0


NORM = Wide("normed")
WITHIN = Wide("normed", "normed")
SEVERAL = Wide("normed", ("normed",))  # reads several rows side by side
INTO_STREAM = Wide("stream", "normed")

LAYER = {
    "self_attn.[qkv]_proj": WITHIN,
    "self_attn.o_proj": INTO_STREAM,
    "mlp.gate_proj": WITHIN,
    "mlp.up_proj": WITHIN,
    "mlp.down_proj": INTO_STREAM,
    "*_layernorm": NORM,
}
"""A decoder layer with a norm before each half, and rotary positions: its heads are copied, and stay as wide as they are."""

Table = Mapping[str, Wide]
"""Names of modules, `*` for any part of a name, and how their weights widen."""


def layers_at(place: str) -> dict[str, Wide]:
    return {f"{place}.*.{name}": wide for name, wide in LAYER.items()}


def widened(name: str, weight: Tensor, table: Table, times: int, hidden: int) -> Tensor:
    """The weight called `name`, such as `block.0.mlp.up_proj.weight`, for rows `times` as wide."""
    return _rule(name, table).widened(weight, times, hidden)


def narrowed(name: str, weight: Tensor, table: Table, times: int, hidden: int) -> Tensor:
    """The weight of which `widened` made this one; `hidden` is the narrow hidden size."""
    return _rule(name, table).narrowed(weight, times, hidden)


def _rule(name: str, table: Table) -> Wide:
    found = {wide for pattern, wide in table.items() if fnmatchcase(name.rpartition(".")[0], pattern)}
    if len(found) != 1:
        raise InputError(f"nothing says how {name} widens, or two things do; its table knows {', '.join(table)}")
    return found.pop()


def per_token(weight: Tensor, times: int) -> Tensor:
    """An embedding or a head [V, H]: its rows belong to tokens and are as many as before."""
    return (weight / times).repeat(1, times)


def per_token_narrowed(weight: Tensor, times: int) -> Tensor:
    """The embedding or head of which `per_token` made this one."""
    return weight[:, : weight.shape[1] // times] * times


def check_times(times: int) -> None:
    if type(times) is not int or times < 1 or times & (times - 1):
        raise InputError(f"a model grows by a power of two, which rounds nothing, got {times!r}; use 2, 4, 8 or 16")

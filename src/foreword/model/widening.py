"""How weights for hidden size H become weights for r H that compute the same: those of a target, and those of its drafters.

A wide row is r copies of a narrow row, concatenated, in one of two scales. The output of a norm is copied unchanged. The
residual stream, which begins with the embedding, is divided by r, so that a head tied to the embedding sums r copies to the
original value. Some rows keep their width, such as those of a low rank. Each weight declares what it reads and writes; the
rest follows. If r is a power of two, nothing is rounded, so a widened weight can be narrowed again to the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor

from foreword.errors import InputError

Scale = Literal["normed", "stream", "fixed"]


@dataclass(frozen=True)
class Wide:
    """The scales of the rows that a linear (with its bias) or a norm reads and writes. What a norm reads does not matter.

    `reads` is one row of any width, or a tuple for several concatenated rows of hidden size; further rows are like the last.
    """

    writes: Scale
    reads: Scale | tuple[Scale, ...] = "normed"

    def widened(self, weight: Tensor, times: int, hidden: int) -> Tensor:
        """Return a weight [out, in], bias or norm for rows `times` as wide; `hidden` is the narrow hidden size."""
        copies = _copies(self.writes, times)
        if weight.dim() == 1:
            return (weight * _factor(self.writes, times)).repeat(copies)
        parts = self._parts(weight, times, hidden)
        return torch.cat([(part * scale).repeat(1, read) for part, scale, read in parts], dim=1).repeat(copies, 1)

    def narrowed(self, weight: Tensor, times: int, hidden: int) -> Tensor:
        """Return the weight that `widened` was given: the first copy of each row that it reads or writes, rescaled."""
        written = weight[: weight.shape[0] // _copies(self.writes, times)]
        if weight.dim() == 1:
            return written / _factor(self.writes, times)
        parts = self._parts(written, times, hidden * times)
        return torch.cat([part[:, : part.shape[1] // read] / scale for part, scale, read in parts], dim=1)

    def _parts(self, weight: Tensor, times: int, hidden: int) -> list[tuple[Tensor, float, int]]:
        """Return the parts of a weight [out, in] that each read one row, and for each part its factor when widened, and how
        often it is repeated."""
        given = (self.reads,) if isinstance(self.reads, str) else self.reads
        parts = [weight] if isinstance(self.reads, str) else weight.split(hidden, dim=1)
        reads = [given[min(index, len(given) - 1)] for index in range(len(parts))]
        factors = [_factor(self.writes, times) / _factor(read, times) / _copies(read, times) for read in reads]
        return [(part, factor, _copies(read, times)) for part, factor, read in zip(parts, factors, reads, strict=True)]


def _factor(scale: Scale, times: int) -> float:
    return 1 / times if scale == "stream" else 1.0


def _copies(scale: Scale, times: int) -> int:
    """Return how many copies of a narrow row a wide one consists of."""
    return 1 if scale == "fixed" else times


NORM = Wide("normed")
WITHIN = Wide("normed", "normed")
SEVERAL = Wide("normed", ("normed",))  # reads several concatenated rows
INTO_STREAM = Wide("stream", "normed")
INTO_RANK = Wide("fixed", "normed")  # writes a row of a width of its own
FROM_RANK = Wide("normed", "fixed")  # reads such a row

LAYER = {
    "self_attn.[qkv]_proj": WITHIN,
    "self_attn.o_proj": INTO_STREAM,
    "mlp.gate_proj": WITHIN,
    "mlp.up_proj": WITHIN,
    "mlp.down_proj": INTO_STREAM,
    "*_layernorm": NORM,
}
"""A decoder layer with pre-norms and rotary positions. Its heads are copied and keep their width."""

Table = Mapping[str, Wide]
"""Names of modules, `*` for any part of a name, and the rule for their weights."""


def layers_at(place: str) -> dict[str, Wide]:
    return {f"{place}.*.{name}": wide for name, wide in LAYER.items()}


def widened(name: str, weight: Tensor, table: Table, times: int, hidden: int) -> Tensor:
    """Return the weight called `name`, such as `block.0.mlp.up_proj.weight`, for rows `times` as wide."""
    return _rule(name, table).widened(weight, times, hidden)


def narrowed(name: str, weight: Tensor, table: Table, times: int, hidden: int) -> Tensor:
    """Return the weight that `widened` was given for this one; `hidden` is the narrow hidden size."""
    return _rule(name, table).narrowed(weight, times, hidden)


def _rule(name: str, table: Table) -> Wide:
    found = {wide for pattern, wide in table.items() if fnmatchcase(name.rpartition(".")[0], pattern)}
    if len(found) != 1:
        raise InputError(f"no rule, or several, for widening {name}; the table has {', '.join(table)}")
    return found.pop()


def per_token(weight: Tensor, times: int) -> Tensor:
    """Widen an embedding or a head [V, H]. It keeps one row per token."""
    return (weight / times).repeat(1, times)


def per_token_narrowed(weight: Tensor, times: int) -> Tensor:
    """Return the embedding or head that `per_token` was given for this one."""
    return weight[:, : weight.shape[1] // times] * times


def check_times(times: int) -> None:
    if type(times) is not int or times < 1 or times & (times - 1):
        raise InputError(
            f"a model is widened by a power of two, so that nothing is rounded, got {times!r}; use 2, 4, 8 or 16"
        )

"""A fused decoder layer with few calls, for models that were packed or quantised for the CPU.

A small model's pass spends a third of its time between the products, and most of that on call overhead: a product evicts
the CPU caches, so every call into torch after it waits for its own code. So a layer is four products, one attention and
five compiled loops (ops/layer/cpu_loops.py). All layers and passes share one set of buffers, whatever their shapes. A layer
returns a tensor that no other pass reuses, so taps may keep it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from foreword.core.needs import HalfKind
from foreword.model.attention import LayerPass
from foreword.model.layer_cache import KVRows
from foreword.model.linears import MAX_STOCK_ROWS, padded_row_count
from foreword.model.plain_linears import Buffer
from foreword.model.quantised_linears import cpu_kernels

KEPT_ROWS = 64  # passes of more rows are prompts, of any length: their views are not kept
_NO_NORM = np.empty(0, dtype=np.float32)


class WorkspaceMemory:
    """The memory of a stack's workspaces: for each purpose one flat buffer for rounds and one for prompts, as large as the
    longest pass so far needed."""

    def __init__(self) -> None:
        self.rounds: dict[str, Buffer] = {}
        self.prompts: dict[str, Buffer] = {}
        self.spaces: dict[tuple[int, int], Workspace] = {}  # of rounds: views of `rounds`

    def of(self, purpose: str, rows: int, width: int, most: int = KEPT_ROWS) -> Buffer:
        """Return [rows, width] of a buffer. The tensor is padded with further rows, so that few row counts occur. Rounds
        ask for `most` rows or fewer."""
        padded, buffers = padded_row_count(rows), self.rounds if rows <= KEPT_ROWS else self.prompts
        if purpose not in buffers or len(buffers[purpose].array) < padded * width:
            buffers[purpose] = Buffer.of(max(padded, most) * width)
        tensor, array = buffers[purpose]
        return Buffer(tensor[: padded * width].view(padded, width), array[: rows * width].reshape(rows, width))


class Workspace:
    """Buffers for passes of one shape."""

    @torch.inference_mode(False)  # a view made in inference mode cannot be written to outside of it
    def __init__(self, memory: WorkspaceMemory, layer: CpuLayer, batch: int, count: int, heads: int) -> None:
        rows, width = batch * count, layer.width
        self.normed = memory.of("normed", rows, layer.qkv.columns_in)
        self.gated = memory.of("gated", rows, layer.down.columns_in)
        self.attended = memory.of("attended", rows, layer.q_size)
        self.by_head = self.attended.tensor[:rows].view(batch, count, -1, width)
        few = min(rows, MAX_STOCK_ROWS)  # for more rows a product allocates its own result
        self.qkv = memory.of("qkv", few, layer.qkv.columns_out, MAX_STOCK_ROWS)
        self.out = memory.of("out", few, layer.out.columns_out, MAX_STOCK_ROWS)
        self.gate_up = memory.of("gate_up", few, layer.gate_up.columns_out, MAX_STOCK_ROWS)
        query = memory.of("query", rows, layer.q_size)
        shape = batch, heads, layer.q_size // width // heads * count, width
        self.query = Buffer(query.tensor[:rows].view(shape), query.array.reshape(shape))


class CachedView(NamedTuple):
    """The keys and values that a layer reads in its cache. A view is kept while the layer reads the same rows."""

    key: tuple[KVRows, tuple[int, ...], int]
    keys: Tensor
    values: Tensor


class CpuLayer:
    """A layer with packed or quantised linears, computed in few calls. It reads the weights and changes nothing in them."""

    def __init__(self, layer: Any, memory: WorkspaceMemory) -> None:
        """`memory` is shared by all layers of a stack."""
        self.loops, self.memory, self.spaces = cpu_kernels("layer.cpu_loops"), memory, memory.spaces
        attention, mlp = layer.self_attn, layer.mlp
        self.width: int = attention.head_dim
        self.scaling: float = attention.scaling
        self.qkv, self.out = attention.q_proj.fusion.linear, attention.o_proj
        self.gate_up, self.down = mlp.gate_proj.fusion.linear, mlp.down_proj
        self.before_attention, self.before_mlp = _norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)
        self.q_norm, self.head_epsilon = _norm(getattr(attention, "q_norm", None))
        self.k_norm, _ = _norm(getattr(attention, "k_norm", None))
        self.q_size: int = attention.q_proj.columns.stop
        self.kept_view: CachedView | None = None

    def __call__(self, hidden: Tensor, positions: tuple[Tensor, Tensor], view: LayerPass, half: HalfKind | None) -> Tensor:
        """Run rows [b, n, H] through the layer or one half of it; attention stores keys and values in the view's cache."""
        space, rows = self._space(hidden, view), hidden.reshape(-1, hidden.shape[2]).numpy()
        if half == "mlp":
            self.loops.normed(rows, *self.before_mlp, space.normed.array)
            return self._through_mlp(space, rows).view(hidden.shape)
        self.loops.normed(rows, *self.before_attention, space.normed.array)
        attended = self._attend(space, positions, view)
        if half == "attention":
            result: Tensor = self.out(attended)[: len(rows)]
            self.loops.added(result.numpy(), rows)
            return result.view(hidden.shape)
        stream = self.out.into(attended, space.out)[: len(rows)]
        self.loops.added_and_normed(stream, rows, *self.before_mlp, space.normed.array)
        return self._through_mlp(space, stream).view(hidden.shape)

    def _space(self, hidden: Tensor, view: LayerPass) -> Workspace:
        """Return the buffers for rows [b, n, H]."""
        batch, count, _ = hidden.shape
        assert view.cache is not None
        space = self.spaces.get((batch, count))
        if space is None:
            space = Workspace(self.memory, self, batch, count, view.cache.keys.shape[1])
            if batch * count <= KEPT_ROWS:
                self.spaces[batch, count] = space
        return space

    def _through_mlp(self, space: Workspace, stream: np.ndarray) -> Tensor:
        """Return the MLP of the rows that `space` holds normed, added to the residual stream [b * n, H]."""
        self.loops.gated(self.gate_up.into(space.normed.tensor, space.gate_up)[: len(stream)], space.gated.array)
        result: Tensor = self.down(space.gated.tensor)[: len(stream)]
        self.loops.added(result.numpy(), stream)
        return result

    def _attend(self, space: Workspace, positions: tuple[Tensor, Tensor], view: LayerPass) -> Tensor:
        """Return the output of attention [b * n or more for padding, heads * width]."""
        assert view.cache is not None and view.places is not None
        keys, values, places = view.cache.keys, view.cache.values, view.places
        cosine, sine = (part.flatten(0, 1).numpy() for part in positions)
        qkv = self.qkv.into(space.normed.tensor, space.qkv)[: len(cosine)]
        self.loops.rotated_and_stored(
            qkv, cosine, sine, self.q_norm, self.k_norm, self.head_epsilon,
            places.numpy(), keys.view(-1, self.width).numpy(), values.view(-1, self.width).numpy(), space.query.array,
        )  # fmt: skip
        cached = self._cached(view)
        attended = scaled_dot_product_attention(space.query.tensor, *cached, attn_mask=view.mask, scale=self.scaling)
        batch, heads, grouped, _ = attended.shape
        count = grouped * heads * self.width // self.q_size
        if count == 1:
            return attended.reshape(batch, self.q_size)
        space.by_head.copy_(attended.view(batch, -1, count, self.width).transpose(1, 2))
        return space.attended.tensor

    def _cached(self, view: LayerPass) -> tuple[Tensor, Tensor]:
        """Return the keys and values that the pass reads."""
        assert view.cache is not None and view.batch is not None
        if view.batch.run is None:  # a copy, which cannot be reused
            return view.cache.view(view.batch, view.key_rows)
        key = view.cache, view.batch.ids, view.key_rows
        if self.kept_view is None or self.kept_view.key[0] is not key[0] or self.kept_view.key[1:] != key[1:]:
            self.kept_view = CachedView(key, *view.cache.view(view.batch, view.key_rows))
        return self.kept_view.keys, self.kept_view.values


def _norm(norm: Any) -> tuple[np.ndarray, float]:
    return (_NO_NORM, 0.0) if norm is None else (norm.weight.detach().numpy(), norm.variance_epsilon)

"""A decoder layer in as few calls as it takes, for models that were packed for the CPU.

A small model's pass spends a third of its time between the products, and most of that on calling: behind a product that has
swept the caches, every call into torch waits for its own code. So a layer is four products, one attention and five compiled
loops (ops/layer/between.py), on buffers that all layers and passes use in turn, whatever their shapes. What a layer gives
back is its own: taps may keep it.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from foreword.hub.storage import place
from foreword.model.attention import Pass
from foreword.model.layer_cache import KVRows
from foreword.model.linears import MOST_STOCK, Buffer, one_of_few
from foreword.ops.dispatch import kernels

KEPT_ROWS = 64  # passes of more rows are prompts, of any length: their views are made anew
_NO_NORM = np.empty(0, dtype=np.float32)


class Memory:
    """What the workspaces of a stack lie in: for each purpose a flat buffer for rounds, and one for prompts, as long as the
    longest pass so far needed it."""

    def __init__(self) -> None:
        self.rounds: dict[str, Buffer] = {}
        self.prompts: dict[str, Buffer] = {}
        self.spaces: dict[tuple[int, int], Workspace] = {}  # of rounds: views of the former

    def of(self, purpose: str, rows: int, width: int, most: int = KEPT_ROWS) -> Buffer:
        """[rows, width] of it: for torch with some rows after them, so that few numbers of rows occur. Rounds ask for `most`
        rows or fewer."""
        more, held = one_of_few(rows), self.rounds if rows <= KEPT_ROWS else self.prompts
        if purpose not in held or len(held[purpose].array) < more * width:
            held[purpose] = Buffer.of(max(more, most) * width)
        tensor, array = held[purpose]
        return Buffer(tensor[: more * width].view(more, width), array[: rows * width].reshape(rows, width))


class Workspace:
    """Buffers for passes of one shape."""

    @torch.inference_mode(False)  # a view that is born in inference mode cannot be written to outside of it
    def __init__(self, memory: Memory, layer: CpuLayer, batch: int, count: int, heads: int) -> None:
        rows, width = batch * count, layer.width
        self.ready = memory.of("ready", rows, layer.qkv.columns_in)
        self.gated = memory.of("gated", rows, layer.down.columns_in)
        self.mixed = memory.of("mixed", rows, layer.q_size)
        self.by_head = self.mixed.tensor[:rows].view(batch, count, -1, width)
        few = min(rows, MOST_STOCK)  # of more rows a product makes its own tensor
        self.qkv = memory.of("qkv", few, layer.qkv.columns_out, MOST_STOCK)
        self.own = memory.of("own", few, layer.out.columns_out, MOST_STOCK)
        self.both = memory.of("both", few, layer.gate_up.columns_out, MOST_STOCK)
        query = memory.of("query", rows, layer.q_size)
        shape = batch, heads, layer.q_size // width // heads * count, width
        self.query = Buffer(query.tensor[:rows].view(shape), query.array.reshape(shape))


class Looked(NamedTuple):
    """What a layer looks at in its cache, made once for as long as it looks there."""

    key: tuple[KVRows, tuple[int, ...], int]
    keys: Tensor
    values: Tensor


class CpuLayer:
    """Reads the weights of a packed layer; the layer itself stays as it is."""

    def __init__(self, layer: Any, memory: Memory) -> None:
        """`memory` is that of all layers of a stack."""
        self.between, self.memory, self.spaces = _compiled_loops(), memory, memory.spaces
        attention, mlp = layer.self_attn, layer.mlp
        self.width: int = attention.head_dim
        self.scaling: float = attention.scaling
        self.qkv, self.out = attention.q_proj.fusion.linear, attention.o_proj
        self.gate_up, self.down = mlp.gate_proj.fusion.linear, mlp.down_proj
        self.before_attention, self.before_mlp = _norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)
        self.q_norm, self.head_epsilon = _norm(getattr(attention, "q_norm", None))
        self.k_norm, _ = _norm(getattr(attention, "k_norm", None))
        self.q_size: int = attention.q_proj.columns.stop
        self.looked: Looked | None = None

    def __call__(self, hidden: Tensor, positions: tuple[Tensor, Tensor], view: Pass) -> Tensor:
        """Rows [b, n, H] through the layer; keys and values of the rows land in the view's cache."""
        batch, count, size = hidden.shape
        assert view.cached is not None
        space = self.spaces.get((batch, count))
        if space is None:
            space = Workspace(self.memory, self, batch, count, view.cached.keys.shape[1])
            if batch * count <= KEPT_ROWS:
                self.spaces[batch, count] = space
        rows = hidden.reshape(-1, size).numpy()
        self.between.normed(rows, *self.before_attention, space.ready.array)
        own = self.out.into(self._attend(space, positions, view), space.own)[: len(rows)]
        self.between.added_and_normed(own, rows, *self.before_mlp, space.ready.array)
        self.between.gated(self.gate_up.into(space.ready.tensor, space.both)[: len(rows)], space.gated.array)
        result = self.down(space.gated.tensor)[: len(rows)]
        self.between.added(result.numpy(), own)
        return result.view(batch, count, size)

    def _attend(self, space: Workspace, positions: tuple[Tensor, Tensor], view: Pass) -> Tensor:
        """[b * n or some more, heads * width]: the values that each row's heads mix."""
        assert view.cached is not None and view.places is not None
        keys, values, places = view.cached.keys, view.cached.values, view.places
        cosine, sine = (part.flatten(0, 1).numpy() for part in positions)
        qkv = self.qkv.into(space.ready.tensor, space.qkv)[: len(cosine)]
        self.between.turned_and_stored(
            qkv, cosine, sine, self.q_norm, self.k_norm, self.head_epsilon,
            places.numpy(), keys.view(-1, self.width).numpy(), values.view(-1, self.width).numpy(), space.query.array,
        )  # fmt: skip
        seen = self._look(view)
        mixed = scaled_dot_product_attention(space.query.tensor, *seen, attn_mask=view.mask, scale=self.scaling)
        batch, heads, grouped, _ = mixed.shape
        count = grouped * heads * self.width // self.q_size
        if count == 1:
            return mixed.reshape(batch, self.q_size)
        space.by_head.copy_(mixed.view(batch, -1, count, self.width).transpose(1, 2))
        return space.mixed.tensor

    def _look(self, view: Pass) -> tuple[Tensor, Tensor]:
        assert view.cached is not None and view.batch is not None
        if view.batch.run is None:  # copied, so never the same again
            return view.cached.view(view.batch, view.reach)
        key = view.cached, view.batch.ids, view.reach
        if self.looked is None or self.looked.key[0] is not key[0] or self.looked.key[1:] != key[1:]:
            self.looked = Looked(key, *view.cached.view(view.batch, view.reach))
        return self.looked.keys, self.looked.values


def _compiled_loops() -> ModuleType:
    """Told where to keep machine code before the loops, which are compiled on import, are imported."""
    compiled: Any = kernels("layer.compiled")
    compiled.spare = place() / "numba"
    return kernels("layer.between")


def _norm(norm: Any) -> tuple[np.ndarray, float]:
    return (_NO_NORM, 0.0) if norm is None else (norm.weight.detach().numpy(), norm.variance_epsilon)

"""Tree attention, registered with transformers: rows attend to the cached prefix and to the scratch rows that `sees` allows.

A decoder layer of transformers computes queries, keys and values and calls the attention function that its config names.
Ours finds a `LayerPass` among the arguments, stores the new keys and values in our cache and attends to what the pass
allows. Without a `LayerPass` it calls the model's original function, so the model's own `generate` still works.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from foreword.core.state import Batch
from foreword.errors import ModelUnsupported
from foreword.model.cache import SlotCache
from foreword.model.family import AttentionSpec
from foreword.model.layer_cache import KVRows
from foreword.ops.device import has_half_precision_kernels
from foreword.ops.dispatch import kernels

PREFIX = "foreword_"
# Options of transformers that cannot change a row here. A served model has no dropout, rows are rotated to their positions
# before, and what is cached or returned changes no row. `scaling` is used, the others are ignored.
SAFE_OPTIONS = frozenset(
    {"scaling", "dropout", "position_ids", "position_embeddings", "cache_position", "use_cache", "output_attentions"}
)
SPEC_FIELDS = {"sliding_window": "window", "softcap": "softcap"}  # option of transformers -> field of `AttentionSpec`
KERNEL_WIDTHS = (16, 32, 64, 128, 256)  # head widths that our kernel supports


@dataclass
class SequenceKV:
    """Keys and values [b, key heads, n, width] of whole sequences in the current layer, for the rows that join them."""

    keys: Tensor | None = None
    values: Tensor | None = None

    def extended(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return them with those of the joined rows appended."""
        assert self.keys is not None and self.values is not None
        return torch.cat([self.keys, keys], dim=2), torch.cat([self.values, values], dim=2)


class LayerPass(NamedTuple):
    """A pass as one layer gets it: where its rows are stored and what they attend to.

    Without a cache the rows attend only to each other, as in training. Without a cache and a mask they are those of whole
    sequences with causal attention.
    """

    base: Tensor  # [b] committed rows before the scratch rows
    depth: Tensor  # [b or 1, m] of the m scratch rows; the n rows of the pass are the last of them
    sees: Tensor  # [b or 1, n, m] the scratch rows that each row attends to
    chain: bool = False  # every row attends to all rows before it
    causal: bool = True  # no row attends to a later one
    spec: AttentionSpec = AttentionSpec()
    mask: Tensor | None = None  # `sees` as a mask over all keys, if torch computes attention: see `mask_of`
    cache: KVRows | None = None  # of this layer
    batch: Batch | None = None
    places: Tensor | None = None  # flat cache places of the n rows
    key_rows: int = 0  # rows of the cache that attention reads, if torch computes it
    kv_out: SequenceKV | None = None  # without a cache: where whole sequences leave their keys and values
    kv_in: SequenceKV | None = None  # without a cache: where the rows that join sequences find theirs


@dataclass
class Installation:
    """How many `Model`s use a transformers model, and whether it was in training mode before the first of them."""

    users: int
    was_training: bool


_INSTALLATIONS: WeakKeyDictionary[PreTrainedModel, Installation] = WeakKeyDictionary()


def install(model: PreTrainedModel) -> None:
    """Route the model's attention through ours, on top of its original one, and switch dropout off."""
    installed = _INSTALLATIONS.setdefault(model, Installation(0, model.training))
    installed.users += 1
    model.eval()
    route(model)


def route(model: PreTrainedModel) -> None:
    """Select our attention function. It is called before every pass, because `set_attn_implementation` on a wrapped model
    deselects it."""
    original = model.config._attn_implementation
    if original.startswith(PREFIX):
        return
    name = PREFIX + original
    AttentionInterface.register(name, partial(tree_attention, original))
    mask = ALL_MASK_ATTENTION_FUNCTIONS.get(original)
    if mask is not None:
        AttentionMaskInterface.register(name, mask)
    model.config._attn_implementation = name


def remove(model: PreTrainedModel) -> None:
    """Undo `install` once its last user is gone."""
    installed = _INSTALLATIONS[model]
    installed.users -= 1
    if not installed.users:
        del _INSTALLATIONS[model]
        model.config._attn_implementation = model.config._attn_implementation.removeprefix(PREFIX)
        if installed.was_training:
            model.train()


def tree_attention(
    original: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Compute attention as transformers calls it: query [b, heads, n, width], key and value [b, key heads, n, width]."""
    view: LayerPass | None = options.pop("foreword_pass", None)
    if view is None:
        return _original_attention(original, module)(module, query, key, value, mask, **options)
    check_options(module, view.spec, options)
    sinks = options["s_aux"] if view.spec.sinks else None
    if view.cache is not None:
        assert view.batch is not None and view.places is not None
        view.cache.store(view.places, key, value)
        if view.mask is None:
            return attend_by_kernel(query, view, options["scaling"], sinks), None
        key, value = view.cache.view(view.batch, view.key_rows)
    if view.kv_out is not None:
        view.kv_out.keys, view.kv_out.values = key, value
    if view.kv_in is not None:
        key, value = view.kv_in.extended(key, value)
    if view.mask is None:
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True, scale=options["scaling"], enable_gqa=True)
        return mixed.transpose(1, 2), None
    return attend(query, key, value, view.mask, options["scaling"], view.spec.softcap, sinks), None


def for_any_length() -> AbstractContextManager[None]:
    """Let torch choose attention kernels that need no preparation for a new length. cuDNN's, which it prefers on an H200,
    plans each new length on the host, for a millisecond or more."""
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def check_options(module: nn.Module, spec: AttentionSpec, options: dict[str, Any]) -> None:
    """Refuse options of a layer's attention that ours would ignore: the outputs would be wrong without any sign of it."""
    for name, value in options.items():
        if name in SAFE_OPTIONS or value is None or (name == "s_aux" and spec.sinks):
            continue
        if name not in SPEC_FIELDS:
            raise ModelUnsupported(
                f"{type(module).__name__} passes {name!r} to its attention, which Foreword does not support; "
                f"supported: {', '.join(sorted(SAFE_OPTIONS | SPEC_FIELDS.keys()))}"
            )
        configured = getattr(spec, SPEC_FIELDS[name])
        if value != configured:
            raise ModelUnsupported(
                f"{type(module).__name__} passes {name}={value!r} to its attention, but its config says "
                f"{configured or None!r}; load the model again with the config that it is to have"
            )


def has_kernel(cache: SlotCache) -> bool:
    """Whether our kernel computes attention over this cache: in half precision on CUDA it is faster than a mask."""
    return has_half_precision_kernels(cache.length.device, cache.shape.dtype) and cache.shape.width in KERNEL_WIDTHS


def attend_by_kernel(query: Tensor, view: LayerPass, scaling: float, sinks: Tensor | None = None) -> Tensor:
    """Return the attention of query [b, heads, n, width] over the layer's cache: [b, n, heads, width]."""
    assert view.cache is not None and view.batch is not None
    depth = view.depth[:, -query.shape[2] :]
    where = view.batch.slots, view.base, view.sees, view.batch.span, scaling, depth, view.spec.window, view.spec.softcap
    attend_tree: Callable[..., Tensor] = kernels("layer.tree_attention").attend_tree
    return attend_tree(query, view.cache.keys, view.cache.values, *where, chain=view.chain, causal=view.causal, sinks=sinks)


def within_window(sees: Tensor, depth: Tensor, window: int) -> Tensor:
    """Return `sees` [b or 1, n, m] without the scratch rows outside each row's window; `depth` [b or 1, m] is theirs."""
    if not window:
        return sees
    far = depth[:, -sees.shape[1] :].unsqueeze(2) - depth.unsqueeze(1) >= window
    return sees & ~far


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return masked attention. Queries that share a key head are concatenated, so keys are never repeated. sinks [heads]: a
    score of each head that takes part in the softmax and has no value."""
    batch, heads, rows, width = query.shape
    shared = key.shape[1]
    grouped = query.reshape(batch, shared, heads // shared * rows, width)
    if softcap or sinks is not None:
        sink = None if sinks is None else sinks.repeat_interleave(rows).view(1, shared, -1, 1).expand(batch, -1, -1, -1)
        out = _attend_in_steps(grouped, key, value, mask, scaling, softcap, sink)
    else:
        out = scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(batch, heads, rows, width).transpose(1, 2)


def _attend_in_steps(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, softcap: float, sink: Tensor | None
) -> Tensor:
    """Return the same with capped scores, or with a sink for every row: torch's own attention has neither."""
    scores = query @ key.transpose(-1, -2) * scaling
    if softcap:
        scores = (scores / softcap).tanh() * softcap
    scores = scores + mask
    if sink is not None:
        scores = torch.cat([scores, sink.to(scores.dtype)], dim=-1)
    weights = scores.softmax(-1, dtype=torch.promote_types(query.dtype, torch.float32)).to(query.dtype)
    return weights[..., : key.shape[2]] @ value


def mask_of(
    base: Tensor,
    sees: Tensor,
    keys: int,
    groups: int,
    dtype: torch.dtype,
    window: int = 0,
    depth: Tensor | None = None,
) -> Tensor:
    """Return an additive mask [b, 1, groups * n, keys], open for the prefix and for the scratch rows that a row sees.

    base [b]: committed rows. sees [b or 1, n, m]: over the m scratch rows after them. A window closes keys that lie too far
    back by position, which in a tree is not the order of the rows. So it needs `depth` [b or 1, m] of the scratch rows; the
    n rows of the pass are the last of them.
    """
    batch, rows, scratch = base.shape[0], sees.shape[1], sees.shape[2]
    away = torch.arange(keys, device=base.device) - base.unsqueeze(1)  # [b, keys] from the first scratch row
    column = away.clamp(0, scratch - 1)
    seen = sees.expand(batch, -1, -1).gather(2, column.unsqueeze(1).expand(-1, rows, -1))
    open_ = (away < 0).unsqueeze(1) | (seen & (away < scratch).unsqueeze(1))
    if window:
        assert depth is not None
        from_base = torch.where(away < 0, away, depth.expand(batch, -1).gather(1, column))
        open_ &= from_base.unsqueeze(1) > depth[:, scratch - rows :].unsqueeze(2) - window
    mask = torch.zeros(open_.shape, dtype=dtype, device=base.device).masked_fill_(~open_, -math.inf)
    return mask.repeat(1, groups, 1).unsqueeze(1)


def _original_attention(name: str, module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)

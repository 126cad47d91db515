"""Tree attention, registered with transformers: rows see the cached prefix and those scratch rows that `sees` allows.

A decoder layer of transformers computes queries, keys and values and calls the attention function that its config names.
Ours finds a `Pass` among the arguments, stores the new keys and values in our cache and attends over what the pass may
see. Without a `Pass` it hands over to the function the model had before, so the model's own `generate` still works.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from foreword.core.state import Batch
from foreword.errors import ModelUnsupported
from foreword.model.cache import SlotCache
from foreword.model.families import Sight
from foreword.model.layer_cache import KVRows
from foreword.ops.device import has_half_precision_kernels
from foreword.ops.dispatch import kernels

PREFIX = "foreword_"
# What transformers hands to an attention function and ours may leave alone: a served model has no dropout, rows are rotated
# to their positions before, and what is cached and returned changes no row. `scaling` we heed.
HARMLESS = frozenset({"scaling", "dropout", "position_ids", "cache_position", "use_cache", "output_attentions"})
IN_SIGHT = {"sliding_window": "window", "softcap": "softcap"}  # an option of transformers -> where a `Sight` says the same
KERNEL_WIDTHS = (16, 32, 64, 128, 256)  # of a head, that our kernel is made for


@dataclass
class Held:
    """Keys and values [b, key heads, n, width] that the rows of a text had in the layer at hand, for the rows beside it."""

    keys: Tensor | None = None
    values: Tensor | None = None

    def joined(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """With those of the rows beside it behind them."""
        assert self.keys is not None and self.values is not None
        return torch.cat([self.keys, keys], dim=2), torch.cat([self.values, values], dim=2)


class Pass(NamedTuple):
    """One layer's view of a pass: where its rows are stored and what they see.

    Without a cache the rows see one another only: that is how a stack is trained. Without a mask either, they are those of
    whole texts.
    """

    base: Tensor  # [b] committed rows before
    depth: Tensor  # [b or 1, m] of the m scratch rows behind them; the n rows of the pass are the last
    sees: Tensor  # [b or 1, n, m] which of the m scratch rows each row looks at
    chain: bool = False  # every row sees all before it
    causal: bool = True  # no row sees a later one
    sight: Sight = Sight()
    mask: Tensor | None = None  # the same for all keys, where attention is torch's own: see `mask_of`
    cached: KVRows | None = None  # the layer's own cache
    batch: Batch | None = None
    places: Tensor | None = None  # of the n rows, flat
    reach: int = 0  # how many rows of the cache are looked at
    held: Held | None = None  # without a cache: where the rows of a text leave keys and values
    alongside: Held | None = None  # or where rows that run alongside it find them


@dataclass
class Loan:
    """How many walk a transformers model, and whether it was in training when the first of them came."""

    users: int
    was_training: bool


_LOANS: WeakKeyDictionary[PreTrainedModel, Loan] = WeakKeyDictionary()


def install(model: PreTrainedModel) -> None:
    """Route the model's attention through ours, on top of what it used before, and switch dropout off."""
    loan = _LOANS.setdefault(model, Loan(0, model.training))
    loan.users += 1
    model.eval()
    route(model)


def route(model: PreTrainedModel) -> None:
    """Again at every pass: whoever calls `set_attn_implementation` on a wrapped model takes our attention out."""
    before = model.config._attn_implementation
    if before.startswith(PREFIX):
        return
    name = PREFIX + before
    AttentionInterface.register(name, partial(tree_attention, before))
    mask = ALL_MASK_ATTENTION_FUNCTIONS.get(before)
    if mask is not None:
        AttentionMaskInterface.register(name, mask)
    model.config._attn_implementation = name


def remove(model: PreTrainedModel) -> None:
    """Undo `install`, once the last of those who called it is gone."""
    loan = _LOANS[model]
    loan.users -= 1
    if not loan.users:
        del _LOANS[model]
        model.config._attn_implementation = model.config._attn_implementation.removeprefix(PREFIX)
        if loan.was_training:
            model.train()


def tree_attention(
    before: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """What transformers calls: query [b, heads, n, width], key and value [b, key heads, n, width]."""
    view: Pass | None = options.pop("foreword_pass", None)
    if view is None:
        return _original(before, module)(module, query, key, value, mask, **options)
    check_options(module, view.sight, options)
    if view.cached is not None:
        assert view.batch is not None and view.places is not None
        view.cached.store(view.places, key, value)
        if view.mask is None:
            return attend_by_kernel(query, view, options["scaling"]), None
        key, value = view.cached.view(view.batch, view.reach)
    if view.held is not None:
        view.held.keys, view.held.values = key, value
    if view.alongside is not None:
        key, value = view.alongside.joined(key, value)
    if view.mask is None:
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True, scale=options["scaling"], enable_gqa=True)
        return mixed.transpose(1, 2), None
    return attend(query, key, value, view.mask, options["scaling"], view.sight.softcap), None


def check_options(module: nn.Module, sight: Sight, options: dict[str, Any]) -> None:
    """Refuse what a layer asks of its attention and ours would leave out: the outputs would be wrong without a word."""
    for name, value in options.items():
        if name in HARMLESS or value is None:
            continue
        if name not in IN_SIGHT:
            raise ModelUnsupported(
                f"{type(module).__name__} passes {name!r} to its attention, which Foreword does not support; "
                f"supported: {', '.join(sorted(HARMLESS | IN_SIGHT.keys()))}"
            )
        known = getattr(sight, IN_SIGHT[name])
        if value != known:
            raise ModelUnsupported(
                f"{type(module).__name__} passes {name}={value!r} to its attention, but its config says {known or None!r}; "
                "load the model again with the config that it is to have"
            )


def has_kernel(cache: SlotCache) -> bool:
    """Whether attention over this cache goes by our kernel: half precision on CUDA, where it is faster than a mask."""
    return has_half_precision_kernels(cache.length.device, cache.shape.dtype) and cache.shape.width in KERNEL_WIDTHS


def attend_by_kernel(query: Tensor, view: Pass, scaling: float) -> Tensor:
    """query [b, heads, n, width] over what its layer has cached: [b, n, heads, width]."""
    assert view.cached is not None and view.batch is not None
    depth = view.depth[:, -query.shape[2] :]
    where = view.batch.slots, view.base, view.sees, view.batch.span, scaling, depth, view.sight.window, view.sight.softcap
    attend_tree: Callable[..., Tensor] = kernels("layer.tree_attention").attend_tree
    return attend_tree(query, view.cached.keys, view.cached.values, *where, chain=view.chain, causal=view.causal)


def within(sees: Tensor, depth: Tensor, window: int) -> Tensor:
    """`sees` [b or 1, n, m] with the scratch rows closed that lie outside a row's window; `depth` [b or 1, m] is theirs."""
    if not window:
        return sees
    far = depth[:, -sees.shape[1] :].unsqueeze(2) - depth.unsqueeze(1) >= window
    return sees & ~far


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, softcap: float = 0.0) -> Tensor:
    """Masked attention; the queries that share a key head are laid side by side, so keys are never repeated."""
    batch, heads, rows, width = query.shape
    shared = key.shape[1]
    grouped = query.reshape(batch, shared, heads // shared * rows, width)
    if softcap:
        out = _attend_capped(grouped, key, value, mask, scaling, softcap)
    else:
        out = scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(batch, heads, rows, width).transpose(1, 2)


def _attend_capped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, softcap: float) -> Tensor:
    """The same by hand, since torch's own attention has no place for a cap between the scores and their softmax."""
    scores = query @ key.transpose(-1, -2) * scaling
    capped = (scores / softcap).tanh() * softcap + mask
    weights = capped.softmax(-1, dtype=torch.promote_types(query.dtype, torch.float32)).to(query.dtype)
    return weights @ value


def mask_of(
    base: Tensor,
    sees: Tensor,
    keys: int,
    groups: int,
    dtype: torch.dtype,
    window: int = 0,
    depth: Tensor | None = None,
) -> Tensor:
    """Additive mask [b, 1, groups * n, keys]: open for the prefix and for the scratch rows that a row sees.

    `base` [b] counts the committed rows; `sees` [b or 1, n, m] is over the m scratch rows behind them. A window closes
    keys that lie too far back by position, which in a tree is not the order of the rows: it wants the `depth` [b or 1, m]
    of the scratch rows, the last n of which are those of the pass.
    """
    batch, rows, scratch = base.shape[0], sees.shape[1], sees.shape[2]
    away = torch.arange(keys, device=base.device) - base.unsqueeze(1)  # [b, keys] from the first scratch row
    column = away.clamp(0, scratch - 1)
    seen = sees.expand(batch, -1, -1).gather(2, column.unsqueeze(1).expand(-1, rows, -1))
    open_ = (away < 0).unsqueeze(1) | (seen & (away < scratch).unsqueeze(1))
    if window:
        assert depth is not None
        behind_base = torch.where(away < 0, away, depth.expand(batch, -1).gather(1, column))
        open_ &= behind_base.unsqueeze(1) > depth[:, scratch - rows :].unsqueeze(2) - window
    mask = torch.zeros(open_.shape, dtype=dtype, device=base.device).masked_fill_(~open_, -math.inf)
    return mask.repeat(1, groups, 1).unsqueeze(1)


def _original(before: str, module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get_interface(before, eager)

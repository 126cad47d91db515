"""Divide a model over the ranks: what each loads, and whole layers again for those who copy them.

Attention heads and the inner rows of MLPs are divided; embedding, norms and head are whole on every rank, so whatever reads
them, such as a drafter, finds them as ever. transformers loads the parts and runs them. Where our kernels run instead, its
linears become ordinary ones, and the last of each half-layer a `SummedLinear`. A layer's own shapes say how it was divided.
"""

from __future__ import annotations

import copy
import re
from functools import reduce
from math import gcd
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig

from foreword.errors import InputError, ModelUnsupported
from foreword.model.family import Family, Parts, key_heads
from foreword.model.linears import FusedPart, JointLinear, is_rebuilt, make_adjacent, unpacked
from foreword.model.summed_linear import SummedLinear
from foreword.ranks.group import Ranks

BASE = "model."  # where a causal language model of transformers has its layers
WHOLE = "replicated_with_grad_allreduce"  # transformers' name for parameters that every rank has whole
KEYS = "layers.*.self_attn.k_proj"
STYLES = {"colwise", "rowwise", "packed_colwise", "moe_tp_experts", WHOLE, "colwise_gather_output", "rowwise_split_input"}
SIZES = {
    "num_attention_heads": "attention heads",
    "num_key_value_heads": "key heads",
    "intermediate_size": "inner rows of an MLP",
    "moe_intermediate_size": "inner rows of an expert",
    "shared_expert_intermediate_size": "inner rows of the shared expert",
}

_WHOLE: WeakKeyDictionary[PreTrainedModel, list[nn.Module]] = WeakKeyDictionary()  # layers without weights


def check_divisible(family: Family, config: Any, ranks: int) -> None:
    """Refuse a model that cannot be divided over that many ranks."""
    if family.parts != Parts():
        raise ModelUnsupported(
            f"{family.name}: models of this family cannot be divided over ranks, their parts have other names; leave tp out"
        )
    plan = {} if family.loops else getattr(config, "base_model_tp_plan", None) or {}
    if not plan or {*plan.values()} - STYLES:
        why = (
            "transformers has no plan for it" if not plan else f"of its plan, {sorted({*plan.values()} - STYLES)} is unknown"
        )
        raise ModelUnsupported(f"{family.name}: models of this family cannot be divided over ranks, {why}; leave tp out")
    if family.name == "cohere" and config.use_qk_norm:
        raise ModelUnsupported(
            "cohere: with use_qk_norm each head has a norm of its own, which transformers does not divide; leave tp out"
        )
    sizes = {name: getattr(config, name, None) for name in SIZES}
    known = {name: size for name, size in sizes.items() if isinstance(size, int) and size}
    common = reduce(gcd, known.values())
    for name, size in known.items():
        if size % ranks:
            fitting = [str(count) for count in range(1, min(common, 64) + 1) if common % count == 0]
            raise InputError(
                f"{family.name}: {size} {SIZES[name]} ({name} in config.json) cannot be divided over {ranks} ranks; "
                f"tp can be {', '.join(fitting)}"
            )


def options_for(config: Any, ranks: Ranks) -> dict[str, Any]:
    """Return the options with which transformers loads this rank's part of a model, and runs it."""
    if ranks.count == 1:
        return {}
    return {"distributed_config": DistributedConfig(tp_size=ranks.count, tp_plan=_plan(config))}


def _plan(config: Any) -> dict[str, str]:
    """Return how each module is divided. Unlike transformers' own plan, it leaves embedding and head whole."""
    own = config.base_model_tp_plan or {}
    return {BASE + name: style for name, style in own.items()} | {f"{BASE}embed_tokens": WHOLE, "lm_head": WHOLE}


def key_heads_of_rank(config: Any, ranks: int) -> int:
    """Return how many key heads the attention of each rank has."""
    divided = (config.base_model_tp_plan or {}).get(KEYS) == "colwise"
    heads = key_heads(config)
    return heads // ranks if divided else heads


def take_over(model: PreTrainedModel, ranks: Ranks) -> None:
    """Replace divided linears that transformers runs by ordinary ones, which can be rebuilt for speed, and by their sums."""
    plan = _plan(model.config)
    for parent, module in [*model.named_modules()]:
        for name, child in [*module.named_children()]:
            style = plan.get(re.sub(r"\.\d+\.", ".*.", f"{parent}.{name}"))
            if type(child) is nn.Linear and style == "colwise":
                setattr(module, name, _own_part(child))
            elif type(child) is nn.Linear and style == "rowwise":
                setattr(module, name, SummedLinear(_own_part(child), ranks))


def _own_part(linear: nn.Linear) -> nn.Linear:
    """Return a linear with this rank's part of the weights, and nothing of transformers around it."""
    weight = _local(linear.weight)
    part = nn.Linear(weight.shape[1], weight.shape[0], linear.bias is not None, device="meta")
    part.weight = nn.Parameter(weight, requires_grad=False)
    if linear.bias is not None:
        part.bias = nn.Parameter(_local(linear.bias), requires_grad=False)
    return part


def _local(parameter: Tensor) -> Tensor:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.detach()


def remember_shapes(model: PreTrainedModel) -> None:
    """Note what the layers of a divided model look like whole: `whole_layer` fills in their weights."""
    layers: Any = model.model.layers
    with torch.device("meta"):
        _WHOLE[model] = [type(layer)(model.config, layer.self_attn.layer_idx) for layer in layers]


@torch.no_grad()
def whole_layer(model: PreTrainedModel, layer: Any, ranks: Ranks) -> nn.Module:
    """Return a copy of a layer that can be trained, whole and with stock linears. All ranks call this together."""
    if model not in _WHOLE:
        return unpacked(layer)
    own, whole = unpacked(layer) if is_rebuilt(layer) else layer, copy.deepcopy(_WHOLE[model][layer.self_attn.layer_idx])
    held, found = {**dict(own.named_parameters()), **dict(own.named_buffers())}, {}
    for name, like in whole.state_dict().items():
        part = held.get(name)
        if isinstance(part, DTensor):
            found[name] = part.full_tensor()
        else:
            found[name] = ranks.whole(part, torch.empty(like.shape, dtype=model.dtype, device=model.device))
    whole.load_state_dict(found, assign=True)
    if any(isinstance(one, FusedPart) and isinstance(one.fusion.linear, JointLinear) for one in layer.modules()):
        make_adjacent(whole)
    return whole.eval()

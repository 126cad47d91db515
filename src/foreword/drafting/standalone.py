"""A standalone model from the target's first layers, or from trained copies of them.

In: the target and the layers. Out: a causal language model of transformers with the target's embedding and head, on any
device. On the target's own device the embedding is shared, and so is the head if it is tied or not packed.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from foreword.drafting.small_model import FirstLayers
from foreword.model.families import family_of
from foreword.model.model import Model
from foreword.model.quantised_linears import QuantizedEmbedding

BY_LAYER = ("layer_types", "no_rope_layers")  # lists in the config with one entry per layer


def standalone_model(target: Model, module: FirstLayers, device: torch.device) -> PreTrainedModel:
    """Copy the layers with their current weights. Later training does not change the copy."""
    count, config = len(module.layers), copy.deepcopy(target.hf.config)
    config.update({"num_hidden_layers": count} | ({"repeats": 1} if target.repeats > 1 else {}))  # each is applied once
    for name in BY_LAYER:
        if getattr(config, name, None):
            setattr(config, name, getattr(config, name)[:count])
    with torch.device("meta"):  # without weights, which are set below
        attention = family_of(config).stock_attention
        model: Any = AutoModelForCausalLM.from_config(config, dtype=target.dtype, attn_implementation=attention)
    own: Any = target.hf
    parts, held, made = target.family.parts, target.family.inner(own), target.family.inner(model)
    embedding = getattr(held, parts.embedding)
    embedding = embedding.stock() if isinstance(embedding, QuantizedEmbedding) else embedding
    setattr(made, parts.embedding, _on_device(embedding, device))
    for name in filter(None, (parts.rotary, parts.positions)):
        setattr(made, name, _on_device(getattr(held, name), device))
    setattr(made, parts.layers, copy.deepcopy(module.layers).to(device))
    last = target.family.final_norm
    setattr(made, last, _norm(getattr(held, last), module.norm.weight).to(device))
    if config.tie_word_embeddings:
        model.lm_head.weight = getattr(made, parts.embedding).weight
    else:
        model.lm_head.weight = nn.Parameter(target.head_weight().to(device), requires_grad=False)
    if (bias := getattr(own.lm_head, "bias", None)) is not None:
        model.lm_head.bias = nn.Parameter(bias.detach().to(device), requires_grad=False)
    return model.eval().requires_grad_(False)


@torch.no_grad()
def _norm(like: nn.Module, weight: Tensor) -> nn.Module:
    """Return a norm of the family's type that multiplies by `weight`. Some families add one to the stored weight."""
    norm: Any = copy.deepcopy(like)
    norm.weight.zero_()
    added = norm(torch.ones_like(norm.weight)).round()
    norm.weight.copy_(weight - added)
    return norm


def _on_device(module: nn.Module, device: torch.device) -> nn.Module:
    """Return the module itself if it is on the device already, else a copy."""
    devices = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    return module if devices == {device} else copy.deepcopy(module).to(device)

"""Widen a model without changing its function, and narrow it again.

In: a causal language model as transformers makes it. Out: a model with every hidden coordinate, head and MLP unit repeated r
times, which computes the same logits; or the original of such a model. Weights are made one by one, on the model's device
and in its dtype, by the rules in `model/widening.py`. If r is a power of two, nothing is rounded either way.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from foreword.errors import ModelUnsupported
from foreword.model.plain_linears import is_plain_linear
from foreword.model.widening import NORM, check_times, layers_at, narrowed, per_token, per_token_narrowed, widened

WIDENABLE = ("llama", "mistral", "qwen2")
"""Families with the layers of `model/widening.py`, whose norms all read the residual stream, with one epsilon."""

WIDE = {**layers_at("model.layers"), "model.norm": NORM}
PER_TOKEN = ("model.embed_tokens.weight", "lm_head.weight")
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


def widen_model(hf: Any, times: int) -> Any:
    """Return the model `times` as wide, on the same device and in the same dtype."""
    check_times(times)
    if hf.config.model_type not in WIDENABLE:
        raise ModelUnsupported(
            f"models of type {hf.config.model_type!r} cannot be widened; those of {', '.join(WIDENABLE)} can"
        )
    if not all(is_plain_linear(linear) for linear in (hf.lm_head, hf.model.layers[0].self_attn.q_proj)):
        raise ModelUnsupported("only a model with the linears of transformers can be widened; widen it before it is rebuilt")
    hidden, config = hf.config.hidden_size, copy.deepcopy(hf.config)
    for size in SIZES:
        setattr(config, size, getattr(config, size) * times)
    config.rms_norm_eps /= times**2  # the stream is divided by `times`, its squares by `times**2`

    def wide(name: str, weight: Tensor) -> Tensor:
        return per_token(weight, times) if name in PER_TOKEN else widened(name, weight, WIDE, times, hidden)

    return _remade(hf, config, wide)


def narrow_model(hf: Any, times: int) -> Any:
    """Return the model that `widen_model` widened."""
    config = copy.deepcopy(hf.config)
    for size in SIZES:
        setattr(config, size, getattr(config, size) // times)
    config.rms_norm_eps *= times**2
    hidden = config.hidden_size

    def narrow(name: str, weight: Tensor) -> Tensor:
        return per_token_narrowed(weight, times) if name in PER_TOKEN else narrowed(name, weight, WIDE, times, hidden)

    return _remade(hf, config, narrow)


def _remade(hf: Any, config: Any, make: Callable[[str, Tensor], Tensor]) -> Any:
    """Return a model of the same class with the sizes of `config`. `make` makes each weight from the one of `hf`."""
    config.name_or_path = ""  # the weights in that folder are not these
    with torch.device("meta"):
        other = type(hf)(config)
    for name, weight in hf.named_parameters():
        place, _, leaf = name.rpartition(".")
        setattr(other.get_submodule(place), leaf, nn.Parameter(make(name, weight.detach()), requires_grad=False))
    if config.tie_word_embeddings:
        other.lm_head.weight = other.model.embed_tokens.weight
    other.model.rotary_emb = copy.deepcopy(hf.model.rotary_emb)  # heads keep their width
    other.generation_config = copy.deepcopy(hf.generation_config)
    return other.eval()

"""Models of known shapes with random weights, for timing, where sizes matter and outputs do not.

In: the name of a shape, a device and a dtype. Out: a llama of transformers, rebuilt for speed like a loaded one. Nothing is
downloaded, and the weights are made on the device, without passing through host memory.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from foreword.errors import InputError
from foreword.model import linears

_CONTEXT = 8192

SHAPES: dict[str, dict[str, Any]] = {
    "135m": dict(
        hidden_size=576,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        intermediate_size=1536,
        vocab_size=49152,
        tie_word_embeddings=True,
    ),
    "7b": dict(
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=14336,
        vocab_size=32000,
        tie_word_embeddings=False,
    ),
}


def random_model(shape: str, device: torch.device, dtype: torch.dtype, rebuild: bool = True) -> PreTrainedModel:
    """Return a llama of a shape in `SHAPES`, with weights sampled from a normal distribution of standard deviation 0.02."""
    if shape not in SHAPES:
        raise InputError(f"unknown shape {shape!r}; choose from {', '.join(SHAPES)}")
    config = AutoConfig.for_model("llama", max_position_embeddings=_CONTEXT, initializer_range=0.02, **SHAPES[shape])
    torch.manual_seed(0)
    with device, torch.no_grad():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.eval().requires_grad_(False).to(device)
    if rebuild:
        linears.rebuild(model, device, dtype)
    return model

"""Models of known shapes with random weights, made where they run: for timing, which asks for sizes and not for sense.

In: the name of a shape, a device and a dtype. Out: a llama of transformers, rebuilt for speed like one that was loaded.
Nothing is downloaded, and no weight passes through the memory of the host.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from foreword.errors import InputError
from foreword.model import linears as pack

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
    """A llama of a shape in `SHAPES`, its weights drawn from a normal distribution of width 0.02."""
    if shape not in SHAPES:
        raise InputError(f"no shapes are called {shape!r}; there are: {', '.join(SHAPES)}")
    config = AutoConfig.for_model("llama", max_position_embeddings=_CONTEXT, initializer_range=0.02, **SHAPES[shape])
    torch.manual_seed(0)
    with device, torch.no_grad():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.eval().requires_grad_(False).to(device)
    if rebuild:
        pack.rebuild(model, device, dtype)
    return model

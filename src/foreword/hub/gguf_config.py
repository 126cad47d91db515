"""The architectures that GGUF files are read for: the names of their tensors, and what `config.json` says; called by
`hub.gguf`.

In: an opened file. Out: the entries of the config and of the generation config. An unknown rotation is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from foreword.errors import ModelCorrupt, ModelUnsupported
from foreword.hub.gguf_source import Source

ROPE_FACTORS = "rope_freqs.weight"  # a table of divisors; config.json has the rule that gives them
LOCAL_ROPE_BASE, LAYERS_PER_GLOBAL = 10000.0, 6  # of Gemma 3, whose files do not say them
LARGEST_GEMMA = 62  # layers of the 27B model, whose attention is scaled in another way

Config = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """How the files of an architecture differ from a model folder of transformers."""

    causal: str  # the class of the model
    model_type: str
    layer: Mapping[str, str]  # the tensors of a layer: name in the file -> name in transformers
    pairs_rows: bool = False  # rows of q and k that are rotated together follow each other
    norms_add_one: bool = False  # the file has 1 + the weight of a norm
    differs: Callable[[Source, Config], Config] = lambda source, config: config


def _weights(names: Mapping[str, str]) -> dict[str, str]:
    return {f"{gguf}.weight": f"{hf}.weight" for gguf, hf in names.items()}


ATTENTION = _weights({f"attn_{one}": f"self_attn.{one}_proj" for one in "qkv"} | {"attn_output": "self_attn.o_proj"})
MLP = _weights({f"ffn_{one}": f"mlp.{one}_proj" for one in ("gate", "up", "down")})
TWO_NORMS = _weights({"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"})
FOUR_NORMS = _weights(
    {
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)
QK_NORMS = _weights({"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"})
BIASES = {f"attn_{one}.bias": f"self_attn.{one}_proj.bias" for one in "qkv"}


def _without_bias_flag(source: Source, config: Config) -> Config:
    """Qwen 2 always has biases on q, k and v, so its config has no entry for them."""
    return {name: value for name, value in config.items() if name != "attention_bias"}


def _gemma3(source: Source, config: Config) -> Config:
    layers, head_dim = config["num_hidden_layers"], config["head_dim"]
    scaled_by = config["hidden_size"] // config["num_attention_heads"] if layers == LARGEST_GEMMA else head_dim
    full = [(layer + 1) % LAYERS_PER_GLOBAL == 0 for layer in range(layers)]
    rotated = {"sliding_attention": {"rope_type": "default", "rope_theta": LOCAL_ROPE_BASE}}
    return {name: value for name, value in config.items() if name != "hidden_act"} | {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scaled_by,
        "sliding_window": source.size("attention.sliding_window"),
        "layer_types": ["full_attention" if one else "sliding_attention" for one in full],
        "rope_parameters": rotated | {"full_attention": config["rope_parameters"]},
    }


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "llama", TWO_NORMS | ATTENTION | MLP, pairs_rows=True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", TWO_NORMS | ATTENTION | BIASES | MLP, differs=_without_bias_flag),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", TWO_NORMS | ATTENTION | QK_NORMS | MLP),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        "gemma3_text",
        FOUR_NORMS | ATTENTION | QK_NORMS | MLP,
        norms_add_one=True,
        differs=_gemma3,
    ),
}


def config_of(source: Source, architecture: Architecture, dtype: str) -> Config:
    hidden, heads = source.size("embedding_length"), source.size("attention.head_count")
    head_dim = source.size("attention.key_length", hidden // heads)
    kv_heads = source.size("attention.head_count_kv", heads)
    rows = [source.tensors[f"blk.0.attn_{one}.weight"].shape[0] for one in "qk"]
    if rows != [heads * head_dim, kv_heads * head_dim]:
        given = f"{heads} and {kv_heads} heads of {head_dim}"
        raise ModelCorrupt(f"{source.path}: {given} do not fill the {rows} rows of q and k; fetch it again")
    if head_dim % 2:
        raise ModelCorrupt(f"{source.path}: heads have {head_dim} values, which cannot be rotated in pairs; fetch it again")
    if source.about("rope.dimension_count", head_dim) != head_dim:
        raise ModelUnsupported(f"{source.path}: only a part of each head is rotated, which is not supported")
    common = {
        "architectures": [architecture.causal],
        "model_type": architecture.model_type,
        "dtype": dtype,
        "vocab_size": source.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": source.size("feed_forward_length"),
        "num_hidden_layers": source.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": source.size("context_length"),
        "rms_norm_eps": source.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(source, head_dim),
        "tie_word_embeddings": "output.weight" not in source.tensors,
        "attention_bias": False,
    }
    return architecture.differs(source, ids_of(source) | common)


def ids_of(source: Source) -> dict[str, Any]:
    """Return the ids of the special tokens. A chat model may end its turn with another token than its text."""
    vocabulary = source.tensors["token_embd.weight"].shape[0]

    def of(kind: str) -> int | None:
        key = f"tokenizer.ggml.{kind}_token_id"
        token = source.fields.get(key)
        if token is not None and (type(token) is not int or not 0 <= token < vocabulary):
            raise source.wrong(key, token, f"a token from 0 to {vocabulary - 1}")
        return token

    ends = list(dict.fromkeys(of(kind) for kind in ("eos", "eot", "eom") if of(kind) is not None))
    return {
        "bos_token_id": of("bos"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": of("padding"),
    }


def _rope(source: Source, head_dim: int) -> dict[str, Any]:
    theta = source.number("rope.freq_base", 10000.0)
    scaling = source.about("rope.scaling.type", "none")
    if ROPE_FACTORS in source.tensors:
        return _llama3_rope(source, theta, head_dim)
    if scaling == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if scaling == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": source.number("rope.scaling.factor")}
    raise ModelUnsupported(
        f"{source.path}: rope scaling {scaling} is not read from GGUF files (none, linear and Llama 3's are); "
        "give the model as a folder with safetensors weights"
    )


def _llama3_rope(source: Source, theta: float, head_dim: int) -> dict[str, Any]:
    """Return the rule of Llama 3. Its files hold the divisor of each frequency; refuse those that do not follow the rule."""
    table = source.values(ROPE_FACTORS)
    factor, low, high, context = float(table.max()), 1.0, 4.0, 8192
    turns = context * theta ** -(np.arange(0, head_dim, 2) / head_dim) / (2 * np.pi)  # [head_dim / 2] in that context
    blend = np.clip((turns - low) / (high - low), 0, 1)
    if table.shape != turns.shape or not np.allclose(table, 1 / ((1 - blend) / factor + blend), rtol=1e-4):
        raise ModelUnsupported(f"{source.path}: {ROPE_FACTORS} does not follow Llama 3's rule, the only one known")
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }

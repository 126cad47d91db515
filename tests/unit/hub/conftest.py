"""Fixtures: tiny GGUF files, made from tiny transformers models; and commands of other processes."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import foreword

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
PROSE = [
    "The words that come before are a foreword, and the words that come after are the book.",
    "In 1998  it cost 12 pounds;   in 2024 it's 345, don't you know?\n\n\tdef f(x):\n        return x",
    "Il était une fois un naïf café où l'on écrivait; ещё раз; 世界",
]


@pytest.fixture
def python() -> Callable[[str], list[str]]:
    """The command that runs a script with single modules, without importing the whole package."""
    bare = f"import sys, types; bare = types.ModuleType('foreword'); bare.__path__ = {list(foreword.__path__)!r}"
    return lambda script: [sys.executable, "-c", f"{bare}; sys.modules['foreword'] = bare\n{script}"]


FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
}


@pytest.fixture(scope="session")
def original() -> Tokenizer:
    """A byte-level tokenizer with single digits, as the default model has."""
    tokenizer = Tokenizer(models.BPE())
    cuts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = [AddedToken(token, normalized=False, special=True) for token in SPECIAL]
    trainer = trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(PROSE * 3, trainer)
    return tokenizer


@pytest.fixture
def tiny(original: Tokenizer) -> Callable[..., PreTrainedModel]:
    """A random model of a family: tiny("llama", tie_word_embeddings=True)."""

    def make(family: str, **changes: Any) -> PreTrainedModel:
        sizes = {"vocab_size": original.get_vocab_size(), "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
        depth = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
        config, kind = FAMILIES[family]
        own = {"num_hidden_layers": 7, "sliding_window": 8, "query_pre_attn_scalar": 16} if family == "gemma3" else {}
        torch.manual_seed(7)
        model = kind(config(**sizes | depth | {"tie_word_embeddings": False} | own | changes)).eval()
        for parameter in model.parameters():  # with norms of ones, a lost norm would not be noticed
            torch.nn.init.normal_(parameter, mean=0.1, std=0.3)
        return model

    return make


@pytest.fixture
def write_gguf(original: Tokenizer) -> Callable[..., Path]:
    """Write a model as a GGUF file: write_gguf(path, model, quant="Q8_0", fields={...}, tensors={...}, drop=[...]). Tensors
    among `floats` stay float32."""
    gguf = pytest.importorskip("gguf")

    def write(
        path: Path,
        model: PreTrainedModel,
        quant: str = "F32",
        architecture: str | None = None,
        fields: dict[str, Any] | None = None,
        tensors: dict[str, np.ndarray] | None = None,
        drop: tuple[str, ...] = (),
        floats: tuple[str, ...] = (),
    ) -> Path:
        writer = gguf.GGUFWriter(path, architecture or model.config.model_type.removesuffix("_text"))
        _write_sizes(writer, model.config)
        _write_tokenizer(writer, original)
        for key, value in (fields or {}).items():
            _write_field(writer, key, value)
        for name, values in (_tensors(gguf, model) | (tensors or {})).items():
            if name not in drop:
                kind = gguf.GGMLQuantizationType[quant if values.ndim == 2 and name not in floats else "F32"]
                writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def _write_sizes(writer: Any, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters.get("full_attention", config.rope_parameters)["rope_theta"])
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def _write_tokenizer(writer: Any, original: Tokenizer) -> None:
    tokens = sorted(original.get_vocab().items(), key=lambda item: item[1])
    merges = json.loads(original.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([token for token, _ in tokens])
    writer.add_token_types([3 if token in SPECIAL else 1 for token, _ in tokens])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT)


def _write_field(writer: Any, key: str, value: Any) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    writer.kv_data[0].pop(key, None)  # the writer refuses to write a field twice
    kinds.get(type(value), writer.add_array)(key, value)


def _tensors(gguf: Any, model: PreTrainedModel) -> dict[str, np.ndarray]:
    config = model.config
    family = config.model_type.removesuffix("_text")
    kind = getattr(gguf.MODEL_ARCH, family.upper())
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values, count = tensor.numpy(), heads.get(name.split(".")[-2])
        if family == "llama" and count:
            values = values.reshape(count, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        if family == "gemma3" and "norm" in name:
            values = values + 1
        tensors[names.get_name(name, try_suffixes=(".weight", ".bias"))] = values
    return tensors

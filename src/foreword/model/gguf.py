"""A GGUF file made into a model folder, once, so that transformers loads it in seconds ever after; called by `hub`.

In comes a quantised file of a known architecture; out go `config.json`, `generation_config.json`, `model.safetensors`
in float32 and the tokenizer. One tensor at a time is in memory. `config.json` is written last: a folder that has it is
complete. A tensor or rotation that is not known here is refused by name, never dropped.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from foreword.errors import ModelCorrupt, ModelNotFound, ModelUnsupported
from foreword.model.gguf_tokenizer import write_tokenizer
from foreword.model.storage import room

if TYPE_CHECKING:
    from gguf import ReaderTensor

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}

AROUND = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
ROPE_FACTORS = "rope_freqs.weight"  # a table of numbers that config.json says in words
TOKENIZER_OVERHEAD = 64 << 20  # bytes; the largest tokenizer.json in use is about half of that


@dataclass(frozen=True)
class Source:
    """A GGUF file that has been opened: its metadata and its tensors by name."""

    path: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, ReaderTensor]

    @property
    def architecture(self) -> str:
        return self.need("general.architecture")

    def need(self, key: str) -> Any:
        if key not in self.fields:
            raise ModelCorrupt(f"{self.path}: the field {key} is missing; fetch or convert the file again")
        return self.fields[key]

    def size(self, key: str) -> int:
        return int(self.need(f"{self.architecture}.{key}"))

    def about(self, key: str, default: Any) -> Any:
        return self.fields.get(f"{self.architecture}.{key}", default)


def convert(gguf_path: str | os.PathLike[str], folder: str | os.PathLike[str]) -> None:
    """Write the model in the file `gguf_path` as a model folder."""
    source, folder = _open(Path(gguf_path)), Path(folder)
    if source.architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelUnsupported(
            f"{source.path} holds a model of architecture {source.architecture}; GGUF files are read for {known}; "
            "give the model as a folder with safetensors weights"
        )
    names, config = _names(source), _config(source)
    folder.mkdir(parents=True, exist_ok=True)
    with room(folder, 4 * sum(int(source.tensors[name].n_elements) for name in names) + TOKENIZER_OVERHEAD):
        write_tokenizer(source.path, source.fields, config["max_position_embeddings"], folder)
        _write_weights(folder / "model.safetensors", source, names, config)
        _write_json(folder / "generation_config.json", _ids(source))
        _write_json(folder / "config.json", config)


def _open(path: Path) -> Source:
    from gguf import GGUFReader  # noqa: PLC0415  only a conversion needs the package

    try:
        reader = GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except OSError as error:
        raise ModelNotFound(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise ModelCorrupt(f"{path} is not a whole GGUF file ({error}); fetch it again") from error
    if fields.get("split.count", 1) > 1:
        parts = fields["split.count"]
        raise ModelUnsupported(f"{path} is one of {parts} parts; join them with `llama-gguf-split --merge`")
    return Source(path, fields, {tensor.name: tensor for tensor in reader.tensors})


def _names(source: Source) -> dict[str, str]:
    """Every tensor of the model: its name in the file -> its name in transformers."""
    around = {gguf: hf for gguf, hf in AROUND.items() if gguf != "output" or "output.weight" in source.tensors}
    layer = LAYER | (QK_NORM if source.architecture == "qwen3" else {})
    names = {f"{gguf}.weight": f"{hf}.weight" for gguf, hf in around.items()}
    for i in range(source.size("block_count")):
        names |= {f"blk.{i}.{gguf}.weight": f"model.layers.{i}.{hf}.weight" for gguf, hf in layer.items()}
    if missing := [name for name in names if name not in source.tensors]:
        raise ModelCorrupt(f"{source.path}: {len(missing)} tensors are missing, {missing[0]} first; fetch it again")
    if unknown := [name for name in source.tensors if name not in names and name != ROPE_FACTORS]:
        raise ModelUnsupported(
            f"{source.path}: {len(unknown)} tensors have no place in a plain {source.architecture}, "
            f"{unknown[0]} first; give the model as a folder with safetensors weights"
        )
    return names


def _config(source: Source) -> dict[str, Any]:
    hidden, heads = source.size("embedding_length"), source.size("attention.head_count")
    head_dim = int(source.about("attention.key_length", hidden // heads))
    kv_heads = int(source.about("attention.head_count_kv", heads))
    rows = [int(source.tensors[f"blk.0.attn_{part}.weight"].shape[1]) for part in "qk"]
    if rows != [heads * head_dim, kv_heads * head_dim]:
        given = f"{heads} and {kv_heads} heads of {head_dim}"
        raise ModelCorrupt(f"{source.path}: {given} do not fill the {rows} rows of q and k; fetch it again")
    if source.about("rope.dimension_count", head_dim) != head_dim:
        raise ModelUnsupported(f"{source.path}: only a part of each head is rotated, which is not supported")
    return _ids(source) | {
        "architectures": [ARCHITECTURES[source.architecture]],
        "model_type": source.architecture,
        "dtype": "float32",
        "vocab_size": int(source.tensors["token_embd.weight"].shape[1]),
        "hidden_size": hidden,
        "intermediate_size": source.size("feed_forward_length"),
        "num_hidden_layers": source.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": source.size("context_length"),
        "rms_norm_eps": _as_written(source.need(f"{source.architecture}.attention.layer_norm_rms_epsilon")),
        "rope_parameters": _rope(source, head_dim),
        "tie_word_embeddings": "output.weight" not in source.tensors,
        "attention_bias": False,
    }


def _ids(source: Source) -> dict[str, Any]:
    """The special tokens; a chat model may end its turn with another token than its text."""

    def of(kind: str) -> int | None:
        return source.fields.get(f"tokenizer.ggml.{kind}_token_id")

    ends = list(dict.fromkeys(of(kind) for kind in ("eos", "eot", "eom") if of(kind) is not None))
    return {
        "bos_token_id": of("bos"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": of("padding"),
    }


def _as_written(value: float) -> float:
    """The decimal number that was meant: GGUF keeps float32, where 1e-5 reads 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _rope(source: Source, head_dim: int) -> dict[str, Any]:
    theta = _as_written(source.about("rope.freq_base", 10000.0))
    scaling = source.about("rope.scaling.type", "none")
    if ROPE_FACTORS in source.tensors:
        return _llama3_rope(source, theta, head_dim)
    if scaling == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if scaling == "linear":
        factor = _as_written(source.need(f"{source.architecture}.rope.scaling.factor"))
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    raise ModelUnsupported(
        f"{source.path}: rope scaling {scaling} is not read from GGUF files (none, linear and Llama 3's are); "
        "give the model as a folder with safetensors weights"
    )


def _llama3_rope(source: Source, theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3 files hold the divisor of each frequency. Find the rule that gives them, and make sure that it does."""
    table = _values(source, ROPE_FACTORS)
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


def _write_weights(path: Path, source: Source, names: Mapping[str, str], config: Mapping[str, Any]) -> None:
    """Stream the tensors into a safetensors file: its header, as all sizes are known, then tensor after tensor."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, hf in names.items():
        shape = [int(length) for length in reversed(source.tensors[name].shape)]
        start, end = end, end + 4 * int(source.tensors[name].n_elements)
        header[hf] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # the data that follows is to be aligned
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for values in _tensors(source, names, config):
            file.write(np.ascontiguousarray(values, dtype="<f4").data)


def _tensors(source: Source, names: Iterable[str], config: Mapping[str, Any]) -> Iterable[np.ndarray]:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name in names:
        values = _values(source, name)
        part = re.sub(r"blk\.\d+\.|\.weight", "", name)
        yield _halves(values, heads[part]) if source.architecture == "llama" and part in heads else values


def _values(source: Source, name: str) -> np.ndarray:
    from gguf.quants import dequantize  # noqa: PLC0415  only a conversion needs the package

    tensor = source.tensors[name]
    try:
        values = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        kind = tensor.tensor_type.name
        raise ModelUnsupported(f"{source.path}: {name} is quantised as {kind}, unknown here; try Q8_0") from error
    if not np.isfinite(values).all():
        raise ModelCorrupt(f"{source.path}: {name} holds values that are not numbers; fetch the file again")
    return values


def _halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Llama files pair coordinate 2i with 2i+1 in a rotation; transformers pairs i with i + d/2."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])  # [heads, d / 2, 2, hidden]
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

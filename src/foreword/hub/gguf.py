"""Convert a GGUF file to a model folder, once, so that transformers loads it in seconds later; called by `hub`.

In: a quantised file of a known architecture. Out: `config.json`, `generation_config.json`, `model.safetensors` in float32
and the tokenizer. One tensor at a time is in memory. `config.json` is written last: a folder that has it is complete. An
unknown tensor or rotation is refused by name, never dropped.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foreword.errors import ModelCorrupt, ModelNotFound, ModelUnsupported
from foreword.hub.gguf_header import Tensor, read_header
from foreword.hub.gguf_tokenizer import write_tokenizer
from foreword.hub.storage import room

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
LAYER_NUMBER = re.compile(r"blk\.(\d{1,6})\.")
ROPE_FACTORS = "rope_freqs.weight"  # a table of divisors; config.json has the rule that gives them
TOKENIZER_OVERHEAD = 64 << 20  # bytes; the largest tokenizer.json in use is about half of that


@dataclass(frozen=True)
class Source:
    """An opened GGUF file: its metadata and its tensors by name."""

    path: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @property
    def architecture(self) -> str:
        return str(self.need("general.architecture"))

    def need(self, key: str) -> Any:
        if key not in self.fields:
            raise ModelCorrupt(f"{self.path}: the field {key} is missing; fetch or convert the file again")
        return self.fields[key]

    def size(self, key: str, default: int | None = None) -> int:
        value = self.about(key, default)
        if type(value) is not int or value < 1:
            raise self.wrong(key, value, "a whole number from 1 on")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return the decimal number that was meant: GGUF stores float32, where 1e-5 reads 9.999999747378752e-06."""
        value = self.about(key, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self.wrong(key, value, "a number above 0")
        return float(str(np.float32(value)))

    def about(self, key: str, default: Any) -> Any:
        """Return a field of the architecture; without a default it is required."""
        name = f"{self.architecture}.{key}"
        return self.need(name) if default is None else self.fields.get(name, default)

    def wrong(self, key: str, value: object, needed: str) -> ModelCorrupt:
        given = f"{self.path}: the field {key} is {str(value)[:80]!r}, but must be {needed}"
        return ModelCorrupt(f"{given}; fetch or convert the file again")


def convert(gguf_path: str | os.PathLike[str], folder: str | os.PathLike[str]) -> None:
    """Convert the model in the file `gguf_path` to a model folder."""
    source, folder = _open(Path(gguf_path)), Path(folder)
    if source.architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelUnsupported(
            f"{source.path} holds a model of architecture {source.architecture}; GGUF files are read for {known}; "
            "give the model as a folder with safetensors weights"
        )
    names, config = _names(source), _config(source)
    _check_shapes(source, config)
    folder.mkdir(parents=True, exist_ok=True)
    with room(folder, 4 * sum(source.tensors[name].elements for name in names) + TOKENIZER_OVERHEAD):
        write_tokenizer(source.path, source.fields, config["max_position_embeddings"], folder)
        _write_weights(folder / "model.safetensors", source, names, config)
        _write_json(folder / "generation_config.json", _ids(source))
        _write_json(folder / "config.json", config)


def _open(path: Path) -> Source:
    try:
        header = read_header(path)
    except OSError as error:
        raise ModelNotFound(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelCorrupt(f"{path} is not a whole GGUF file ({error}); fetch it again") from error
    if header.fields.get("split.count", 1) not in (0, 1):  # joined files have 0
        parts = header.fields["split.count"]
        raise ModelUnsupported(f"{path} is one of {parts} parts; join them with `llama-gguf-split --merge`")
    return Source(path, header.fields, header.tensors)


def _names(source: Source) -> dict[str, str]:
    """Return every tensor of the model: its name in the file -> its name in transformers."""
    around = {gguf: hf for gguf, hf in AROUND.items() if gguf != "output" or "output.weight" in source.tensors}
    layer = LAYER | (QK_NORM if source.architecture == "qwen3" else {})
    names = {f"{gguf}.weight": f"{hf}.weight" for gguf, hf in around.items()}
    for i in range(_layers(source)):
        names |= {f"blk.{i}.{gguf}.weight": f"model.layers.{i}.{hf}.weight" for gguf, hf in layer.items()}
    if missing := [name for name in names if name not in source.tensors]:
        raise ModelCorrupt(f"{source.path}: {len(missing)} tensors are missing, {missing[0]} first; fetch it again")
    if unknown := [name for name in source.tensors if name not in names and name != ROPE_FACTORS]:
        raise ModelUnsupported(
            f"{source.path}: {len(unknown)} tensors have no place in a plain {source.architecture}, "
            f"{unknown[0]} first; give the model as a folder with safetensors weights"
        )
    return names


def _layers(source: Source) -> int:
    """Return the number of layers, on which header and tensors must agree."""
    count = source.size("block_count")
    found = {int(number[1]) for name in source.tensors if (number := LAYER_NUMBER.match(name))}
    if len(found) != count or max(found) != count - 1:
        held = f"the tensors are of {len(found)} layers" + (f", up to number {max(found)}" if found else "")
        raise ModelCorrupt(f"{source.path}: the field block_count is {count}, but {held}; fetch it again")
    return count


def _check_shapes(source: Source, config: Mapping[str, Any]) -> None:
    """Refuse tensors whose shapes do not follow from the fields."""
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    of_query, of_key = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    embedding, norm, up = (config["vocab_size"], hidden), (hidden,), (config["intermediate_size"], hidden)
    layer = {"attn_norm": norm, "ffn_norm": norm, "ffn_gate": up, "ffn_up": up, "ffn_down": up[::-1]}
    layer |= {"attn_q": (of_query, hidden), "attn_k": (of_key, hidden), "attn_v": (of_key, hidden)}
    layer |= {"attn_output": (hidden, of_query), "attn_q_norm": (head_dim,), "attn_k_norm": (head_dim,)}
    tokens = source.fields.get("tokenizer.ggml.tokens", [])
    if isinstance(tokens, list) and len(tokens) > config["vocab_size"]:
        found = f"{source.path}: the tokenizer has {len(tokens)} tokens, the embedding {config['vocab_size']} rows"
        raise ModelCorrupt(f"{found}; fetch it again")
    needed = {"token_embd": embedding, "output": embedding, "output_norm": norm} | layer
    for name, tensor in source.tensors.items():
        shape = needed.get(_short_name(name), tensor.shape)
        if tensor.shape != shape:
            found = f"{source.path}: {name} has shape {tensor.shape}, but needs {shape} by the file's fields"
            raise ModelCorrupt(f"{found}; fetch it again")


def _short_name(name: str) -> str:
    """Return a tensor's name without layer and suffix: attn_q for blk.3.attn_q.weight."""
    return re.sub(r"blk\.\d+\.|\.weight", "", name)


def _config(source: Source) -> dict[str, Any]:
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
    return _ids(source) | {
        "architectures": [ARCHITECTURES[source.architecture]],
        "model_type": source.architecture,
        "dtype": "float32",
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


def _ids(source: Source) -> dict[str, Any]:
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
    """Stream the tensors into a safetensors file: first its header, since all sizes are known, then each tensor."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, hf in names.items():
        shape = source.tensors[name].shape
        start, end = end, end + 4 * source.tensors[name].elements
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
        short = _short_name(name)
        yield _halves(values, heads[short]) if source.architecture == "llama" and short in heads else values


def _values(source: Source, name: str) -> np.ndarray:
    from gguf.quants import dequantize  # noqa: PLC0415  only a conversion needs the package

    tensor = source.tensors[name]
    try:
        values = dequantize(tensor.data, tensor.kind)
    except NotImplementedError as error:
        kind = tensor.kind.name
        raise ModelUnsupported(f"{source.path}: {name} is quantised as {kind}, which is not supported; try Q8_0") from error
    if not np.isfinite(values).all():
        raise ModelCorrupt(f"{source.path}: {name} holds values that are not numbers; fetch the file again")
    return values


def _halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows for rotations: Llama files pair coordinate 2i with 2i+1, transformers pairs i with i + d/2."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])  # [heads, d / 2, 2, hidden]
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

"""Convert a GGUF file to a model folder, once, so that transformers loads it in seconds later; called by `hub`.

In: a quantised file of a known architecture. Out: `config.json`, `generation_config.json`, `model.safetensors` in float32 or
bfloat16, and the tokenizer. One tensor at a time is in memory. `config.json` is written last: a folder that has it is
complete. An unknown tensor or rotation is refused by name, never dropped.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from foreword.errors import ModelCorrupt, ModelUnsupported
from foreword.hub.gguf_config import ARCHITECTURES, ROPE_FACTORS, Architecture, config_of, ids_of
from foreword.hub.gguf_source import Source
from foreword.hub.gguf_tokenizer import write_tokenizer
from foreword.hub.storage import room

AROUND = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NUMBER = re.compile(r"blk\.(\d{1,6})\.")
WIDTHS, STORED = {"float32": 4, "bfloat16": 2}, {"float32": "F32", "bfloat16": "BF16"}
TOKENIZER_OVERHEAD = 64 << 20  # bytes; the largest tokenizer.json in use is about half of that


def convert(
    gguf_path: str | os.PathLike[str], folder: str | os.PathLike[str], dtype: Literal["float32", "bfloat16"] = "float32"
) -> None:
    """Convert the model in the file `gguf_path` to a model folder with weights in `dtype`."""
    source, folder = Source.open(Path(gguf_path)), Path(folder)
    if source.architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelUnsupported(
            f"{source.path} holds a model of architecture {source.architecture}; GGUF files are read for {known}; "
            "give the model as a folder with safetensors weights"
        )
    architecture = ARCHITECTURES[source.architecture]
    names, config = _names(source, architecture), config_of(source, architecture, dtype)
    _check_shapes(source, config)
    folder.mkdir(parents=True, exist_ok=True)
    with room(folder, WIDTHS[dtype] * sum(source.tensors[name].elements for name in names) + TOKENIZER_OVERHEAD):
        write_tokenizer(source.path, source.fields, config["max_position_embeddings"], folder)
        _write_weights(folder / "model.safetensors", source, names, config)
        _write_json(folder / "generation_config.json", ids_of(source))
        _write_json(folder / "config.json", config)


def _names(source: Source, architecture: Architecture) -> dict[str, str]:
    """Return every tensor of the model: its name in the file -> its name in transformers."""
    around = {gguf: hf for gguf, hf in AROUND.items() if gguf != "output" or "output.weight" in source.tensors}
    names = {f"{gguf}.weight": f"{hf}.weight" for gguf, hf in around.items()}
    for i in range(_layers(source)):
        names |= {f"blk.{i}.{gguf}": f"model.layers.{i}.{hf}" for gguf, hf in architecture.layer.items()}
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
    layer |= {"post_attention_norm": norm, "post_ffw_norm": norm}
    layer |= {"attn_q.bias": (of_query,), "attn_k.bias": (of_key,), "attn_v.bias": (of_key,)}
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


def _write_weights(path: Path, source: Source, names: Mapping[str, str], config: Mapping[str, Any]) -> None:
    """Stream the tensors into a safetensors file: first its header, since all sizes are known, then each tensor."""
    dtype: str = config["dtype"]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, hf in names.items():
        shape = source.tensors[name].shape
        start, end = end, end + WIDTHS[dtype] * source.tensors[name].elements
        header[hf] = {"dtype": STORED[dtype], "shape": shape, "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # the data that follows is to be aligned
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for values in _tensors(source, names, config):
            file.write(_stored(np.ascontiguousarray(values, dtype="<f4"), dtype).data)


def _tensors(source: Source, names: Iterable[str], config: Mapping[str, Any]) -> Iterable[np.ndarray]:
    """Yield every tensor as transformers has it."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    architecture = ARCHITECTURES[source.architecture]
    for name in names:
        values, short = source.values(name), _short_name(name)
        if architecture.pairs_rows and short in heads:
            values = _halves(values, heads[short])
        yield values - 1 if architecture.norms_add_one and short.endswith("norm") else values


def _halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows for rotations: Llama files pair coordinate 2i with 2i+1, transformers pairs i with i + d/2."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])  # [heads, d / 2, 2, hidden]
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return the bits of float32 values in a dtype; numpy has no bfloat16. Ties are rounded to even."""
    if dtype == "float32":
        return values
    bits = values.view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2")


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

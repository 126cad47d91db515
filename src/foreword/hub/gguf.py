"""Convert a GGUF file to a model folder, once, so that it loads in seconds later; called by `hub`.

In: a quantised file of a known architecture. Out: `config.json`, `generation_config.json`, `model.safetensors` in float32 or
bfloat16 or with the codes of the file (`hub/stored.py`), and the tokenizer. One tensor at a time is in memory. `config.json`
is written last: a folder that has it is complete. An unknown tensor or rotation is refused by name, never dropped.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np

from foreword.errors import ModelCorrupt, ModelUnsupported
from foreword.hub.gguf_codes import FORMS, codes_of
from foreword.hub.gguf_config import ARCHITECTURES, ROPE_FACTORS, Architecture, config_of, ids_of
from foreword.hub.gguf_source import Source
from foreword.hub.gguf_tokenizer import write_tokenizer
from foreword.hub.storage import room
from foreword.hub.stored import QUANT_METHOD, describe
from foreword.ops.group_codes import Layout, PackedCodes

AROUND = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NUMBER = re.compile(r"blk\.(\d{1,6})\.")
Form = Literal["float32", "bfloat16", "stored"]
TOKENIZER_OVERHEAD = 64 << 20  # bytes; the largest tokenizer.json in use is about half of that


def convert(gguf_path: str | os.PathLike[str], folder: str | os.PathLike[str], form: Form = "float32") -> None:
    """Convert the model in the file `gguf_path` to a model folder: with weights in float32 or bfloat16, or with the codes of
    the file as they are stored."""
    source, folder = Source.open(Path(gguf_path)), Path(folder)
    if source.architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelUnsupported(
            f"{source.path} holds a model of architecture {source.architecture}; GGUF files are read for {known}; "
            "give the model as a folder with safetensors weights"
        )
    architecture = ARCHITECTURES[source.architecture]
    names, config = _names(source, architecture), config_of(source, architecture, "float32" if form == "stored" else form)
    _check_shapes(source, config)
    entries = [_entry(source, name, hf, form) for name, hf in names.items()]
    if form == "stored":
        _check_codes(source, entries)
        config["quantization_config"] = {"quant_method": QUANT_METHOD}
    folder.mkdir(parents=True, exist_ok=True)
    with room(folder, sum(entry.bytes for entry in entries) + TOKENIZER_OVERHEAD):
        write_tokenizer(source.path, source.fields, config["max_position_embeddings"], folder)
        _write_weights(folder / "model.safetensors", source, entries, config)
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


@dataclass(frozen=True)
class Entry:
    """A tensor of the file and how it is written: as floats, or as packed blocks of codes."""

    name: str
    hf: str  # its name in transformers
    dtype: str  # as safetensors calls it
    shape: tuple[int, ...]
    bytes: int
    layout: Layout | None = None
    outputs: int = 0


def _entry(source: Source, name: str, hf: str, form: Form) -> Entry:
    tensor = source.tensors[name]
    if form == "stored" and tensor.kind.name in FORMS and len(tensor.shape) == 2:
        layout, (outputs, inputs) = FORMS[tensor.kind.name].layout, tensor.shape
        shape = layout.shape(outputs, inputs)
        return Entry(name, hf, "U8", shape, prod(shape), layout, outputs)
    width, dtype = (2, "BF16") if form == "bfloat16" else (4, "F32")
    return Entry(name, hf, dtype, tensor.shape, width * tensor.elements)


def _check_codes(source: Source, entries: list[Entry]) -> None:
    """Refuse a file without codes, and say which of its weights are dequantised all the same."""
    others = [source.tensors[entry.name].kind.name for entry in entries if entry.layout is None and len(entry.shape) == 2]
    kinds, readable = ", ".join(sorted(set(others))), ", ".join(FORMS)
    if all(entry.layout is None for entry in entries):
        raise ModelUnsupported(
            f"{source.path}: its weights are stored as {kinds}, and those that run as they are stored are {readable}; "
            "leave quantization out, or give q4 or q8, which quantise the weights anew"
        )
    if others:
        print(f"{source.path.name}: {len(others)} weights are stored as {kinds} and run dequantised", file=sys.stderr)


def _write_weights(path: Path, source: Source, entries: list[Entry], config: Mapping[str, Any]) -> None:
    """Stream the tensors into a safetensors file: first its header, since all sizes are known, then each tensor."""
    about = {entry.hf: describe(entry.layout, entry.outputs) for entry in entries if entry.layout is not None}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"} | about}
    end = 0
    for entry in entries:
        start, end = end, end + entry.bytes
        header[entry.hf] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # the data that follows is to be aligned
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for entry in entries:
            file.write(_written(source, entry, config).data)


def _written(source: Source, entry: Entry, config: Mapping[str, Any]) -> np.ndarray:
    """Return a tensor as transformers has it, in the form in which it is written."""
    architecture, short, rows = ARCHITECTURES[source.architecture], _short_name(entry.name), None
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    if architecture.pairs_rows and short in heads:
        rows = _halves(np.arange(entry.shape[0] if entry.layout is None else entry.outputs), heads[short])
    if entry.layout is not None:
        return _codes(source, entry, entry.layout, rows)
    values = source.values(entry.name)
    values = values if rows is None else values[rows]
    values = values - 1 if architecture.norms_add_one and short.endswith("norm") else values
    return _stored(np.ascontiguousarray(values, dtype="<f4"), entry.dtype)


def _codes(source: Source, entry: Entry, layout: Layout, rows: np.ndarray | None) -> np.ndarray:
    """Return the packed blocks of a quantised tensor."""
    tensor = source.tensors[entry.name]
    codes = codes_of(tensor.data if rows is None else tensor.data[rows], tensor.kind.name)
    if codes is None:
        raise source.not_numbers(entry.name)
    packed = PackedCodes.of(codes, layout.half)
    assert packed.layout == layout
    return packed.blocks.numpy()


def _halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows for rotations: Llama files pair coordinate 2i with 2i+1, transformers pairs i with i + d/2."""
    return rows.reshape(heads, -1, 2).swapaxes(1, 2).ravel()  # from [heads, d / 2, 2]


def _stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return the bits of float32 values in a dtype; numpy has no bfloat16. Ties are rounded to even."""
    if dtype == "F32":
        return values
    bits = values.view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2")


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

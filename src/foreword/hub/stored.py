"""Model folders whose weights are stored as codes: packed blocks in `model.safetensors`, and their layouts in its header.

In: a folder that `hub.gguf` made with the form "stored". Out: its tensors, the quantised ones as `PackedCodes`. What does
not fit together is refused. Other programs refuse such a folder: its config names a quantisation that they do not know.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from foreword.errors import ModelCorrupt
from foreword.files import BadJSON, read_json
from foreword.ops.group_codes import Layout, PackedCodes, aligned

QUANT_METHOD = "foreword"
WEIGHTS = "model.safetensors"


def is_stored(folder: Path) -> bool:
    """Return whether a folder holds codes."""
    try:
        about = read_json(folder / "config.json").get("quantization_config")
    except (OSError, BadJSON, AttributeError):
        return False
    return isinstance(about, dict) and about.get("quant_method") == QUANT_METHOD


def describe(layout: Layout, outputs: int) -> str:
    """Return a layout and a number of outputs as the header has them."""
    return " ".join(str(int(one)) for one in (*layout, outputs))


def tensors(folder: Path) -> Iterator[tuple[str, Tensor | PackedCodes]]:
    """Yield the tensors of a folder by name, one in memory at a time."""
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        about, names = file.metadata() or {}, file.keys()
        for name in names:
            tensor = file.get_tensor(name)
            yield name, _packed(tensor, about[name], f"{folder}: {name}") if name in about else tensor


def _packed(blocks: Tensor, about: str, name: str) -> PackedCodes:
    try:
        bits, group, half, minimum, outputs = map(int, about.split())
        layout = Layout(bits, group, bool(half), bool(minimum))
        if bits not in (4, 8) or group not in (16, 32) or outputs < 1:
            raise ValueError("unknown layout")
        if layout.shape(outputs, blocks.shape[1] * group) != tuple(blocks.shape):
            raise ValueError(f"blocks of shape {tuple(blocks.shape)}")
    except (ValueError, IndexError) as error:
        raise ModelCorrupt(
            f"{name} does not fit its layout {about!r} ({error}); delete the folder and load again"
        ) from error
    held = aligned(*blocks.shape)
    held.copy_(blocks)
    return PackedCodes(layout, held, outputs)

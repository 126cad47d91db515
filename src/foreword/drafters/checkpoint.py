"""Read and write the weights of trained drafters as safetensors files. `drafters/saved.py` knows what they are for.

In: a module's tensors. Out: the same in bfloat16, or with every matrix as int8 and one scale per row, which halves the file
again. Reading gives float tensors, whichever way they were stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from foreword.errors import DrafterError, StorageError
from foreword.model.draft_linears import int8_codes

StoredDtype = Literal["bfloat16", "int8"]
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
SCALE = ".scale"  # after the name of a matrix: the tensor with the scales of its rows


def write_weights(weights: Mapping[str, Tensor], file: Path, dtype: StoredDtype) -> None:
    """Write all weights, or leave the earlier file as it was if the run is interrupted."""
    held: dict[str, Tensor] = {}
    for name, weight in weights.items():
        weight = weight.detach().cpu()
        if dtype == "int8" and weight.is_floating_point() and weight.dim() > 1:
            held[name], held[name + SCALE] = int8_codes(weight)
        else:
            held[name] = weight.bfloat16().contiguous() if weight.is_floating_point() else weight.contiguous()
    _write(held, file)


def replace_tensor(file: Path, name: str, tensor: Tensor | None) -> None:
    """Put a tensor into a file unchanged, or remove it (None); all others stay as they are stored."""
    held = {other: one for other, one in _read(file).items() if other != name}
    _write(held if tensor is None else held | {name: tensor.cpu()}, file)


def _write(held: dict[str, Tensor], file: Path) -> None:
    partial = file.with_suffix(".partial")
    try:
        save_file(held, partial)
        partial.replace(file)
    except (SafetensorError, OSError) as error:
        raise StorageError(f"{file} cannot be written ({error}); make room, or name another folder") from error


def _read(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except FileNotFoundError as error:
        raise DrafterError(f"{file} is missing; a trained drafter is a folder with config.json and {file.name}") from error
    except (SafetensorError, OSError) as error:
        raise DrafterError(f"{file} cannot be read ({error}); copy or train the drafter again") from error


def read_weights(file: Path) -> dict[str, Tensor]:
    """Read all tensors, and multiply int8 matrices by their scales."""
    held = _read(file)
    scales = {name.removesuffix(SCALE): held.pop(name) for name in list(held) if name.endswith(SCALE)}
    for name, scale in scales.items():
        _check_scale(file, name, held.get(name), scale)
    return {name: weight.float() * scales[name] if name in scales else weight for name, weight in held.items()}


def _check_scale(file: Path, name: str, weight: Tensor | None, scale: Tensor) -> None:
    found, again = f"{file}: {name + SCALE}", "copy or train the drafter again"
    if weight is None or weight.dtype != torch.int8:
        stored = f"no tensor {name}" if weight is None else f"{name} as {dtype_name(weight)}"
        raise DrafterError(f"{found} belongs to an int8 matrix, but the file has {stored}; {again}")
    needed = (*weight.shape[:-1], 1)
    if tuple(scale.shape) != needed or scale.dtype not in FLOATS:
        raise DrafterError(f"{found} is {dtype_name(scale)} {tuple(scale.shape)}, but must be floats {needed}; {again}")
    if not bool((scale.isfinite() & (scale > 0)).all()):
        wrong = scale[~(scale.isfinite() & (scale > 0))][0].item()
        raise DrafterError(f"{found} holds {wrong:.6g}, but scales must be above 0 and finite; {again}")


def dtype_name(weight: Tensor) -> str:
    """Return the name of a tensor's dtype, such as "bfloat16"."""
    return str(weight.dtype).removeprefix("torch.")

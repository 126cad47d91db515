"""Read and write the weights of trained drafters as safetensors files. `drafters/saved.py` knows what they are for.

In: a module's tensors. Out: the same in bfloat16; or every matrix as int8 with one scale per row, which halves the file; or,
as "int4", as deflated codes, which nearly halves it again. Reading gives float tensors, whichever way they were stored: the
dtype and the dimensions of a matrix tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from foreword.drafters.deflated import deflated, inflated
from foreword.drafters.int4 import from_int4, scales_shape
from foreword.errors import DrafterError, StorageError
from foreword.model.draft_linears import int8_codes

StoredDtype = Literal["bfloat16", "int8", "int4"]
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
SCALE = ".scale"  # after the name of a matrix: the tensor with the scales of its rows, or of their groups
LARGE = ".large"  # the same: the codes of a deflated matrix that are too large for a byte, if there are any
AGAIN = "copy or train the drafter again"


def write_weights(weights: Mapping[str, Tensor], file: Path, dtype: StoredDtype) -> None:
    """Write all weights, or leave the earlier file as it was if the run is interrupted."""
    held: dict[str, Tensor] = {}
    for name, weight in weights.items():
        weight = weight.detach().cpu()
        if dtype == "bfloat16" or not weight.is_floating_point() or weight.dim() < 2:
            held[name] = weight.bfloat16().contiguous() if weight.is_floating_point() else weight.contiguous()
        elif dtype == "int8":
            held[name], held[name + SCALE] = int8_codes(weight)
        else:
            held[name], held[name + SCALE], large = deflated(weight)
            held |= {name + LARGE: large} if large.numel() else {}
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
        raise DrafterError(f"{file} cannot be read ({error}); {AGAIN}") from error


def read_weights(file: Path) -> dict[str, Tensor]:
    """Read all tensors, as floats where they are codes with scales."""
    held = _read(file)
    scales, large = _taken(held, SCALE), _taken(held, LARGE)
    for name, codes in large.items():
        if name not in scales or not _is_stream(held.get(name)):
            raise DrafterError(f"{file}: {name + LARGE} belongs to a deflated matrix, but {name} is none; {AGAIN}")
        if codes.dtype != torch.int16 or codes.dim() != 1:
            found = f"{file}: {name + LARGE} is {dtype_name(codes)}"
            raise DrafterError(f"{found}, but must be int16 in one dimension; {AGAIN}")
    for name, scale in scales.items():
        _check_scale(file, name, held.get(name), scale)
        try:
            held[name] = _scaled(held[name], scale, large.get(name))
        except ValueError as error:
            raise DrafterError(f"{file}: {name} cannot be read ({error}); {AGAIN}") from error
    return held


def _taken(held: dict[str, Tensor], suffix: str) -> dict[str, Tensor]:
    """Take the tensors whose names end with a suffix out of a file's. Return them by the names without it."""
    return {name.removesuffix(suffix): held.pop(name) for name in list(held) if name.endswith(suffix)}


def _scaled(codes: Tensor, scale: Tensor, large: Tensor | None) -> Tensor:
    if _is_stream(codes):
        return inflated(codes, scale, torch.empty(0) if large is None else large)
    return codes.float() * scale if codes.dtype == torch.int8 else from_int4(codes, scale)


def _is_stream(weight: Tensor | None) -> bool:
    return weight is not None and weight.dtype == torch.uint8 and weight.dim() == 1


def _check_scale(file: Path, name: str, weight: Tensor | None, scale: Tensor) -> None:
    found = f"{file}: {name + SCALE}"
    needed = None if weight is None else _scale_shape(weight, scale)
    if weight is None or needed is None:
        stored = f"no tensor {name}" if weight is None else f"{name} as {dtype_name(weight)} {tuple(weight.shape)}"
        raise DrafterError(f"{found} belongs to an int8 or int4 matrix, but the file has {stored}; {AGAIN}")
    if tuple(scale.shape) != needed or scale.dtype not in FLOATS or not scale.numel():
        shape = needed if 0 not in needed else "with a row"
        raise DrafterError(f"{found} is {dtype_name(scale)} {tuple(scale.shape)}, but must be floats {shape}; {AGAIN}")
    signed = scales_shape(weight) is not None
    good = scale.isfinite() & ((scale.abs() if signed else scale) > 0)
    if not bool(good.all()):
        allowed = "finite and not 0" if signed else "above 0 and finite"
        raise DrafterError(f"{found} holds {scale[~good][0].item():.6g}, but scales must be {allowed}; {AGAIN}")


def _scale_shape(weight: Tensor, scale: Tensor) -> tuple[int, ...] | None:
    """Return the shape of the scales that belong to a matrix in int8 or int4; None for other tensors. A stream of deflated
    codes does not know its own shape: it has a scale for every row."""
    if _is_stream(weight):
        return (*(scale.shape if scale.dim() < 2 else scale.shape[:-1]), 1)
    return (*weight.shape[:-1], 1) if weight.dtype == torch.int8 else scales_shape(weight)


def dtype_name(weight: Tensor) -> str:
    """Return the name of a tensor's dtype, such as "bfloat16"."""
    return str(weight.dtype).removeprefix("torch.")

"""The quantised tensors of a GGUF file as codes, scales and minimums, without a loss; called by `hub.gguf`.

In: a tensor of one of the `FORMS`. Out: `GroupCodes` with exactly the values that dequantising the file gives. The other
kinds look their values up in tables, or have scales of another shape: they have no such form.
Format: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch

from foreword.ops.group_codes import GroupCodes, Layout

Parts = tuple[np.ndarray, np.ndarray, np.ndarray | None]  # codes [n, 32 or 256], scales and minimums [n, groups]


class CodeForm(NamedTuple):
    """How blocks of a kind are read, and how they are packed."""

    read: Callable[[np.ndarray], Parts]
    block_bytes: int
    layout: Layout


def codes_of(data: np.ndarray, kind: str) -> GroupCodes | None:
    """Return a tensor's rows of blocks [N, bytes] as codes, or None if it holds values that are not numbers."""
    form, rows = FORMS[kind], len(data)
    with np.errstate(invalid="ignore"):
        codes, scale, minimum = form.read(np.ascontiguousarray(data).reshape(-1, form.block_bytes))
    if not (np.isfinite(scale).all() and (minimum is None or np.isfinite(minimum).all())):
        return None
    return GroupCodes(
        form.layout.bits,
        _by_row(codes.astype(np.int8), rows),
        _by_row(scale, rows),
        None if minimum is None else _by_row(minimum, rows),
    )


def _by_row(values: np.ndarray, rows: int) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values.reshape(rows, -1)))


def _split(blocks: np.ndarray, *sizes: int) -> list[np.ndarray]:
    """Cut blocks [n, bytes] into pieces of these sizes."""
    return np.split(blocks, np.cumsum(sizes)[:-1], axis=1)


def _float16(piece: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(piece).view("<f2")


def _float32(piece: np.ndarray) -> np.ndarray:
    return _float16(piece).astype(np.float32)


def _nibbles(piece: np.ndarray, run: int) -> np.ndarray:
    """Return codes of four bits: in each run of bytes, first all low halves, then all high ones."""
    runs = piece.reshape(len(piece), -1, 1, run)
    return np.concatenate([runs & 15, runs >> 4], axis=2).reshape(len(piece), -1)


def _bits(piece: np.ndarray, run: int, width: int, count: int) -> np.ndarray:
    """Return `count` fields of `width` bits of each byte: in each run of bytes, first all lowest fields, and so on."""
    shifts = np.arange(count, dtype=np.uint8).reshape(1, 1, -1, 1) * np.uint8(width)
    fields = (piece.reshape(len(piece), -1, 1, run) >> shifts) & np.uint8((1 << width) - 1)
    return fields.reshape(len(piece), -1)


def _q4_0(blocks: np.ndarray) -> Parts:
    scale, codes = _split(blocks, 2, 16)
    return _nibbles(codes, 16).astype(np.int8) - 8, _float16(scale), None


def _q4_1(blocks: np.ndarray) -> Parts:
    scale, minimum, codes = _split(blocks, 2, 2, 16)
    return _nibbles(codes, 16), _float16(scale), _float16(minimum)


def _five_bits(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    return _nibbles(low, 16) | (np.unpackbits(high, axis=1, bitorder="little") << 4)


def _q5_0(blocks: np.ndarray) -> Parts:
    scale, high, low = _split(blocks, 2, 4, 16)
    return _five_bits(high, low).astype(np.int8) - 16, _float16(scale), None


def _q5_1(blocks: np.ndarray) -> Parts:
    scale, minimum, high, low = _split(blocks, 2, 2, 4, 16)
    return _five_bits(high, low), _float16(scale), _float16(minimum)


def _q8_0(blocks: np.ndarray) -> Parts:
    scale, codes = _split(blocks, 2, 32)
    return codes.view(np.int8), _float16(scale), None


def _six_bits(piece: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the scales and minimums [n, 8] of a block of 256; twelve bytes hold both."""
    low, middle, high = _split(piece, 4, 4, 4)
    scale = np.concatenate([low & 63, (high & 15) | ((low >> 2) & 48)], axis=1)
    minimum = np.concatenate([middle & 63, (high >> 4) | ((middle >> 2) & 48)], axis=1)
    return scale.astype(np.float32), minimum.astype(np.float32)


def _q2_k(blocks: np.ndarray) -> Parts:
    scales, codes, scale, minimum = _split(blocks, 16, 64, 2, 2)
    low, high = (scales & 15).astype(np.float32), (scales >> 4).astype(np.float32)
    return _bits(codes, 32, 2, 4), _float32(scale) * low, -(_float32(minimum) * high)


def _q3_k(blocks: np.ndarray) -> Parts:
    mask, codes, scales, scale = _split(blocks, 32, 64, 12, 2)
    low, high = _split(scales, 8, 4)
    six = _nibbles(low, 8) | (_bits(high, 4, 2, 4) << 4)
    signed = _bits(codes, 32, 2, 4).astype(np.int8) - 4 * (1 - _bits(mask, 32, 1, 8).astype(np.int8))
    return signed, _float32(scale) * (six.astype(np.float32) - 32), None


def _q4_k(blocks: np.ndarray) -> Parts:
    scale, minimum, sixes, codes = _split(blocks, 2, 2, 12, 128)
    scales, minimums = _six_bits(sixes)
    return _nibbles(codes, 32), _float32(scale) * scales, -(_float32(minimum) * minimums)


def _q5_k(blocks: np.ndarray) -> Parts:
    scale, minimum, sixes, high, low = _split(blocks, 2, 2, 12, 32, 128)
    scales, minimums = _six_bits(sixes)
    codes = _nibbles(low, 32) | (_bits(high, 32, 1, 8) << 4)
    return codes, _float32(scale) * scales, -(_float32(minimum) * minimums)


def _q6_k(blocks: np.ndarray) -> Parts:
    low, high, scales, scale = _split(blocks, 128, 64, 16, 2)
    codes = (_nibbles(low, 64) | (_bits(high, 32, 2, 4) << 4)).astype(np.int8) - 32
    return codes, _float32(scale) * scales.view(np.int8).astype(np.float32), None


FORMS: Mapping[str, CodeForm] = {
    "Q4_0": CodeForm(_q4_0, 18, Layout(4, 32, half=True, minimum=False)),
    "Q4_1": CodeForm(_q4_1, 20, Layout(4, 32, half=True, minimum=True)),
    "Q5_0": CodeForm(_q5_0, 22, Layout(8, 32, half=True, minimum=False)),
    "Q5_1": CodeForm(_q5_1, 24, Layout(8, 32, half=True, minimum=True)),
    "Q8_0": CodeForm(_q8_0, 34, Layout(8, 32, half=True, minimum=False)),
    "Q2_K": CodeForm(_q2_k, 84, Layout(4, 16, half=False, minimum=True)),
    "Q3_K": CodeForm(_q3_k, 110, Layout(4, 16, half=False, minimum=False)),
    "Q4_K": CodeForm(_q4_k, 144, Layout(4, 32, half=False, minimum=True)),
    "Q5_K": CodeForm(_q5_k, 176, Layout(8, 32, half=False, minimum=True)),
    "Q6_K": CodeForm(_q6_k, 210, Layout(8, 16, half=False, minimum=False)),
}
"""By the name of a kind. Codes of five and six bits are stored in eight."""

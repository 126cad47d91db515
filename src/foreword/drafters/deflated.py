"""Matrices as rounded codes, deflated, for small files: 4.7 bits per weight.

In: a tensor [.., K]. Out: a deflate stream of one byte per code, one bfloat16 scale per row, and the few codes that are too
large for a byte. The scale is a fraction of the row's median magnitude, which a few large weights do not move. Small codes
are frequent and take few bits, so a fine scale costs little ("entropy coding"). Reading gives floats.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import torch
from torch import Tensor

STEPS = 4  # in the median magnitude of a row
LARGEST = 127  # magnitude of a code that fits a byte
ESCAPE = 255  # the byte in place of a code that does not
MOST = 32_000  # magnitude of any code
SMALLEST = 1e-12  # scale; a row of zeros stays one


class Deflated(NamedTuple):
    """A tensor [.., K] as it is stored."""

    stream: Tensor  # uint8 [bytes]
    scale: Tensor  # bfloat16 [.., 1]
    large: Tensor  # int16 [n]: the codes that the stream has an ESCAPE for, in its order


def deflated(weight: Tensor, steps: int = STEPS) -> Deflated:
    """Round a tensor [.., K] of two or more dimensions to codes, and deflate them. `steps`: of a row's median magnitude."""
    weight = weight.float()
    sizes = weight.abs()
    scale = torch.maximum(sizes.median(-1, keepdim=True).values / steps, sizes.amax(-1, keepdim=True) / MOST)
    scale = scale.clamp(min=SMALLEST).bfloat16()
    codes = (weight / scale.float()).round()
    too_large = codes.abs() > LARGEST
    stored = torch.where(too_large, ESCAPE, codes + LARGEST).to(torch.uint8)
    # Codes of rounded weights do not repeat, so only their frequencies help: at least one bit each, as `inflated` expects.
    deflater = zlib.compressobj(level=9, memLevel=9, strategy=zlib.Z_HUFFMAN_ONLY)
    stream = deflater.compress(stored.numpy().tobytes()) + deflater.flush()
    return Deflated(torch.frombuffer(bytearray(stream), dtype=torch.uint8), scale, codes[too_large].to(torch.int16))


def inflated(stream: Tensor, scale: Tensor, large: Tensor) -> Tensor:
    """Return the float tensor [.., K]. ValueError if the parts do not belong together, or if the stream is damaged."""
    inflater = zlib.decompressobj()
    try:
        stored = inflater.decompress(stream.numpy().tobytes(), 8 * stream.numel())
    except zlib.error as error:
        raise ValueError(f"its stream is damaged: {error}") from error
    if not inflater.eof:
        raise ValueError("its stream is cut off, or holds more than a code per bit")
    columns, rest = divmod(len(stored), scale.numel())
    if rest or not columns:
        raise ValueError(f"its stream has {len(stored)} codes, which are not {scale.numel()} rows")
    codes = torch.frombuffer(bytearray(stored), dtype=torch.uint8)
    too_large, codes = codes == ESCAPE, codes.float() - LARGEST
    if (count := int(too_large.sum())) != large.numel():
        raise ValueError(f"its stream has {count} large codes, but {large.numel()} are stored")
    codes[too_large] = large.float()
    return codes.view(*scale.shape[:-1], columns) * scale.float()

"""The header of a GGUF file: its fields as plain values, and its tensors, each with its bytes in the file.

In: an untrusted, possibly damaged file. Out: a Header, or a ValueError that says what is wrong. Every length is compared
with the rest of the file before anything of that length is read, so that one flipped bit costs nothing.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

MAGIC, VERSIONS = b"GGUF", (2, 3)
NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "|b1", 10: "<u8", 11: "<i8", 12: "<f8"}
STRING, ARRAY = 8, 9
ALIGNMENT = 32  # bytes; the alignment of tensors if the file does not set it
LONGEST_STRING = 1 << 24  # bytes; chat templates have thousands
LONGEST_ARRAY = 1 << 22  # items; the largest vocabularies have a quarter of a million tokens, and twice as many merges
MOST_DIMENSIONS = 4


@dataclass(frozen=True)
class Tensor:
    name: str
    kind: Any  # GGMLQuantizationType
    shape: tuple[int, ...]  # in torch's order: the contiguous dimension is last
    data: np.ndarray  # as `gguf.quants.dequantize` takes it

    @property
    def elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Header:
    fields: dict[str, Any]
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class _Place:
    """The entry of a tensor in the header."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


def read_header(path: Path) -> Header:
    """Read fields and tensors of a file. The tensors are mapped, not read."""
    file = _File(np.asarray(np.memmap(path, dtype=np.uint8, mode="r")))
    if file.take(4).tobytes() != MAGIC:
        raise ValueError("it does not begin as one")
    version = file.number("<u4")
    if version not in VERSIONS:
        order = ", or its numbers are big-endian" if version & 0xFFFF == 0 else ""
        raise ValueError(f"it is of version {version}{order}; versions 2 and 3 are read")
    tensors, fields = file.number("<u8"), file.number("<u8")
    held = _by_name(fields, file.field, "field")
    places = _by_name(tensors, file.place, "tensor")
    return Header(held, _tensors(file, places, _alignment(held)))


def _by_name(count: int, read: Callable[[], tuple[str, Any]], what: str) -> dict[str, Any]:
    """Read `count` named entries, and refuse a name that occurs twice."""
    found: dict[str, Any] = {}
    for _ in range(count):
        name, value = read()
        if name in found:
            raise ValueError(f"the {what} {name} is there twice")
        found[name] = value
    return found


def _alignment(fields: dict[str, Any]) -> int:
    alignment = fields.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment is {alignment!r}, which is no power of two")
    return alignment


def _tensors(file: _File, places: dict[str, _Place], alignment: int) -> dict[str, Tensor]:
    """Map the tensors. They follow each other without gaps, except for alignment, so a wrong size or kind is noticed."""
    begin, end, found = _aligned(file.at, alignment), 0, {}
    for name, one in places.items():
        if one.offset != end:
            raise ValueError(f"the tensor {name} begins at byte {one.offset} of the data, but must begin at {end}")
        found[name] = _tensor(file, one, begin + one.offset)
        end = _aligned(end + found[name].data.nbytes, alignment)
    return found


def _tensor(file: _File, place: _Place, at: int) -> Tensor:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType  # noqa: PLC0415  only a conversion needs the package

    kind = GGMLQuantizationType(place.kind)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    *rows, columns = place.shape
    if columns % block:
        raise ValueError(f"the tensor {place.name} has rows of {columns} values, but {kind.name} has blocks of {block}")
    row_bytes = columns // block * block_bytes
    file.at = at
    data = file.take(prod(rows) * row_bytes).reshape(*rows, row_bytes)
    return Tensor(place.name, kind, place.shape, data)


def _aligned(at: int, alignment: int) -> int:
    return -(-at // alignment) * alignment


class _File:
    """The bytes of a file, and the position of the next read."""

    def __init__(self, data: np.ndarray) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> np.ndarray:
        """Return the next bytes. The count is a Python integer, which does not overflow."""
        if count > len(self.data) - self.at:
            raise ValueError(f"{count} bytes are needed from byte {self.at} on, but it has {len(self.data)} in total")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, kind: str) -> Any:
        return self.take(np.dtype(kind).itemsize).view(kind)[0].item()

    def string(self) -> str:
        length = int.from_bytes(self.take(8).tobytes(), "little")
        if length > LONGEST_STRING:
            raise ValueError(f"a string has {length} bytes")
        return self.take(length).tobytes().decode("utf-8")

    def field(self) -> tuple[str, Any]:
        name = self.string()
        return name, self.value(self.number("<u4"))

    def value(self, kind: int) -> Any:
        if kind == ARRAY:
            return self.array()
        if kind == STRING:
            return self.string()
        if kind not in NUMBERS:
            raise ValueError(f"a field is of kind {kind}, which does not exist")
        return self.number(NUMBERS[kind])

    def array(self) -> list[Any]:
        kind, length = self.number("<u4"), self.number("<u8")
        if length > LONGEST_ARRAY:
            raise ValueError(f"a list has {length} items")
        if kind == STRING:
            return [self.string() for _ in range(length)]
        if kind not in NUMBERS:
            raise ValueError(f"a list holds values of kind {kind}, which are not supported")
        return self.take(length * np.dtype(NUMBERS[kind]).itemsize).view(NUMBERS[kind]).tolist()

    def place(self) -> tuple[str, _Place]:
        name, dimensions = self.string(), self.number("<u4")
        if not 1 <= dimensions <= MOST_DIMENSIONS:
            raise ValueError(f"the tensor {name} has {dimensions} dimensions")
        shape = tuple(reversed([self.number("<u8") for _ in range(dimensions)]))
        if not all(shape):
            raise ValueError(f"the tensor {name} is empty: {shape}")
        return name, _Place(name, shape, self.number("<u4"), self.number("<u8"))

"""An opened GGUF file: its fields, checked when they are read, and its tensors as floats; called by `hub.gguf`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foreword.errors import ModelCorrupt, ModelNotFound, ModelUnsupported
from foreword.hub.gguf_header import Tensor, read_header


@dataclass(frozen=True)
class Source:
    """An opened GGUF file: its metadata and its tensors by name."""

    path: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @staticmethod
    def open(path: Path) -> Source:
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

    def values(self, name: str) -> np.ndarray:
        """Return a tensor as float32."""
        from gguf.quants import dequantize  # noqa: PLC0415  only a conversion needs the package

        tensor = self.tensors[name]
        try:
            values = dequantize(tensor.data, tensor.kind)
        except NotImplementedError as error:
            kind = tensor.kind.name
            raise ModelUnsupported(
                f"{self.path}: {name} is quantised as {kind}, which is not supported; try Q8_0"
            ) from error
        if not np.isfinite(values).all():
            raise self.not_numbers(name)
        return values

    def not_numbers(self, name: str) -> ModelCorrupt:
        return ModelCorrupt(f"{self.path}: {name} holds values that are not numbers; fetch the file again")

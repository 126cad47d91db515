"""Which model made this: a name for people, and hashes that tell two models apart whatever they are called.

In: a Model as it lies in memory, rebuilt for speed or not. Out: a Fingerprint, which travels in manifests and beside
trained drafters. Equal weights match in float32, bfloat16 and float16, on CPU and GPU: the hash is of what the first two
have in common; float16 rounds otherwise, so there a few weights are compared.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from foreword.model.linears import is_rebuilt, unpacked
from foreword.model.model import Model
from foreword.model.plain_linears import is_plain_tensor

SAMPLED = 65_536  # values of each tensor that are hashed, evenly spaced
FEW = 4  # of each tensor that are kept
CLOSE = 2.0**-8, 2.0**-24  # relative and absolute: what rounding to bfloat16 and to float16 may do, and nothing more
SHAPE = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True)
class Fingerprint:
    name: str
    config: str
    vocab_size: int
    weights: str
    dtype: str = ""
    few: str = ""

    @staticmethod
    def of(model: Model) -> Fingerprint:
        shape = {name: getattr(model.hf.config, name, None) for name in SHAPE}
        config = hashlib.sha256(json.dumps(shape).encode()).hexdigest()[:16]
        parts = _parts(model)
        few = " ".join(f"{value:.5g}" for part in parts for value in _spaced(part, FEW)[:FEW].tolist())
        return Fingerprint(model.name, config, model.vocab_size, _hash(parts), str(model.dtype).removeprefix("torch."), few)

    @staticmethod
    def of_function(model: Model) -> Fingerprint:
        """Of the model, or of the one that it was grown from, which computes the same: whose drafters serve it."""
        return Fingerprint.of(model) if model.grown is None else model.grown.original

    @staticmethod
    def from_dict(fields: dict[str, Any]) -> Fingerprint:
        """From what `to_dict` made of one; TypeError or ValueError where it could not have made that."""
        found = Fingerprint(**fields)
        for name, value in asdict(found).items():
            if type(value) is not (int if name == "vocab_size" else str):
                raise TypeError(f"{name} is {value!r}")
        found._few_numbers()
        return found

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def matches(self, other: Fingerprint) -> bool:
        """The same model, under this name or another."""
        if (self.config, self.vocab_size) != (other.config, other.vocab_size):
            return False
        return self.weights == other.weights or ("float16" in (self.dtype, other.dtype) and self._is_close(other))

    def _is_close(self, other: Fingerprint) -> bool:
        mine, theirs = (torch.tensor(one._few_numbers()) for one in (self, other))
        return mine.shape == theirs.shape and bool(self.few) and torch.allclose(mine, theirs, *CLOSE)

    def _few_numbers(self) -> list[float]:
        return [float(value) for value in self.few.split()]

    def __str__(self) -> str:
        return f"{self.name} (weights {self.weights}, vocabulary {self.vocab_size})"


@torch.no_grad()
def _parts(model: Model) -> list[Tensor]:
    """The embedding, and one layer in the middle, which any training moves."""
    layers = model.layer_stack.layers
    middle = layers[len(layers) // 2]
    middle = unpacked(middle) if is_rebuilt(middle) else middle  # what others quantised can not always be copied
    held = sorted([*middle.named_parameters(), *middle.named_buffers()], key=lambda one: one[0])
    parts = [model.hf.get_input_embeddings().weight, *(part for _, part in held)]
    return [piece for part in parts for piece in _pieces(part.detach())]


def _pieces(part: Any) -> list[Tensor]:
    """A weight as ordinary tensors: one of a library's own class is made of several, such as codes and scales."""
    if is_plain_tensor(part):
        return [part]
    if not hasattr(part, "__tensor_flatten__"):
        return [part.as_subclass(Tensor)]
    names, _ = part.__tensor_flatten__()
    return [piece for name in names for piece in _pieces(getattr(part, name))]


def _hash(parts: list[Tensor]) -> str:
    """Rounded to bfloat16: what a model loaded in float32 and the same one in bfloat16 have in common."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(_spaced(part, SAMPLED).to(torch.bfloat16).view(torch.int16).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _spaced(part: Tensor, count: int) -> Tensor:
    """About `count` values of a tensor, evenly spaced."""
    flat = part.flatten()
    return flat[:: max(1, flat.numel() // count)]

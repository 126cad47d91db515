"""Fingerprint: which model made a file. It has a name for people, and hashes that distinguish models whatever their names.

In: a Model in memory, rebuilt for speed or not. Out: a Fingerprint, which is stored in manifests and with trained drafters.
Equal weights match in float32, bfloat16 and float16, on CPU and GPU. The hash is of the weights rounded to bfloat16; float16
rounds differently, so a few of its weights are compared instead.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from foreword.model.linears import is_rebuilt
from foreword.model.model import Model
from foreword.model.plain_linears import is_plain_tensor
from foreword.model.quantised_linears import QuantizedEmbedding
from foreword.model.sharding import whole_layer
from foreword.ops.group_codes import PackedCodes
from foreword.ranks.group import current

SAMPLED = 65_536  # values of each tensor that are hashed, evenly spaced
MIDDLE = 8  # parameters in the middle of a model whose layers are not known
FEW = 4  # values of each tensor that are stored
CLOSE = 2.0**-8, 2.0**-24  # relative and absolute error of rounding to bfloat16 and to float16
SHAPE = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True)
class Fingerprint:
    """What identifies a model. Manifests and drafter folders store its fields under these names."""

    name: str
    config: str
    vocab_size: int
    weights: str
    dtype: str = ""
    few: str = ""

    @staticmethod
    def of(model: Model) -> Fingerprint:
        """Return that of a model. Of one that is divided over ranks, all of them compute it together, when it is loaded."""
        if model.ranks > 1 and model.fingerprint is not None:
            return model.fingerprint
        tensors = _tensors(model)
        few = " ".join(f"{value:.5g}" for tensor in tensors for value in _spaced(tensor, FEW)[:FEW].tolist())
        dtype = str(model.dtype).removeprefix("torch.")
        shape = _shape_hash(model.hf.config)
        model.fingerprint = Fingerprint(model.name, shape, model.vocab_size, _hash(tensors), dtype, few)
        return model.fingerprint

    @staticmethod
    def of_function(model: Model) -> Fingerprint:
        """Return that of the model, or, if it was widened, that of its original: they share their drafters."""
        return Fingerprint.of(model) if model.widened_from is None else model.widened_from.original

    @staticmethod
    def from_dict(fields: dict[str, Any]) -> Fingerprint:
        """Read what `to_dict` made. Raises TypeError or ValueError for anything else."""
        found = Fingerprint(**fields)
        for name, value in asdict(found).items():
            if type(value) is not (int if name == "vocab_size" else str):
                raise TypeError(f"{name} is {value!r}")
        found._few_numbers()
        return found

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def matches(self, other: Fingerprint) -> bool:
        """Whether both are of the same model, whatever its name."""
        if (self.config, self.vocab_size) != (other.config, other.vocab_size):
            return False
        return self.weights == other.weights or ("float16" in (self.dtype, other.dtype) and self._is_close(other))

    def may_be(self, config: Any, embedding: Tensor) -> bool:
        """Whether a model that another engine has loaded may be the same: by its config, and a few values of its embedding
        [V, H]. Models that share both are not distinguished."""
        if (self.config, self.vocab_size) != (_shape_hash(config), len(embedding)):
            return False
        mine, theirs = self._few_numbers()[:FEW], _spaced(embedding, FEW)[:FEW].float().cpu()
        return not mine or torch.allclose(torch.tensor(mine), theirs, *CLOSE)

    def _is_close(self, other: Fingerprint) -> bool:
        mine, theirs = (torch.tensor(one._few_numbers()) for one in (self, other))
        return mine.shape == theirs.shape and bool(self.few) and torch.allclose(mine, theirs, *CLOSE)

    def _few_numbers(self) -> list[float]:
        return [float(value) for value in self.few.split()]

    def __str__(self) -> str:
        return f"{self.name} (weights {self.weights}, vocabulary {self.vocab_size})"


def _shape_hash(config: Any) -> str:
    shape = {name: getattr(config, name, None) for name in SHAPE}
    return hashlib.sha256(json.dumps(shape).encode()).hexdigest()[:16]


@torch.no_grad()
def _tensors(model: Model) -> list[Tensor | PackedCodes]:
    """Return the embedding and the weights of one layer in the middle, which any training changes."""
    if model.slow:
        every = list(model.hf.parameters())
        return [tensor for one in (every[0], *every[len(every) // 2 :][:MIDDLE]) for tensor in _plain_tensors(one.detach())]
    layers = model.layer_stack.layers
    middle = layers[len(layers) // 2]
    if is_rebuilt(middle) or model.ranks > 1:  # a layer quantised by a library cannot always be copied
        middle = whole_layer(model.hf, middle, current())
    named = sorted([*middle.named_parameters(), *middle.named_buffers()], key=lambda one: one[0])
    embedding = model.hf.get_input_embeddings()
    first: Any = embedding.codes if isinstance(embedding, QuantizedEmbedding) else embedding.weight.detach()
    return [tensor for weight in (first, *(one.detach() for _, one in named)) for tensor in _plain_tensors(weight)]


def _plain_tensors(weight: Any) -> list[Tensor | PackedCodes]:
    """Return a weight as ordinary tensors: a library's own class may consist of several, such as codes and scales."""
    if is_plain_tensor(weight) or isinstance(weight, PackedCodes):
        return [weight]
    if not hasattr(weight, "__tensor_flatten__"):
        return [weight.as_subclass(Tensor)]
    names, _ = weight.__tensor_flatten__()
    return [tensor for name in names for tensor in _plain_tensors(getattr(weight, name))]


def _hash(tensors: list[Tensor | PackedCodes]) -> str:
    """Return the hash of tensors rounded to bfloat16, so that float32 and bfloat16 of the same model agree."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(_spaced(tensor, SAMPLED).to(torch.bfloat16).view(torch.int16).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _spaced(tensor: Tensor | PackedCodes, count: int) -> Tensor:
    """Return about `count` values of a tensor, evenly spaced."""
    if isinstance(tensor, PackedCodes):
        size = tensor.outputs * tensor.inputs
        return tensor.elements(torch.arange(0, size, max(1, size // count)))
    flat = tensor.flatten()
    return flat[:: max(1, flat.numel() // count)]

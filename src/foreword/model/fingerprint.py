"""Which model made this: a name for people, and hashes that tell two models apart whatever they are called.

In: a Model as it lies in memory, rebuilt for speed or not, in any wide enough dtype. Out: a Fingerprint, which travels in
manifests and checkpoints. Equal weights give equal prints in float32 and bfloat16, on CPU and GPU.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from foreword.model.model import Model
from foreword.model.pack import unpacked

SAMPLED = 65_536  # values of each tensor that are hashed, evenly spaced
SHAPE = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True)
class Fingerprint:
    name: str
    config: str
    vocab_size: int
    weights: str

    @staticmethod
    def of(model: Model) -> Fingerprint:
        shape = {name: getattr(model.hf.config, name, None) for name in SHAPE}
        config = hashlib.sha256(json.dumps(shape).encode()).hexdigest()[:16]
        return Fingerprint(model.name, config, model.vocab_size, _hash_weights(model))

    @staticmethod
    def from_dict(fields: dict[str, Any]) -> Fingerprint:
        return Fingerprint(**fields)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def matches(self, other: Fingerprint) -> bool:
        """The same model, under this name or another."""
        mine, theirs = ((one.config, one.vocab_size, one.weights) for one in (self, other))
        return mine == theirs

    def __str__(self) -> str:
        return f"{self.name} (weights {self.weights}, vocabulary {self.vocab_size})"


@torch.no_grad()
def _hash_weights(model: Model) -> str:
    """Of the embedding, and of one layer in the middle, which any training moves."""
    layers = model.layer_stack.layers
    middle = unpacked(layers[len(layers) // 2])
    parts = [model.hf.get_input_embeddings().weight, *(part for _, part in sorted(middle.named_parameters()))]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(_sample(part))
    return digest.hexdigest()[:16]


def _sample(part: Tensor) -> bytes:
    """Rounded to bfloat16: what a model loaded in float32 and the same one in bfloat16 have in common."""
    flat = part.detach().flatten()
    return flat[:: max(1, flat.numel() // SAMPLED)].to(torch.bfloat16).view(torch.int16).cpu().numpy().tobytes()

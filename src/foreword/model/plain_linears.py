"""Which linears are ordinary ones, with weights that can be read, concatenated and rounded like any tensor.

Libraries that quantise a model in memory replace linears by classes of their own, or keep the linear and replace its weight
by a tensor class of their own. Such a linear can be called; nothing else is known about it.
"""

from __future__ import annotations

from typing import NamedTuple, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn


class Buffer(NamedTuple):
    """The same memory for torch and for Numba."""

    tensor: Tensor
    array: np.ndarray

    @staticmethod
    def of(*shape: int) -> Buffer:
        with torch.inference_mode(False):  # a tensor made in inference mode cannot be written to outside of it
            tensor = torch.zeros(shape)
        return Buffer(tensor, tensor.numpy())


def is_plain_linear(module: object) -> TypeGuard[nn.Linear]:
    return type(module) is nn.Linear and is_plain_tensor(module.weight)


def is_plain_tensor(tensor: object) -> TypeGuard[Tensor]:
    return type(tensor) in (Tensor, nn.Parameter)


def plain_linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return a linear with a copy of these weights, which can be trained."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, weight.device, weight.dtype)
    linear.weight.data.copy_(weight)
    if bias is not None:
        linear.bias.data.copy_(bias)
    return linear

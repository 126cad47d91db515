"""Which linears are ordinary ones, with weights that can be read, concatenated and rounded like any tensor.

Libraries that quantise a model in memory replace linears by classes of their own, or keep the linear and replace its weight
by a tensor class of their own. Such a linear can be called; nothing else is known about it.
"""

from __future__ import annotations

from typing import TypeGuard

from torch import Tensor, nn


def is_plain_linear(module: object) -> TypeGuard[nn.Linear]:
    return type(module) is nn.Linear and is_plain_tensor(module.weight)


def is_plain_tensor(tensor: object) -> TypeGuard[Tensor]:
    return type(tensor) in (Tensor, nn.Parameter)

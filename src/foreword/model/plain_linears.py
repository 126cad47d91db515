"""Which linears are ordinary ones, whose weights can be read, joined and rounded as any tensor.

Libraries that quantise a model in memory put classes of their own in the place of linears, or leave the linear and put a
tensor class of their own in the place of its weight. Such a linear can be called, and no more than that is known of it.
"""

from __future__ import annotations

from typing import TypeGuard

from torch import Tensor, nn


def is_plain_linear(module: object) -> TypeGuard[nn.Linear]:
    return type(module) is nn.Linear and is_plain_tensor(module.weight)


def is_plain_tensor(tensor: object) -> TypeGuard[Tensor]:
    return type(tensor) in (Tensor, nn.Parameter)

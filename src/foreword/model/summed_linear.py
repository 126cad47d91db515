"""SummedLinear: a linear whose inputs are divided over the ranks. Each rank's product is a part of the result, their sum."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from foreword.model.plain_linears import Buffer
from foreword.ranks.group import Ranks

if TYPE_CHECKING:
    from foreword.model.linears import PackedLinear


class SummedLinear(nn.Module):
    """The part of one rank, and the sum. Only the first rank's part has the bias, which is added once."""

    def __init__(self, linear: nn.Linear, ranks: Ranks) -> None:
        super().__init__()
        if not ranks.is_first:
            linear.register_parameter("bias", None)
        self.part: nn.Linear | PackedLinear = linear
        self.ranks = ranks

    def forward(self, rows: Tensor) -> Tensor:
        return self.ranks.summed(self.part(rows))

    def into(self, rows: Tensor, out: Buffer) -> np.ndarray:
        """Return the sum for rows [m, K], written to `out` if torch can do that: see `PackedLinear.into`."""
        part: Any = self.part
        product: np.ndarray = part.into(rows, out)
        self.ranks.summed(torch.from_numpy(product))
        return product

    @property
    def weight(self) -> Any:
        return self.part.weight

    @property
    def bias(self) -> Any:
        return self.part.bias

    @property
    def columns_out(self) -> int:
        part: Any = self.part
        return int(part.columns_out)

    @property
    def columns_in(self) -> int:
        part: Any = self.part
        return int(part.columns_in)

    def stock(self) -> nn.Linear:
        """Return this rank's part as a copy that can be trained."""
        part: Any = self.part
        stock: nn.Linear = copy.deepcopy(part) if isinstance(part, nn.Linear) else part.stock()
        return stock

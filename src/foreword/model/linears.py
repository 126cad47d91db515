"""Faster linears for models that we loaded: fused ones on CUDA; on the CPU packed and fused, and norms in one operation.

Linears that read the same rows (q, k, v; gate, up) are one product. On some CPUs a stock linear reads its weights at full
speed for up to three rows, and badly for more; on others badly for any. In the block layout of oneDNN more rows stay cheap,
which is what makes a tree of candidates worth checking. Which CPU this is, is measured. The numbers are in
docs/performance.md. A model rebuilt so cannot be trained.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import cache
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from foreword.model.busy import Waits
from foreword.model.measured import Figure, is_anew, machine_facts, recall
from foreword.model.plain_linears import is_plain_linear
from foreword.ops.device import has_half_precision_kernels, has_packed_linears
from foreword.ops.norms import rms_normed

# oneDNN picks the layout for the number of rows it is told to expect; this one serves 4 to 64 rows well.
_ROWS_EXPECTED = 16
MOST_STOCK = 3  # rows; for more of them the packed layout is the quicker one everywhere
_TRIED_BYTES, _TRIED_SHAPE, _TRIALS = 64 * 2**20, (3072, 576), 5
# Keeping the stock layout beside the packed one doubles the weights; larger models run packed only.
_KEEP_BOTH_BYTES = 2 * 2**30

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Buffer(NamedTuple):
    """The same numbers for torch and for Numba."""

    tensor: Tensor
    array: np.ndarray

    @staticmethod
    def of(*shape: int) -> Buffer:
        with torch.inference_mode(False):  # a tensor born in inference mode cannot be written to outside of it
            tensor = torch.zeros(shape)
        return Buffer(tensor, tensor.numpy())


class PackedLinear(nn.Module):
    def __init__(self, weight: Tensor, bias: Tensor | None, keep_stock: bool) -> None:
        super().__init__()
        self.weight = weight if keep_stock else None
        self.bias = bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_EXPECTED)
        self.columns_out, self.columns_in = weight.shape
        self._by_columns = weight.t() if keep_stock else None
        self.rows_stock = rows_quicker_stock(torch.get_num_threads()) if keep_stock else 0

    def forward(self, rows: Tensor) -> Tensor:
        if self.weight is not None and rows.numel() <= self.rows_stock * rows.shape[-1]:
            return functional.linear(rows, self.weight, self.bias)
        count = rows.numel() // rows.shape[-1]
        if (size := one_of_few(count)) == count:
            return _packed_product(rows, self.packed, self.bias)
        more = rows.new_zeros(size, rows.shape[-1])
        more[:count] = rows.reshape(count, -1)
        return _packed_product(more, self.packed, self.bias)[:count].view(*rows.shape[:-1], -1)

    def into(self, rows: Tensor, out: Buffer) -> np.ndarray:
        """The product of rows [m, K], in `out` where torch lets it be put there."""
        if self._by_columns is None or rows.shape[0] > self.rows_stock:
            return self(rows).numpy()
        if self.bias is None:
            torch.mm(rows, self._by_columns, out=out.tensor)
        else:
            torch.addmm(self.bias, rows, self._by_columns, out=out.tensor)
        return out.array

    def stock(self, columns: slice = slice(None)) -> nn.Linear:
        """The linear that was packed, or some of its outputs, as a copy that can be trained."""
        return _stock(self.packed.to_dense()[columns], None if self.bias is None else self.bias[columns])


def one_of_few(rows: int) -> int:
    """As many rows or some more: the next of 16 numbers between a power of two and the next.

    oneDNN compiles a product for every number of rows, 0.6 MB each, and keeps a thousand of them. So prompts of all lengths
    would take hundreds of megabytes. Few rows, whose number decides what a round costs, stay as they are."""
    step = 1 << max(0, (rows - 1).bit_length() - 5)
    return -(-rows // step) * step


@cache
def rows_quicker_stock(threads: int) -> int:
    """Up to how many rows a stock linear is quicker than a packed one on this machine, with so many threads: measured once
    and kept, so that every load computes alike."""

    def measure(_: Figure | None) -> Figure:
        with Waits() as waits:
            rows = _rows_tried()
        return Figure(rows, not waits.doubt, waits.doubt)

    facts = machine_facts(torch.device("cpu")) | {"threads": threads}
    return int(recall("linears", facts, measure, Figure.read).value)


def _rows_tried() -> int:
    weights = [torch.full(_TRIED_SHAPE, 0.01) for _ in range(_TRIED_BYTES // (4 * math.prod(_TRIED_SHAPE)))]
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_EXPECTED) for weight in weights]
    for count in range(1, MOST_STOCK + 1):
        rows = torch.full((count, _TRIED_SHAPE[1]), 0.01)
        if _seconds(functional.linear, rows, weights) > _seconds(_packed_product, rows, packed):
            return count - 1
    return MOST_STOCK


def _packed_product(rows: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")


@torch.inference_mode()
def _seconds(product: Callable[[Tensor, Tensor], Tensor], rows: Tensor, weights: list[Tensor]) -> float:
    """For all weights one after the other, as in a model: of each the quickest of a few times. One alone is read between the
    turns of other programs, all together are not."""
    best = [math.inf] * len(weights)
    for _ in range(_TRIALS):
        for place, weight in enumerate(weights):
            started = perf_counter()
            product(rows, weight)
            best[place] = min(best[place], perf_counter() - started)
    return sum(best)


class JointLinear(nn.Module):
    """Several linears on top of one another."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, rows: Tensor) -> Tensor:
        return functional.linear(rows, self.weight, self.bias)

    def stock(self, columns: slice) -> nn.Linear:
        """One of them, as a copy that can be trained."""
        return _stock(self.weight[columns], None if self.bias is None else self.bias[columns])


class Fusion:
    """One product for several linears that read the same rows; the first to be asked computes it for all."""

    def __init__(self, linear: PackedLinear | JointLinear, parts: int) -> None:
        self.linear, self.parts = linear, parts
        self._rows: Tensor | None = None
        self._out: Tensor | None = None
        self._served = 0

    def __call__(self, rows: Tensor) -> Tensor:
        if self._out is None or self._rows is not rows:
            self._rows, self._out, self._served = rows, self.linear(rows), 0
        out, self._served = self._out, self._served + 1
        if self._served == self.parts:
            self._rows = self._out = None  # nothing of a pass outlives it
        return out


class FusedPart(nn.Module):
    """Stands where one of the fused linears stood: its columns of the common product."""

    def __init__(self, fusion: Fusion, columns: slice) -> None:
        super().__init__()
        self.fusion, self.columns = fusion, columns

    def forward(self, rows: Tensor) -> Tensor:
        return self.fusion(rows)[..., self.columns]

    def stock(self) -> nn.Linear:
        return self.fusion.linear.stock(self.columns)


class FusedRMSNorm(nn.Module):
    """RMSNorm as one kernel; in float32 the same numbers as the five steps of transformers."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = norm.weight, norm.variance_epsilon

    def forward(self, rows: Tensor) -> Tensor:
        return rms_normed(rows, self.weight, self.variance_epsilon)


def some_of(linear: Any, columns: Tensor) -> nn.Module:
    """A copy of some of a linear's outputs, as fast as the linear is."""
    whole = linear.stock() if linear.weight is None else linear  # a packed one may have given its weight up
    weight, bias = whole.weight.detach()[columns], None if linear.bias is None else linear.bias.detach()[columns]
    if isinstance(linear, PackedLinear):
        return PackedLinear(weight, bias, linear.weight is not None)
    return _stock(weight, bias).requires_grad_(False)


def pack(model: nn.Module) -> None:
    """Rebuild a float32 model on the CPU; an embedding tied to the head keeps its own weights."""
    size = sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())
    keep_stock = size <= _KEEP_BOTH_BYTES
    for module in _parents(model):
        for names in FUSED:
            if all(is_plain_linear(getattr(module, name, None)) for name in names):
                _replace(module, names, lambda weight, bias: PackedLinear(weight, bias, keep_stock))
        for name, child in list(module.named_children()):
            if is_plain_linear(child):
                setattr(module, name, PackedLinear(*_weights([child]), keep_stock))
    _fuse_norms(model)


def _fuse_norms(model: nn.Module) -> None:
    for module in _parents(model):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNorm") and hasattr(child, "variance_epsilon"):
                setattr(module, name, FusedRMSNorm(child))


def fuse(model: nn.Module) -> None:
    """Rebuild a model in half precision on CUDA."""
    for module in _parents(model):
        for names in FUSED:
            if all(is_plain_linear(getattr(module, name, None)) for name in names):
                _replace(module, names, JointLinear)
    _fuse_norms(model)


def lay_together(model: nn.Module) -> None:
    """Weights that could be one product lie one behind the other in memory: `joint` finds them, and they can be trained."""
    for module in _parents(model):
        for names in FUSED:
            linears: list[Any] = [getattr(module, name, None) for name in names]
            if all(map(is_plain_linear, linears)):
                _lay_together(linears)


def _lay_together(linears: list[nn.Linear]) -> None:
    sizes = [linear.out_features for linear in linears]
    for whole, name in zip(_weights(linears), ("weight", "bias"), strict=True):
        for linear, part in zip(linears, () if whole is None else whole.split(sizes), strict=False):
            getattr(linear, name).data = part


def joint(module: Any, names: tuple[str, ...]) -> PackedLinear | JointLinear | None:
    """The one product that several linears of a module are, or None where they are several."""
    parts: list[Any] = [getattr(module, name, None) for name in names]
    if all(isinstance(part, FusedPart) for part in parts):
        linear: PackedLinear | JointLinear = parts[0].fusion.linear
        return linear
    if not all(map(is_plain_linear, parts)):
        return None
    weight = _behind_one_another([part.weight for part in parts])
    bias = _behind_one_another([part.bias for part in parts]) if parts[0].bias is not None else None
    return None if weight is None or (bias is None) != (parts[0].bias is None) else JointLinear(weight, bias)


def _behind_one_another(parts: list[Tensor]) -> Tensor | None:
    """Tensors that lie one behind the other in memory, as one, or None."""
    first, end = parts[0], parts[0].data_ptr()
    for part in parts:
        if part.data_ptr() != end or not part.is_contiguous():
            return None
        end += part.numel() * part.itemsize
    if (end - first.data_ptr()) > first.untyped_storage().nbytes() - first.storage_offset() * first.itemsize:
        return None  # neighbours by chance
    rows = sum(part.shape[0] for part in parts)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride())


def _parents(model: nn.Module) -> list[nn.Module]:
    """Every module but the linears: holding those would keep all their weights until the last of them is replaced."""
    return [module for module in model.modules() if type(module) is not nn.Linear]


def kinds(model: nn.Module) -> list[str]:
    """What its linears are: passes over the same shapes cost otherwise with others."""
    found = (type(one.fusion.linear) if isinstance(one, FusedPart) else type(one) for one in model.modules())
    names = {f"{kind.__module__}.{kind.__name__}" for kind in found if "linear" in kind.__name__.lower()}
    packed = any(isinstance(one, PackedLinear) and one.weight is None for one in model.modules())
    others = {type(one.weight).__name__ for one in model.modules() if type(one) is nn.Linear and not is_plain_linear(one)}
    return sorted(names | others | ({"packed alone"} if packed else set()))


def read_bytes(model: nn.Module) -> int:
    """Bytes of weights that a pass reads: every linear once, the head among them. Of an embedding a pass reads few rows."""
    found = [module.fusion.linear if isinstance(module, FusedPart) else module for module in model.modules()]
    linears = {id(module): module for module in found if isinstance(module, nn.Linear | JointLinear | PackedLinear)}
    held = (*model.parameters(), *model.buffers())  # all there is to go by where every linear is of an unknown kind
    return sum(_bytes(linear) for linear in linears.values()) or sum(one.numel() * one.itemsize for one in held)


def _bytes(linear: nn.Linear | JointLinear | PackedLinear) -> int:
    weight = linear.packed if isinstance(linear, PackedLinear) else linear.weight
    held = [weight] if linear.bias is None else [weight, linear.bias]
    return sum(part.numel() * part.itemsize for part in held)


def rebuild(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Whatever makes a model faster on its device and in its dtype."""
    if has_packed_linears(device, dtype):
        if is_anew():
            rows_quicker_stock.cache_clear()
        pack(model)
    if has_half_precision_kernels(device, dtype):
        fuse(model)


def is_plain_norm(norm: Any) -> bool:
    """Whether it is the RMSNorm that `functional.rms_norm` computes; some families add 1 to the weight, or norm by group."""
    plain = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")
    return isinstance(norm, FusedRMSNorm) or type(norm).__name__ in plain


def is_rebuilt(layer: nn.Module) -> bool:
    return any(isinstance(module, PackedLinear | FusedPart) for module in layer.modules())


def unpacked(layer: nn.Module) -> nn.Module:
    """A copy of a layer that can be trained, with stock linears in place of packed and fused ones; what one product was on
    CUDA still lies together."""
    rebuilt = [module for module in layer.modules() if isinstance(module, PackedLinear | FusedPart)]
    # What deepcopy finds in its memo it takes for copied already.
    stock = copy.deepcopy(layer, {id(module): module.stock() for module in rebuilt})
    if any(isinstance(module, FusedPart) and isinstance(module.fusion.linear, JointLinear) for module in rebuilt):
        lay_together(stock)
    return stock


def _replace(module: nn.Module, names: tuple[str, ...], make: Callable[[Tensor, Tensor | None], Any]) -> None:
    """One product in place of the linears that `names` names."""
    linears = [getattr(module, name) for name in names]
    fusion, first = Fusion(make(*_weights(linears)), len(linears)), 0
    for name, linear in zip(names, linears, strict=True):
        setattr(module, name, FusedPart(fusion, slice(first, first + linear.out_features)))
        first += linear.out_features


def _stock(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, weight.device, weight.dtype)
    linear.weight.data.copy_(weight)
    if bias is not None:
        linear.bias.data.copy_(bias)
    return linear


def _weights(linears: list[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Weights and biases of linears on top of one another."""
    weight = torch.cat([linear.weight.detach() for linear in linears]) if len(linears) > 1 else linears[0].weight.detach()
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    assert len(biases) in (0, len(linears)), "linears that are fused have all a bias or none"
    return weight, torch.cat(biases) if biases else None

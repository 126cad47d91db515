"""Faster linears for models that we load: fused on CUDA, packed and fused on the CPU. Norms become one operation.

Linears that read the same rows (q, k, v; gate, up) become one product. On some CPUs a stock linear reads its weights at full
speed for up to three rows and slowly for more; on others it is always slow. In the block layout of oneDNN more rows stay
cheap, which makes it worthwhile to check a tree of candidates. We measure which kind of CPU this is. The numbers are in
docs/performance.md. A rebuilt model cannot be trained.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import cache
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from foreword.model.busy import Waits
from foreword.model.measured import Figure, is_remeasuring, machine_facts, recall
from foreword.model.plain_linears import Buffer, is_plain_linear, plain_linear
from foreword.model.quantised_linears import QuantizedEmbedding, QuantizedLinear
from foreword.model.summed_linear import SummedLinear
from foreword.ops.device import has_half_precision_kernels, has_packed_linears
from foreword.ops.norms import rms_normed

# oneDNN chooses the layout for an expected number of rows; this number is good for 4 to 64 rows.
_ROWS_EXPECTED = 16
MAX_STOCK_ROWS = 3  # for more rows the packed layout is faster on every CPU
_TIMED_BYTES, _TIMED_SHAPE, _REPEATS = 64 * 2**20, (3072, 576), 5
# Keeping the stock layout next to the packed one doubles the weights; larger models run packed only.
_KEEP_BOTH_BYTES = 2 * 2**30

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class PackedLinear(nn.Module):
    """A linear whose weight is in oneDNN's block layout, and in the stock layout as well if `keep_stock`."""

    def __init__(self, weight: Tensor, bias: Tensor | None, keep_stock: bool) -> None:
        super().__init__()
        self.weight = weight if keep_stock else None
        self.bias = bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_EXPECTED)
        self.columns_out, self.columns_in = weight.shape
        self._transposed = weight.t() if keep_stock else None
        self.stock_rows = max_stock_rows(torch.get_num_threads()) if keep_stock else 0

    def forward(self, rows: Tensor) -> Tensor:
        if self.weight is not None and rows.numel() <= self.stock_rows * rows.shape[-1]:
            return functional.linear(rows, self.weight, self.bias)
        count = rows.numel() // rows.shape[-1]
        if (size := padded_row_count(count)) == count:
            return _packed_product(rows, self.packed, self.bias)
        padded = rows.new_zeros(size, rows.shape[-1])
        padded[:count] = rows.reshape(count, -1)
        return _packed_product(padded, self.packed, self.bias)[:count].view(*rows.shape[:-1], -1)

    def into(self, rows: Tensor, out: Buffer) -> np.ndarray:
        """Return the product of rows [m, K], written to `out` if torch can do that."""
        if self._transposed is None or rows.shape[0] > self.stock_rows:
            return self(rows).numpy()
        if self.bias is None:
            torch.mm(rows, self._transposed, out=out.tensor)
        else:
            torch.addmm(self.bias, rows, self._transposed, out=out.tensor)
        return out.array

    def stock(self, columns: slice = slice(None)) -> nn.Linear:
        """Return the linear that was packed, or some of its outputs, as a copy that can be trained."""
        return plain_linear(self.packed.to_dense()[columns], None if self.bias is None else self.bias[columns])


def padded_row_count(rows: int) -> int:
    """Return the number of rows rounded up to one of 16 steps between a power of two and the next.

    oneDNN compiles a product for every row count, 0.6 MB each, and keeps a thousand of them. So prompts of all lengths would
    take hundreds of megabytes. Counts up to 32 are not rounded, since there every row adds to the cost of a round."""
    step = 1 << max(0, (rows - 1).bit_length() - 5)
    return -(-rows // step) * step


@cache
def max_stock_rows(threads: int) -> int:
    """Return up to how many rows a stock linear is faster than a packed one on this machine, with `threads` threads. It is
    measured once and kept, so that every load computes the same. On a busy machine the answer is 0 and not kept: a wrong
    stock linear makes passes of one row far slower, a wrong packed one only a little."""

    def measure(_: Figure | None) -> Figure:
        with Waits() as waits:
            rows = _measure_max_stock_rows()
        return Figure(0 if waits.doubt else rows, not waits.doubt, waits.doubt)

    facts = machine_facts(torch.device("cpu")) | {"threads": threads}
    return int(recall("linears", facts, measure, Figure.read, quiet=True).value)


def _measure_max_stock_rows() -> int:
    weights = [torch.full(_TIMED_SHAPE, 0.01) for _ in range(_TIMED_BYTES // (4 * math.prod(_TIMED_SHAPE)))]
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_EXPECTED) for weight in weights]
    for count in range(1, MAX_STOCK_ROWS + 1):
        rows = torch.full((count, _TIMED_SHAPE[1]), 0.01)
        if _seconds(functional.linear, rows, weights) > _seconds(_packed_product, rows, packed):
            return count - 1
    return MAX_STOCK_ROWS


def _packed_product(rows: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")


@torch.inference_mode()
def _seconds(product: Callable[[Tensor, Tensor], Tensor], rows: Tensor, weights: list[Tensor]) -> float:
    """Return the seconds of the product with all weights in sequence, as in a model: the sum of each one's fastest timing. A
    single product can run while no other program interferes; all of them together cannot."""
    best = [math.inf] * len(weights)
    for _ in range(_REPEATS):
        for index, weight in enumerate(weights):
            started = perf_counter()
            product(rows, weight)
            best[index] = min(best[index], perf_counter() - started)
    return sum(best)


class JointLinear(nn.Module):
    """Several linears with their outputs concatenated, as one product."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, rows: Tensor) -> Tensor:
        return functional.linear(rows, self.weight, self.bias)

    def stock(self, columns: slice) -> nn.Linear:
        """Return one of them as a copy that can be trained."""
        return plain_linear(self.weight[columns], None if self.bias is None else self.bias[columns])


WholeLinear = PackedLinear | JointLinear | QuantizedLinear
"""What several linears may become."""


class Fusion:
    """One product for several linears that read the same rows. The first of them to be called computes it for all."""

    def __init__(self, linear: WholeLinear, parts: int) -> None:
        self.linear, self.parts = linear, parts
        self._rows: Tensor | None = None
        self._out: Tensor | None = None
        self._served = 0

    def __call__(self, rows: Tensor) -> Tensor:
        if self._out is None or self._rows is not rows:
            self._rows, self._out, self._served = rows, self.linear(rows), 0
        out, self._served = self._out, self._served + 1
        if self._served == self.parts:
            self._rows = self._out = None  # keep nothing after the pass
        return out


class FusedPart(nn.Module):
    """Replaces one of the fused linears: returns its columns of the joint product."""

    def __init__(self, fusion: Fusion, columns: slice) -> None:
        super().__init__()
        self.fusion, self.columns = fusion, columns

    def forward(self, rows: Tensor) -> Tensor:
        return self.fusion(rows)[..., self.columns]

    def stock(self) -> nn.Linear:
        return self.fusion.linear.stock(self.columns)


class FusedRMSNorm(nn.Module):
    """RMSNorm as one kernel; in float32 it gives the same values as the five steps of transformers."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = norm.weight, norm.variance_epsilon

    def forward(self, rows: Tensor) -> Tensor:
        return rms_normed(rows, self.weight, self.variance_epsilon)


def select_outputs(linear: Any, columns: Tensor) -> nn.Module:
    """Return a copy of some of a linear's outputs, in the same layout as the linear."""
    if isinstance(linear, QuantizedLinear):
        return linear.selected(columns)
    whole = linear.stock() if linear.weight is None else linear  # a packed linear may keep no stock weight
    weight, bias = whole.weight.detach()[columns], None if linear.bias is None else linear.bias.detach()[columns]
    if isinstance(linear, PackedLinear):
        return PackedLinear(weight, bias, linear.weight is not None)
    return plain_linear(weight, bias).requires_grad_(False)


def pack(model: nn.Module) -> None:
    """Rebuild a float32 model on the CPU; an embedding tied to the head keeps its own weights."""
    size = sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())
    keep_stock = size <= _KEEP_BOTH_BYTES
    for module in _parents(model):
        for names in FUSED:
            if linears := _plain_linears(module, names):
                _replace(module, names, PackedLinear(*_weights(linears), keep_stock))
        for name, child in list(module.named_children()):
            if is_plain_linear(child):
                setattr(module, name, PackedLinear(*_weights([child]), keep_stock))
    _fuse_norms(model)


def join(model: nn.Module) -> None:
    """Make one product of quantised linears that read the same rows."""
    for module in _parents(model):
        for names in FUSED:
            parts: list[Any] = [getattr(module, name, None) for name in names]
            if all(isinstance(part, QuantizedLinear) for part in parts):
                _replace(module, names, QuantizedLinear.joined(parts))


def _plain_linears(module: nn.Module, names: tuple[str, ...]) -> list[nn.Linear]:
    """Return the linears called `names`, or none if one of them is of another kind."""
    found = [getattr(module, name, None) for name in names]
    return [linear for linear in found if is_plain_linear(linear)] if all(map(is_plain_linear, found)) else []


def _fuse_norms(model: nn.Module) -> None:
    for module in _parents(model):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNorm") and hasattr(child, "variance_epsilon"):
                setattr(module, name, FusedRMSNorm(child))


def fuse(model: nn.Module) -> None:
    """Rebuild a model in half precision on CUDA."""
    for module in _parents(model):
        for names in FUSED:
            if linears := _plain_linears(module, names):
                _replace(module, names, JointLinear(*_weights(linears)))
    _fuse_norms(model)


def make_adjacent(model: nn.Module) -> None:
    """Make weights that could be one product adjacent in memory: `joint` finds them, and they can still be trained."""
    for module in _parents(model):
        for names in FUSED:
            linears: list[Any] = [getattr(module, name, None) for name in names]
            if all(map(is_plain_linear, linears)):
                _make_adjacent(linears)


def _make_adjacent(linears: list[nn.Linear]) -> None:
    sizes = [linear.out_features for linear in linears]
    for whole, name in zip(_weights(linears), ("weight", "bias"), strict=True):
        for linear, part in zip(linears, () if whole is None else whole.split(sizes), strict=False):
            getattr(linear, name).data = part


def joint(module: Any, names: tuple[str, ...]) -> WholeLinear | None:
    """Return the one product for several linears of a module, or None if their weights are separate."""
    parts: list[Any] = [getattr(module, name, None) for name in names]
    if all(isinstance(part, FusedPart) for part in parts):
        linear: WholeLinear = parts[0].fusion.linear
        return linear
    if not all(map(is_plain_linear, parts)):
        return None
    weight = _as_one_tensor([part.weight for part in parts])
    bias = _as_one_tensor([part.bias for part in parts]) if parts[0].bias is not None else None
    return None if weight is None or (bias is None) != (parts[0].bias is None) else JointLinear(weight, bias)


def _as_one_tensor(parts: list[Tensor]) -> Tensor | None:
    """Return tensors that are adjacent in memory as one view, or None if they are not."""
    first, end = parts[0], parts[0].data_ptr()
    for part in parts:
        if part.data_ptr() != end or not part.is_contiguous():
            return None
        end += part.numel() * part.itemsize
    if (end - first.data_ptr()) > first.untyped_storage().nbytes() - first.storage_offset() * first.itemsize:
        return None  # adjacent by chance, in different allocations
    rows = sum(part.shape[0] for part in parts)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride())


def _parents(model: nn.Module) -> list[nn.Module]:
    """Return every module except the linears: a list of those would keep all their weights alive until the end."""
    return [module for module in model.modules() if type(module) is not nn.Linear]


def kinds(model: nn.Module) -> list[str]:
    """Return the kinds of a model's linears. The cost of a pass depends on them too, not on shapes alone."""
    found = [one.fusion.linear if isinstance(one, FusedPart) else one for one in model.modules()]
    names = {f"{type(one).__module__}.{type(one).__name__}" for one in found if "linear" in type(one).__name__.lower()}
    packed = any(isinstance(one, PackedLinear) and one.weight is None for one in found)
    others = {type(one.weight).__name__ for one in found if type(one) is nn.Linear and not is_plain_linear(one)}
    layouts = {str(layout) for one in found if isinstance(one, QuantizedLinear) for layout in one.layouts}
    return sorted(names | others | layouts | ({"packed alone"} if packed else set()))


def read_bytes(model: nn.Module) -> int:
    """Return the bytes of weights that a pass reads: every linear once, including the head, and all experts, though a pass
    of few rows reads some of them. An embedding is not counted: a pass reads few of its rows."""
    found = [module.fusion.linear if isinstance(module, FusedPart) else module for module in model.modules()]
    linears = {id(module): module for module in found if isinstance(module, nn.Linear | Conv1D | WholeLinear)}
    held = (*model.parameters(), *model.buffers())  # the fallback if every linear is of an unknown kind
    experts = sum(_held_bytes(one) for one in model.parameters() if one.dim() == 3)  # their weights are one tensor
    return experts + sum(map(_bytes, linears.values())) or sum(map(_held_bytes, held))


def _bytes(linear: nn.Linear | Conv1D | WholeLinear) -> int:
    if isinstance(linear, QuantizedLinear):
        return linear.bytes
    weight = linear.packed if isinstance(linear, PackedLinear) else linear.weight
    held = [weight] if linear.bias is None else [weight, linear.bias]
    return sum(map(_held_bytes, held))


def _held_bytes(weight: Any) -> int:
    """Return the bytes of a weight in this process: with several ranks transformers has a part of it here."""
    own = weight.to_local() if hasattr(weight, "to_local") else weight
    return own.numel() * own.itemsize


def rebuilds(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether there is a way to rebuild linears in floats for this device and dtype."""
    return has_packed_linears(device, dtype) or has_half_precision_kernels(device, dtype)


def rebuild(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Rebuild a model's linears and norms for speed on its device and in its dtype, if there is a way."""
    join(model)
    if has_packed_linears(device, dtype):
        if is_remeasuring():
            max_stock_rows.cache_clear()
        pack(model)
    if has_half_precision_kernels(device, dtype):
        fuse(model)


def is_plain_norm(norm: Any) -> bool:
    """Whether a norm is the RMSNorm of `functional.rms_norm`; some families add 1 to the weight, or normalise by group."""
    plain = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")
    return isinstance(norm, FusedRMSNorm) or type(norm).__name__ in plain


REBUILT = PackedLinear | FusedPart | QuantizedLinear | QuantizedEmbedding | SummedLinear


def is_rebuilt(layer: nn.Module) -> bool:
    return any(isinstance(module, REBUILT) for module in layer.modules())


def unpacked(layer: nn.Module) -> nn.Module:
    """Return a copy of a layer that can be trained, with stock linears in place of packed, fused and quantised ones. Weights
    that were one product on CUDA stay adjacent in memory."""
    rebuilt = [module for module in layer.modules() if isinstance(module, REBUILT)]
    # deepcopy takes what it finds in its memo as already copied.
    stock = copy.deepcopy(layer, {id(module): module.stock() for module in rebuilt})
    if any(isinstance(module, FusedPart) and isinstance(module.fusion.linear, JointLinear) for module in rebuilt):
        make_adjacent(stock)
    return stock


def _replace(module: nn.Module, names: tuple[str, ...], whole: WholeLinear) -> None:
    """Replace the linears called `names` by one product."""
    fusion, first = Fusion(whole, len(names)), 0
    for name in names:
        linear: Any = getattr(module, name)
        columns = linear.columns_out if isinstance(linear, QuantizedLinear) else linear.out_features
        setattr(module, name, FusedPart(fusion, slice(first, first + columns)))
        first += columns


def _weights(linears: list[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Return the concatenated weights and biases of linears."""
    weight = torch.cat([linear.weight.detach() for linear in linears]) if len(linears) > 1 else linears[0].weight.detach()
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    assert len(biases) in (0, len(linears)), "linears that are fused have all a bias or none"
    return weight, torch.cat(biases) if biases else None

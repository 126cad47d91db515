"""Linears and embeddings whose weights are codes, run as they are stored (`ops/group_codes.py`), on the CPU in float32.

They compute the function of the dequantised weights; only the order of sums differs. A row's result does not depend on the
other rows of its pass, bit for bit, so speculative decoding is exact on them. `quantise` makes them from a float model.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from foreword.errors import ForewordWarning, InputError
from foreword.hub.storage import place
from foreword.model.plain_linears import Buffer, is_plain_linear, plain_linear
from foreword.ops.dispatch import kernels
from foreword.ops.group_codes import Layout, PackedCodes, quantised

GROUP = 32  # inputs that share a scale
HEAD_BITS = 8  # of head and embedding: four bits there cost more accuracy than anywhere else


class QuantizedLinear(nn.Module):
    """A linear whose weights are codes. Several weights in sequence give their outputs in sequence; their layouts may
    differ."""

    weight = None

    def __init__(self, parts: Sequence[PackedCodes], bias: Tensor | None) -> None:
        super().__init__()
        self.parts, self.bias = tuple(parts), bias
        self.columns_in, self.columns_out = parts[0].inputs, sum(part.outputs for part in parts)
        cpu_kernels("layer.code_products")

    @staticmethod
    def joined(linears: Sequence[QuantizedLinear]) -> QuantizedLinear:
        """Return the outputs of several linears as one linear. Weights of equal layouts become one."""
        parts = [part for linear in linears for part in linear.parts]
        if len({part.layout for part in parts}) == 1 and all(part.is_full for part in parts):
            parts = [PackedCodes.joined(parts)]
        biases = [linear.bias for linear in linears if linear.bias is not None]
        assert len(biases) in (0, len(linears)), "linears that are joined have all a bias or none"
        return QuantizedLinear(parts, torch.cat(biases) if biases else None)

    @property
    def layouts(self) -> list[Layout]:
        return [part.layout for part in self.parts]

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts) + (0 if self.bias is None else self.bias.numel() * 4)

    def forward(self, rows: Tensor) -> Tensor:
        flat = rows.detach().reshape(-1, self.columns_in).contiguous()
        out = torch.empty(len(flat), self.columns_out)
        self._multiply(flat, out)
        return out.view(*rows.shape[:-1], self.columns_out)

    def into(self, rows: Tensor, out: Buffer) -> np.ndarray:
        """Return the product of rows [m, K], written to `out` if that has as many rows."""
        if len(out.array) != len(rows):
            made: Tensor = self(rows)
            return made.numpy()
        self._multiply(rows, out.tensor[: len(rows)])
        return out.array

    def _multiply(self, rows: Tensor, out: Tensor) -> None:
        first, product = 0, kernels("layer.code_products").product
        for part in self.parts:
            product(rows, part, out[:, first : first + part.outputs])
            first += part.outputs
        if self.bias is not None:
            out += self.bias

    def stock(self, columns: slice = slice(None)) -> nn.Linear:
        """Return the linear with dequantised weights, or some of its outputs, as a copy that can be trained."""
        weight = torch.cat([part.dequantised() for part in self.parts])
        return plain_linear(weight[columns], None if self.bias is None else self.bias[columns])

    def selected(self, columns: Tensor) -> QuantizedLinear:
        """Return a copy of some of its outputs."""
        (part,) = self.parts
        few = PackedCodes.of(part.codes(columns), part.layout.half)
        return QuantizedLinear([few], None if self.bias is None else self.bias[columns])


class QuantizedEmbedding(nn.Module):
    """An embedding whose rows are dequantised when they are read. Gemma's is scaled."""

    def __init__(self, codes: PackedCodes, like: nn.Embedding) -> None:
        """`like`: the embedding that it replaces, whose weight is dropped."""
        super().__init__()
        self.codes, self.factor = codes, getattr(like, "embed_scale", None)
        like.weight = nn.Parameter(like.weight.to("meta"), requires_grad=False)
        self._like = (like,)  # in a tuple, so that it is no module of the model

    @staticmethod
    def replaces(module: nn.Module) -> bool:
        """Whether an embedding is one of torch, or one of torch whose rows are multiplied by its `embed_scale`."""
        return type(module) is nn.Embedding or type(module).__name__.endswith("TextScaledWordEmbedding")

    def forward(self, tokens: Tensor) -> Tensor:
        rows = self.codes.rows(tokens.flatten()).view(*tokens.shape, -1)
        return rows if self.factor is None else rows * self.factor

    def stock(self) -> nn.Embedding:
        """Return the embedding with dequantised weights."""
        whole = copy.deepcopy(self._like[0])
        whole.weight = nn.Parameter(self.codes.dequantised(), requires_grad=False)
        return whole


def is_quantised(model: nn.Module) -> bool:
    """Return whether some of a model's linears are of codes."""
    return any(isinstance(module, QuantizedLinear) for module in model.modules())


def cpu_kernels(name: str) -> ModuleType:
    """Import a module of loops, after setting where their machine code is kept: some are compiled on import."""
    compiled: Any = kernels("layer.compiled")
    compiled.fallback_folder = place() / "numba"
    return kernels(name)


def fitted(codes: PackedCodes) -> PackedCodes:
    """Return codes in a layout that this CPU has an instruction for."""
    half = cpu_kernels("layer.code_products").form_of_this_cpu().half
    return codes if half or not codes.layout.half else codes.without_half()


def quantise(model: Any, bits: int) -> None:
    """Round the weights of a float32 model's linears to codes, and those of its head and embedding to eight bits."""
    linears = {name: module for name, module in model.named_modules() if is_plain_linear(module)}
    few = [name for name, linear in linears.items() if linear.in_features % GROUP]
    if len(few) == len(linears):
        raise InputError(f"the model has no linear with a multiple of {GROUP} inputs; load it without quantization")
    if few:
        _warn(f"{len(few)} linears stay in float32, {few[0]} first: their inputs are no multiple of {GROUP}")
    if any(parameter.dim() == 3 for parameter in model.parameters()):
        _warn("the experts of a mixture stay in float32: only linears are quantised")
    if any(isinstance(module, Conv1D) for module in model.modules()):
        _warn(f"the layers of a {model.config.model_type} stay in float32: its products are no linears")
    head, embedding = model.lm_head, model.get_input_embeddings()
    tied = is_plain_linear(head) and head.weight is embedding.weight
    for name in linears.keys() - set(few):
        linear = linears.pop(name)
        codes = _rounded(linear.weight, HEAD_BITS if linear is head else bits)
        bias = None if linear.bias is None else linear.bias.detach()
        model.set_submodule(name, QuantizedLinear([codes], bias))
    if QuantizedEmbedding.replaces(embedding) and embedding.weight.shape[1] % GROUP == 0:
        own = isinstance(model.lm_head, QuantizedLinear) and tied
        codes = model.lm_head.parts[0] if own else _rounded(embedding.weight, HEAD_BITS)
        model.set_input_embeddings(QuantizedEmbedding(codes, embedding))


def _warn(message: str) -> None:
    warnings.warn(message, ForewordWarning, stacklevel=3)


def _rounded(weight: Tensor, bits: int) -> PackedCodes:
    return fitted(PackedCodes.of(quantised(weight.detach(), bits, GROUP)))

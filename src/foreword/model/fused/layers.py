"""Choose fused layers for a model whose linears were rebuilt: `cpu.py` and `cuda.py` compute them in a few calls.

Both cover pre-norm layers with rotary positions and SiLU, with or without windows, biases, and norms on q and k: families
that families.py marks as fused, if `_is_known` accepts their layers. Any other layer runs as transformers wrote it, and so
does every layer on a CPU without Numba.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Protocol

from torch import Tensor, nn

from foreword.model.attention import KERNEL_WIDTHS, LayerPass
from foreword.model.fused.cpu import CpuLayer, WorkspaceMemory
from foreword.model.fused.cuda import CudaLayer
from foreword.model.linears import FUSED, JointLinear, PackedLinear, is_plain_norm, joint
from foreword.model.plain_linears import is_plain_linear


class FusedLayer(Protocol):
    """A layer, and its two halves alone for passes that leave out the other one."""

    def __call__(self, hidden: Tensor, positions: tuple[Tensor, Tensor], view: LayerPass) -> Tensor: ...

    def attention_half(self, hidden: Tensor, positions: tuple[Tensor, Tensor], view: LayerPass) -> Tensor: ...

    def mlp_half(self, hidden: Tensor, view: LayerPass) -> Tensor: ...


def fused_layers(layers: nn.ModuleList) -> list[FusedLayer] | None:
    """Return the fused layers, or None if the layers were not rebuilt or are of an unknown kind."""
    if not layers or not all(map(_is_known, layers)):
        return None
    first: Any = layers[0]
    product = joint(first.self_attn, FUSED[0])
    if isinstance(product, JointLinear) and first.self_attn.head_dim in KERNEL_WIDTHS:
        return _cuda_layers(layers)
    if isinstance(product, PackedLinear) and find_spec("numba") is not None:
        memory = WorkspaceMemory()
        return [CpuLayer(layer, memory) for layer in layers]
    return None


def _cuda_layers(layers: nn.ModuleList) -> list[FusedLayer]:
    """Build the layers from the last to the first, since each has to know the next one."""
    found: list[CudaLayer] = []
    for layer in reversed(layers):
        found.append(CudaLayer(layer, found[-1] if found else None))
    return [*reversed(found)]


def _is_known(layer: Any) -> bool:
    """Whether the fused layers compute what this layer does."""
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    single = [getattr(attention, "o_proj", None), getattr(mlp, "down_proj", None)]
    norms = [getattr(layer, name, None) for name in ("input_layernorm", "post_attention_layernorm")]
    inner = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    return (
        all(joint(part, names) is not None for part, names in zip((attention, mlp), FUSED, strict=True))
        and all(isinstance(part, PackedLinear) or is_plain_linear(part) for part in single)
        and all(map(is_plain_norm, norms))
        and (inner == [None, None] or all(_is_per_head(norm, attention) for norm in inner))
        and type(getattr(mlp, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")
    )


def _is_per_head(norm: Any, attention: Any) -> bool:
    return is_plain_norm(norm) and norm.weight.shape == (attention.head_dim,)

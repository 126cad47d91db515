"""Choose fused layers for a model whose linears were rebuilt: `cpu.py` and `cuda.py` compute them in a few calls.

Both cover pre-norm layers with rotary positions and SiLU, with or without windows, biases, and norms on q and k: families
that families.py marks as fused, if `_is_known` accepts their layers. Any other layer runs as transformers wrote it, and so
does every layer on a CPU without Numba.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Protocol

from torch import Tensor, nn

from foreword.core.needs import HalfKind
from foreword.model.attention import KERNEL_WIDTHS, LayerPass
from foreword.model.fused.cpu import CpuLayer, WorkspaceMemory
from foreword.model.fused.cuda import CudaAttention, CudaLayer
from foreword.model.linears import FUSED, JointLinear, PackedLinear, is_plain_norm, joint
from foreword.model.plain_linears import is_plain_linear
from foreword.model.quantised_linears import QuantizedLinear
from foreword.model.summed_linear import SummedLinear


class FusedLayer(Protocol):
    def __call__(self, hidden: Tensor, positions: tuple[Tensor, Tensor], view: LayerPass, half: HalfKind | None) -> Tensor:
        """Run rows [b, n, H] through the layer, or through one half of it. Their keys and values are stored in the view's
        cache, unless attention is left out."""


def fused_layers(layers: nn.ModuleList) -> list[FusedLayer] | None:
    """Return the fused layers, or None if the layers were not rebuilt or are of an unknown kind."""
    if not layers or not all(map(_is_known, layers)):
        return None
    first: Any = layers[0]
    product = joint(first.self_attn, FUSED[0])
    if isinstance(product, JointLinear) and first.self_attn.head_dim in KERNEL_WIDTHS:
        return _cuda_layers(layers)
    if isinstance(product, PackedLinear | QuantizedLinear) and hasattr(first, "mlp") and find_spec("numba") is not None:
        memory = WorkspaceMemory()
        return [CpuLayer(layer, memory) for layer in layers]
    return None


def _cuda_layers(layers: nn.ModuleList) -> list[FusedLayer]:
    """Build the layers from the last to the first, since each has to know the next one."""
    if not hasattr(layers[0], "mlp"):
        return [CudaAttention(layer) for layer in layers]
    found: list[CudaLayer] = []
    for layer in reversed(layers):
        found.append(CudaLayer(layer, found[-1] if found else None))
    return [*reversed(found)]


def _is_known(layer: Any) -> bool:
    """Whether the fused layers compute what this layer does."""
    attention = getattr(layer, "self_attn", None)
    inner = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    return (
        _is_known_half(attention, FUSED[0], "o_proj", getattr(layer, "input_layernorm", None))
        and (inner == [None, None] or all(_is_per_head(norm, attention) for norm in inner))
        and (not hasattr(layer, "mlp") or _is_known_mlp(layer))
    )


def _is_known_mlp(layer: Any) -> bool:
    known = _is_known_half(layer.mlp, FUSED[1], "down_proj", getattr(layer, "post_attention_layernorm", None))
    return known and type(getattr(layer.mlp, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")


def _is_known_half(half: Any, first: tuple[str, ...], last: str, norm: Any) -> bool:
    """Whether a half-layer is a plain norm, one product for the linears `first`, and a linear `last` of a kind of ours."""
    part = getattr(half, last, None)
    part = part.part if isinstance(part, SummedLinear) else part
    known = isinstance(part, PackedLinear | QuantizedLinear) or is_plain_linear(part)
    return joint(half, first) is not None and known and is_plain_norm(norm)


def _is_per_head(norm: Any, attention: Any) -> bool:
    return is_plain_norm(norm) and norm.weight.shape == (attention.head_dim,)

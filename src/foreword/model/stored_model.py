"""Load a folder of codes (`hub/stored.py`) as a transformers model, without ever holding its weights as floats.

In: the folder and its config. Out: the model, with quantised linears and embedding, or with everything dequantised. It is
built without memory for its parameters; each tensor then takes its place. A tensor that is missing or does not fit is
refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import get_ident
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoModelForCausalLM, PreTrainedModel

from foreword.errors import ModelCorrupt
from foreword.hub.stored import tensors
from foreword.model.quantised_linears import QuantizedEmbedding, QuantizedLinear, fitted
from foreword.ops.group_codes import PackedCodes

AGAIN = "delete the folder, and the next load makes it again"


def load_stored(folder: Path, config: Any, attention: str, dtype: torch.dtype, dequantised: bool) -> PreTrainedModel:
    """Load the model in `folder`, with its codes or with all weights dequantised to `dtype`."""
    del config.quantization_config  # it is for other programs
    with _without_memory():
        model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    biases: dict[str, Tensor] = {}
    for name, tensor in tensors(folder):
        if isinstance(tensor, PackedCodes) and not dequantised:
            _place_codes(model, name, fitted(tensor), folder)
            continue
        whole = tensor.dequantised() if isinstance(tensor, PackedCodes) else tensor
        if name.endswith(".bias"):
            biases[name] = whole.to(dtype)  # placed after its linear, which may become a quantised one
        else:
            _place(model, name, whole.to(dtype), folder)
    for name, bias in biases.items():
        _place_bias(model, name, bias, folder)
    if config.tie_word_embeddings:
        _tie(model)
    if missing := [name for name, parameter in model.named_parameters() if parameter.is_meta]:
        raise ModelCorrupt(f"the weights in {folder} lack {len(missing)} tensors, {missing[0]} first; {AGAIN}")
    loaded: PreTrainedModel = model
    return loaded


@contextmanager
def _without_memory() -> Iterator[None]:
    """Build modules in this thread whose parameters have shapes alone. Buffers, such as rotary frequencies, are real."""
    thread = get_ident()

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or get_ident() != thread:
            return None
        return nn.Parameter(parameter.to("meta"), requires_grad=False)

    # torch takes what a hook returns in place of the parameter, but declares that it returns nothing
    hook = register_module_parameter_registration_hook(cast(Any, on_meta))
    try:
        yield
    finally:
        hook.remove()


def _place_codes(model: Any, name: str, codes: PackedCodes, folder: Path) -> None:
    """Put a weight in place of a linear or an embedding. An embedding of an unknown class is dequantised."""
    path = name.removesuffix(".weight")
    module = _checked(model, name, (codes.outputs, codes.inputs), folder)
    if type(module) is nn.Linear:
        model.set_submodule(path, QuantizedLinear([codes], None))
        return
    if module is model.get_input_embeddings() and model.config.tie_word_embeddings:
        model.lm_head = QuantizedLinear([codes], None)
    if QuantizedEmbedding.replaces(module):
        model.set_submodule(path, QuantizedEmbedding(codes, module))
    else:
        _place(model, name, codes.dequantised(), folder)


def _place(model: Any, name: str, tensor: Tensor, folder: Path) -> None:
    module = _checked(model, name, tuple(tensor.shape), folder)
    setattr(module, name.rpartition(".")[2], nn.Parameter(tensor, requires_grad=False))


def _place_bias(model: Any, name: str, bias: Tensor, folder: Path) -> None:
    module = model.get_submodule(name.removesuffix(".bias"))
    if isinstance(module, QuantizedLinear):
        module.bias = bias
    else:
        _place(model, name, bias, folder)


def _checked(model: Any, name: str, shape: tuple[int, ...], folder: Path) -> Any:
    """Return the module that a tensor belongs to, or refuse a tensor without a place."""
    path, _, own = name.rpartition(".")
    try:
        module = model.get_submodule(path)
        expected = tuple(getattr(module, own).shape)
    except AttributeError as error:
        raise ModelCorrupt(f"{folder} holds a tensor {name}, which the model does not have; {AGAIN}") from error
    if shape != expected:
        raise ModelCorrupt(f"{folder}: {name} has shape {shape}, but needs {expected} by config.json; {AGAIN}")
    return module


def _tie(model: Any) -> None:
    """Give the head the weights of the embedding, if it has none yet."""
    embedding = model.get_input_embeddings()
    if type(model.lm_head) is nn.Linear and not isinstance(embedding, QuantizedEmbedding):
        model.lm_head.weight = embedding.weight

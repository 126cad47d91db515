"""Load a transformers model from a folder, or check one that the caller hands over.

Models that we load ourselves may be rebuilt for speed (packed linears on the CPU, fused ones on CUDA), and quantised. A
model that the caller hands over is only checked. What is not supported is refused here, by name.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from foreword.errors import ForewordWarning, InputError, ModelCorrupt, ModelUnsupported
from foreword.files import read_json
from foreword.hub.resolve import is_adapter
from foreword.hub.stored import WEIGHTS as WEIGHTS_FILE
from foreword.hub.stored import is_stored
from foreword.model import linears
from foreword.model.adapters import base_folder, merged, refuse_virtual_tokens
from foreword.model.families import family_of
from foreword.model.linear_check import check_linears, unknown_linears
from foreword.model.parameter_limit import TooManyParameters, at_most_parameters
from foreword.model.quantised_linears import quantise
from foreword.model.sharding import check_divisible, options_for, remember_shapes, take_over
from foreword.model.stored_model import AGAIN, load_stored
from foreword.ops.device import has_code_products
from foreword.ranks.group import ALONE, Ranks

MOST_LAYERS = 10_000
BITS = {"q4": 4, "q8": 8}
QUANTIZATIONS = ("stored", *BITS)
PARAMETERS_PER_BYTE = 4  # of codes: two, and a tied head is counted twice while it is built
EXACT_EXPERTS = "eager"  # how transformers computes experts in float64; its faster ways refuse that
WEIGHTS = (".safetensors", ".bin")
LAYER = re.compile(r"(?:\w+\.)?(?:decoder\.)?(?:layers|h)\.(\d+)\.")  # the beginning of the name of a tensor in a layer
DEQUANTISED = "mxfp4"  # the one kind of quantised folders that transformers dequantises, on any device
TEXT_PARTS = {
    "gemma3": {"^language_model.model": "model", "^model.language_model": "model", "^language_model.lm_head": "lm_head"}
}
"""Types of models that also read images, and how their checkpoints name what belongs to the text model."""
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(requested: str | torch.device | None) -> torch.device:
    """Return the requested device, checked, or by default CUDA if there is a GPU."""
    if requested is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(requested)
    except RuntimeError as error:
        raise InputError(f"device is {requested!r}; use 'cpu' or 'cuda'") from error
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"device is {requested!r}; Foreword runs on 'cpu' and 'cuda'")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError("device is 'cuda', but torch sees no CUDA device here; use device='cpu'")
    return device


def choose_dtype(requested: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """Return the requested dtype, checked. The default on the CPU is float32, in which outputs equal those of plain decoding
    token for token; on a GPU it is bfloat16, for which GPUs are built."""
    if requested is None:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if isinstance(requested, str):
        requested = DTYPES.get(requested.removeprefix("torch."), requested)
    if requested not in DTYPES.values():
        raise InputError(f"dtype is {requested!r}; choose from {', '.join(DTYPES)}")
    assert isinstance(requested, torch.dtype)
    return requested


def check_quantization(quantization: str | None, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse a quantisation that does not run here."""
    if quantization is None:
        return
    if quantization not in QUANTIZATIONS:
        raise InputError(f"quantization is {quantization!r}; choose from {', '.join(QUANTIZATIONS)}, or leave it out")
    if not has_code_products(device, dtype):
        found = f"the device is {device.type} and dtype {str(dtype).removeprefix('torch.')}"
        raise InputError(
            f"quantization={quantization!r} runs on a CPU in float32, but {found}; leave quantization out (a GGUF file is "
            "dequantised then), or use device='cpu'"
        )
    if find_spec("numba") is None:
        raise InputError(
            f"quantization={quantization!r} needs Numba, which is not installed; run `pip install 'foreword[cpu]'`"
        )


def load_weights(
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    rebuild: bool = True,
    quantization: str | None = None,
    ranks: Ranks = ALONE,
) -> PreTrainedModel:
    """Load the model in `folder`, quantised if asked for, and rebuild it for speed unless `rebuild` is False. `ranks`: over
    which it is divided."""
    check_quantization(quantization, device, dtype)
    if quantization == "stored":
        config = read_config(folder)
        model = _stored(folder, config, dtype, dequantised=False, device=device)
    elif ranks.sums:
        model = _divided(folder, device, dtype, rebuild, ranks)
    else:
        model = load_stock(folder, device, dtype)
    if quantization in BITS:
        quantise(model, BITS[quantization])
    if rebuild:
        linears.rebuild(model, device, dtype)
    return model


def check_division(folder: Path, ranks: int) -> None:
    """Refuse a model that cannot be divided over that many ranks."""
    if is_adapter(folder) or is_stored(folder):
        what = "a LoRA adapter is merged" if is_adapter(folder) else "a GGUF file is converted"
        raise InputError(f"tp is {ranks}, but {folder} cannot be read in parts, since {what}; give a folder of safetensors")
    config = read_config(folder)
    check_divisible(family_of(config), config, ranks)


def _divided(folder: Path, device: torch.device, dtype: torch.dtype, rebuild: bool, ranks: Ranks) -> PreTrainedModel:
    """Load this rank's part of the model in `folder`."""
    config = read_config(folder)
    family = family_of(config)
    exact = {"experts_implementation": EXACT_EXPERTS} if family.has_experts and dtype == torch.float64 else {}
    options = exact | options_for(config, ranks)
    model: PreTrainedModel = read_weights(folder, config, dtype, family.stock_attention, options).to(device)
    if ranks.count > 1:
        remember_shapes(model)
    if rebuild and linears.rebuilds(device, dtype):
        take_over(model, ranks)
    return model


def load_stock(folder: Path, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Load the model in `folder` as transformers makes it. For an adapter's folder that is its base model with the adapter
    merged."""
    if is_adapter(folder):
        base = load_stock(base_folder(folder), torch.device("cpu"), torch.float32)
        whole: Any = merged(base, folder)
        return whole.to(device, dtype)
    config = read_config(folder)
    if is_stored(folder):
        return _stored(folder, config, dtype, dequantised=True, device=device)
    family = family_of(config)
    exact = {"experts_implementation": EXACT_EXPERTS} if family.has_experts and dtype == torch.float64 else {}
    return read_weights(folder, config, dtype, family.stock_attention, exact).to(device)


def read_weights(
    folder: Path, config: Any, dtype: torch.dtype, attention: str | None, options: dict[str, Any] | None = None
) -> Any:
    """Return the model of transformers in a folder, whatever its family, or raise an error if a tensor cannot be read.
    `options`: further ones of transformers."""
    held = sum(file.stat().st_size for file in folder.iterdir() if file.suffix in WEIGHTS and file.is_file())
    if quantisation_of(config) == DEQUANTISED:
        held *= 2  # two weights in a byte
        _dequantise(config, folder, held * dtype.itemsize)
    _refuse_quantised(
        config,
        "and `load` reads no folders of that kind; give one in float32, bfloat16 or float16, or load this one with "
        "transformers and hand it to `foreword.wrap`, which takes models whose weights alone are quantised",
    )
    options = dict(options or {})
    if (whole := read_json(folder / "config.json").get("model_type")) in TEXT_PARTS and whole != config.model_type:
        options["key_mapping"] = TEXT_PARTS[whole]
        warnings.warn(
            f"{folder} holds a model of type {whole}, which also reads images; its text model is loaded, and its vision "
            "part is left out",
            ForewordWarning,
            stacklevel=2,
        )
    try:
        with without_progress_bars(), at_most_parameters(held):  # a parameter takes at least a byte
            model, report = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation=attention,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, with their names
                **options,
            )
    except TooManyParameters as error:
        problem = f"the weights in {folder} cannot be read: config.json asks for more than their {held} bytes can hold"
        raise ModelCorrupt(f"{problem}; fetch or save the model again") from error
    except Exception as error:  # safetensors, json and torch each raise errors of their own for a damaged file
        raise ModelCorrupt(f"the weights in {folder} cannot be read: {error}; fetch or save the model again") from error
    if mismatched := sorted(report["mismatched_keys"]):
        name, stored, asked = mismatched[0]
        raise ModelCorrupt(
            f"the weights in {folder} do not fit config.json: {name} has shape {_shape(stored)}, and config.json asks for "
            f"{_shape(asked)} (of {len(mismatched)} such tensors); give the weights their own config.json"
        )
    if missing := sorted(report["missing_keys"]):  # transformers initialises them at random and only warns
        raise ModelCorrupt(
            f"the weights in {folder} lack {len(missing)} tensors, {missing[0]} first; fetch or save the model again"
        )
    if more := _layers_beyond(config, report["unexpected_keys"]):  # transformers leaves them out
        raise ModelCorrupt(
            f"the weights in {folder} have a layer {more[0]}, and config.json asks for {config.num_hidden_layers} layers "
            "(num_hidden_layers), counted from 0; give the weights their own config.json"
        )
    return model.eval().requires_grad_(False)


def _layers_beyond(config: Any, names: Iterable[str]) -> list[int]:
    """Return the layers among tensors without a place, except those that predict further tokens."""
    found = {int(match[1]) for name in names if (match := LAYER.match(name))}
    layers = getattr(config, "num_hidden_layers", None)
    known = 0 if layers is None else layers + (getattr(config, "num_nextn_predict_layers", None) or 0)
    return sorted(layer for layer in found if known and layer >= known)


def _shape(sizes: Any) -> str:
    return "x".join(map(str, sizes))


def _stored(folder: Path, config: Any, dtype: torch.dtype, dequantised: bool, device: torch.device) -> PreTrainedModel:
    """Load a folder of codes, as they are or dequantised."""
    attention, held = family_of(config).stock_attention, (folder / WEIGHTS_FILE).stat().st_size
    try:
        with at_most_parameters(PARAMETERS_PER_BYTE * held):
            model: Any = load_stored(folder, config, attention, dtype, dequantised)
    except ModelCorrupt:
        raise
    except TooManyParameters as error:
        problem = f"the weights in {folder} cannot be read: config.json asks for more than their {held} bytes can hold"
        raise ModelCorrupt(f"{problem}; {AGAIN}") from error
    except Exception as error:  # as in `load_stock`
        raise ModelCorrupt(f"the weights in {folder} cannot be read: {error}; {AGAIN}") from error
    whole: PreTrainedModel = model.eval().requires_grad_(False).to(device)
    return whole


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Hide the progress bars of transformers inside this block, and its report on tensors that are missing or too many: what
    matters of it becomes an error with names."""
    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()


def read_config(folder: Path) -> Any:
    try:
        layers = read_json(folder / "config.json").get("num_hidden_layers")
        if isinstance(layers, int) and layers > MOST_LAYERS:  # some configs make a list with an entry per layer
            raise ValueError(f"it asks for {layers} layers")
        return _text_part(AutoConfig.from_pretrained(folder, local_files_only=True))
    except Exception as error:  # an unknown model type and a damaged file raise ValueErrors and others
        raise ModelUnsupported(f"{folder}/config.json cannot be used: {error}") from error


def _text_part(config: Any) -> Any:
    """Return the config of the text model, if Foreword can load it from a checkpoint that holds more."""
    if config.model_type not in TEXT_PARTS:
        return config
    text = config.text_config
    text.name_or_path = config.name_or_path
    if (quantised := getattr(config, "quantization_config", None)) is not None:
        text.quantization_config = quantised
    return text


def check_wrapped(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model inside what the caller gave, or raise an error that says why it cannot be used."""
    model = _without_adapter(model)
    if not isinstance(model, PreTrainedModel):
        raise ModelUnsupported(
            f"wrap takes a transformers causal language model, got {type(model).__module__}.{type(model).__name__}"
        )
    refuse_several_devices(model)
    family = family_of(model.config)
    if not hasattr(model, "lm_head"):
        raise ModelUnsupported(f"{type(model).__name__} has no language-model head; load it with AutoModelForCausalLM")
    if family.softcap(model.config) and model.config._attn_implementation == "sdpa":  # transformers ignores the cap there
        raise ModelUnsupported(
            f"{family.name}: the model's attention is 'sdpa', which does not cap scores as its config asks "
            f"({family.softcap(model.config)}); load it with attn_implementation='eager'"
        )
    if family.has_experts and model.dtype == torch.float64 and model.config._experts_implementation != EXACT_EXPERTS:
        raise ModelUnsupported(
            f"{family.name}: the model is in float64, which transformers' {model.config._experts_implementation!r} experts "
            f"do not compute; load it with experts_implementation={EXACT_EXPERTS!r}"
        )
    _check_linears(model)
    return model


def _without_adapter(model: nn.Module) -> nn.Module:
    """Return the model inside a peft model, with its weight adapters active. One that adds virtual tokens is refused."""
    adapters = getattr(model, "peft_config", None)
    if adapters is None or not hasattr(model, "get_base_model"):
        return model
    for name, adapter in adapters.items():
        refuse_virtual_tokens(name, adapter)
    return model.get_base_model()  # type: ignore[operator]


def quantisation_of(config: Any) -> str | None:
    """Return how the config says that the weights are quantised."""
    quantised = getattr(config, "quantization_config", None)
    if quantised is None:
        return None
    fields = quantised if isinstance(quantised, dict) else vars(quantised)
    # The first quantised folders named no method: there was only bitsandbytes.
    method = fields.get("quant_method") or "bitsandbytes"
    return str(getattr(method, "value", method))


def _dequantise(config: Any, folder: Path, size: int) -> None:
    """Let transformers dequantise the weights while it reads them, and say what that takes."""
    config.quantization_config = {**config.quantization_config, "dequantize": True}
    warnings.warn(
        f"{folder} holds {DEQUANTISED} weights, which are dequantised while they are read: up to {size / 2**30:.1f} GiB",
        ForewordWarning,
        stacklevel=3,
    )


def _refuse_quantised(config: Any, what_to_do: str) -> None:
    found = quantisation_of(config)
    if found not in (None, DEQUANTISED):
        raise ModelUnsupported(f"the model is quantised ({found}), {what_to_do}")


def _check_linears(model: PreTrainedModel) -> None:
    """Check linears that another library quantised by running them: neither config nor class says how they treat rows."""
    unknown = unknown_linears(model)
    if not unknown:
        _refuse_quantised(
            model.config,
            "according to its config, but none of its linears can be checked; set config.quantization_config to None if the "
            "weights are not quantised, or load it in float32, bfloat16 or float16",
        )
    check_linears(model, unknown)


def refuse_several_devices(model: PreTrainedModel) -> None:
    """Refuse a model on several devices: its rows and its cache must be on the same one."""
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    places |= {str(parameter.device) for parameter in model.parameters()}
    used = {"cuda:" + place if place.isdigit() else place for place in places}
    used = {"cuda:0" if place == "cuda" else place for place in used}
    if len(used) > 1 or used & {"meta", "disk"}:
        raise ModelUnsupported(
            f"the model's weights lie on {', '.join(sorted(used))}; Foreword runs a model on one device: "
            "load it with device_map={'': 'cuda:0'} or on the CPU"
        )

"""The same model at the cost of a larger one: every hidden coordinate, head and MLP unit r times, the function unchanged.

In: a model as transformers makes it. Out: one r times as wide that answers the same logits, so that speed can be measured at
the size that people run, on real text with real acceptance. The default model grown 8 times has 7.0 B parameters. The wide
weights are made one by one where the model lies and in its dtype; `core/widening.py` has the rule, by which drafters widen
too. Figures of a grown model are always labelled so.
"""

from __future__ import annotations

import copy
import math
import os
import re
from typing import Any

import torch
from torch import nn

from foreword.api import LLM
from foreword.core.widening import NORM, check_times, layers_at, per_token, widened
from foreword.errors import InputError, ModelUnsupported
from foreword.methods.wanted import Wanted
from foreword.model import pack
from foreword.model.fingerprint import Fingerprint
from foreword.model.hub import resolve
from foreword.model.loading import choose_device, choose_dtype, load_stock
from foreword.model.model import Grown, Model
from foreword.text import Tokenizer

GROWS = ("llama", "mistral", "qwen2")
"""Families whose layers are those of `core/widening.py`, and whose norms all stand in the stream, with one epsilon."""

WIDE = {**layers_at("model.layers"), "model.norm": NORM}
PER_TOKEN = ("model.embed_tokens.weight", "lm_head.weight")
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


def grow(hf: Any, times: int) -> Any:
    """A causal language model of transformers, `times` as wide, on the same device and in the same dtype."""
    check_times(times)
    if hf.config.model_type not in GROWS:
        raise ModelUnsupported(f"models of type {hf.config.model_type!r} cannot be grown; those of {', '.join(GROWS)} can")
    if not all(type(linear) is nn.Linear for linear in (hf.lm_head, hf.model.layers[0].self_attn.q_proj)):
        raise ModelUnsupported("only a model with the linears of transformers can be grown; grow it before it is rebuilt")
    with torch.device("meta"):
        wide = type(hf)(_wide_config(hf.config, times))
    for name, weight in hf.named_parameters():
        place, _, leaf = name.rpartition(".")
        setattr(wide.get_submodule(place), leaf, nn.Parameter(_wide(name, weight.detach(), times, hf), requires_grad=False))
    if hf.lm_head.weight is hf.model.embed_tokens.weight:
        wide.lm_head.weight = wide.model.embed_tokens.weight
    wide.model.rotary_emb = copy.deepcopy(hf.model.rotary_emb)  # heads are as wide as before
    wide.generation_config = copy.deepcopy(hf.generation_config)
    return wide.eval()


def _wide_config(config: Any, times: int) -> Any:
    wide = copy.deepcopy(config)
    for size in SIZES:
        setattr(wide, size, getattr(config, size) * times)
    wide.rms_norm_eps = config.rms_norm_eps / times**2  # the stream is divided by `times`, and its squares twice
    wide.name_or_path = ""  # the weights in that folder are not these
    return wide


def _wide(name: str, weight: torch.Tensor, times: int, hf: Any) -> torch.Tensor:
    return per_token(weight, times) if name in PER_TOKEN else widened(name, weight, WIDE, times, hf.config.hidden_size)


SIZE = re.compile(r"(\d+(?:\.\d+)?)b", re.IGNORECASE)


def times_for(wanted: int | str, hf: Any) -> int:
    """`8`, or a size such as `7b`: the power of two that brings the model nearest to so many billions of parameters."""
    size = SIZE.fullmatch(str(wanted))
    if size is None:
        return int(wanted)
    weights = sum(weight.numel() for weight in hf.parameters())
    per_word = sum(weight.numel() for name, weight in hf.named_parameters() if name in PER_TOKEN)  # wider one way only

    def distance(times: int) -> float:
        return abs(math.log(((weights - per_word) * times**2 + per_word * times) / (float(size[1]) * 1e9)))

    return min((2**power for power in range(1, 8)), key=distance)


def load_grown(
    model: str | os.PathLike[str] | None,
    times: int | str,
    *,
    slots: int = 1,
    max_context: int | None = None,
    device: str | None = None,
    dtype: str | None = None,
    threads: int | None = None,
    compile: bool = True,
    graph: bool = True,
) -> tuple[LLM, LLM]:
    """A model as it is and the same grown, both decoding plainly; the options are those of `foreword.load`.

    `times` may be a size, as `times_for` takes it. The grown one answers to the fingerprint of its original, so that it
    takes the original's drafters.
    """
    if SIZE.fullmatch(str(times)) is None:
        check_times(int(times))
    if threads is not None:
        if threads < 1:
            raise InputError(f"threads is {threads}; it must be 1 or more")
        torch.set_num_threads(threads)
    place, folder = choose_device(device), resolve(model)
    precision = choose_dtype(dtype, place)
    hf = load_stock(folder, place, precision)
    times = times_for(times, hf)
    wide = grow(hf, times)
    parameters = sum(weight.numel() for weight in wide.parameters())  # a rebuilt model hides some of them
    if compile:
        for one in (hf, wide):
            pack.rebuild(one, place, precision)
    original = Model(hf, str(model) if model is not None else folder.name)
    grown = Model(wide, f"{original.name}, grown r={times}", grown=Grown(times, Fingerprint.of(original), parameters))
    words = Tokenizer.load(folder)
    first, second = (LLM(one, words, Wanted.of("plain"), slots, max_context, graph) for one in (original, grown))
    return first, second

"""Load a model twice: as it is, and widened (`model/widened_model.py`): the same outputs at the cost of a larger model.

In: the name of a model. Out: both. So speed can be measured at a common model size, on real prompts with real acceptance.
The default model widened 8 times has 7.0 B parameters. Drafters of the original serve the widened model. Its figures are
labelled "grown r=R", as in published results.
"""

from __future__ import annotations

import math
import os
import re
from typing import Any

import torch

from foreword.api import LLM
from foreword.drafters.resolve import DrafterRequest
from foreword.errors import InputError
from foreword.hub.resolve import resolve
from foreword.model import linears as pack
from foreword.model.adapters import tokenizer_folder
from foreword.model.fingerprint import Fingerprint
from foreword.model.loading import choose_device, choose_dtype, load_stock
from foreword.model.model import Model, WidenedFrom
from foreword.model.widened_model import PER_TOKEN, widen_model
from foreword.model.widening import check_times
from foreword.text import Tokenizer

SIZE = re.compile(r"(\d+(?:\.\d+)?)b", re.IGNORECASE)


def times_for(size: int | str, hf: Any) -> int:
    """Return the factor for `8`, or for a size such as `7b`: the power of two that comes nearest."""
    billions = SIZE.fullmatch(str(size))
    if billions is None:
        return int(size)
    weights = sum(weight.numel() for weight in hf.parameters())
    per_token = sum(
        weight.numel() for name, weight in hf.named_parameters() if name in PER_TOKEN
    )  # widened in one dimension only

    def distance(times: int) -> float:
        return abs(math.log(((weights - per_token) * times**2 + per_token * times) / (float(billions[1]) * 1e9)))

    return min((2**power for power in range(1, 8)), key=distance)


def load_widened(
    model: str | os.PathLike[str] | None,
    times: int | str,
    *,
    revision: str | None = None,
    slots: int = 1,
    max_context: int | None = None,
    device: str | None = None,
    dtype: str | None = None,
    threads: int | None = None,
    fused_layers: bool = True,
    cuda_graphs: bool = True,
) -> tuple[LLM, LLM]:
    """Return a model as it is and the same model widened, both with plain decoding. Options: those of `foreword.load`.

    `times` may be a size, as in `times_for`. The widened model has the fingerprint of its original, so it takes the
    original's drafters.
    """
    if SIZE.fullmatch(str(times)) is None:
        check_times(int(times))
    if threads is not None:
        if threads < 1:
            raise InputError(f"threads is {threads}; it must be 1 or more")
        torch.set_num_threads(threads)
    place, folder = choose_device(device), resolve(model, revision)
    precision = choose_dtype(dtype, place)
    hf = load_stock(folder, place, precision)
    times = times_for(times, hf)
    wide = widen_model(hf, times)
    parameters = sum(weight.numel() for weight in wide.parameters())  # before the layers are fused, which hides some of them
    if fused_layers:
        for one in (hf, wide):
            pack.rebuild(one, place, precision)
    original = Model(hf, str(model) if model is not None else folder.name)
    widened = Model(
        wide, f"{original.name}, grown r={times}", widened_from=WidenedFrom(times, Fingerprint.of(original), parameters)
    )
    tokenizer = Tokenizer.load(tokenizer_folder(folder))
    first, second = (
        LLM.of(one, tokenizer, DrafterRequest.of("plain"), slots, max_context, cuda_graphs) for one in (original, widened)
    )
    return first, second

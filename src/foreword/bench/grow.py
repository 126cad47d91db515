"""The same model at the cost of a larger one, its function unchanged: loaded as it is, and grown (`model/width.py`).

In: the name of a model. Out: two of them that write the same text, so that speed can be measured at the size that people
run, on real text with real acceptance. The default model grown 8 times has 7.0 B parameters. Drafters of the original serve
the grown one. Figures of a grown model are always labelled so.
"""

from __future__ import annotations

import math
import os
import re
from typing import Any

import torch

from foreword.api import LLM
from foreword.core.widening import check_times
from foreword.errors import InputError
from foreword.methods.wanted import Wanted
from foreword.model import pack
from foreword.model.fingerprint import Fingerprint
from foreword.model.hub import resolve
from foreword.model.loading import choose_device, choose_dtype, load_stock
from foreword.model.model import Grown, Model
from foreword.model.width import PER_TOKEN, grow
from foreword.text import Tokenizer

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

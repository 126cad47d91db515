"""Other people's decoding of the same model, in the same process: `generate` of transformers in four ways, and llama.cpp.

In: the words of `--baselines`, NAME or NAME=PLACE. Out: contenders that write greedily, one text at a time, with the
weights, dtype, threads, prompts and stop rules of ours; those of transformers share one copy of the stock weights, and its
assistant is the draft model that ships unless another is named. llama.cpp reads a GGUF file of its own and is labelled by
its quantisation. What cannot run is refused before a model is loaded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from foreword.api import LLM
from foreword.bench.contenders import Answer, Contender, Manner, Task
from foreword.drafters.auto import fitting
from foreword.drafters.saved import as_model
from foreword.drafters.shipped import model_of, shipped
from foreword.errors import DrafterError, InputError
from foreword.hub.storage import fill_empty
from foreword.model.loading import load_stock, without_bars
from foreword.model.widened import grow

WAYS: dict[str, dict[str, Any]] = {
    "hf": {},
    "hf_static": {"cache_implementation": "static"},
    "hf_lookup": {"prompt_lookup_num_tokens": 10},
    "hf_assistant": {},
}
BASELINES = (*WAYS, "llama_cpp")
FOR_ANY_LENGTH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Kernels of attention for a cache that grows. cuDNN's, which torch prefers on an H200, are planned anew for every length
that the process has not seen yet, and a token waits for that."""
PLACES = {"hf_assistant": "the folder of a draft model", "llama_cpp": "a GGUF file"}

# The file types of GGUF, by the number that a file carries.
_FILE_TYPES = (
    "0 F32, 1 F16, 2 Q4_0, 3 Q4_1, 7 Q8_0, 8 Q5_0, 9 Q5_1, 10 Q2_K, 11 Q3_K_S, 12 Q3_K_M, 13 Q3_K_L, 14 Q4_K_S, 15 Q4_K_M, "
    "16 Q5_K_S, 17 Q5_K_M, 18 Q6_K, 32 BF16"
)
QUANTISATIONS = {int(number): name for number, name in (pair.split() for pair in _FILE_TYPES.split(", "))}


def check_baseline(words: str) -> str:
    """The words themselves, if somebody is called so and has what it needs."""
    name, equals, place = words.partition("=")
    if name not in BASELINES:
        raise InputError(f"no baseline is called {name!r}; there are: {', '.join(BASELINES)}")
    if name not in PLACES:
        if equals:
            raise InputError(f"the baseline {name} takes nothing; leave ={place} out")
        return words
    if words == "hf_assistant" and "draft_model" in shipped():
        return words
    if not place:
        raise InputError(f"the baseline {name} needs {PLACES[name]}: {name}=PLACE")
    if not (Path(place) / "config.json" if name == "hf_assistant" else Path(place)).is_file():
        raise InputError(f"the baseline {name} needs {PLACES[name]}, and {place} is none")
    if name == "llama_cpp" and find_spec("llama_cpp") is None:
        raise InputError("the baseline llama_cpp needs the package llama-cpp-python: install it, or leave llama_cpp out")
    return words


def make_baselines(asked: Sequence[str], llm: LLM, folder: Path, max_context: int) -> list[Contender]:
    """Make the baselines that were asked for, on the weights in `folder`, which are those of `llm`, widened if it is."""

    @cache
    def stock() -> Any:
        model = load_stock(folder, llm.model.device, llm.model.dtype)
        model = model if llm.model.grown is None else grow(model, llm.model.grown.times)
        model.generation_config = type(model.generation_config)()  # what a model recommends may be a penalty
        return model

    return [_baseline(check_baseline(words), llm, stock, max_context) for words in asked]


def _baseline(words: str, llm: LLM, stock: Callable[[], Any], max_context: int) -> Contender:
    name, _, place = words.partition("=")
    if name == "llama_cpp":
        return _llama_cpp(Path(place), llm, max_context)
    if name == "hf_static" and llm.model.device.type != "cuda":
        raise InputError("the baseline hf_static is compiled by transformers on a GPU only; leave it out here")
    options = dict(WAYS[name])
    if name == "hf_assistant":
        options["assistant_model"] = _assistant(Path(place), llm) if place else _shipped_assistant(llm)
    return _generate(name, stock(), llm, options)


def _assistant(folder: Path, llm: LLM) -> Any:
    model = load_stock(folder, llm.model.device, llm.model.dtype)
    if model.config.vocab_size != llm.model.vocab_size:
        raise DrafterError(
            f"hf_assistant: the draft model in {folder} has {model.config.vocab_size} tokens, {llm.model.name} has "
            f"{llm.model.vocab_size}; give a draft model of the same vocabulary"
        )
    return model


def _shipped_assistant(llm: LLM) -> Any:
    """Load the shipped draft model as transformers does. For a widened target it keeps its size."""
    if "draft_model" not in fitting(llm.model):
        raise DrafterError(
            f"hf_assistant: no draft model ships for {llm.model.name} (there is one for "
            f"{model_of(shipped()['draft_model'])}); name the folder of one: hf_assistant=FOLDER"
        )
    small = as_model(shipped()["draft_model"], llm.model)
    with TemporaryDirectory(prefix="foreword-assistant-") as place, without_bars():
        folder = Path(place) / "model"
        fill_empty(folder, small.save_pretrained)
        return load_stock(folder, llm.model.device, llm.model.dtype)


# transformers -------------------------------------------------------------------------------------------------------------


class Watch:
    """A streamer, told by `generate` of the prompt and then of what each round brought: how much, and when the first came.

    A stopping criterion will not do: some versions ask it of guesses too, before the target has seen them."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.first_s: float | None = None
        self.told: list[int] = []

    def put(self, tokens: Tensor) -> None:
        if len(self.told) == 1:
            self.first_s = time.perf_counter() - self.started
        self.told.append(tokens.numel())

    def end(self) -> None:
        pass


def _generate(name: str, model: Any, llm: LLM, options: dict[str, Any]) -> Contender:
    ends = llm.model.ends.tolist()

    @torch.inference_mode()
    def answer(task: Task, manner: Manner) -> Answer:
        watch = Watch()
        ids = torch.tensor([task.ids], device=model.device)
        with nullcontext() if name == "hf_static" else sdpa_kernel(FOR_ANY_LENGTH):
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=manner.max_new_tokens,
                do_sample=False,
                eos_token_id=ends or None,
                pad_token_id=ends[0] if ends else 0,
                streamer=watch,
                **options,
            )
        tokens = counted(out[0, ids.shape[1] :].tolist(), ends, manner)
        return Answer(tokens, per_round(watch.told[1:], len(tokens)), first_s=watch.first_s)

    def write(tasks: Sequence[Task], manner: Manner) -> list[Answer]:
        return [answer(task, manner) for task in tasks]

    def capture(tasks: Sequence[Task], manner: Manner) -> None:
        """A static cache is made as large as the first text needs, and what is compiled fits that size: longest first."""
        if name == "hf_static":
            answer(max(tasks, key=lambda task: len(task.ids)), manner)

    return Contender(name, write, capture, alone=True)


def per_round(told: Sequence[int], tokens: int) -> list[int]:
    """How many tokens each round brought, of those that count: what was cut off does not."""
    ends = [min(end, tokens) for end in accumulate(told)]
    return [after - before for before, after in zip([0, *ends], ends, strict=False) if after > before]


def counted(tokens: list[int], ends: Sequence[int], manner: Manner) -> list[int]:
    """Tokens are counted once and by us: up to the first that ends a text, that one included, and no more than asked."""
    stop = next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: min(stop + 1, manner.max_new_tokens)]


# llama.cpp ----------------------------------------------------------------------------------------------------------------


def _llama_cpp(file: Path, llm: LLM, max_context: int) -> Contender:
    from llama_cpp import Llama  # noqa: PLC0415  optional

    if llm.model.grown is not None:
        raise InputError(
            f"llama_cpp reads its own weights, and those in {file} are not widened; leave --widen or llama_cpp out"
        )
    threads = torch.get_num_threads()
    layers = -1 if llm.model.device.type == "cuda" else 0
    own = Llama(str(file), n_ctx=max_context, n_threads=threads, n_threads_batch=threads, n_gpu_layers=layers, verbose=False)
    if own.n_vocab() != llm.model.vocab_size:
        raise InputError(f"llama_cpp: {file} has {own.n_vocab()} tokens, {llm.model.name} has {llm.model.vocab_size}")
    kind = int(own.metadata.get("general.file_type", -1))
    ends = llm.model.ends.tolist()

    def answer(task: Task, manner: Manner) -> Answer:
        started, first_s, tokens = time.perf_counter(), None, []
        own.reset()  # or it would keep what it has read of this prompt before
        for token in own.generate(list(task.ids), top_k=1, temp=0.0, repeat_penalty=1.0):
            first_s = first_s or time.perf_counter() - started
            tokens.append(token)
            if token in ends or len(tokens) == manner.max_new_tokens:
                break
        return Answer(tokens, [1] * len(tokens), first_s=first_s)

    def write(tasks: Sequence[Task], manner: Manner) -> list[Answer]:
        return [answer(task, manner) for task in tasks]

    name = f"llama_cpp ({QUANTISATIONS.get(kind, f'file type {kind}')})"
    return Contender(name, write, close=getattr(own, "close", lambda: None), alone=True)

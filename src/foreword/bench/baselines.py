"""Other decoders of the same model, in the same process: `generate` of transformers in four ways, and llama.cpp.

In: the values of `--baselines`, NAME or NAME=PATH. Out: contenders that decode greedily, one request at a time, with the
weights, dtype, threads, prompts and stop rules that our methods have. Those of transformers share one copy of the stock
weights. The default assistant is the shipped draft model. llama.cpp reads its own GGUF file and is labelled by its
quantisation. A baseline that cannot run is refused before a model is loaded.
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

from foreword.api import LLM
from foreword.bench.contenders import Answer, Contender, GenerationSettings, Task
from foreword.drafters.auto import shipped_for
from foreword.drafters.saved import as_model
from foreword.drafters.shipped import model_of, shipped
from foreword.errors import DrafterError, InputError
from foreword.hub.storage import fill_empty
from foreword.model.attention import for_any_length
from foreword.model.loading import load_stock, without_progress_bars
from foreword.model.widened_model import widen_model

GENERATE_OPTIONS: dict[str, dict[str, Any]] = {
    "hf": {},
    "hf_static": {"cache_implementation": "static"},
    "hf_lookup": {"prompt_lookup_num_tokens": 10},
    "hf_assistant": {},
}
BASELINES = (*GENERATE_OPTIONS, "llama_cpp")
PATH_KINDS = {"hf_assistant": "the folder of a draft model", "llama_cpp": "a GGUF file"}

# GGUF file types by their number in the file's metadata.
_FILE_TYPES = (
    "0 F32, 1 F16, 2 Q4_0, 3 Q4_1, 7 Q8_0, 8 Q5_0, 9 Q5_1, 10 Q2_K, 11 Q3_K_S, 12 Q3_K_M, 13 Q3_K_L, 14 Q4_K_S, 15 Q4_K_M, "
    "16 Q5_K_S, 17 Q5_K_M, 18 Q6_K, 32 BF16"
)
QUANTISATIONS = {int(number): name for number, name in (pair.split() for pair in _FILE_TYPES.split(", "))}


def check_baseline(spec: str) -> str:
    """Return the spec if it names a baseline that has what it needs."""
    name, equals, path = spec.partition("=")
    if name not in BASELINES:
        raise InputError(f"no baseline is called {name!r}; choose from: {', '.join(BASELINES)}")
    if name not in PATH_KINDS:
        if equals:
            raise InputError(f"the baseline {name} takes no path; leave out ={path}")
        return spec
    if spec == "hf_assistant" and "draft_model" in shipped():
        return spec
    if not path:
        raise InputError(f"the baseline {name} needs {PATH_KINDS[name]}: {name}=PATH")
    if not (Path(path) / "config.json" if name == "hf_assistant" else Path(path)).is_file():
        raise InputError(f"the baseline {name} needs {PATH_KINDS[name]}, and {path} is not one")
    if name == "llama_cpp" and find_spec("llama_cpp") is None:
        raise InputError("the baseline llama_cpp needs the package llama-cpp-python: install it, or leave out llama_cpp")
    return spec


def make_baselines(specs: Sequence[str], llm: LLM, folder: Path, max_context: int) -> list[Contender]:
    """Make the baselines of `specs`. `folder` holds the weights of `llm`; they are widened if the model of `llm` is."""

    @cache
    def stock() -> Any:
        model = load_stock(folder, llm.model.device, llm.model.dtype)
        model = model if llm.model.widened_from is None else widen_model(model, llm.model.widened_from.times)
        model.generation_config = type(model.generation_config)()  # the model's own defaults may hold a penalty
        return model

    return [_baseline(check_baseline(spec), llm, stock, max_context) for spec in specs]


def _baseline(spec: str, llm: LLM, stock: Callable[[], Any], max_context: int) -> Contender:
    name, _, path = spec.partition("=")
    if name == "llama_cpp":
        return _llama_cpp(Path(path), llm, max_context)
    if name == "hf_static" and llm.model.device.type != "cuda":
        raise InputError("the baseline hf_static is compiled by transformers only on a GPU; leave it out here")
    options = dict(GENERATE_OPTIONS[name])
    if name == "hf_assistant":
        options["assistant_model"] = _assistant(Path(path), llm) if path else _shipped_assistant(llm)
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
    if "draft_model" not in shipped_for(llm.model):
        raise DrafterError(
            f"hf_assistant: no draft model ships for {llm.model.name} (there is one for "
            f"{model_of(shipped()['draft_model'])}); name the folder of one: hf_assistant=FOLDER"
        )
    small = as_model(shipped()["draft_model"], llm.model)
    with TemporaryDirectory(prefix="foreword-assistant-") as path, without_progress_bars():
        folder = Path(path) / "model"
        fill_empty(folder, small.save_pretrained)
        return load_stock(folder, llm.model.device, llm.model.dtype)


# transformers -------------------------------------------------------------------------------------------------------------


class RoundStreamer:
    """Record how many tokens each round decided, and when the first came. `generate` passes the prompt first.

    A stopping criterion would not do: some versions of transformers also call it with draft tokens before they are verified.
    """

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.first_s: float | None = None
        self.counts: list[int] = []

    def put(self, tokens: Tensor) -> None:
        if len(self.counts) == 1:
            self.first_s = time.perf_counter() - self.started
        self.counts.append(tokens.numel())

    def end(self) -> None:
        pass


def _generate(name: str, model: Any, llm: LLM, options: dict[str, Any]) -> Contender:
    ends = llm.model.ends.tolist()

    @torch.inference_mode()
    def answer(task: Task, settings: GenerationSettings) -> Answer:
        streamer = RoundStreamer()
        ids = torch.tensor([task.ids], device=model.device)
        # A growing cache has a new length for every token.
        with nullcontext() if name == "hf_static" else for_any_length():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=settings.max_new_tokens,
                do_sample=False,
                eos_token_id=ends or None,
                pad_token_id=ends[0] if ends else 0,
                streamer=streamer,
                **options,
            )
        tokens = up_to_stop(out[0, ids.shape[1] :].tolist(), ends, settings)
        return Answer(tokens, round_sizes(streamer.counts[1:], len(tokens)), first_s=streamer.first_s)

    def write(tasks: Sequence[Task], settings: GenerationSettings) -> list[Answer]:
        return [answer(task, settings) for task in tasks]

    def capture(tasks: Sequence[Task], settings: GenerationSettings) -> None:
        """Run the longest prompt first: the first request sets the size of the static cache and of what is compiled."""
        if name == "hf_static":
            answer(max(tasks, key=lambda task: len(task.ids)), settings)

    return Contender(name, write, capture, greedy_single=True)


def round_sizes(counts: Sequence[int], tokens: int) -> list[int]:
    """Return how many of the first `tokens` tokens each round decided; tokens that were cut off do not count."""
    ends = [min(end, tokens) for end in accumulate(counts)]
    return [after - before for before, after in zip([0, *ends], ends, strict=False) if after > before]


def up_to_stop(tokens: list[int], ends: Sequence[int], settings: GenerationSettings) -> list[int]:
    """Return the tokens that count: up to and including the first end token, at most `max_new_tokens`."""
    stop = next((index for index, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: min(stop + 1, settings.max_new_tokens)]


# llama.cpp ----------------------------------------------------------------------------------------------------------------


def _llama_cpp(file: Path, llm: LLM, max_context: int) -> Contender:
    from llama_cpp import Llama  # noqa: PLC0415  optional

    if llm.model.widened_from is not None:
        raise InputError(
            f"llama_cpp reads its own weights, and those in {file} are not widened; leave out --widen or llama_cpp"
        )
    threads = torch.get_num_threads()
    layers = -1 if llm.model.device.type == "cuda" else 0
    own = Llama(str(file), n_ctx=max_context, n_threads=threads, n_threads_batch=threads, n_gpu_layers=layers, verbose=False)
    if own.n_vocab() != llm.model.vocab_size:
        raise InputError(f"llama_cpp: {file} has {own.n_vocab()} tokens, {llm.model.name} has {llm.model.vocab_size}")
    kind = int(own.metadata.get("general.file_type", -1))
    ends = llm.model.ends.tolist()

    def answer(task: Task, settings: GenerationSettings) -> Answer:
        started, first_s, tokens = time.perf_counter(), None, []
        own.reset()  # otherwise it reuses what it has read of this prompt
        for token in own.generate(list(task.ids), top_k=1, temp=0.0, repeat_penalty=1.0):
            first_s = first_s or time.perf_counter() - started
            tokens.append(token)
            if token in ends or len(tokens) == settings.max_new_tokens:
                break
        return Answer(tokens, [1] * len(tokens), first_s=first_s)

    def write(tasks: Sequence[Task], settings: GenerationSettings) -> list[Answer]:
        return [answer(task, settings) for task in tasks]

    name = f"llama_cpp ({QUANTISATIONS.get(kind, f'file type {kind}')})"
    return Contender(name, write, close=getattr(own, "close", lambda: None), greedy_single=True)

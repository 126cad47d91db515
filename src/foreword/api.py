"""The Python API: load or wrap a model, choose a method, write. The only file that knows both engine and methods."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, overload

import torch
from torch import nn

from foreword.core.ctrl_c import HeldBack
from foreword.core.drafter import Drafter
from foreword.core.sampling import Sampling
from foreword.core.trace import Traced
from foreword.engine.engine import Engine
from foreword.engine.request import Request, Running
from foreword.errors import InputError, PromptError
from foreword.methods import DEFAULT_METHOD
from foreword.methods.wanted import Wanted
from foreword.model.hub import default_model, resolve
from foreword.model.loading import check_wrapped, choose_device, choose_dtype, load_weights
from foreword.model.model import Model
from foreword.results import Piece, Result
from foreword.text import Message, TextStream, Tokenizer

__all__ = ["LLM", "Chat", "Stream", "default_model", "load", "wrap"]

Prompt = str | list[Message]


def load(
    model: str | os.PathLike[str] | None = None,
    method: str = DEFAULT_METHOD,
    *,
    drafter: str | os.PathLike[str] | None = None,
    rows: int | None = None,
    slots: int = 4,
    max_context: int | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    threads: int | None = None,
    compile: bool = True,
    graph: bool = True,
    **options: Any,
) -> LLM:
    """A model, ready to write.

    `model`: a folder, a GGUF file or a Hugging Face id; None is SmolLM2-135M-Instruct, fetched once. `method`: "auto" is
    what is expected to be fastest on this machine. `drafter`: the folder of a trained drafter, which says itself whose it
    is; None is the one that ships for this model. `rows`: at most so many rows in a pass; None is what pays on this
    machine. `slots`: texts written at a time. `max_context`: tokens a text may have, prompt included; None is what the
    model was trained for, at most 4096. `compile`: run the layers of known families as our own kernels, on linears rebuilt
    for it. `graph`: on CUDA, capture a round and replay it. `options` go to the method; in one word, "gsd:width=4".
    """
    wanted = Wanted.of(method, drafter, rows, **options)
    if threads is not None:
        if threads < 1:
            raise InputError(f"threads is {threads}; it must be 1 or more")
        torch.set_num_threads(threads)
    place = choose_device(device)
    precision = choose_dtype(dtype, place)
    folder = resolve(model)
    hf = load_weights(folder, place, precision, rebuild=compile)
    name = str(model) if model is not None else folder.name
    return LLM(Model(hf, name), Tokenizer.load(folder), wanted, slots, max_context, graph)


def wrap(
    model: nn.Module,
    tokenizer: Any,
    method: str = DEFAULT_METHOD,
    *,
    drafter: str | os.PathLike[str] | None = None,
    rows: int | None = None,
    slots: int = 4,
    max_context: int | None = None,
    graph: bool = True,
    **options: Any,
) -> LLM:
    """A transformers model that is already in memory. Nothing in it is replaced: its own `generate` still works."""
    wanted = Wanted.of(method, drafter, rows, **options)
    hf, words = check_wrapped(model), Tokenizer(tokenizer)
    return LLM(Model(hf), words, wanted, slots, max_context, graph)


class LLM:
    """A model and a method. Made by `load` and `wrap`."""

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        wanted: Wanted,
        slots: int,
        max_context: int | None,
        graph: bool = True,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        model.pieces = lambda: tokenizer.pieces
        self._capacity = (slots, max_context)
        self._graph = graph
        self._closed = False
        try:
            self._take(*wanted.on(model))
        except BaseException:
            model.release()  # the caller never gets an LLM to close
            raise

    def use(
        self,
        method: str = DEFAULT_METHOD,
        rows: int | None = None,
        *,
        drafter: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> Self:
        """Go on with another method on the same weights. What was being written is given up."""
        wanted = Wanted.of(method, drafter, rows, **options)
        self._check_open()
        found = wanted.on(self.model)  # all that can be refused is, before the engine at work gives way
        self.engine.give_up()
        self.engine.drafter.close()
        self._take(*found)
        return self

    def trace(self, file: str | os.PathLike[str]) -> Self:
        """From now on, and until another method is used, every round of every text is a line of JSON in `file`: what was
        drafted, and what of it was accepted. Slower, since rounds are not captured; what was being written is given up."""
        self._check_open()
        drafter = self.engine.drafter
        inner = drafter.inner if isinstance(drafter, Traced) else drafter
        traced = Traced(inner, Path(file).expanduser(), lambda token: self.tokenizer.decode([token], False))
        self.engine.give_up()
        self._take(self.method, traced)
        return self

    def _take(self, method: str, drafter: Drafter) -> None:
        with HeldBack():  # an engine and its cache come together
            self.method, self.engine = method, Engine(self.model, drafter, *self._capacity, graph=self._graph)

    @overload
    def generate(self, prompt: str | list[Message], *, n: None = None, **settings: Any) -> Result: ...
    @overload
    def generate(self, prompt: Sequence[Prompt] | Prompt, *, n: int | None = None, **settings: Any) -> list[Result]: ...

    def generate(self, prompt: Any, *, n: int | None = None, **settings: Any) -> Result | list[Result]:
        """Write the answer to a prompt: a string, chat messages, or a list of either.

        One prompt gives a Result, a list or `n` gives a list of them, the samples of a prompt side by side. Settings:
        max_new_tokens, min_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, seed, stop, ignore_eos,
        logprobs, speculate, chat (False: the string as it is, without the chat template).
        """
        if n is not None and (type(n) is not int or n < 1):
            raise InputError(f"n is {n!r}; ask for a whole number of samples, 1 or more")
        single = _is_single(prompt)
        if not single and not isinstance(prompt, list | tuple):
            raise PromptError(
                f"a prompt is a string, a list of chat messages, or a list of those; got {type(prompt).__name__}"
            )
        prompts = [prompt] if single else list(prompt)
        if not prompts:
            raise PromptError("the list of prompts is empty")
        requests = self._requests([one for one in prompts for _ in range(n or 1)], settings)
        results = [self._result(run) for run in self.engine.generate(requests)]
        return results[0] if single and n is None else results

    def stream(self, prompt: Prompt, **settings: Any) -> Stream:
        """The same for one prompt, piece by piece as rounds decide them; `.result` is there at the end."""
        return Stream(self, self._requests([prompt], settings)[0])

    def chat(self, system: str | None = None, **settings: Any) -> Chat:
        """A conversation whose earlier turns stay in the cache."""
        return Chat(self, system, settings)

    def close(self) -> None:
        """Free the cache and give the model its own attention back. What was being written is given up."""
        self.engine.give_up()
        self.engine.drafter.close()
        self.model.release()
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise InputError("this LLM is closed; load or wrap the model again")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _requests(self, prompts: list[Prompt], settings: dict[str, Any]) -> list[Request]:
        self._check_open()
        choose, limits, text = _sorted_settings(settings)
        sampling = Sampling(**choose).seeded()
        encoded = [self.tokenizer.encode(prompt, chat=text.get("chat", True)) for prompt in prompts]
        stop = text.get("stop") or ()
        if not isinstance(stop, str | list | tuple):
            raise InputError(f"stop is {stop!r}; give a string or a list of strings")
        return [
            Request(tuple(ids), sampling.derived(i), stream=TextStream(self.tokenizer, stop), **limits)
            for i, ids in enumerate(encoded)
        ]

    def _result(self, run: Running) -> Result:
        return Result.of(run, self.model.name, self.method)


class Stream:
    """Pieces of text as they are decided. Leaving the loop early gives the request up."""

    def __init__(self, llm: LLM, request: Request) -> None:
        self._engine, self._names = llm.engine, (llm.model.name, llm.method)
        self._run = llm.engine.add(request)
        # A function, not a method: a generator that held `self` would live on until the collector comes by, and then
        # give the request up in the middle of somebody else's round.
        self._pieces = _pieces(llm.engine, self._run)

    def __iter__(self) -> Iterator[Piece]:
        return self._pieces

    @property
    def result(self) -> Result:
        """What was written; drains the stream if it has not ended."""
        for _ in self._pieces:
            pass
        return Result.of(self._run, *self._names)

    def close(self) -> None:
        self._pieces.close()
        self._engine.abort(self._run)  # a generator that never began has no `finally`


def _pieces(engine: Engine, run: Running) -> Generator[Piece]:
    """Steps the engine whenever there is nothing new; another stream's steps may have brought our pieces too."""
    shown = 0
    try:
        while shown < len(run.events) or not run.done:
            if shown == len(run.events):
                engine.step_for([run])
                continue
            event = run.events[shown]
            shown += 1
            yield Piece(event.text, event.tokens)
        if run.error:  # in a step of somebody else's
            raise run.error
    finally:
        engine.abort(run)


class Chat:
    """A conversation. What both sides said so far stays in the cache: only what is new is read."""

    def __init__(self, llm: LLM, system: str | None, settings: dict[str, Any]) -> None:
        self._llm, self._settings = llm, settings
        self._system: list[Message] = [{"role": "system", "content": system}] if system else []
        self.messages: list[Message] = list(self._system)

    def stream(self, text: str, **settings: Any) -> Iterator[Piece]:
        """Say something, and get the reply piece by piece."""
        turn: list[Message] = [*self.messages, {"role": "user", "content": text}]
        stream = self._llm.stream(turn, reuse=True, **{**self._settings, **settings})
        yield from stream
        self.last = stream.result
        if self.last.finish_reason != "abort":  # a step of somebody else's broke off
            self.messages = [*turn, {"role": "assistant", "content": self.last.text}]

    def send(self, text: str, **settings: Any) -> Result:
        """Say something, and get the whole reply."""
        for _ in self.stream(text, **settings):
            pass
        return self.last

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = list(self._system)


_CHOOSE = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "logprobs")
_LIMITS = ("max_new_tokens", "min_new_tokens", "ignore_eos", "speculate", "reuse")
_TEXT = ("stop", "chat")


def _sorted_settings(settings: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    known = (*_CHOOSE, *_LIMITS, *_TEXT)
    for name in settings:
        if name not in known:
            raise InputError(f"no setting is called {name!r}; there are: {', '.join(known)}")
    return tuple({name: settings[name] for name in group if name in settings} for group in (_CHOOSE, _LIMITS, _TEXT))


def _is_single(prompt: Any) -> bool:
    """A string or one list of messages; anything else is a list of prompts."""
    return isinstance(prompt, str) or (
        isinstance(prompt, list) and bool(prompt) and all(isinstance(message, dict) for message in prompt)
    )

"""The Python API: load or wrap a model, choose a method, write. The only file that knows both engine and methods."""

from __future__ import annotations

import os
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any, ParamSpec, Self, Unpack, overload

import torch
from torch import nn

from foreword.core.drafter import Drafter
from foreword.drafters.keywords import options_of_method, renamed
from foreword.drafters.resolve import DrafterRequest
from foreword.engine.ctrl_c import DelayedCtrlC
from foreword.engine.driver import Driver
from foreword.engine.engine import Engine
from foreword.engine.request import Request, Running
from foreword.errors import ForewordWarning, InputError, NumericsError
from foreword.hub.resolve import default_model, resolve
from foreword.methods import DEFAULT_METHOD, MethodLike
from foreword.model.adapters import fetch_base, tokenizer_folder
from foreword.model.generation import sampling_defaults
from foreword.model.loading import check_wrapped, choose_device, choose_dtype, load_weights
from foreword.model.measured import remeasuring
from foreword.model.model import Model
from foreword.requests import EACH, Prompt, Settings, build, is_single, listed
from foreword.results import Piece, Result
from foreword.text import Message, Tokenizer
from foreword.trace import Traced

__all__ = ["LLM", "AsyncStream", "Chat", "Stream", "default_model", "load", "wrap"]


MOST_THREADS = 4096
Given = ParamSpec("Given")


def wrap(
    model: nn.Module,
    tokenizer: Any,
    method: MethodLike = DEFAULT_METHOD,
    *,
    drafter: str | os.PathLike[str] | None = None,
    rows: int | None = None,
    slots: int = 4,
    max_context: int | None = None,
    cuda_graphs: bool = True,
    remeasure: bool = False,
    generation_config: bool = True,
    **options: Any,
) -> LLM:
    """A transformers model that is already in memory. Nothing in it is replaced: its own `generate` still works.

    `generation_config`: where a request says nothing, the model's `generation_config` says how tokens are sampled.
    """
    cuda_graphs = renamed(options, "cuda_graphs", cuda_graphs)
    wanted = DrafterRequest.of(method, drafter, rows, **options_of_method(wrap, method, options))
    hf, words = check_wrapped(model), Tokenizer(tokenizer)
    target = Model(hf)
    target.dry_run()
    with remeasuring() if remeasure else nullcontext():
        defaults = sampling_defaults(hf) if generation_config else {}
        return LLM.of(target, words, wanted, slots, max_context, cuda_graphs, defaults=defaults)


class LLM:
    """A model and a method. `LLM(...)` and `load(...)` are the same; `wrap` takes a model that is in memory."""

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        method: MethodLike = DEFAULT_METHOD,
        *,
        drafter: str | os.PathLike[str] | None = None,
        rows: int | None = None,
        slots: int = 4,
        max_context: int | None = None,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        threads: int | None = None,
        fused_layers: bool = True,
        cuda_graphs: bool = True,
        remeasure: bool = False,
        revision: str | None = None,
        token: str | bool | None = None,
        generation_config: bool = True,
        warm_up: bool = False,
        **options: Any,
    ) -> None:
        """Load a model, ready to write.

        `model`: a folder, a GGUF file, a Hugging Face id, or the folder or id of a LoRA adapter, which is merged into the
        model that it names; None is SmolLM2-135M-Instruct, fetched once. `revision` and `token`: of a Hugging Face id.
        `method`: a name that `foreword methods` lists, a `Drafter` or its class, or the folder of a trained drafter; "auto"
        is what is expected to be fastest on this machine. `drafter`: the folder of a trained drafter; None is the one that
        ships for this model. `rows`: the most rows of a pass; None is what pays off on this machine. `slots`: sequences at a
        time. `max_context`: tokens of a sequence, prompt included; None is what the model was trained for, at most 4096.
        `fused_layers`: run layers of known families on our own kernels. `cuda_graphs`: on CUDA, capture rounds and replay
        them. `remeasure`: measure anew what rounds cost on this machine. `generation_config`: where a request says nothing,
        the model's generation_config.json says how tokens are sampled; False is greedy. `warm_up`: call `warm_up` now.
        `options` go to the method; in one word, "gsd:width=4".
        """
        fused_layers = renamed(options, "fused_layers", fused_layers)
        cuda_graphs = renamed(options, "cuda_graphs", cuda_graphs)
        wanted = DrafterRequest.of(method, drafter, rows, **options_of_method(load, method, options))
        if threads is not None:
            _set_threads(threads)
        place = choose_device(device)
        precision = choose_dtype(dtype, place)
        folder = resolve(model, revision, token)
        fetch_base(folder, token)
        # Weights of ours stay as they are, and in half precision a near-tie may tip: rows of another pass round otherwise.
        reuses = precision.itemsize >= 4
        with remeasuring() if remeasure else nullcontext():
            hf = load_weights(folder, place, precision, rebuild=fused_layers)
            target = Model(hf, str(model) if model is not None else folder.name)
            words = Tokenizer.load(tokenizer_folder(folder))
            defaults = sampling_defaults(hf) if generation_config else {}
            self._begin(target, words, wanted, slots, max_context, cuda_graphs, reuses, defaults)
        if warm_up:
            self.warm_up()

    @classmethod
    def of(
        cls,
        model: Model,
        tokenizer: Tokenizer,
        wanted: DrafterRequest,
        slots: int,
        max_context: int | None,
        cuda_graphs: bool = True,
        reuses: bool = False,
        defaults: dict[str, Any] | None = None,
    ) -> Self:
        """One of parts that are there. `reuses`: prompts start from cached rows unless a request says otherwise, since that
        is exact here. `defaults`: how tokens are sampled where a request does not say."""
        llm = cls.__new__(cls)
        llm._begin(model, tokenizer, wanted, slots, max_context, cuda_graphs, reuses, defaults)
        return llm

    def _begin(
        self,
        model: Model,
        tokenizer: Tokenizer,
        wanted: DrafterRequest,
        slots: int,
        max_context: int | None,
        cuda_graphs: bool,
        reuses: bool,
        defaults: dict[str, Any] | None,
    ) -> None:
        self.sampling_defaults = defaults or {}
        self.model, self.tokenizer = model, tokenizer
        model.use_pieces(lambda: tokenizer.pieces)
        self._capacity = (slots, max_context)
        self._graph, self._reuses = cuda_graphs, reuses
        try:
            self.method, drafter = wanted.resolve(model)
            self._driver = Driver(self._engine_of(drafter))
        except BaseException:
            model.release()  # the caller never gets an LLM to close
            raise

    def use(
        self,
        method: MethodLike = DEFAULT_METHOD,
        rows: int | None = None,
        *,
        drafter: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> Self:
        """Go on with another method on the same weights. What was being written is given up."""
        wanted = DrafterRequest.of(method, drafter, rows, **options_of_method(LLM.use, method, options))
        with self._driver.claimed() as engine:
            self._check_open()
            found, drafting = wanted.resolve(self.model)  # all that can be refused is, before the engine at work gives way
            with DelayedCtrlC():  # an engine and its cache come together
                self._driver.give_up()
                engine.drafter.close()
                self.method, self._driver.engine = found, self._engine_of(drafting)
        return self

    def warm_up(self, longest: int | None = None, **given: Unpack[Settings]) -> Self:
        """Record on CUDA what sequences of up to `longest` tokens need, so that the first request does not wait for it; None
        is the whole context. `given`: how they will be sampled, as in `generate`. Requests under way are aborted. It takes
        seconds to minutes on CUDA, and nothing elsewhere."""
        (like,) = self._requests([[0]], given)
        with self._driver.claimed() as engine:
            self._check_open()
            self._driver.give_up()
            engine.warm_up(longest=longest, sampling=like.sampling)
        return self

    def trace(self, file: str | os.PathLike[str]) -> Self:
        """From now on, and until another method is used, every round of every text is a line of JSON in `file`: what was
        drafted, and what of it was accepted. Slower, since rounds are not captured; what was being written is given up."""
        with self._driver.claimed() as engine:
            self._check_open()
            drafter = engine.drafter
            inner = drafter.inner if isinstance(drafter, Traced) else drafter
            traced = Traced(inner, Path(os.path.expanduser(file)), lambda token: self.tokenizer.decode([token], False))
            with DelayedCtrlC():
                self._driver.give_up()
                self._driver.engine = self._engine_of(traced)
        return self

    def _engine_of(self, drafter: Drafter) -> Engine:
        return Engine(self.model, drafter, *self._capacity, graph=self._graph)

    @property
    def engine(self) -> Engine:
        """The engine at work. Only `generate`, `stream` and `chat` are safe from several threads at a time."""
        return self._driver.engine

    @overload
    def generate(  # type: ignore[overload-overlap]  # a string is a sequence of strings too: it is one prompt
        self, prompt: Prompt, *, n: None = None, **given: Unpack[Settings]
    ) -> Result: ...
    @overload
    def generate(self, prompt: Prompt, *, n: int, **given: Unpack[Settings]) -> list[Result]: ...
    @overload
    def generate(
        self,
        prompt: Sequence[Prompt],
        *,
        n: int | None = None,
        settings: Sequence[Settings] | None = None,
        **given: Unpack[Settings],
    ) -> list[Result]: ...

    def generate(
        self,
        prompt: Any,
        *,
        n: int | None = None,
        settings: Sequence[Settings] | None = None,
        **given: Unpack[Settings],
    ) -> Result | list[Result]:
        """Write the answer to a prompt: a string, chat messages or token ids, or a list of those.

        One prompt gives a Result, a list or `n` gives a list of them, the samples of a prompt next to each other.
        The keywords are those of `foreword.Settings`, which docs/api.md describes: sampling, or temperature, top_k, top_p,
        seed and their like; max_new_tokens, stop, chat and others. `settings` [one dict per prompt]: what counts for each.
        """
        runs = self._checked(listed(prompt), {EACH: settings, **given}, n)
        single = is_single(prompt) and n is None
        results = [*self._results(runs)]
        if single and runs[0].error:
            raise runs[0].error
        return results[0] if single else results

    def generate_each(
        self,
        prompts: Sequence[Prompt],
        *,
        n: int = 1,
        settings: Sequence[Settings] | None = None,
        **given: Unpack[Settings],
    ) -> Iterator[Result]:
        """Like `generate` for a list, but gives each result, in order, as soon as it is there.

        All prompts are checked and queued at the first `next`; leaving the loop early aborts the rest.
        """
        return self._results(self._checked(listed(prompts), {EACH: settings, **given}, n))

    def _checked(self, prompts: list[Prompt], settings: Mapping[str, Any], n: int | None = None) -> list[Running]:
        return [self.engine.checked(request) for request in self._requests(prompts, settings, n)]

    def _results(self, runs: list[Running]) -> Iterator[Result]:
        """What each request came to. One that failed by itself is a result with an error; a broken step is raised."""
        names = self.model.name, self.method
        for index, run in enumerate(self._driver.run(runs)):
            yield _result(run, index, len(runs), names)

    @overload
    async def agenerate(  # type: ignore[overload-overlap]  # as in `generate`
        self, prompt: Prompt, *, n: None = None, **given: Unpack[Settings]
    ) -> Result: ...
    @overload
    async def agenerate(self, prompt: Prompt, *, n: int, **given: Unpack[Settings]) -> list[Result]: ...
    @overload
    async def agenerate(
        self,
        prompt: Sequence[Prompt],
        *,
        n: int | None = None,
        settings: Sequence[Settings] | None = None,
        **given: Unpack[Settings],
    ) -> list[Result]: ...

    async def agenerate(
        self,
        prompt: Any,
        *,
        n: int | None = None,
        settings: Sequence[Settings] | None = None,
        **given: Unpack[Settings],
    ) -> Result | list[Result]:
        """`generate` for tasks of an event loop, which all share the batch. A cancelled task aborts its requests."""
        names = self.model.name, self.method
        runs = self._checked(listed(prompt), {EACH: settings, **given}, n)
        await self._driver.finished(runs)
        results = [_result(run, index, len(runs), names) for index, run in enumerate(runs)]
        if not (is_single(prompt) and n is None):
            return results
        if runs[0].error:
            raise runs[0].error
        return results[0]

    def astream(self, prompt: Prompt, **settings: Unpack[Settings]) -> AsyncStream:
        """`stream` for tasks of an event loop: `async for piece in llm.astream(...)`."""
        return AsyncStream(self, self._requests([prompt], {**settings})[0])

    def stream(self, prompt: Prompt, **settings: Unpack[Settings]) -> Stream:
        """The same for one prompt, piece by piece as rounds decide them; `.result` is there at the end."""
        return Stream(self, self._requests([prompt], {**settings})[0])

    def chat(self, system: str | None = None, **settings: Unpack[Settings]) -> Chat:
        """A conversation whose earlier turns stay in the cache."""
        return Chat(self, system, settings)

    def close(self) -> None:
        """Free the cache and give the model its own attention back. What was being written is given up."""
        with self._driver.claimed() as engine, DelayedCtrlC():
            self._driver.give_up()
            self._driver.closed = True
            engine.drafter.close()
            self.model.release()

    def _check_open(self) -> None:
        if self._driver.closed:
            raise InputError("this LLM is closed; load or wrap the model again")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _requests(self, prompts: list[Prompt], settings: Mapping[str, Any], n: int | None = None) -> list[Request]:
        self._check_open()
        given = {"reuse": self._reuses, **settings}
        return build(self.tokenizer, self.engine.limits, prompts, given, n, self.sampling_defaults)


def _result(run: Running, index: int, count: int, names: tuple[str, str]) -> Result:
    """What a request came to. One that failed by itself is a result with an error; a broken step is raised."""
    if run.error and not isinstance(run.error, NumericsError):
        raise run.error
    if run.error and count > 1:
        warnings.warn(f"output {index} of {count} failed: {run.error}", ForewordWarning, stacklevel=4)
    return Result.of(run, *names)


def _set_threads(threads: int) -> None:
    if type(threads) is not int or not 1 <= threads <= MOST_THREADS:
        raise InputError(f"threads is {threads!r}; it must be a whole number, 1 or more and at most {MOST_THREADS}")
    torch.set_num_threads(threads)


def _loading(made: Callable[Given, LLM]) -> Callable[Given, LLM]:
    """The class as a function of the same parameters."""

    @wraps(made.__init__, assigned=("__doc__",), updated=())
    def load(*args: Given.args, **named: Given.kwargs) -> LLM:
        return made(*args, **named)

    load.__signature__ = signature(made)  # type: ignore[attr-defined]
    return load


load = _loading(LLM)


class Stream:
    """Pieces of text as they are decided. The request is queued when iteration begins; leaving the loop early aborts it."""

    def __init__(self, llm: LLM, request: Request) -> None:
        self._names = llm.model.name, llm.method
        self._run = llm.engine.checked(request)
        # A function, not a method: a generator that held `self` would live on until the collector comes by.
        self._pieces = _pieces(llm._driver, self._run)

    def __iter__(self) -> Iterator[Piece]:
        return self._pieces

    @property
    def result(self) -> Result:
        """What was written; drains the stream if it has not ended."""
        for _ in self._pieces:
            pass
        return Result.of(self._run, *self._names)

    def close(self) -> None:
        """Abort the request if it has not ended."""
        self._pieces.close()
        if not self._run.done:  # iteration never began, so nothing was queued
            self._run.finish_reason = "abort"


def _pieces(driver: Driver, run: Running) -> Generator[Piece]:
    shown = 0

    def has_more() -> bool:
        return shown < len(run.events) or run.done

    driver.submit([run])
    try:
        driver.wait(has_more)
        while shown < len(run.events):
            event = run.events[shown]
            shown += 1
            yield Piece(event.text, event.tokens)
            driver.wait(has_more)
    finally:
        driver.abort(run)
    if run.error:
        raise run.error


class AsyncStream:
    """A stream for tasks of an event loop. Leaving the loop early, or cancelling the task, aborts the request."""

    def __init__(self, llm: LLM, request: Request) -> None:
        self._names = llm.model.name, llm.method
        self._run = llm.engine.checked(request)
        self._pieces = _async_pieces(llm._driver, self._run)

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self._pieces

    async def result(self) -> Result:
        """What was written; drains the stream if it has not ended."""
        async for _ in self._pieces:
            pass
        return Result.of(self._run, *self._names)

    async def aclose(self) -> None:
        """Abort the request if it has not ended."""
        await self._pieces.aclose()


async def _async_pieces(driver: Driver, run: Running) -> AsyncGenerator[Piece]:
    shown = 0

    def has_more() -> bool:
        return shown < len(run.events) or run.done

    driver.submit([run])
    try:
        await driver.ready(has_more)
        while shown < len(run.events):
            event = run.events[shown]
            shown += 1
            yield Piece(event.text, event.tokens)
            await driver.ready(has_more)
    finally:
        driver.leave(run)
    if run.error:
        raise run.error


class Chat:
    """A conversation. What both sides said so far stays in the cache: only what is new is read."""

    def __init__(self, llm: LLM, system: str | None, settings: Settings) -> None:
        self._llm, self._settings = llm, settings
        self._system: list[Message] = [{"role": "system", "content": system}] if system else []
        self.messages: list[Message] = list(self._system)

    def stream(self, text: str, **settings: Unpack[Settings]) -> Iterator[Piece]:
        """Say something, and get the reply piece by piece."""
        turn: list[Message] = [*self.messages, {"role": "user", "content": text}]
        given: Settings = {"reuse": True, **self._settings, **settings}
        stream = self._llm.stream(turn, **given)
        yield from stream
        self.last = stream.result
        if self.last.finish_reason != "abort":  # a step of somebody else's broke off
            self.messages = [*turn, {"role": "assistant", "content": self.last.text}]

    def send(self, text: str, **settings: Unpack[Settings]) -> Result:
        """Say something, and get the whole reply."""
        for _ in self.stream(text, **settings):
            pass
        return self.last

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = list(self._system)

"""The Python API: load or wrap a model, choose a method, generate. The lowest file that knows both engine and methods."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Self, Unpack, overload

import torch
from torch import nn

from foreword.core.drafter import Drafter
from foreword.drafters.keywords import check_flags, options_of_method, renamed
from foreword.drafters.resolve import DrafterRequest
from foreword.engine.ctrl_c import DelayedCtrlC
from foreword.engine.driver import AsyncRunner, Driver
from foreword.engine.engine import Engine
from foreword.engine.following import follow
from foreword.engine.leading import LeadingEngine
from foreword.engine.orders import Close, Switch, packed
from foreword.engine.request import Request, Running
from foreword.errors import ForewordWarning, GrammarError, InputError, NumericsError
from foreword.hub.resolve import called, default_model, resolve
from foreword.methods import DEFAULT_METHOD, MethodLike
from foreword.model.adapters import fetch_base, tokenizer_folder
from foreword.model.fingerprint import Fingerprint
from foreword.model.generation import sampling_defaults
from foreword.model.loading import (
    check_division,
    check_quantization,
    check_wrapped,
    choose_device,
    choose_dtype,
    load_weights,
)
from foreword.model.measured import remeasuring
from foreword.model.model import Model
from foreword.model.slow import load_slow, wrap_slow
from foreword.ranks.group import ALONE, check_launch, current, device_of_rank, fail, is_launched, join
from foreword.requests import EACH, Prompt, Settings, build, is_single, listed
from foreword.results import Piece, Result
from foreword.text import Message, Tokenizer
from foreword.text.grammar import GrammarCompiler
from foreword.trace import Traced

if TYPE_CHECKING:
    from foreword.text.tokenizer import TransformersTokenizer

__all__ = ["LLM", "AsyncStream", "Chat", "Stream", "default_model", "load", "wrap"]


MOST_THREADS = 4096
Parameters = ParamSpec("Parameters")


def wrap(
    model: nn.Module,
    tokenizer: TransformersTokenizer,
    method: MethodLike = DEFAULT_METHOD,
    *,
    drafter: str | os.PathLike[str] | None = None,
    rows: int | None = None,
    slots: int = 4,
    max_context: int | None = None,
    cuda_graphs: bool = True,
    remeasure: bool = False,
    generation_config: bool = True,
    isolated: bool = False,
    slow: bool = False,
    **options: Any,
) -> LLM:
    """Use a transformers model that is already in memory. The model is not changed, and its own `generate` still works.

    `model` and `tokenizer`: as `AutoModelForCausalLM` and `AutoTokenizer` of transformers give them. All other parameters
    are those of `load`. Models that `load` reads are faster, since only those run on Foreword's own kernels.
    """
    cuda_graphs = renamed(options, "cuda_graphs", cuda_graphs)
    check_flags(
        cuda_graphs=cuda_graphs, remeasure=remeasure, generation_config=generation_config, isolated=isolated, slow=slow
    )
    drafter_request = DrafterRequest.of(method, drafter, rows, **options_of_method(wrap, method, options))
    encoder = Tokenizer(tokenizer)
    target = wrap_slow(model) if slow else Model(check_wrapped(model))
    if not slow:
        target.dry_run()
    with remeasuring() if remeasure else nullcontext():
        defaults = sampling_defaults(target.hf) if generation_config else {}
        capacity = slots, max_context
        return LLM.of(target, encoder, drafter_request, *capacity, cuda_graphs, defaults=defaults, isolated=isolated)


class LLM:
    """A model, a drafting method and a KV cache, ready to generate. `LLM(...)` and `load(...)` are the same.

    `model`: the target model. `tokenizer`: its tokenizer. `method`: the name of the drafting method; if "auto" was asked
    for, the method that it chose. `sampling_defaults`: the sampling settings of the model's generation config, which apply
    to requests that do not set them. Close an LLM after use, or use it in a `with` block: that frees the cache.
    """

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
        quantization: str | None = None,
        threads: int | None = None,
        fused_layers: bool = True,
        cuda_graphs: bool = True,
        remeasure: bool = False,
        revision: str | None = None,
        token: str | bool | None = None,
        generation_config: bool = True,
        warm_up: bool = False,
        isolated: bool = False,
        tp: int | None = None,
        slow: bool = False,
        **options: Any,
    ) -> None:
        """Load a model from disk or from the Hugging Face hub.

        `model`: a folder, a GGUF file, a name that `foreword models` lists, a Hugging Face id, or the folder or id of a LoRA
        adapter, which is merged into the model that it names. None: SmolLM2-135M-Instruct, downloaded once.
        `method`: a name that `foreword methods` lists, a `Drafter` or its class, or the folder of a trained drafter.
        "auto": the method that is expected to be fastest on this machine.
        `drafter`: the folder of a trained drafter. None: the drafter that ships for this model, if there is one.
        `rows`: the most tokens that one pass verifies per sequence. None: as many as pay off on this machine.
        `slots`: how many sequences run at a time (the batch size); further requests wait. The cache grows with it.
        `max_context`: the most tokens of a sequence, prompt included. None: what the model was trained for, at most 4096.
        `device`, `dtype`: such as "cuda:1" and "float32". None: a GPU and bfloat16 if there is one, else the CPU and
        float32.
        `quantization`: "stored" runs the quantised weights of a GGUF file as they are stored; "q4" and "q8" quantise the
        weights of any model. On a CPU in float32. None: weights are floats, and those of a GGUF file are dequantised.
        `threads`: the number of CPU threads of torch, for the whole process. None: unchanged.
        `fused_layers`: run layers of known families on Foreword's own kernels.
        `cuda_graphs`: on CUDA, capture rounds and replay them.
        `remeasure`: measure again what rounds cost on this machine, and replace the stored figures.
        `revision`, `token`: of a Hugging Face id, as in `huggingface_hub`.
        `generation_config`: settings that a request does not give come from the model's generation_config.json. False: they
        are greedy.
        `warm_up`: call `warm_up()` after loading.
        `isolated`: drafts of a conversation use no tokens of others, so that its speed tells nothing of them. For servers.
        `tp`: divide the model over this many processes, each with a GPU (tensor parallelism). torchrun starts them, all with
        the same program. In the first one this returns as ever; the others serve it in here, and end when it closes the
        model. None: this process alone.
        `slow`: run a family that Foreword does not support, by the forward pass of transformers alone. Its outputs are those
        of plain decoding too. Methods: plain, prompt_lookup and token_recycling.
        `options`: options of the method. They may be part of its name too, as in "gsd:width=4".
        """
        fused_layers = renamed(options, "fused_layers", fused_layers)
        cuda_graphs = renamed(options, "cuda_graphs", cuda_graphs)
        check_flags(fused_layers=fused_layers, cuda_graphs=cuda_graphs, remeasure=remeasure)
        check_flags(generation_config=generation_config, warm_up=warm_up, isolated=isolated, slow=slow)
        with _one_report(tp):
            drafter_request = DrafterRequest.of(method, drafter, rows, **options_of_method(load, method, options))
            if threads is not None:
                _set_threads(threads)
            place = choose_device(device)
            precision = choose_dtype(dtype, place)
            check_quantization(quantization, place, precision)
            if slow:
                _check_slow(quantization, tp)
            if tp is not None:
                check_launch(tp)
                _check_ranks(tp, drafter_request, quantization)
                place = device_of_rank(place, tp)
            folder = resolve(model, revision, token, stored=quantization == "stored")
            fetch_base(folder, token)
            ranks = ALONE
            if tp is not None and is_launched():
                check_division(folder, tp)
                ranks = join(tp, place)
            # Reuse is exact here: nobody else changes the weights. Not in half precision, where rows of another pass round
            # differently and a near-tie may go either way.
            reuses = precision.itemsize >= 4
            with remeasuring() if remeasure else nullcontext():
                if slow:
                    target: Model = load_slow(folder, place, precision, called(folder, model))
                else:
                    hf = load_weights(folder, place, precision, fused_layers, quantization, ranks)
                    target = Model(hf, called(folder, model), ranks=ranks.count)
                if ranks.count > 1:
                    Fingerprint.of(target)
                tokenizer = Tokenizer.load(tokenizer_folder(folder))
                defaults = sampling_defaults(target.hf) if generation_config else {}
                capacity = slots, max_context
                self._begin(target, tokenizer, drafter_request, *capacity, cuda_graphs, reuses, defaults, isolated)
        if ranks.links is not None and not ranks.is_first:
            follow(self, ranks.links)
            self.close()
            sys.exit()
        if warm_up:
            self.warm_up()

    @classmethod
    def of(
        cls,
        model: Model,
        tokenizer: Tokenizer,
        drafter_request: DrafterRequest,
        slots: int,
        max_context: int | None,
        cuda_graphs: bool = True,
        reuses: bool = False,
        defaults: dict[str, Any] | None = None,
        isolated: bool = False,
    ) -> Self:
        """Make an LLM from a loaded model. `reuses`: prompts start from cached rows by default, because that is exact here.
        `defaults`: sampling settings of requests that do not set them."""
        llm = cls.__new__(cls)
        llm._begin(model, tokenizer, drafter_request, slots, max_context, cuda_graphs, reuses, defaults, isolated)
        return llm

    def _begin(
        self,
        model: Model,
        tokenizer: Tokenizer,
        drafter_request: DrafterRequest,
        slots: int,
        max_context: int | None,
        cuda_graphs: bool,
        reuses: bool,
        defaults: dict[str, Any] | None,
        isolated: bool,
    ) -> None:
        self.sampling_defaults = defaults or {}
        self.model, self.tokenizer = model, tokenizer
        model.use_pieces(lambda: tokenizer.pieces)
        self._capacity, self._isolated = (slots, max_context), isolated
        self._graph, self.reuses = cuda_graphs and not model.slow, reuses
        ends = frozenset(model.ends.tolist())
        self._grammars = GrammarCompiler(lambda: tokenizer.grammar_vocabulary(model.vocab_size, ends))
        try:
            self.method, drafter = drafter_request.resolve(model)
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
        """Switch to another method on the same weights, and return this LLM. Requests in progress are aborted.

        The parameters are those of `load`.
        """
        drafter_request = DrafterRequest.of(method, drafter, rows, **options_of_method(LLM.use, method, options))
        with self._driver.claimed() as engine:
            self._check_open()
            if isinstance(engine, LeadingEngine):
                _check_ranks(engine.links.count, drafter_request)
                engine.links.send_bytes(packed(Switch(drafter_request)))
            self.switch(drafter_request)
        return self

    def switch(self, drafter_request: DrafterRequest) -> None:
        """Switch to another method while no step runs. If it is refused, the current one stays."""
        name, new_drafter = drafter_request.resolve(self.model)
        with DelayedCtrlC():  # replace the engine and its cache together
            self._driver.give_up()
            self.engine.drafter.close()
            self.method, self._driver.engine = name, self._engine_of(new_drafter)

    def warm_up(self, longest: int | None = None, **given: Unpack[Settings]) -> Self:
        """Record the CUDA graphs that sequences of up to `longest` tokens need, so that the first requests do not wait for
        them. Return this LLM. It takes seconds to minutes on CUDA, and does nothing elsewhere.

        `longest`: prompt included; None is the whole context. `given`: the sampling settings of the requests to come, as in
        `generate`. Requests in progress are aborted.
        """
        (like,) = self._requests([[0]], given)
        with self._driver.claimed() as engine:
            self._check_open()
            self._driver.give_up()
            engine.warm_up(longest=longest, sampling=like.sampling)
        return self

    def trace(self, file: str | os.PathLike[str]) -> Self:
        """Write every round of every sequence to `file` as a line of JSON: what was drafted, and what of it was accepted.
        Return this LLM.

        It ends when another method is used (`use`). Rounds are slower, since they are not captured. Requests in progress are
        aborted. `foreword draw` makes pictures of the file.
        """
        with self._driver.claimed() as engine:
            self._check_open()
            if isinstance(engine, LeadingEngine):
                raise InputError("rounds cannot be traced while several ranks run the model; load it without tp")
            drafter = engine.drafter
            inner = drafter.inner if isinstance(drafter, Traced) else drafter
            traced = Traced(inner, Path(os.path.expanduser(file)), lambda token: self.tokenizer.decode([token], False))
            with DelayedCtrlC():
                self._driver.give_up()
                self._driver.engine = self._engine_of(traced)
        return self

    def _engine_of(self, drafter: Drafter) -> Engine:
        if self._isolated:
            drafter.isolate()
        ranks = current()
        made: Callable[..., Engine] = Engine
        if ranks.links is not None and ranks.is_first and self.model.ranks > 1:
            made = partial(LeadingEngine, links=ranks.links)
        return made(self.model, drafter, *self._capacity, graph=self._graph, compiler=self._grammars)

    def __repr__(self) -> str:
        where = f"{str(self.model.dtype).removeprefix('torch.')} on {self.model.device}"
        slow = f", slow: {self.slow}" if self.slow else ""
        return f"<foreword.LLM {self.model.name!r}, method {self.method!r}, {where}{slow}>"

    @property
    def slow(self) -> str:
        """How transformers runs the model alone, if it was loaded with `slow=True`; otherwise an empty string."""
        return self.model.slow

    @property
    def engine(self) -> Engine:
        """The current engine, for tools that drive it themselves from one thread while nobody calls the other methods."""
        return self._driver.engine

    @property
    def runner(self) -> AsyncRunner:
        """What runs requests for tasks of an event loop."""
        return self._driver

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
        """Generate the answer to a prompt, or to each of a list of prompts.

        `prompt`: a string, a list of chat messages, or a list of token ids; or a list of such prompts.
        `n`: how many samples to generate for each prompt. None: one.
        `settings`: for a list of prompts, one dict per prompt, with settings that apply to that prompt alone.
        `given`: settings of all prompts; `foreword.Settings` describes them. Examples: max_new_tokens, temperature, stop.

        Return one `Result` for a single prompt without `n`; otherwise a list, with the samples of a prompt next to each
        other. A failed request of a list is a `Result` with an `error`; a single one raises it.
        """
        runs = self._checked(listed(prompt), {EACH: settings, **given}, n)
        single = is_single(prompt) and n is None
        names = self.model.name, self.method
        self._driver.run_all(runs)
        if single and runs[0].error:
            raise runs[0].error
        results = [*_results(runs, len(runs), names)]
        return results[0] if single else results

    def generate_each(
        self,
        prompts: Sequence[Prompt],
        *,
        n: int = 1,
        settings: Sequence[Settings] | None = None,
        **given: Unpack[Settings],
    ) -> Iterator[Result]:
        """Generate like `generate` for a list, but yield each result, in order, as soon as it is complete.

        The prompts are checked at once and queued at the first `next`. Leaving the loop early aborts the rest.
        """
        runs = self._checked(listed(prompts), {EACH: settings, **given}, n)
        return _results(self._driver.run(runs), len(runs), (self.model.name, self.method))

    def _checked(self, prompts: list[Prompt], settings: Mapping[str, Any], n: int | None = None) -> list[Running]:
        return [self.engine.checked(request) for request in self._requests(prompts, settings, n)]

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
        """Generate like `generate`, in a task of an event loop. All tasks and threads share the batch. Cancelling the task
        aborts its requests."""
        runs = self._checked(listed(prompt), {EACH: settings, **given}, n)
        single = is_single(prompt) and n is None
        results = await finished(self._driver, runs, (self.model.name, self.method), single)
        return results[0] if single else results

    def astream(self, prompt: Prompt, **settings: Unpack[Settings]) -> AsyncStream:
        """Generate like `stream`, in a task of an event loop: `async for piece in llm.astream(...)`."""
        (run,) = self._checked([prompt], {**settings})
        return AsyncStream(self._driver, run, (self.model.name, self.method))

    def stream(self, prompt: Prompt, **settings: Unpack[Settings]) -> Stream:
        """Generate the answer to one prompt, and give its text piece by piece: `for piece in llm.stream(...)`.

        `prompt` and `settings` are those of `generate`. The `result` of the stream is the whole answer.
        """
        return Stream(self, self._requests([prompt], {**settings})[0])

    def chat(self, system: str | None = None, **settings: Unpack[Settings]) -> Chat:
        """Start a conversation. Its earlier turns stay in the cache, so each turn reads only what is new.

        `system`: the system message. `settings`: of all replies, as in `generate`.
        """
        return Chat(self, system, settings)

    def close(self) -> None:
        """Free the cache, and restore the attention of a wrapped model. Requests in progress are aborted."""
        with self._driver.claimed() as engine, DelayedCtrlC():
            self._driver.give_up()
            if isinstance(engine, LeadingEngine) and not (self._driver.closed or engine.links.failed):
                engine.links.send_bytes(packed(Close()))
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
        given = {"reuse": self.reuses, **settings}
        return build(self.tokenizer, self.engine.limits, prompts, given, n, self.sampling_defaults)


def _results(finished: Iterable[Running], count: int, names: tuple[str, str]) -> Iterator[Result]:
    """Yield the results of requests. A request that failed by itself has an error in it; an error of a step is raised."""
    for index, run in enumerate(finished):
        if run.error and not isinstance(run.error, NumericsError | GrammarError):
            raise run.error
        if run.error and count > 1:
            warnings.warn(f"output {index} of {count} failed: {run.error}", ForewordWarning, stacklevel=3)
        yield Result.of(run, *names)


async def finished(runner: AsyncRunner, runs: list[Running], names: tuple[str, str], single: bool) -> list[Result]:
    """Run requests to their end, and return their results. `names`: of the model and of the method. `single`: if the request
    failed, raise its error."""
    await runner.finished(runs)
    if single and runs[0].error:
        raise runs[0].error
    return [*_results(runs, len(runs), names)]


def _check_slow(quantization: str | None, tp: int | None) -> None:
    """Refuse what cannot be done by the forward pass of transformers alone."""
    if quantization is not None:
        raise InputError(f"slow=True runs a model as transformers does, in floats; leave quantization={quantization!r} out")
    if tp is not None and tp > 1:
        raise InputError(f"slow=True runs a model on one device; leave tp={tp} out")


def _check_ranks(tp: int, drafter_request: DrafterRequest, quantization: str | None = None) -> None:
    """Refuse what several ranks cannot do."""
    if tp == 1:
        return
    if quantization is not None:
        raise InputError(f"tp is {tp} and quantization is {quantization!r}; leave one of them out: codes are not divided")
    if drafter_request.method == "amusd":
        raise InputError(f"tp is {tp} and the method is amusd, whose rounds depend on the clock; choose another method")
    if drafter_request.factory is not None and current() is not ALONE:
        raise InputError("several ranks run the model, and a drafter cannot be sent to them; name a method or a folder")


@contextmanager
def _one_report(tp: int | None) -> Iterator[None]:
    """If this block raises an error, let the first rank report it, and end the others."""
    try:
        yield
    except BaseException as error:
        if tp is None:
            raise
        fail(error)
        if is_launched() and os.environ["RANK"] != "0":  # it was refused before the ranks had met, by each of them
            sys.exit()
        raise


def _set_threads(threads: int) -> None:
    if type(threads) is not int or not 1 <= threads <= MOST_THREADS:
        raise InputError(f"threads is {threads!r}; it must be a whole number, 1 or more and at most {MOST_THREADS}")
    torch.set_num_threads(threads)


def _as_function(llm_class: Callable[Parameters, LLM]) -> Callable[Parameters, LLM]:
    """Return the class as a function with the same parameters."""

    @wraps(llm_class.__init__, assigned=("__doc__",), updated=())
    def load(*args: Parameters.args, **named: Parameters.kwargs) -> LLM:
        return llm_class(*args, **named)

    load.__signature__ = signature(llm_class)  # type: ignore[attr-defined]
    return load


load = _as_function(LLM)


class Stream:
    """The text of one request, piece by piece as rounds decide it. Iterate over it once.

    The request is queued when iteration begins; leaving the loop early aborts it.
    """

    def __init__(self, llm: LLM, request: Request) -> None:
        self._names = llm.model.name, llm.method
        self._run = llm.engine.checked(request)
        # A function, not a method: a generator that held `self` would make a cycle, which only the garbage collector frees.
        self._pieces = _pieces(llm._driver, self._run)

    def __iter__(self) -> Iterator[Piece]:
        return self._pieces

    @property
    def result(self) -> Result:
        """The whole answer. Reads the stream to its end first."""
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
            yield Piece(event.text, event.tokens, event.logprobs, event.draft)
            driver.wait(has_more)
    finally:
        driver.abort(run)
    if run.error:
        raise run.error


class AsyncStream:
    """The text of one request, piece by piece, for a task of an event loop. Iterate over it once, with `async for`.

    Leaving the loop early, or cancelling the task, aborts the request.
    """

    def __init__(self, runner: AsyncRunner, run: Running, names: tuple[str, str]) -> None:
        """`run`: a checked request. `names`: of the model and of the method."""
        self._run, self._names = run, names
        self._pieces = _async_pieces(runner, run)

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self._pieces

    async def result(self) -> Result:
        """Return the whole answer. Reads the stream to its end first."""
        async for _ in self._pieces:
            pass
        return Result.of(self._run, *self._names)

    async def aclose(self) -> None:
        """Abort the request if it has not ended."""
        await self._pieces.aclose()


async def _async_pieces(runner: AsyncRunner, run: Running) -> AsyncGenerator[Piece]:
    shown = 0
    runner.submit([run])
    try:
        await runner.more(run, shown)
        while shown < len(run.events):
            event = run.events[shown]
            shown += 1
            yield Piece(event.text, event.tokens, event.logprobs, event.draft)
            await runner.more(run, shown)
    finally:
        runner.leave(run)
    if run.error:
        raise run.error


class Chat:
    """A conversation, from `LLM.chat`. Earlier turns stay in the cache, so each turn reads only what is new.

    `messages`: all turns so far, as chat messages. `last`: the `Result` of the last reply.
    """

    last: Result

    def __init__(self, llm: LLM, system: str | None, settings: Settings) -> None:
        self._llm, self._settings = llm, settings
        self._system: list[Message] = [{"role": "system", "content": system}] if system else []
        self.messages: list[Message] = list(self._system)

    def stream(self, text: str, **settings: Unpack[Settings]) -> Iterator[Piece]:
        """Send a user message, and yield the reply piece by piece. `settings` take precedence over those of the chat."""
        turn: list[Message] = [*self.messages, {"role": "user", "content": text}]
        given: Settings = {"reuse": True, **self._settings, **settings}
        stream = self._llm.stream(turn, **given)
        yield from stream
        self.last = stream.result
        if self.last.finish_reason != "abort":  # a step broke, or another caller aborted all requests
            self.messages = [*turn, {"role": "assistant", "content": self.last.text}]

    def send(self, text: str, **settings: Unpack[Settings]) -> Result:
        """Send a user message, and return the whole reply. `settings` take precedence over those of the chat."""
        for _ in self.stream(text, **settings):
            pass
        return self.last

    def reset(self) -> None:
        """Forget all turns; the system message stays."""
        self.messages = list(self._system)

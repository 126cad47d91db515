"""AsyncLLM: a model for the tasks of an event loop, its engine in a process of its own or in this one.

The methods are those of `LLM.agenerate` and `LLM.astream`. Tokenizer, text and stop strings are here in both cases; the
engine has token ids only.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self, Unpack, overload

from foreword.api import LLM, AsyncStream, finished
from foreword.engine.driver import AsyncRunner
from foreword.engine.request import EngineLimits, Running
from foreword.errors import InputError
from foreword.hub.resolve import resolve
from foreword.methods import DEFAULT_METHOD
from foreword.model.adapters import fetch_base, tokenizer_folder
from foreword.requests import EACH, Prompt, Settings, build, is_single, listed
from foreword.results import Result
from foreword.serve.client import EngineClient
from foreword.serve.health import Health
from foreword.serve.local import LocalEngine
from foreword.serve.messages import Ready
from foreword.text import Tokenizer


class Transport(AsyncRunner, Protocol):
    """Where the engine runs."""

    ready: Ready

    @property
    def health(self) -> Health: ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def use(self, method: str, options: dict[str, Any]) -> None: ...


class AsyncLLM:
    """A model whose engine runs in a process of its own, for servers and other programs with an event loop.

        async with foreword.AsyncLLM("my-org/my-model", slots=8) as llm:
            result = await llm.agenerate("Why is the sky blue?")

    `tokenizer`: the model's tokenizer. `model`, `method`: their names. `slots`: how many requests run at a time. `limits`:
    what fits. `sampling_defaults`: the sampling settings of the model's generation config. `fingerprint`: what outputs
    depend on besides the request, such as the weights, the dtype and the kernels. All are known after `start`.
    """

    tokenizer: Tokenizer

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        method: str = DEFAULT_METHOD,
        *,
        restarts: int = 1,
        warm_up: bool = True,
        **options: Any,
    ) -> None:
        """`model`, `method`, `options`: as in `foreword.load`; a method is given by its name or folder. `restarts`: how
        often the engine's process is started again if it dies."""
        if not isinstance(method, str):
            raise InputError(f"method is {method!r}; give a name or a folder, since the engine runs in another process")
        given = {name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in options.items()}
        name = None if model is None else os.fspath(model)
        self._model, self._options = name, options
        self._transport: Transport = EngineClient({"model": name, "method": method, "warm_up": warm_up, **given}, restarts)
        self._owned: LLM | None = None

    @classmethod
    def of(cls, llm: LLM) -> Self:
        """Use an LLM of this process, for tests and small programs: its engine shares the interpreter with the event loop,
        which makes rounds slower."""
        made = cls.__new__(cls)
        made.tokenizer, made._transport, made._owned = llm.tokenizer, LocalEngine(llm), llm
        return made

    async def start(self) -> Self:
        """Load the model, and return this object when it can serve."""
        folder = None if self._owned else await asyncio.to_thread(self.fetched)
        starting = asyncio.create_task(self._transport.start())
        try:
            if folder is not None:  # next to the engine's process, which takes longer
                self.tokenizer = await asyncio.to_thread(Tokenizer.load, tokenizer_folder(folder))
            await starting
        except BaseException:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            raise
        return self

    def fetched(self) -> Path:
        """Return the model's folder. What is missing of it is downloaded. `start` does so too."""
        stored = self._options.get("quantization") == "stored"
        folder = resolve(self._model, self._options.get("revision"), self._options.get("token"), stored)
        fetch_base(folder, self._options.get("token"))
        return folder

    async def close(self) -> None:
        """End the engine. Requests in progress end with an error."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def model(self) -> str:
        return self._transport.ready.model

    @property
    def method(self) -> str:
        return self._transport.ready.method

    @property
    def slots(self) -> int:
        return self._transport.ready.slots

    @property
    def cache_rows(self) -> int:
        """How many tokens the cache holds, of all slots together."""
        return self._transport.ready.cache_rows

    @property
    def fingerprint(self) -> dict[str, str]:
        return self._transport.ready.fingerprint

    @property
    def limits(self) -> EngineLimits:
        return self._transport.ready.limits

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        return self._transport.ready.sampling_defaults

    @property
    def health(self) -> Health:
        """Whether the engine can serve, and what it is busy with."""
        return self._transport.health

    async def use(self, method: str = DEFAULT_METHOD, **options: Any) -> None:
        """Switch to another method on the same weights, as `LLM.use` does. Requests in progress are aborted."""
        await self._transport.use(method, options)

    def checked(self, prompts: list[Prompt], settings: Mapping[str, Any], n: int | None = None) -> list[Running]:
        """Encode prompts, and check them and their settings. Return `n` requests for each prompt, not yet queued. It may run
        in a thread: long prompts take long to encode."""
        ready = self._transport.ready
        given = {"reuse": ready.reuses, **settings}
        built = build(self.tokenizer, ready.limits, prompts, given, n, ready.sampling_defaults)
        return [Running(request) for request in built]

    def run(self, running: Running) -> AsyncStream:
        """Stream a request that `checked` returned. It is queued when iteration begins; leaving the loop early aborts it."""
        return AsyncStream(self._transport, running, (self.model, self.method))

    @overload
    async def agenerate(  # type: ignore[overload-overlap]  # a string is a sequence of strings too: it is one prompt
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
        """Generate the answer to a prompt, or to each of a list of prompts, as `LLM.agenerate` does. Cancelling the task
        aborts its requests."""
        runs = self.checked(listed(prompt), {EACH: settings, **given}, n)
        single = is_single(prompt) and n is None
        results = await finished(self._transport, runs, (self.model, self.method), single)
        return results[0] if single else results

    def astream(self, prompt: Prompt, **settings: Unpack[Settings]) -> AsyncStream:
        """Generate the answer to one prompt piece by piece: `async for piece in llm.astream(...)`."""
        (running,) = self.checked([prompt], {**settings})
        return self.run(running)

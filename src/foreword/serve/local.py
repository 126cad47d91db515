"""An engine in this process, with the methods of an engine's client. For tests and small programs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from foreword.api import LLM
from foreword.engine.request import Running
from foreword.serve.health import Health
from foreword.serve.ready import engine_load, ready


class LocalEngine:
    """Implements `Transport` by an LLM of this process, whose own thread steps its engine."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.ready = llm, ready(llm)
        self.is_closed = False

    @property
    def health(self) -> Health:
        return Health("dead") if self.is_closed else Health("ready", engine_load(self.llm.engine))

    async def start(self) -> None:
        """Nothing: the model is loaded."""

    async def close(self) -> None:
        """Abort all requests. The LLM is its owner's to close."""
        self.is_closed = True

    def submit(self, runs: Sequence[Running]) -> None:
        self.llm.runner.submit(runs)

    async def more(self, run: Running, shown: int) -> None:
        await self.llm.runner.more(run, shown)

    async def finished(self, runs: Sequence[Running]) -> None:
        await self.llm.runner.finished(runs)

    def leave(self, *runs: Running) -> None:
        self.llm.runner.leave(*runs)

    async def use(self, method: str, options: dict[str, Any]) -> None:
        await asyncio.to_thread(lambda: self.llm.use(method, **options))
        self.ready = ready(self.llm)

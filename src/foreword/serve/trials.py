"""Trials of grammars that are new: one at a time, in a thread of their own.

A trial may take as long as `grammar_check.COMPILE_S`. Requests without a grammar, or with one that was tried before, do not
wait for it. Only so many wait; those that come then are told to try again. One whose client leaves waits no longer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from foreword.serve.errors import Refusal
from foreword.text.grammar import KINDS, GrammarSpec
from foreword.text.grammar_check import COMPILE_S, check, is_checked

if TYPE_CHECKING:
    from foreword.serve.async_llm import AsyncLLM

MOST_WAITING = 32  # new grammars


class GrammarTrials:
    """Tries grammars for one model. All methods belong to the event loop."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._thread = ThreadPoolExecutor(1, "foreword-trials")
        self._waiting = 0

    async def passed(self, settings: Mapping[str, Any]) -> None:
        """Return when the grammar in some settings has passed its trial, or raise an InputError."""
        if not settings.keys() & {*KINDS}:
            return
        spec = await asyncio.to_thread(self._new, settings)
        if spec is None:
            return
        if self._waiting >= MOST_WAITING:
            message = f"{self._waiting} new grammars wait to be compiled, and at most {MOST_WAITING} may; try again later"
            raise Refusal(429, message, headers={"Retry-After": f"{COMPILE_S:g}"})
        self._waiting += 1
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, check, spec, self._vocabulary())
        finally:
            self._waiting -= 1

    def _new(self, settings: Mapping[str, Any]) -> GrammarSpec | None:
        """Return the grammar if it was not tried before."""
        spec = GrammarSpec.of(settings)
        return None if spec is None or is_checked(spec, self._vocabulary()) else spec

    def _vocabulary(self) -> str:
        limits = self._llm.limits
        return self._llm.tokenizer.grammar_vocabulary(limits.vocabulary, limits.ends)

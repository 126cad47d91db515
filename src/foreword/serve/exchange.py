"""Exchange: the interface of what an endpoint makes of one request, and what such exchanges have in common.

An exchange says what the engine is asked, and writes the answer: as events while rounds come, or whole at the end.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, Protocol
from uuid import uuid4

from foreword.core.draft import ORIGINS
from foreword.engine.request import Event, Running
from foreword.engine.round_trace import RoundTrace
from foreword.requests import Prompt
from foreword.serve.errors import Refusal
from foreword.serve.fields import ChatFields, CompletionFields, Object, StreamOptions
from foreword.serve.flow import News
from foreword.serve.service import Service
from foreword.serve.usage import cost_of, usage_of


class Exchange(Protocol):
    """One request that generates, and its answer."""

    prompts: list[Prompt]
    samples: int  # outputs per prompt
    streams: bool

    def settings(self) -> Object:
        """Return the settings of `generate`. May take long."""

    def begin(self, runs: list[Running]) -> None:
        """Take the runs, those of a prompt next to each other, after `settings` and before any other method."""

    def opening(self) -> bytes:
        """Return the events before the first round."""

    def chunk(self, news: News) -> bytes:
        """Return the events of what is new of an output."""

    def closing(self) -> bytes:
        """Return the events after the last round."""

    def failure(self, refusal: Refusal) -> bytes:
        """Return the last event of a stream that fails."""

    def whole(self) -> Object:
        """Return the answer of a request that does not stream."""


class Chunks:
    """What the chunks of a stream have in common, and the whole answer: its name, and what it cost."""

    def __init__(self, service: Service, kinds: tuple[str, str, str], options: StreamOptions | None, n: int) -> None:
        """`kinds`: of ids, of chunks and of whole answers. `n`: outputs per prompt."""
        self._method, self._samples = service.llm.method, n
        prefix, self._chunk_kind, self._kind = kinds
        self._head = {
            "id": f"{prefix}-{uuid4().hex}",
            "created": int(time.time()),
            "model": service.names[0],
            "system_fingerprint": service.fingerprint,
        }
        self._shows_usage = bool(options and options.include_usage)
        self._always = self._shows_usage and bool(options and options.continuous_usage_stats)

    def one(self, choices: list[Object], runs: Sequence[Running], **more: Any) -> Object:
        """Return a chunk."""
        usage: Object = {}
        if self._shows_usage:
            usage = {"usage": usage_of(runs, self._samples) if self._always else None}
        return {**self._head, "object": self._chunk_kind, "choices": choices, **usage, **more}

    def last(self, runs: Sequence[Running]) -> Object | None:
        """Return the chunk after the last choice, if the client asked for it."""
        if not self._shows_usage:
            return None
        return self.one([], runs) | {"usage": usage_of(runs, self._samples), **self.cost(runs)}

    def whole(self, choices: list[Object], runs: Sequence[Running]) -> Object:
        """Return the answer of a request that does not stream."""
        usage = usage_of(runs, self._samples)
        return {**self._head, "object": self._kind, "choices": choices, "usage": usage, **self.cost(runs)}

    def cost(self, runs: Sequence[Running]) -> Object:
        return cost_of(runs, self._method)


def by_round(news: News, fields: ChatFields | CompletionFields) -> list[list[Event]]:
    """Return the events that each make a chunk: all of them together, or one by one if the client traces rounds."""
    if fields.trace_rounds:
        return [[event] for event in news.events]
    return [news.events] if news.events else []


def traced(events: list[Event], fields: ChatFields | CompletionFields) -> Object:
    """Return what a chunk tells about its round, if the client asked for it."""
    if not fields.trace_rounds or not events:
        return {}
    draft = events[0].draft
    return {"foreword": {"tokens": events[0].tokens, "round": None if draft is None else _drawn(draft)}}


def _drawn(draft: RoundTrace) -> Object:
    """Return a round's draft as a tree of nodes, in the order of its rows. Node 0 is the root."""
    columns = zip(draft.tokens, draft.texts, draft.parents, draft.origins, draft.chances, strict=True)
    nodes = [
        {
            "token": token,
            "text": text,
            "parent": parent,
            "origin": ORIGINS[origin],
            "probability": chance if math.isfinite(chance) else None,
        }
        for token, text, parent, origin, chance in columns
    ]
    return {"nodes": nodes, "accepted": draft.path, "next": {"token": draft.next, "text": draft.next_text}}


def tokens_of(events: list[Event]) -> list[int]:
    return [token for event in events for token in event.tokens]


def length_limit(given: Object, context: int, default: int) -> Object:
    """Return the settings with a limit of tokens that fits into the context: where that is full, an output ends anyway."""
    return {**given, "max_new_tokens": min(given.get("max_new_tokens", default), context)}

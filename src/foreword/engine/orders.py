"""What the first rank tells the others to do with their engines, before it does the same with its own.

Each order is one small object. Requests are sent whole, so that every rank finds end tokens and stop strings by itself, in
the same round; only the tokenizer stays where it is.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from foreword.core.sampling import Sampling
from foreword.engine.request import Request, Running
from foreword.text import Tokenizer


@dataclass(frozen=True)
class Step:
    """Queue requests, abort others, and then run a step with that many rounds, or none."""

    arrived: dict[int, Request]  # by number
    aborted: list[int]
    rounds: int
    decided: int  # what the first rank's requests are before the step: see `digest`


@dataclass(frozen=True)
class WarmUp:
    """Run `Engine.warm_up`."""

    shortest: int
    longest: int | None
    sampling: Sampling | None


@dataclass(frozen=True)
class Switch:
    """Switch to another method."""

    drafter_request: Any


@dataclass(frozen=True)
class Close:
    """The model is closed."""


Order = Step | WarmUp | Switch | Close


def digest(runs: Collection[Running]) -> int:
    """Return a number that differs, most likely, if any request has other tokens on another rank."""
    return hash(tuple((one.slot, len(one.tokens), one.tokens[-1] if one.tokens else -1) for one in runs))


def packed(order: Order) -> bytes:
    """Return an order as bytes, without the tokenizer."""
    written = io.BytesIO()
    _Pickler(written, pickle.HIGHEST_PROTOCOL).dump(order)
    return written.getvalue()


def unpacked(order: bytes, tokenizer: Tokenizer) -> Order:
    """Return an order from bytes, with this rank's own tokenizer."""
    reader = _Unpickler(io.BytesIO(order))
    reader.tokenizer = tokenizer
    found: Order = reader.load()
    return found


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> str | None:
        return "tokenizer" if isinstance(value, Tokenizer) else None


class _Unpickler(pickle.Unpickler):
    tokenizer: Tokenizer

    def persistent_load(self, name: str) -> Tokenizer:
        return self.tokenizer

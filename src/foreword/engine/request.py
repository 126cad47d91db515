"""What the world asks for, and what the host keeps of it while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from foreword.core.sampling import Sampling
from foreword.errors import InputError, NumericsError
from foreword.text.stream import TextStream

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Request:
    """One text to write. `stream` watches the text for stop strings; without one, tokens are all there is."""

    prompt: tuple[int, ...]
    sampling: Sampling = Sampling()
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    ignore_eos: bool = False
    speculate: bool = True
    reuse: bool = False
    """Start from the longest beginning of the prompt that a free slot still holds, as a chat does."""

    stream: TextStream | None = None

    def __post_init__(self) -> None:
        for name, kind in (("max_new_tokens", int), ("min_new_tokens", int), ("ignore_eos", bool), ("speculate", bool)):
            if type(getattr(self, name)) is not kind:
                raise InputError(f"{name} is {getattr(self, name)!r}; it must be of type {kind.__name__}")
        if self.max_new_tokens < 1:
            raise InputError(f"max_new_tokens is {self.max_new_tokens}; it must be 1 or more")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise InputError(
                f"min_new_tokens is {self.min_new_tokens}; it must lie between 0 and max_new_tokens ({self.max_new_tokens})"
            )


@dataclass(frozen=True)
class Logprob:
    """How likely a token was to the model itself, before penalties, temperature and filters."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(eq=False)
class Running:
    """A request on its way: what has been written, and what it cost."""

    request: Request
    slot: int = -1
    prefilled: int = 0  # prompt tokens in the cache
    reused: int = 0  # of those, taken over from the slot's earlier text
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    events: list[Event] = field(default_factory=list)  # what each round brought, kept where the request has a stream
    logprobs: list[Logprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: NumericsError | None = None
    spoiled: bool = False  # the target answered NaN to a draft: from then on it is asked about the text alone
    accepted: list[int] = field(default_factory=list)  # tokens decided in each round, the target's own included
    drafted: list[int] = field(default_factory=list)  # candidates checked in each round
    prefill_s: float = 0.0
    decode_s: float = 0.0  # known once it has left
    began: float = 0.0  # where the engine's clock stood before its first round

    def __post_init__(self) -> None:
        self.rows = len(self.request.prompt) - 1  # of the prompt that are cached
        self.quiet = self.request.stream is None and self.request.sampling.logprobs is None  # tokens are all there is

    @property
    def done(self) -> bool:
        return self.finish_reason is not None

    @property
    def ready(self) -> bool:
        """All of the prompt but its last token, the first root, is cached."""
        return self.prefilled == self.rows

    @property
    def length(self) -> int:
        """Committed rows in the cache."""
        return self.prefilled + len(self.tokens)


@dataclass(eq=False, slots=True)
class Event:
    """What a step brought for one request. Not frozen: making one, for every text in every round, would cost twice."""

    running: Running
    tokens: list[int]
    text: str

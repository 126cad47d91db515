"""What a client and an engine in another process say to each other: token ids and numbers, no text.

The first message is `Start`, answered by `Ready` or `Refused`. Then the client sends `Submit`, `Abort` and `Use`, and the
engine sends `StepReport` after its steps. A request has the number that its client gave it. Each message is one frame: its
length in four bytes, then MessagePack.
"""

from __future__ import annotations

import struct
from dataclasses import fields
from typing import Any, TypeAlias

import msgspec

import foreword.errors
from foreword.core.sampling import Sampling
from foreword.engine.request import EngineLimits, Event, Finish, Logprob, Request, Running
from foreword.engine.round_trace import RoundTrace
from foreword.errors import EngineError, ForewordError
from foreword.text.grammar import GrammarSpec

LENGTH = struct.Struct(">I")
NOT_PACKED = {"stream", "sampling", "grammar"}  # fields of a request: the stream stays, the others are sent next to it


class Start(msgspec.Struct, tag=True):
    """Load a model. `options`: the parameters of `foreword.LLM`."""

    options: dict[str, Any]


class Submit(msgspec.Struct, tag=True):
    """Queue a request."""

    number: int
    request: dict[str, Any]
    sampling: dict[str, Any]
    grammar: GrammarSpec | None = None  # the engine compiles it: compiled, it would take longer to send

    @staticmethod
    def of(number: int, request: Request) -> Submit:
        sampling = {one.name: getattr(request.sampling, one.name) for one in fields(Sampling)}
        rest = {one.name: getattr(request, one.name) for one in fields(Request) if one.name not in NOT_PACKED}
        return Submit(number, rest, sampling, request.grammar)

    def unpacked(self) -> Request:
        """Return the request, without a stream."""
        found: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in self.request.items()
        }
        return Request(sampling=Sampling(**self.sampling), grammar=self.grammar, **found)


class Abort(msgspec.Struct, tag=True):
    """Abort requests."""

    numbers: list[int]


class Use(msgspec.Struct, tag=True):
    """Switch to another method. Answered by `Ready` or `Refused`; requests in progress are aborted."""

    method: str
    options: dict[str, Any]


class Ready(msgspec.Struct, tag=True):
    """The model is loaded. See the fields of `AsyncLLM`."""

    model: str
    method: str
    slots: int
    context: int
    trained: int
    vocabulary: int
    ends: list[int]
    sampling_defaults: dict[str, Any]
    fingerprint: dict[str, str]
    reuses: bool
    cache_rows: int

    @property
    def limits(self) -> EngineLimits:
        return EngineLimits(self.context, self.trained, self.vocabulary, frozenset(self.ends))


class Failure(msgspec.Struct):
    """An exception: the name of its class, and its message."""

    kind: str
    message: str

    @staticmethod
    def of(error: BaseException) -> Failure:
        if isinstance(error, ForewordError):
            return Failure(type(error).__name__, str(error))
        return Failure(EngineError.__name__, f"{type(error).__name__}: {error}")

    def error(self) -> ForewordError:
        kind = getattr(foreword.errors, self.kind, EngineError)
        return kind(self.message)


class Refused(msgspec.Struct, tag=True):
    """What `Start` or `Use` asked for is not possible."""

    failure: Failure


class Begun(msgspec.Struct, array_like=True):
    """What is known of a request when it brings its first tokens."""

    prefill_s: float
    reused: int
    began: float


class Ended(msgspec.Struct, array_like=True):
    """How a request ended."""

    finish: Finish | None
    failure: Failure | None = None
    prompt_logprobs: list[Logprob] | None = None
    draft_was_nan: bool = False


class Progress(msgspec.Struct, array_like=True, omit_defaults=True):
    """What one or several rounds brought to one request. `accepted`, `drafted`: of each round."""

    number: int
    tokens: list[int]
    accepted: list[int]
    drafted: list[int]
    logprobs: list[Logprob] = []
    predicted: int = 0  # of the tokens, the first ones
    draft: RoundTrace | None = None  # of the round, which is then alone
    begun: Begun | None = None
    ended: Ended | None = None

    def can_join(self, later: Progress) -> bool:
        """Whether later rounds can go together with these. A traced round is sent alone, and so is one that drafted from a
        prediction."""
        return not (self.draft or later.draft or later.predicted)

    def join(self, later: Progress) -> None:
        """Add what later rounds brought."""
        self.tokens += later.tokens
        self.accepted += later.accepted
        self.drafted += later.drafted
        self.logprobs += later.logprobs
        self.ended = later.ended


class EngineLoad(msgspec.Struct, array_like=True):
    """What an engine is busy with."""

    running: int = 0
    waiting: int = 0
    cache_rows: int = 0  # of running requests


class StepReport(msgspec.Struct, tag=True):
    """What the last rounds brought. `clock`: seconds that the engine has spent in rounds."""

    progress: list[Progress]
    load: EngineLoad
    clock: float


ToEngine: TypeAlias = Start | Submit | Abort | Use
FromEngine: TypeAlias = Ready | Refused | StepReport

_encoder = msgspec.msgpack.Encoder()
to_engine = msgspec.msgpack.Decoder(ToEngine).decode
from_engine = msgspec.msgpack.Decoder(FromEngine).decode


def frame(message: ToEngine | FromEngine) -> bytes:
    """Return a message as bytes, its length first."""
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body


def progress_of(number: int, event: Event) -> Progress:
    """Return what an event of the engine says. A round that decided nothing counts too."""
    running = event.running
    progress = Progress(number, [*event.tokens], running.accepted[-1:], running.drafted[-1:], [*event.logprobs])
    progress.predicted, progress.draft = event.predicted, event.draft
    if len(running.accepted) == 1:
        progress.begun = Begun(running.prefill_s, running.reused, running.began)
    if running.done:
        progress.ended = ended_of(running)
    return progress


def ended_of(running: Running) -> Ended:
    """Return how a finished request ended."""
    assert running.finish_reason is not None
    failure = None if running.error is None else Failure.of(running.error)
    finish = Finish(running.finish_reason, running.stop_reason)
    return Ended(finish, failure, running.prompt_logprobs or None, running.draft_was_nan)

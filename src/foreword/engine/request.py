"""Request: one sequence to generate. Running: what the host knows of a request while it runs."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from foreword.core.sampling import Sampling
from foreword.engine.round_trace import RoundTrace
from foreword.errors import InputError, PromptError
from foreword.text.grammar import GrammarSpec
from foreword.text.stream import TextStream

FinishReason = Literal["stop", "length", "abort"]

MOST_STOP_TOKENS = 4096
LONGEST_SESSION = 256  # characters


@dataclass(frozen=True)
class Request:
    """One sequence to generate."""

    prompt: tuple[int, ...]
    """Token ids, at least one."""

    sampling: Sampling = Sampling()
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    """End tokens and stop tokens are not sampled before the output is that long."""

    ignore_eos: bool = False
    """Continue after an end token."""

    speculate: bool = True
    """Draft for this request; without, it is decoded plainly, with the same output."""

    reuse: bool = False
    """Start from the longest prefix of the prompt that a slot holds, as a chat does. If another request is reading it, this
    one waits for it and copies its rows."""

    cache_salt: str = ""
    """A prompt reuses only cached rows of requests with the same salt. If users must not affect each other's response times,
    give them different salts."""

    session: str = ""
    """Requests with the same session take the same slot again, if it is free, and leave those of other sessions alone as
    long as there are others. The output is the same."""

    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output as an end token does, also with `ignore_eos`."""

    prompt_logprobs: int | None = None
    """Report the log-probability of each prompt token, and those of this many likeliest tokens at each position. The prompt
    then reuses no cached rows. None: off."""

    prediction: tuple[int, ...] = ()
    """Tokens that the output is expected to repeat for the most part. Methods that look up draft from it."""

    trace_rounds: bool = False
    """Every event tells what its round drafted and accepted: `Event.draft`."""

    model_defaults: tuple[str, ...] = ()
    """The settings in `sampling` that come from the model's generation config; the result reports them."""

    grammar: GrammarSpec | None = None
    """What the output must follow."""

    stream: TextStream | None = None
    """Turns tokens into text and looks for stop strings; None: the output is tokens only."""

    def __post_init__(self) -> None:
        kinds = {"max_new_tokens": int, "min_new_tokens": int, "cache_salt": str, "session": str}
        kinds |= dict.fromkeys(("ignore_eos", "speculate", "reuse", "trace_rounds"), bool)
        for name, kind in kinds.items():
            if type(getattr(self, name)) is not kind:
                raise InputError(f"{name} is {getattr(self, name)!r}; it must be of type {kind.__name__}")
        if len(self.session) > LONGEST_SESSION:
            raise InputError(f"session has {len(self.session)} characters; give at most {LONGEST_SESSION}")
        if self.max_new_tokens < 1:
            raise InputError(f"max_new_tokens is {self.max_new_tokens}; it must be 1 or more")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise InputError(
                f"min_new_tokens is {self.min_new_tokens}; it must lie between 0 and max_new_tokens ({self.max_new_tokens})"
            )
        if self.prompt_logprobs is not None and not (type(self.prompt_logprobs) is int and 0 <= self.prompt_logprobs <= 100):
            raise InputError(
                f"prompt_logprobs is {self.prompt_logprobs!r}; it must be None (off) or the number of likeliest tokens to "
                "report, 0 to 100"
            )
        check_stop_tokens(self.stop_token_ids)
        for token in self.stop_token_ids:
            if type(token) is not int:
                raise InputError(f"stop_token_ids holds {token!r}; give whole numbers")


def check_stop_tokens(ids: Sized) -> None:
    """Refuse a list of stop tokens that is too long, before its entries are looked at."""
    if len(ids) > MOST_STOP_TOKENS:
        raise InputError(f"stop_token_ids has {len(ids)} token ids; give at most {MOST_STOP_TOKENS}")


@dataclass(frozen=True)
class EngineLimits:
    """What an engine can serve, and the check of requests against it."""

    context: int  # the most tokens of a sequence, prompt included
    trained: int  # the most tokens that the model was trained for
    vocabulary: int
    ends: frozenset[int] = frozenset()  # ids of the end tokens

    def check(self, request: Request) -> None:
        """Refuse a request that cannot be served."""
        self.check_prompt(request.prompt)
        self.check_settings(request)

    def check_settings(self, request: Request) -> None:
        """Refuse settings that cannot be served, whatever the prompt is."""
        sampling = request.sampling
        if request.grammar is not None:
            self._check_ending(request, request.grammar.kind)
        self.check_allowed(sampling.allowed_token_ids)
        self._check_ids("stop_token_ids", request.stop_token_ids)
        self._check_ids("allowed_token_ids", sampling.allowed_token_ids or ())
        self._check_ids("logit_bias", tuple(token for token, _ in sampling.biases))
        if sampling.bad_words and not sampling.bad_word_ids:
            raise InputError("bad_words needs a tokenizer; give the token ids of each word as bad_word_ids")
        for word in sampling.bad_word_ids or ():
            self._check_ids("bad_word_ids", word)
        if len(request.prediction) > self.context:
            raise InputError(self.prediction_too_long(f"{len(request.prediction)} tokens"))
        self._check_ids("prediction", request.prediction)
        self._check_that_tokens_are_left(request)

    def _check_ending(self, request: Request, grammar: str) -> None:
        """Refuse what keeps an output from ending where its grammar ends."""
        if not self.ends:
            raise InputError(f"{grammar} needs an end token, and this model has none; leave it out")
        for name in ("min_new_tokens", "ignore_eos"):
            if given := getattr(request, name):
                reason = "where a grammar ends, only an end token is left"
                raise InputError(f"{name} is {given} and {grammar} is given; {reason}, so leave one of them out")

    def check_allowed(self, allowed: object) -> None:
        """Refuse a list of allowed tokens that is longer than the vocabulary, before its entries are looked at."""
        if isinstance(allowed, Sized) and len(allowed) > self.vocabulary:
            raise InputError(
                f"allowed_token_ids has {len(allowed)} token ids; the model's vocabulary has only {self.vocabulary}"
            )

    def prediction_too_long(self, size: str) -> str:
        """Return the error message for a prediction of that size."""
        return f"prediction has {size}, the context holds {self.context} tokens, prompt included; give a part of it"

    def _check_that_tokens_are_left(self, request: Request) -> None:
        """Refuse settings under which there may be no token to sample."""
        allowed = request.sampling.allowed_token_ids
        held = self.ends.union(request.stop_token_ids) if request.min_new_tokens else frozenset()
        if not self._leaves_tokens(allowed, held):
            raise InputError(
                f"min_new_tokens is {request.min_new_tokens}, but every allowed token would end the output; "
                "allow others, or set min_new_tokens to 0"
            )
        if not self._leaves_tokens(allowed, held.union(word[-1] for word in request.sampling.bad_word_ids or ())):
            raise InputError(
                "every token that may be sampled is the last one of a bad word, so none might be left; allow others, or "
                "leave bad words out"
            )

    def _leaves_tokens(self, allowed: tuple[int, ...] | None, excluded: frozenset[int]) -> bool:
        """Return whether some allowed token is not excluded. Nothing as large as the vocabulary is made for it."""
        if allowed is None:
            return sum(0 <= token < self.vocabulary for token in excluded) < self.vocabulary
        return any(token not in excluded for token in allowed)

    def _check_ids(self, name: str, ids: tuple[int, ...]) -> None:
        for token in ids:
            if not 0 <= token < self.vocabulary:
                raise InputError(f"{name} holds {token}, which is outside the model's vocabulary of {self.vocabulary}")

    def check_prompt(self, prompt: Sequence[int]) -> None:
        """Refuse a prompt that is empty, too long, or has ids outside the vocabulary."""
        if not prompt:
            raise PromptError("the prompt is empty; it needs at least one token")
        if len(prompt) >= self.context:
            raise PromptError(self.too_long(f"{len(prompt)} tokens"))
        outside = next((token for token in prompt if not 0 <= token < self.vocabulary), None)
        if outside is not None:
            raise PromptError(f"token id {outside} is outside the model's vocabulary of {self.vocabulary}")

    def too_long(self, size: str) -> str:
        """Return the error message for a prompt of that size, with what to do."""
        holds = f"the prompt has {size}, the context holds {self.context} tokens and must leave room for one more"
        if self.context < self.trained:
            return (
                f"{holds}; shorten the prompt, keep only its end (truncate_prompt_tokens), "
                f"or load with a larger max_context, up to {self.trained}"
            )
        return (
            f"{holds}; max_context is already what the model was trained for: shorten the prompt, or keep only its end "
            "(truncate_prompt_tokens)"
        )


@dataclass(frozen=True)
class Logprob:
    """The log-probability of a token under the model itself, before penalties, temperature and filters."""

    token: int  # its id
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (id, log-probability) of the likeliest tokens, best first
    text: str = ""  # the token as text
    top_texts: tuple[str, ...] = ()  # the same for each token of `top`


@dataclass(eq=False)
class Running:
    """A queued, running or finished request: its output so far, and what it cost."""

    request: Request
    slot: int = -1  # -1: none yet
    prefilled: int = 0  # prompt tokens in the cache
    reused: int = 0  # how many of those it found in its slot, or copied from another
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    events: list[Event] = field(default_factory=list)  # one per round, kept if the request has a stream
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: list[Logprob] = field(default_factory=list)  # of all but the first token
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop token that ended it; "context" if the context was full
    error: BaseException | None = None  # why it was aborted: NaN, or a step that broke
    draft_was_nan: bool = False  # the target answered NaN to a draft: from then on the request runs without drafts
    accepted: list[int] = field(default_factory=list)  # tokens decided in each round, the target's own included
    drafted: list[int] = field(default_factory=list)  # candidates checked in each round
    predicted: int = 0  # accepted draft tokens that came from the request's prediction
    prefill_s: float = 0.0
    decode_s: float = 0.0  # set when the request leaves its slot
    began: float = 0.0  # the engine's clock before its first round

    def __post_init__(self) -> None:
        self.rows = len(self.request.prompt) - 1  # prompt rows that are cached
        self.stops = frozenset(self.request.stop_token_ids)
        request = self.request
        watched = request.stream is not None or request.sampling.logprobs is not None or bool(self.stops)
        watched |= bool(request.prediction) or request.trace_rounds
        self.tokens_only = not watched  # the host need not look at the tokens: the device knows where the output ends

    @property
    def done(self) -> bool:
        return self.finish_reason is not None

    @property
    def ready(self) -> bool:
        """Whether the whole prompt is cached, except its last token, which is the first root."""
        return self.prefilled == self.rows

    @property
    def length(self) -> int:
        """The number of committed rows in the cache."""
        return self.prefilled + len(self.tokens)

    @property
    def sequence(self) -> tuple[int, ...]:
        """The prompt and the output so far."""
        return (*self.request.prompt, *self.tokens)

    @property
    def proven(self) -> int:
        """The number of committed rows that are finite for certain: a token was decided from them, here or where they come
        from."""
        return self.length if self.tokens else self.reused


class Finish(NamedTuple):
    """How an output ends: see `Running.finish_reason` and `Running.stop_reason`."""

    reason: FinishReason
    stop_reason: str | int | None = None


@dataclass(eq=False, slots=True)
class Event:
    """The output of one step for one request. Not frozen, since creating a frozen one takes twice as long, and there is one
    per request and round."""

    running: Running
    tokens: list[int]
    text: str
    logprobs: Sequence[Logprob] = ()  # of the tokens, if the request asked for them
    predicted: int = 0  # how many of the tokens, the first ones, were drafted from the request's prediction
    draft: RoundTrace | None = None  # the draft of the round, if the request asked for it
    finish: Finish | None = None  # if it ends its output

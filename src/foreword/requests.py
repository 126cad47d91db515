"""PROMPT: prompts and settings -> requests.

In: a prompt or a list of them, and settings by name. Out: one `Request` per prompt and sample, encoded and checked. The
tables list the settings that exist, by the part of a request that they belong to. Limits are checked before the work that
they bound.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import index
from types import MappingProxyType
from typing import Any, SupportsIndex, TypedDict

from foreword.core.sampling import LONGEST_BAD_WORD, OPTIONS, Sampling
from foreword.engine.request import EngineLimits, Request, check_stop_tokens
from foreword.errors import InputError, PromptError
from foreword.text import ChatOptions, Message, TextStream, Tokenizer
from foreword.text.grammar import KINDS as GRAMMARS
from foreword.text.grammar import GrammarSpec
from foreword.text.grammar_check import check as check_grammar

Prompt = str | list[Message] | list[int]
"""A string, a list of chat messages, or a list of token ids."""

SAMPLING = tuple(OPTIONS)
LIMITS = (
    "max_new_tokens",
    "min_new_tokens",
    "ignore_eos",
    "stop_token_ids",
    "prompt_logprobs",
    "speculate",
    "reuse",
    "cache_salt",
    "session",
    "trace_rounds",
)
CHAT = ("chat_template", "chat_template_kwargs", "tools", "continue_final_message", "add_generation_prompt")
PROMPT = ("chat", "sanitize_control_tokens", "truncate_prompt_tokens")
TEXT = ("stop", "include_stop_str_in_output", "skip_special_tokens")
PREDICTION = "prediction"
SETTINGS = (*SAMPLING, *LIMITS, *GRAMMARS, *TEXT, *PROMPT, *CHAT, PREDICTION)
ALIASES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}  # vLLM's and OpenAI's names
ALL_SAMPLING = "sampling"  # all settings of SAMPLING as one `Sampling` object
NOTHING: Mapping[str, Any] = MappingProxyType({})
EACH = "settings"  # a list of dicts, one per prompt

MOST_SAMPLES = 1024  # of one prompt
MOST_REQUESTS = 65536  # in one call
MOST_STOPS = 256  # stop strings of one request
LONGEST_STOP = 1024  # characters
SPARE = 64  # tokens; cutting a text changes its encoding only near the cut


class Settings(TypedDict, total=False):
    """The settings of a request: keywords of `generate`, `stream` and `chat`. All are optional.

    Sampling settings that are not given come from the model's generation config, otherwise they are off: greedy decoding.
    """

    sampling: Sampling
    """All sampling settings as one object; then none of those below up to `bad_word_ids` may be given."""

    temperature: float
    """0 is greedy. Larger values flatten the distribution; 1 is the model's own."""

    top_k: int
    """Sample from the k likeliest tokens only. 0 or -1 is off."""

    top_p: float
    """Sample from the likeliest tokens whose probabilities sum to p. 1 is off."""

    min_p: float
    """Sample only from tokens at least p times as likely as the likeliest one. 0 is off."""

    repetition_penalty: float
    """Above 1: tokens of the prompt and the output become less likely, as in transformers. 1 is off."""

    seed: int | None
    """The same seed gives the same output, with any method. None: a random one, which the result reports."""

    logprobs: int | None
    """Report the log-probability of each token, and of this many likeliest tokens at its position, 0 to 100. None: off."""

    allowed_token_ids: Sequence[int] | None
    """Sample from these tokens only. None: all."""

    presence_penalty: float
    """-2 to 2, as in the OpenAI API: subtracted from the logits of all tokens in the output so far. 0 is off."""

    frequency_penalty: float
    """-2 to 2, as in the OpenAI API: subtracted once per occurrence of the token in the output so far. 0 is off."""

    logit_bias: Mapping[int, float] | Mapping[str, float] | None
    """Token id -> number from -100 to 100 that is added to its logit."""

    bad_words: Sequence[str] | None
    """Strings that the output must not contain."""

    bad_word_ids: Sequence[Sequence[int]] | None
    """The same as token sequences."""

    max_new_tokens: int
    """The most tokens to generate. The default is 128."""

    max_tokens: int
    """Another name of `max_new_tokens`."""

    min_new_tokens: int
    """End tokens and `stop_token_ids` are not sampled before the output has this many tokens."""

    min_tokens: int
    """Another name of `min_new_tokens`."""

    ignore_eos: bool
    """Continue after end tokens."""

    stop_token_ids: Collection[int] | None
    """Tokens that end the output, also with `ignore_eos`."""

    prompt_logprobs: int | None
    """The same as `logprobs`, for the tokens of the prompt."""

    speculate: bool
    """False: decode this request without drafts. The output is the same."""

    reuse: bool
    """Start from cached tokens, if the prompt begins like a sequence that is cached. Samples of one prompt read it once."""

    cache_salt: str
    """Reuse only sequences of requests with the same salt."""

    session: str
    """The name of a conversation: its tokens stay cached as long as there are slots for others. The output is the same."""

    prediction: str | Sequence[int] | None
    """What the output is expected to repeat for the most part, as text or token ids: OpenAI's Predicted Outputs. It makes
    `prompt_lookup` and `echo` faster. The output is the same."""

    trace_rounds: bool
    """Pieces of a stream carry the draft of their round, and what of it was accepted: `piece.draft`."""

    json_schema: Mapping[str, Any] | str | bool | None
    """The output is JSON that follows this schema. True: any JSON object. It needs the package xgrammar, as the next three
    do."""

    regex: str | None
    """The whole output matches this regular expression."""

    grammar: str | None
    """The output follows these rules, in EBNF as xgrammar reads it; the first is called root."""

    structural_tag: Mapping[str, Any] | str | None
    """The output follows a structural tag of xgrammar, which joins parts such as fixed strings and JSON schemas."""

    stop: str | Sequence[str] | None
    """Strings that end the output. The text ends before the first one that appears."""

    include_stop_str_in_output: bool
    """The text includes the stop string or stop token that ended it."""

    skip_special_tokens: bool
    """Leave special tokens out of the text. The default is True."""

    chat: bool
    """Put a string prompt into the model's chat template, as a user message. The default is True."""

    sanitize_control_tokens: bool
    """Encode control tokens in the prompt, such as <|im_end|>, as ordinary characters. Use it for untrusted text."""

    truncate_prompt_tokens: int | None
    """Keep only this many last tokens of the prompt."""

    chat_template: str | None
    """A Jinja template to use in place of the model's."""

    chat_template_kwargs: Mapping[str, Any] | None
    """Variables of the chat template, such as {"enable_thinking": False}."""

    tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None
    """What the model may call: JSON schemas, or functions with type hints and a docstring."""

    continue_final_message: bool
    """Continue the last message, which must be one of the assistant."""

    add_generation_prompt: bool
    """False: leave out what the chat template writes before an answer. The default is True."""


def is_single(prompt: Any) -> bool:
    """Return whether it is one prompt: a string, a list of messages, or token ids. Anything else is a list of prompts."""
    if isinstance(prompt, str) or _is_ids(prompt):
        return True
    return isinstance(prompt, list) and bool(prompt) and all(isinstance(message, dict) for message in prompt)


def _is_ids(prompt: Any) -> bool:
    first = prompt[0] if isinstance(prompt, list | tuple) and prompt else None
    return isinstance(first, SupportsIndex) and not isinstance(first, bool)


def listed(prompt: Any) -> list[Prompt]:
    """Return one prompt or several as a list."""
    if is_single(prompt):
        return [prompt]
    if not isinstance(prompt, list | tuple):
        raise PromptError(
            "a prompt is a string, a list of chat messages or a list of token ids, or a list of those; "
            f"got {type(prompt).__name__}"
        )
    if not prompt:
        raise PromptError("the list of prompts is empty")
    return list(prompt)


def build(
    tokenizer: Tokenizer,
    limits: EngineLimits,
    prompts: list[Prompt],
    settings: Mapping[str, Any],
    n: int | None = None,
    defaults: Mapping[str, Any] = NOTHING,
) -> list[Request]:
    """Build `n` requests for each prompt, the samples of a prompt next to each other, each with its own seed.

    settings: of all prompts, and under `EACH` those of single prompts. defaults: the model's sampling settings, which apply
    where `settings` has none.
    """
    samples = _samples(n, len(prompts))
    each = _settings_of_each(settings, len(prompts), defaults, limits)
    each = _checked_settings(tokenizer, limits, each, len(prompts) if settings.get(EACH) is not None else 1)
    requests = []
    for place, (prompt, own) in enumerate(zip(prompts, each, strict=True)):
        with _named("prompts", place, len(prompts)):
            ids = _encoded(tokenizer, limits, prompt, own)
            limits.check_prompt(ids)
        requests += [own.request(tokenizer, ids, place * samples, sample) for sample in range(samples)]
    return requests


def _samples(n: int | None, prompts: int) -> int:
    if n is None:
        n = 1
    elif type(n) is not int or not 1 <= n <= MOST_SAMPLES:
        raise InputError(f"n is {n!r}; ask for a whole number of samples, 1 to {MOST_SAMPLES}")
    if prompts * n > MOST_REQUESTS:
        raise InputError(
            f"{prompts} prompts with {n} samples each are more than the {MOST_REQUESTS} requests that one call takes; "
            "give them in several calls"
        )
    return n


@contextmanager
def _named(what: str, place: int, count: int) -> Iterator[None]:
    """Name the entry of a list that is refused, as in `prompts[3]: ...`."""
    try:
        yield
    except InputError as error:
        raise type(error)(f"{what}[{place}]: {error}") if count > 1 else error from error


# Settings --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PromptSettings:
    """The settings of one prompt, checked and grouped by the part that needs them."""

    sampling: Sampling
    limits: dict[str, Any]  # parameters of a Request
    text: dict[str, Any]  # parameters of a TextStream
    grammar: GrammarSpec | None
    chat: bool
    chat_options: ChatOptions
    sanitize: bool
    keep_last: int | None
    prediction: str | Sequence[int] | None
    model_defaults: tuple[str, ...]  # sampling settings that come from the model
    has_own_seed: bool = False

    @staticmethod
    def of(settings: dict[str, Any], defaults: Mapping[str, Any], limits: EngineLimits) -> PromptSettings:
        limits.check_allowed(settings.get("allowed_token_ids"))
        return PromptSettings(
            sampling=Sampling(**{**defaults, **_subset(settings, SAMPLING)}),
            model_defaults=tuple(name for name in defaults if name not in settings),
            limits=_subset(settings, LIMITS) | _stop_tokens(settings),
            text={
                "stop": _stop_strings(settings.get("stop")),
                "include_stop": _flag(settings, "include_stop_str_in_output", False),
                "skip_special": _flag(settings, "skip_special_tokens", True),
            },
            grammar=GrammarSpec.of(settings),
            chat=_flag(settings, "chat", True),
            chat_options=ChatOptions(**_subset(settings, CHAT)),
            sanitize=_flag(settings, "sanitize_control_tokens", False),
            keep_last=_keep_last(settings.get("truncate_prompt_tokens")),
            prediction=settings.get(PREDICTION),
        )

    def request(self, tokenizer: Tokenizer, ids: tuple[int, ...], first: int, sample: int) -> Request:
        """Build the request of one sample. `first`: the number of requests in the call before those of this prompt."""
        sampling = self.sampling.derived(sample if self.has_own_seed else first + sample)
        stream = TextStream(tokenizer, **self.text)
        own = {"model_defaults": self.model_defaults, **self.limits}
        return Request(ids, sampling, grammar=self.grammar, stream=stream, **own)


def _settings_of_each(
    settings: Mapping[str, Any], prompts: int, defaults: Mapping[str, Any], limits: EngineLimits
) -> list[PromptSettings]:
    """Return the settings of each prompt: those of all prompts, overridden by its own."""
    common = _known({name: value for name, value in settings.items() if name != EACH})
    shared = PromptSettings.of(common, defaults, limits)
    shared = replace(shared, sampling=shared.sampling.seeded())
    own = settings.get(EACH)
    if own is None:
        return [shared] * prompts
    if not isinstance(own, list | tuple) or len(own) != prompts:
        given = f"{len(own)} of them" if isinstance(own, list | tuple) else repr(own)
        raise InputError(f"{EACH} must be a list with one dict for each of {prompts} prompts; got {given}")
    found = []
    for place, some in enumerate(own):
        with _named(EACH, place, prompts):
            found.append(_settings_of_one(some, {**common, "seed": shared.sampling.seed}, defaults, limits))
    return found


def _settings_of_one(own: Any, common: dict[str, Any], defaults: Mapping[str, Any], limits: EngineLimits) -> PromptSettings:
    if not isinstance(own, dict):
        raise InputError(f"a dict of settings is needed, got {own!r}")
    own = _known(own)
    has_seed = own.get("seed") is not None
    seed = own["seed"] if has_seed else common["seed"]
    return replace(PromptSettings.of({**common, **own, "seed": seed}, defaults, limits), has_own_seed=has_seed)


def _checked_settings(
    tokenizer: Tokenizer, limits: EngineLimits, each: list[PromptSettings], count: int
) -> list[PromptSettings]:
    """Check all settings against the engine's limits before any prompt is encoded, and encode their bad words and
    predictions.

    count: 1 if all prompts have the same settings; then no place is named. Settings that prompts share are checked once.
    """
    encoded: dict[tuple[str, ...], tuple[tuple[int, ...], ...]] = {}
    found: list[PromptSettings] = []
    for place, given in enumerate(each):
        if place and given is each[place - 1]:
            found.append(found[-1])
            continue
        with _named(EACH, place, count):
            own = _with_prediction(tokenizer, limits, _with_bad_words(tokenizer, given, encoded))
            limits.check_settings(own.request(tokenizer, (0,), 0, 0))
            if own.grammar is not None:
                check_grammar(own.grammar, tokenizer.grammar_vocabulary(limits.vocabulary, limits.ends))
        found.append(own)
    return found


def _with_bad_words(
    tokenizer: Tokenizer, own: PromptSettings, encoded: dict[tuple[str, ...], tuple[tuple[int, ...], ...]]
) -> PromptSettings:
    """Add the token sequences of bad words. `encoded`: those of earlier prompts, since most prompts share them."""
    words = own.sampling.bad_words
    if not words:
        return own
    if words not in encoded:
        encoded[words] = tuple(ids for word in words for ids in _spellings(tokenizer, word))
    sequences = (*(own.sampling.bad_word_ids or ()), *encoded[words])
    return replace(own, sampling=replace(own.sampling, bad_word_ids=tuple(dict.fromkeys(sequences))))


def _spellings(tokenizer: Tokenizer, word: str) -> list[tuple[int, ...]]:
    """Return the token ids of a bad word at the beginning of a line, and after a space."""
    found = [tokenizer.piece_ids(space + word.lstrip()) for space in ("", " ")]
    if not all(found) or max(map(len, found)) > LONGEST_BAD_WORD:
        raise InputError(f"bad_words holds {word[:80]!r}, which must have 1 to {LONGEST_BAD_WORD} tokens; shorten it")
    return found


def _with_prediction(tokenizer: Tokenizer, limits: EngineLimits, own: PromptSettings) -> PromptSettings:
    """Encode the prediction. One that cannot fit is refused before it is encoded, because encoding takes long."""
    given = own.prediction
    if given is None:
        return own
    if isinstance(given, str):
        if len(given) > limits.context * tokenizer.longest_piece:
            raise InputError(limits.prediction_too_long(f"{len(given)} characters"))
        ids = tokenizer.piece_ids(given)
    else:
        ids = _prediction_ids(limits, given)
    return replace(own, limits=own.limits | {PREDICTION: ids})


def _prediction_ids(limits: EngineLimits, given: Any) -> tuple[int, ...]:
    if not isinstance(given, list | tuple):
        raise InputError(f"prediction is of type {type(given).__name__}; give a string or a list of token ids")
    if len(given) > limits.context:
        raise InputError(limits.prediction_too_long(f"{len(given)} tokens"))
    for token in given:
        if isinstance(token, bool) or not isinstance(token, SupportsIndex):
            raise InputError(f"prediction holds {token!r}; give a string or a list of token ids")
    return tuple(map(index, given))


def _known(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings under their own names. Refuse unknown names, and settings that are given twice."""
    found = _whole_sampling(settings)
    for given, value in settings.items():
        if given == ALL_SAMPLING:
            continue
        name = ALIASES.get(given, given)
        if name not in SETTINGS:
            raise InputError(f"no setting is called {given!r}; there are: {', '.join(SETTINGS)}")
        if name in found:
            raise InputError(f"{given} and {_other(given, name)} are one setting; give one of them")
        found[name] = value
    if found.get("top_k") == -1:  # vLLM's value for all tokens
        found["top_k"] = 0
    return found


def _whole_sampling(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of `sampling=Sampling(...)`. They are complete: neither the model nor other settings add to
    them."""
    whole = settings.get(ALL_SAMPLING)
    if whole is None:
        return {}
    if not isinstance(whole, Sampling):
        raise InputError(f"sampling is {whole!r}; give a foreword.Sampling(...)")
    if twice := [name for name in settings if name in SAMPLING]:
        given = f"sampling says how tokens are sampled, and {', '.join(twice)} is given too"
        raise InputError(f"{given}; put it into Sampling(...), or leave sampling out")
    return {name: getattr(whole, name) for name in SAMPLING}


def _other(given: str, name: str) -> str:
    """Return the other name of a setting that has two."""
    return name if given != name else next(alias for alias, stands_for in ALIASES.items() if stands_for == name)


def _subset(settings: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: settings[name] for name in names if name in settings}


def _stop_tokens(settings: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return the stop tokens as a tuple, if they are given."""
    ids = settings.get("stop_token_ids")
    if ids is not None and not isinstance(ids, list | tuple | set | frozenset):
        raise InputError(f"stop_token_ids is {ids!r}; give a list of token ids")
    check_stop_tokens(ids or ())
    return {} if "stop_token_ids" not in settings else {"stop_token_ids": tuple(ids or ())}


def _flag(settings: dict[str, Any], name: str, default: bool) -> bool:
    value = settings.get(name, default)
    if not isinstance(value, bool):
        raise InputError(f"{name} is {value!r}; it must be True or False")
    return value


def _stop_strings(stop: Any) -> tuple[str, ...]:
    if stop is None:
        return ()
    if not isinstance(stop, str | list | tuple):
        raise InputError(f"stop is {stop!r}; give a string or a list of strings")
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(strings) > MOST_STOPS:
        raise InputError(f"stop has {len(strings)} strings; give at most {MOST_STOPS}")
    long = next((one for one in strings if isinstance(one, str) and len(one) > LONGEST_STOP), None)
    if long is not None:
        raise InputError(f"a stop string has {len(long)} characters; give at most {LONGEST_STOP}")
    return strings


def _keep_last(count: Any) -> int | None:
    if count is not None and (type(count) is not int or count < 1):
        raise InputError(f"truncate_prompt_tokens is {count!r}; it must be the number of last tokens to keep, 1 or more")
    return count


# Prompts ---------------------------------------------------------------------------------------------------------------


def _encoded(tokenizer: Tokenizer, limits: EngineLimits, prompt: Prompt, own: PromptSettings) -> tuple[int, ...]:
    """Encode a prompt. One that cannot fit is refused before it is encoded, because encoding takes long."""
    if _is_ids(prompt):
        return _checked_ids(limits, prompt, own)
    if isinstance(prompt, list) and len(prompt) > limits.context:
        raise PromptError(limits.too_long(f"{len(prompt)} messages"))
    text = tokenizer.rendered(prompt, own.chat, own.chat_options, own.sanitize)  # type: ignore[arg-type]
    if own.keep_last is not None:
        text = text.last(own.keep_last + SPARE, tokenizer.longest_piece)
        return tuple(tokenizer.ids(text)[-own.keep_last :])
    if not text.fits(limits.context, tokenizer.longest_piece):
        raise PromptError(limits.too_long(f"{text.characters} characters"))
    return tuple(tokenizer.ids(text))


def _checked_ids(limits: EngineLimits, prompt: Any, own: PromptSettings) -> tuple[int, ...]:
    if own.chat_options.given:
        raise PromptError(f"{own.chat_options.given[0]} is for a chat template, and this prompt is token ids; leave it out")
    kept = prompt if own.keep_last is None else prompt[-own.keep_last :]
    if len(kept) >= limits.context:
        raise PromptError(limits.too_long(f"{len(kept)} tokens"))
    for token in kept:
        if isinstance(token, bool) or not isinstance(token, SupportsIndex):
            raise PromptError(f"a prompt of token ids holds {token!r}; all of them must be whole numbers")
    return tuple(map(index, kept))

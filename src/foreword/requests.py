"""PROMPT: from what a user asks for to requests. Everything about prompts as given, and about settings, is here.

In: a prompt or a list of them, and settings by name. Out: one `Request` per prompt and sample, encoded and checked. The
tables say which settings exist and which part of a request each belongs to. What bounds the work is checked before the work.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from operator import index
from types import MappingProxyType
from typing import Any, SupportsIndex, TypedDict

from foreword.core.sampling import LONGEST_BAD_WORD, OPTIONS, Sampling
from foreword.engine.request import Request, EngineLimits
from foreword.errors import InputError, PromptError
from foreword.text import ChatOptions, Message, TextStream, Tokenizer

Prompt = str | list[Message] | list[int]

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
)
CHAT = ("chat_template", "chat_template_kwargs", "tools", "continue_final_message")
PROMPT = ("chat", "sanitize_control_tokens", "truncate_prompt_tokens")
TEXT = ("stop", "include_stop_str_in_output", "skip_special_tokens")
SETTINGS = (*SAMPLING, *LIMITS, *TEXT, *PROMPT, *CHAT)
ALIASES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}  # vLLM's and OpenAI's names
ALL_SAMPLING = "sampling"  # the settings of SAMPLING as one object
NOTHING: Mapping[str, Any] = MappingProxyType({})
EACH = "settings"  # a list of dicts, one for each prompt

MOST_SAMPLES = 1024  # of one prompt
MOST_REQUESTS = 65536  # in one call
MOST_STOPS = 256  # stop strings of one request
LONGEST_STOP = 1024  # characters
SPARE = 64  # tokens: a cut in a text changes how it is encoded only close to the cut


class Settings(TypedDict, total=False):
    """The keywords of `generate`, `stream` and `chat` by their types; docs/api.md describes them."""

    sampling: Sampling
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int | None
    logprobs: int | None
    allowed_token_ids: Sequence[int] | None
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | Mapping[str, float] | None
    bad_words: Sequence[str] | None
    bad_word_ids: Sequence[Sequence[int]] | None

    max_new_tokens: int
    max_tokens: int
    min_new_tokens: int
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: Collection[int] | None
    prompt_logprobs: int | None
    speculate: bool
    reuse: bool
    cache_salt: str

    stop: str | Sequence[str] | None
    include_stop_str_in_output: bool
    skip_special_tokens: bool

    chat: bool
    sanitize_control_tokens: bool
    truncate_prompt_tokens: int | None
    chat_template: str | None
    chat_template_kwargs: Mapping[str, Any] | None
    tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None
    continue_final_message: bool


def is_single(prompt: Any) -> bool:
    """A string, one list of messages, or token ids; anything else is a list of prompts."""
    if isinstance(prompt, str) or _is_ids(prompt):
        return True
    return isinstance(prompt, list) and bool(prompt) and all(isinstance(message, dict) for message in prompt)


def _is_ids(prompt: Any) -> bool:
    first = prompt[0] if isinstance(prompt, list | tuple) and prompt else None
    return isinstance(first, SupportsIndex) and not isinstance(first, bool)


def listed(prompt: Any) -> list[Prompt]:
    """One prompt or several, as a list."""
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
    """`n` requests for each prompt, the samples of a prompt next to each other, each with a seed of its own. `defaults` of
    the model say how tokens are sampled where the settings do not."""
    samples = _samples(n, len(prompts))
    each = _with_bad_words(tokenizer, _asked(settings, len(prompts), defaults))
    requests = []
    for place, (prompt, asked) in enumerate(zip(prompts, each, strict=True)):
        with _named("prompts", place, len(prompts)):
            ids = _encoded(tokenizer, limits, prompt, asked)
            limits.check_prompt(ids)
        requests += [asked.request(tokenizer, ids, place * samples, sample) for sample in range(samples)]
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
    """Of several, say which one is refused."""
    try:
        yield
    except InputError as error:
        raise type(error)(f"{what}[{place}]: {error}") if count > 1 else error from error


# Settings --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PromptSettings:
    """The settings of one prompt, checked and sorted by who needs them."""

    sampling: Sampling
    limits: dict[str, Any]
    text: dict[str, Any]  # of a TextStream
    chat: bool
    chat_options: ChatOptions
    sanitize: bool
    keep_last: int | None
    model_defaults: tuple[str, ...]  # settings of the sampling that the model gave
    has_own_seed: bool = False

    @staticmethod
    def of(settings: dict[str, Any], defaults: Mapping[str, Any]) -> PromptSettings:
        return PromptSettings(
            sampling=Sampling(**{**defaults, **_part(settings, SAMPLING)}),
            model_defaults=tuple(name for name in defaults if name not in settings),
            limits=_part(settings, LIMITS) | _ids_part(settings, "stop_token_ids"),
            text={
                "stop": _stop_strings(settings.get("stop")),
                "include_stop": _flag(settings, "include_stop_str_in_output", False),
                "skip_special": _flag(settings, "skip_special_tokens", True),
            },
            chat=_flag(settings, "chat", True),
            chat_options=ChatOptions(**_part(settings, CHAT)),
            sanitize=_flag(settings, "sanitize_control_tokens", False),
            keep_last=_keep_last(settings.get("truncate_prompt_tokens")),
        )

    def request(self, tokenizer: Tokenizer, ids: tuple[int, ...], first: int, sample: int) -> Request:
        """`first`: how many requests of the call come before this prompt's."""
        sampling = self.sampling.derived(sample if self.has_own_seed else first + sample)
        stream = TextStream(tokenizer, **self.text)
        return Request(ids, sampling, stream=stream, model_defaults=self.model_defaults, **self.limits)


def _asked(settings: Mapping[str, Any], prompts: int, defaults: Mapping[str, Any]) -> list[PromptSettings]:
    """What is asked of each prompt: what was said for all of them, and what was said for it alone, which counts more."""
    common = _known({name: value for name, value in settings.items() if name != EACH})
    asked = PromptSettings.of(common, defaults)
    asked = replace(asked, sampling=asked.sampling.seeded())
    own = settings.get(EACH)
    if own is None:
        return [asked] * prompts
    if not isinstance(own, list | tuple) or len(own) != prompts:
        given = f"{len(own)} of them" if isinstance(own, list | tuple) else repr(own)
        raise InputError(f"{EACH} is a list with one dict for each of {prompts} prompts; got {given}")
    found = []
    for place, some in enumerate(own):
        with _named(EACH, place, prompts):
            found.append(_asked_of_one(some, {**common, "seed": asked.sampling.seed}, defaults))
    return found


def _asked_of_one(own: Any, common: dict[str, Any], defaults: Mapping[str, Any]) -> PromptSettings:
    if not isinstance(own, dict):
        raise InputError(f"a dict of settings is needed, got {own!r}")
    own = _known(own)
    has_seed = own.get("seed") is not None
    seed = own["seed"] if has_seed else common["seed"]
    return replace(PromptSettings.of({**common, **own, "seed": seed}, defaults), has_own_seed=has_seed)


def _with_bad_words(tokenizer: Tokenizer, each: list[PromptSettings]) -> list[PromptSettings]:
    """The same, with the token sequences of bad words. Prompts mostly share them, so each list is encoded once."""
    encoded: dict[tuple[str, ...], tuple[tuple[int, ...], ...]] = {}
    found = []
    for asked in each:
        words = asked.sampling.bad_words
        if words:
            if words not in encoded:
                encoded[words] = tuple(ids for word in words for ids in _spellings(tokenizer, word))
            sequences = (*(asked.sampling.bad_word_ids or ()), *encoded[words])
            asked = replace(asked, sampling=replace(asked.sampling, bad_word_ids=tuple(dict.fromkeys(sequences))))
        found.append(asked)
    return found


def _spellings(tokenizer: Tokenizer, word: str) -> list[tuple[int, ...]]:
    """Token ids of a bad word as it stands at the beginning of a line, and after a space."""
    found = [tokenizer.piece_ids(space + word.lstrip()) for space in ("", " ")]
    if not all(found) or max(map(len, found)) > LONGEST_BAD_WORD:
        raise InputError(f"bad_words holds {word[:80]!r}, which must have 1 to {LONGEST_BAD_WORD} tokens; shorten it")
    return found


def _known(settings: dict[str, Any]) -> dict[str, Any]:
    """The same under their own names; a name that there is not, or a setting that is given twice, is refused."""
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
    if found.get("top_k") == -1:  # vLLM's word for all tokens
        found["top_k"] = 0
    return found


def _whole_sampling(settings: dict[str, Any]) -> dict[str, Any]:
    """What `sampling=Sampling(...)` says, which is all of it: neither the model nor another setting adds to it."""
    whole = settings.get(ALL_SAMPLING)
    if whole is None:
        return {}
    if not isinstance(whole, Sampling):
        raise InputError(f"sampling is {whole!r}; give a foreword.Sampling(...)")
    if twice := [name for name in settings if name in SAMPLING]:
        told = f"sampling says how tokens are sampled, and {', '.join(twice)} is given too"
        raise InputError(f"{told}; put it into Sampling(...), or leave sampling out")
    return asdict(whole)


def _other(given: str, name: str) -> str:
    return name if given != name else next(alias for alias, stands_for in ALIASES.items() if stands_for == name)


def _part(settings: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: settings[name] for name in names if name in settings}


def _ids_part(settings: dict[str, Any], name: str) -> dict[str, tuple[Any, ...]]:
    """Token ids that were given, as a tuple."""
    ids = settings.get(name)
    if ids is not None and not isinstance(ids, list | tuple | set | frozenset):
        raise InputError(f"{name} is {ids!r}; give a list of token ids")
    return {} if name not in settings else {name: tuple(ids or ())}


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


def _encoded(tokenizer: Tokenizer, limits: EngineLimits, prompt: Prompt, asked: PromptSettings) -> tuple[int, ...]:
    """Token ids of a prompt. One that cannot fit is refused before it is encoded, which takes long."""
    if _is_ids(prompt):
        return _ids(limits, prompt, asked)
    if isinstance(prompt, list) and len(prompt) > limits.context:
        raise PromptError(limits.too_long(f"{len(prompt)} messages"))
    text = tokenizer.written(prompt, asked.chat, asked.chat_options, asked.sanitize)  # type: ignore[arg-type]
    if asked.keep_last is not None:
        text = text.last(asked.keep_last + SPARE, tokenizer.longest_piece)
        return tuple(tokenizer.ids(text)[-asked.keep_last :])
    if not text.fits(limits.context, tokenizer.longest_piece):
        raise PromptError(limits.too_long(f"{text.characters} characters"))
    return tuple(tokenizer.ids(text))


def _ids(limits: EngineLimits, prompt: Any, asked: PromptSettings) -> tuple[int, ...]:
    if asked.chat_options.given:
        raise PromptError(
            f"{asked.chat_options.given[0]} is for a chat template, and this prompt is token ids; leave it out"
        )
    kept = prompt if asked.keep_last is None else prompt[-asked.keep_last :]
    if len(kept) >= limits.context:
        raise PromptError(limits.too_long(f"{len(kept)} tokens"))
    for token in kept:
        if isinstance(token, bool) or not isinstance(token, SupportsIndex):
            raise PromptError(f"a prompt of token ids holds {token!r}; all of them must be whole numbers")
    return tuple(map(index, kept))

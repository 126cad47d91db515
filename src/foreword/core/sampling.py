"""Sampling: the options by which a request chooses its tokens.

`OPTIONS` is the table of them: one row per option, with its allowed values and the value that is off. The names of settings,
the columns on the device (core/sampling_table.py) and the stages of a round follow from it. core/choosing.py applies them.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from foreword.errors import InputError

MOST_BIASES = 4096
MOST_BAD_WORDS = 1024
MOST_BAD_SEQUENCES = 2 * MOST_BAD_WORDS  # a word at the beginning of a line, and after a space
LONGEST_BAD_WORD = 64  # tokens
LONGEST_BAD_STRING = 1024  # characters

Biases = tuple[tuple[int, float], ...]
Sequences = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Sampling:
    """How one request chooses its tokens. `foreword.Settings` describes each option.

    `seed` None: a random one. `logprobs` n: report the n likeliest tokens at each position. `allowed_token_ids`: the only
    tokens that are sampled. `logit_bias`: kept as pairs of token id and bias. `bad_word_ids`: token sequences that are never
    completed; a tokenizer adds those of `bad_words`.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logprobs: int | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | Mapping[str, float] | Biases | None = None
    bad_words: tuple[str, ...] | None = None
    bad_word_ids: Sequences | None = None

    def __post_init__(self) -> None:
        for name, option in OPTIONS.items():
            given = getattr(self, name)
            if given == option.off and type(given) is type(option.off):
                continue
            _require(option.holds(given), name, given, option.needed)
            if option.read is not None:
                object.__setattr__(self, name, option.read(given))

    @property
    def biases(self) -> Biases:
        """`logit_bias` as pairs of token id and bias."""
        assert self.logit_bias is None or isinstance(self.logit_bias, tuple)  # OPTIONS reads what is given
        return self.logit_bias or ()

    def seeded(self) -> Sampling:
        """Return the same with a seed, a random one if it has none, so that a result can report it."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(63))

    def derived(self, index: int) -> Sampling:
        """Return the sampling of the index-th request of a list that shares one seed."""
        assert self.seed is not None
        return self if index == 0 else replace(self, seed=mix64(mix64(self.seed) + index) >> 1)


@dataclass(frozen=True)
class Option:
    """One row of the table. `off`: the value that turns it off. `holds`: whether a value is allowed. `needed`: the allowed
    values in words. `read`: converts an allowed value to the form that is kept; it may refuse parts of it. `column`: the
    dtype, if the option is a number per slot on the device."""

    off: Any
    holds: Callable[[Any], bool]
    needed: str
    read: Callable[[Any], Any] | None = None
    column: torch.dtype | None = None


def _require(holds: bool, name: str, given: object, needed: str) -> None:
    if not holds:
        raise InputError(f"{name} is {given!r}; it must be {needed}")


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(least: float, most: float) -> Callable[[Any], bool]:
    return lambda value: _finite(value) and least <= value <= most


def _listed(value: object, most: int | None = None) -> bool:
    return isinstance(value, tuple | list) and 0 < len(value) <= (most or len(value))


def _token_ids(name: str) -> Callable[[Any], tuple[int, ...]]:
    def read(given: Any) -> tuple[int, ...]:
        for token in given:
            _require(_whole(token) and token >= 0, f"an entry of {name}", token, "a token id")
        return tuple(given)

    return read


def _read_biases(given: Any) -> Biases | None:
    pairs = given.items() if isinstance(given, Mapping) else given
    found: dict[int, float] = {}
    for key, bias in pairs:
        # Keys of JSON are strings, so in the OpenAI API ids are strings of digits.
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10 else key
        _require(_whole(token) and token >= 0, "a key of logit_bias", key, "a token id")
        _require(_number(-100, 100)(bias), f"logit_bias of token {token}", bias, "a number from -100 to 100")
        found[token] = float(bias)
    return tuple(sorted(found.items())) or None


def _are_biases(given: Any) -> bool:
    pairs = isinstance(given, tuple | list) and all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in given)
    return (isinstance(given, Mapping) or pairs) and len(given) <= MOST_BIASES


def _read_strings(given: Any) -> tuple[str, ...]:
    for word in given:
        fits = isinstance(word, str) and bool(word.strip()) and len(word) <= LONGEST_BAD_STRING
        _require(fits, "an entry of bad_words", word, f"a string of 1 to {LONGEST_BAD_STRING} characters, not only spaces")
    return tuple(given)


def _read_sequences(given: Any) -> Sequences:
    for sequence in given:
        needed = f"a list of 1 to {LONGEST_BAD_WORD} token ids"
        _require(_listed(sequence, LONGEST_BAD_WORD), "an entry of bad_word_ids", sequence, needed)
    return tuple(dict.fromkeys(map(_token_ids("bad_word_ids"), given)))


# Scores are float32: dividing them must not overflow, nor make all of them 0.
OPTIONS: dict[str, Option] = {
    "temperature": Option(
        0.0,
        lambda value: _finite(value) and (value == 0 or 1e-6 <= value <= 1e6),
        "0, or from 1e-6 to 1e6",
        column=torch.float32,
    ),
    "top_k": Option(0, lambda k: _whole(k) and 0 <= k < 2**31, "a whole number, 0 (off) or more", column=torch.long),
    "top_p": Option(1.0, lambda p: _finite(p) and 0 < p <= 1, "above 0 and at most 1 (off)", column=torch.float32),
    "min_p": Option(0.0, lambda p: _finite(p) and 0 <= p < 1, "from 0 (off) to below 1", column=torch.float32),
    "repetition_penalty": Option(1.0, _number(1e-6, 1e6), "from 1e-6 to 1e6; 1 is off", column=torch.float32),
    "seed": Option(None, _whole, "a whole number, or None to choose one at random"),
    "logprobs": Option(
        None,
        lambda n: _whole(n) and 0 <= n <= 100,
        "None (off) or the number of likeliest tokens to report, 0 to 100",
    ),
    "allowed_token_ids": Option(
        None, _listed, "None (all) or a list of at least one token id", read=_token_ids("allowed_token_ids")
    ),
    "presence_penalty": Option(0.0, _number(-2, 2), "from -2 to 2; 0 is off", column=torch.float32),
    "frequency_penalty": Option(0.0, _number(-2, 2), "from -2 to 2; 0 is off", column=torch.float32),
    "logit_bias": Option(
        None, _are_biases, f"None (off) or a mapping of at most {MOST_BIASES} token ids to biases", read=_read_biases
    ),
    "bad_words": Option(
        None,
        lambda words: _listed(words, MOST_BAD_WORDS),
        f"None (off) or a list of 1 to {MOST_BAD_WORDS} strings",
        read=_read_strings,
    ),
    "bad_word_ids": Option(
        None,
        lambda sequences: _listed(sequences, MOST_BAD_SEQUENCES),
        f"None (off) or a list of 1 to {MOST_BAD_SEQUENCES} lists of token ids",
        read=_read_sequences,
    ),
}


def mix64(word: int) -> int:
    """Return a 64-bit hash: those of neighbouring numbers differ in about half of their bits."""
    word = (word + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    for shift, multiplier in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        word = ((word ^ (word >> shift)) * multiplier) & 0xFFFFFFFFFFFFFFFF
    return word ^ (word >> 31)

"""The load: when requests arrive, and how many tokens they have. Made at random from a seed, or read from a file.

A file has one JSON object per line: `arrival` in seconds, `prompt_tokens`, `output_tokens`, and perhaps `session`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from foreword.errors import InputError
from foreword.files import BadJSON, lines_of, parse_json

LONGEST_LINE = 1 << 16
MOST_TOKENS = 1 << 24  # of a prompt or an output


class Arrival(NamedTuple):
    """A request: when it arrives, and its size."""

    second: float
    prompt_tokens: int
    output_tokens: int
    session: str = ""


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths in tokens."""

    spec: str
    sample: Callable[[np.random.Generator, int], Any]

    @staticmethod
    def parse(spec: str) -> Lengths:
        """Parse N, LOW-HIGH (uniform), exp:MEAN or lognormal:MEDIAN:SIGMA."""
        kind, _, rest = spec.partition(":")
        try:
            if kind == "exp":
                mean = _positive(rest)
                return Lengths(spec, lambda rng, count: rng.exponential(mean, count))
            if kind == "lognormal":
                median, sigma = (_positive(one) for one in rest.split(":"))
                return Lengths(spec, lambda rng, count: rng.lognormal(math.log(median), sigma, count))
            low, _, high = spec.partition("-")
            least, most = int(low), int(high or low)
            if not 1 <= least <= most:
                raise ValueError
        except ValueError as error:
            raise InputError(
                f"{spec!r} is no distribution of lengths; give N, LOW-HIGH, exp:MEAN or lognormal:MEDIAN:SIGMA"
            ) from error
        return Lengths(spec, lambda rng, count: rng.integers(least, most + 1, count))

    def tokens(self, rng: np.random.Generator, count: int) -> list[int]:
        """Return that many lengths, each at least 1."""
        return np.clip(np.rint(self.sample(rng, count)), 1, MOST_TOKENS).astype(int).tolist()


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value <= MOST_TOKENS:
        raise ValueError
    return value


def poisson(rate: float, requests: int, prompts: Lengths, outputs: Lengths, seed: int = 0) -> list[Arrival]:
    """Return requests that arrive independently of one another, `rate` of them per second on average."""
    rng = np.random.default_rng(seed)
    seconds = rng.exponential(1 / rate, requests).cumsum().tolist()
    sizes = prompts.tokens(rng, requests), outputs.tokens(rng, requests)
    return [Arrival(*one) for one in zip(seconds, *sizes, strict=True)]


def read_arrivals(file: Path) -> list[Arrival]:
    """Read a recorded trace, and return its requests in the order of their arrival. The first arrives at 0."""
    found = []
    try:
        with file.open("rb") as stream:
            for number, line in enumerate(lines_of(stream, LONGEST_LINE), start=1):
                if line.strip():
                    found.append(_arrival(line, f"{file}, line {number}"))
    except (OSError, BadJSON) as error:
        raise InputError(f"the trace {file} cannot be read: {error}") from error
    if not found:
        raise InputError(f"the trace {file} has no requests; it needs one JSON object per line")
    first = min(one.second for one in found)
    return sorted(one._replace(second=one.second - first) for one in found)


def _arrival(line: bytes, where: str) -> Arrival:
    try:
        given = parse_json(line)
    except BadJSON as error:
        raise InputError(f"{where}: no JSON ({error})") from error
    if not isinstance(given, dict):
        raise InputError(f"{where}: no JSON object")
    second, session = given.get("arrival"), given.get("session") or ""
    if isinstance(second, bool) or not isinstance(second, int | float):
        raise InputError(f"{where}: arrival is {second!r}; it must be a number of seconds")
    if not isinstance(session, str):
        raise InputError(f"{where}: session is {session!r}; it must be a string")
    return Arrival(float(second), _count(given, "prompt_tokens", where), _count(given, "output_tokens", where), session)


def _count(given: dict[str, Any], name: str, where: str) -> int:
    count = given.get(name)
    if type(count) is not int or not 1 <= count <= MOST_TOKENS:
        raise InputError(f"{where}: {name} is {count!r}; it must be a whole number from 1 to {MOST_TOKENS}")
    return count

"""Random models, methods, samplings, stop rules, aborts, streams and threads: every output must be that of plain decoding.

    python studies/fuzz.py --seconds 60
    python studies/fuzz.py --seed 7 --only 12     # one trial again

A trial makes a tiny random model in float64, serves it by a random method under random engine settings, and lets several
threads call that one LLM at once. Plain decoding generates the expected outputs first, one request at a time in its own
engine; some of them are compared with the transformers model alone. The seed is printed. With the same seed every trial
makes the same calls; only the order in which threads take turns differs. The exit status is 1 at the first difference.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import secrets
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

import torch  # noqa: E402  the path to our own source comes first

import doubles  # noqa: E402
from foreword.api import LLM  # noqa: E402
from foreword.core.drafter import Drafter  # noqa: E402
from foreword.methods import METHODS  # noqa: E402
from foreword.model.model import Model  # noqa: E402
from foreword.results import Result  # noqa: E402

HANGS_AFTER_S = 120.0  # a trial takes a few seconds
CONTEXT = doubles.CONTEXT
LETTERS = "abcdefg"  # of the tokenizer's pieces

Prompt = list[int]
Settings = dict[str, Any]


class Difference(Exception):
    """An output is not that of plain decoding."""


# Workloads -------------------------------------------------------------------------------------------------------------


@dataclass
class Workload:
    """Prompts with the same settings, and the outputs of plain decoding."""

    prompts: list[Prompt]
    settings: Settings
    expected: list[Result] = field(default_factory=list)


def random_prompt(random: Random, earlier: list[Prompt]) -> Prompt:
    """Return random tokens, a loop that can be looked up, or the beginning of an earlier prompt and more."""
    kind = random.choice(["noise", "noise", "loop", "more"])
    noise = [random.randrange(3, doubles.VOCABULARY) for _ in range(random.randint(1, 12))]
    if kind == "loop":
        noise = noise[:4] * random.randint(2, 6)
    if kind == "more" and earlier:
        start = random.choice(earlier)
        noise = start[: random.randint(1, len(start))] + noise
    return noise[: CONTEXT - 4]


def random_settings(random: Random) -> Settings:
    def some(chance: float, name: str, *values: Any) -> Settings:
        return {name: random.choice(values)} if random.random() < chance else {}

    stops = ["".join(random.choice(LETTERS) for _ in range(random.randint(1, 3))) for _ in range(2)]
    tokens = [random.randrange(doubles.VOCABULARY) for _ in range(random.randint(6, 30))]
    most = random.randint(1, 16)
    return {
        "max_new_tokens": most,
        "seed": random.randrange(2**40),
        **some(0.6, "temperature", 0.3, 0.8, 1.0, 1.7),
        **some(0.3, "top_k", 1, 3, 17, 60),
        **some(0.3, "top_p", 0.2, 0.7, 0.95),
        **some(0.2, "min_p", 0.02, 0.3),
        **some(0.25, "repetition_penalty", 0.7, 1.3, 2.0),
        **some(0.2, "logprobs", 0, 1, 5, 20),
        **some(0.1, "prompt_logprobs", 0, 3),
        **some(0.25, "stop", stops[0], stops),
        **some(0.1, "stop_token_ids", tokens[:3]),
        **some(0.1, "allowed_token_ids", tokens),
        **some(0.2, "min_new_tokens", random.randint(0, most)),
        **some(0.2, "include_stop_str_in_output", True),
        **some(0.1, "skip_special_tokens", False),
        **some(0.4, "ignore_eos", True),
        **some(0.1, "speculate", False),
        **some(0.4, "reuse", True, False),
        **some(0.1, "cache_salt", "x", "y"),
        "chat": False,
    }


def random_workloads(random: Random, count: int) -> list[Workload]:
    found: list[Workload] = []
    for _ in range(count):
        earlier = [prompt for workload in found for prompt in workload.prompts]
        prompts = [random_prompt(random, earlier) for _ in range(random.choice([1, 1, 2, 4]))]
        found.append(Workload(prompts, random_settings(random)))
    return found


# Ways to call ---------------------------------------------------------------------------------------------------------


def same(found: Result, expected: Result, what: str) -> None:
    for name in ("tokens", "text", "finish_reason", "stop_reason", "error"):
        if getattr(found, name) != getattr(expected, name):
            raise Difference(f"{what}: {name} is {getattr(found, name)!r}, plain has {getattr(expected, name)!r}")
    for name in ("logprobs", "prompt_logprobs"):
        near(getattr(found, name), getattr(expected, name), f"{what}: {name}")


def near(found: Any, expected: Any, what: str) -> None:
    """Compare log-probabilities; passes of other shapes round differently."""
    if found is None or expected is None:
        if found is not expected:
            raise Difference(f"{what} is {found!r}, plain has {expected!r}")
        return
    if len(found) != len(expected):
        raise Difference(f"{what} has {len(found)} entries, plain {len(expected)}")
    for one, other in zip(found, expected, strict=True):
        if (one is None) != (other is None):
            raise Difference(f"{what} has {one}, plain {other}")
        if one is not None and (one.token != other.token or abs(one.logprob - other.logprob) > 1e-6):
            raise Difference(f"{what} has {one}, plain {other}")
        if one is not None and [entry[0] for entry in one.top] != [entry[0] for entry in other.top]:
            raise Difference(f"{what} has alternatives {one.top}, plain {other.top}")


def begins(tokens: list[int], expected: Result, what: str) -> None:
    if tokens != expected.tokens[: len(tokens)]:
        raise Difference(f"{what}: the tokens are {tokens}, plain has {expected.tokens}")


def by_list(llm: LLM, workload: Workload, random: Random) -> None:
    for found, expected in zip(llm.generate(workload.prompts, **workload.settings), workload.expected, strict=True):
        same(found, expected, "generate")


def one_by_one(llm: LLM, workload: Workload, random: Random) -> None:
    """Take results as they come and leave the loop early: the other requests are aborted."""
    stop = random.randint(1, len(workload.prompts))
    for place, found in enumerate(llm.generate_each(workload.prompts, **workload.settings), start=1):
        same(found, workload.expected[place - 1], "generate_each")
        if place == stop:
            break


def streams(llm: LLM, workload: Workload, random: Random) -> None:
    """Read streams alternately; close some early, and never begin some."""
    given = list(zip(workload.prompts, workload.expected, strict=True))
    reading = [
        (iter(stream), stream, expected, random.choice([None, None, random.randint(0, 4)]), Shown())
        for stream, expected in (
            (llm.stream(prompt, **settings_of_one(workload, i)), e) for i, (prompt, e) in enumerate(given)
        )
    ]
    while reading:
        pieces, stream, expected, most, shown = one = random.choice(reading)
        piece = next(pieces, None) if most is None or shown.pieces < most else None
        if piece is not None:
            shown.take(piece)
            begins(shown.tokens, expected, "stream")
            continue
        reading.remove(one)
        stream.close()
        if most is None:
            same(stream.result, expected, "stream")
            if shown.text != expected.text or shown.tokens != expected.tokens:
                raise Difference(f"stream: its pieces are {shown.text!r}, plain has {expected.text!r}")


@dataclass
class Shown:
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    pieces: int = 0

    def take(self, piece: Any) -> None:
        self.text, self.tokens, self.pieces = self.text + piece, self.tokens + piece.tokens, self.pieces + 1


def settings_of_one(workload: Workload, place: int) -> Settings:
    """Each prompt of a list has its own seed; a single call needs that seed."""
    return workload.settings | {"seed": workload.expected[place].sampling.seed}


CALLERS: list[Callable[[LLM, Workload, Random], None]] = [by_list, by_list, one_by_one, streams]


# A trial --------------------------------------------------------------------------------------------------------------


@dataclass
class ReadyDrafter:
    """A request for a drafter that already exists."""

    name: str
    drafter: Drafter

    def resolve(self, model: Model) -> tuple[str, Drafter]:
        return self.name, self.drafter


@dataclass
class Trial:
    number: int
    random: Random
    counts: Counter[str]

    def run(self) -> None:
        random = self.random
        self.family, seed = random.choice(doubles.EVERY_FAMILY), random.randrange(2**30)
        hf = doubles.fresh(self.family, seed=seed, num_hidden_layers=4)
        workloads = random_workloads(random, random.randint(2, 7))
        with until_closed(LLM.of(Model(hf), doubles.tokenizer(), plain(), 1, CONTEXT)) as alone:
            for one in workloads:
                one.expected = alone.generate(one.prompts, **one.settings | {"reuse": False})
            if random.random() < 0.3:
                self._compare_with_transformers(alone, hf, random.choice(workloads))
        self.method = random.choice([*METHODS, "liar", "oracle"])
        with until_closed(self._llm(hf, workloads)) as llm:
            self._call(llm, workloads)
            engine = llm.engine
            if engine.busy or len(engine.slots.free) != engine.slots.count:
                raise Difference("a slot is still taken after all calls have ended")
        self.counts["requests"] += sum(len(one.prompts) for one in workloads)
        self.counts["tokens"] += sum(len(result.tokens) for one in workloads for result in one.expected)
        doubles.forget_truth()

    def _drafter(self, model: Model, workloads: list[Workload]) -> Drafter:
        if self.method == "liar":
            return doubles.Liar(seed=self.random.randrange(99))
        if self.method == "oracle":
            sequences = [
                prompt + out.tokens for one in workloads for prompt, out in zip(one.prompts, one.expected, strict=True)
            ]
            return doubles.Oracle(sequences, seed=self.random.randrange(99))
        return doubles.drafter(self.method, model)

    def _llm(self, hf: Any, workloads: list[Workload]) -> LLM:
        """Make an LLM of the method with random engine settings."""
        model, random = Model(hf), self.random
        drafter = self._drafter(model, workloads)
        llm = LLM.of(model, doubles.tokenizer(), ReadyDrafter(self.method, drafter), random.randint(1, 4), CONTEXT)  # type: ignore[arg-type]
        engine = llm.engine
        engine.chunk, engine.late = random.choice([1, 3, 8, 40]), random.random() < 0.5
        free = [*engine.slots.free]
        random.shuffle(free)
        engine.slots.free = {slot: () for slot in free}
        self.captured = drafter.captures != "nothing" and random.random() < 0.4
        if self.captured:  # as on a GPU
            engine.loop, engine.slots.pads = doubles.rerunning(engine.loop, drafter), True
            engine.loop.most = random.choice([1, 3, 256])
        self.about = f"{self.family}, {self.method}, {engine.slots.count} slots, chunks of {engine.chunk}"
        self.about += f"{', read late' * engine.late}{', captured' * self.captured}"
        return llm

    def _call(self, llm: LLM, workloads: list[Workload]) -> None:
        """Call all workloads, in several threads or one after the other."""
        random, threads = self.random, self.random.choice([1, 1, 2, 5])
        jobs = [(random.choice(CALLERS), one, Random(random.random())) for one in workloads * random.choice([1, 2])]
        self.counts["calls"] += len(jobs)
        self.counts["calls in threads"] += len(jobs) * (threads > 1)
        with ThreadPoolExecutor(threads) as pool:
            called = [(pool.submit(way, llm, one, own), way.__name__, one) for way, one, own in jobs]
            for future, way, one in called:
                self._wait(future, f"{way} in {threads} threads\n{one.prompts}\n{one.settings}")

    def _wait(self, future: Future[None], what: str) -> None:
        try:
            future.result(timeout=HANGS_AFTER_S)
        except TimeoutError:
            faulthandler.dump_traceback()
            print(f"{self.description()}\n{what}\ndoes not return after {HANGS_AFTER_S:.0f} s", flush=True)
            os._exit(1)  # threads that hang cannot be ended
        except Exception as error:
            raise Difference(f"{what}\n{error}") from error

    def _compare_with_transformers(self, alone: LLM, hf: Any, workload: Workload) -> None:
        """Check plain decoding itself, if no stop rule applies: run the whole sequence through the model for every token."""
        if {"stop", "stop_token_ids"} & workload.settings.keys():
            return
        for place, expected in enumerate(workload.expected):
            (request,) = alone._requests([workload.prompts[place]], settings_of_one(workload, place))
            true = doubles.truth(hf, request)
            if expected.tokens != true:
                raise Difference(f"plain: {request} gives {expected.tokens}, transformers {true}")
            self.counts["compared with transformers"] += 1

    def description(self) -> str:
        return f"trial {self.number}: {getattr(self, 'about', self.family)}"


def plain() -> Any:
    return ReadyDrafter("plain", doubles.drafter("plain", None))  # type: ignore[arg-type]


@contextmanager
def until_closed(llm: LLM) -> Iterator[LLM]:
    """Close the LLM at the end, but not after a difference: a hanging call would hang again."""
    yield llm
    llm.close()


def trials(seed: int, only: int | None, counts: Counter[str]) -> Iterator[Trial]:
    number = 0 if only is None else only
    while only is None or number == only:
        yield Trial(number, Random(f"{seed} {number}"), counts)
        number += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="start no trial after this time")
    parser.add_argument("--seed", type=int, help="the seed of all random choices; by default a random one, which is printed")
    parser.add_argument("--only", type=int, help="run only this trial")
    given = parser.parse_args()
    seed = secrets.randbelow(10**6) if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as home:
        os.environ["FOREWORD_HOME"] = home
        for trial in trials(seed, given.only, counts):
            try:
                trial.run()
            except Exception as error:
                traceback.print_exc()
                print(f"\n{trial.description()}\n{error}\nagain: python studies/fuzz.py --seed {seed} --only {trial.number}")
                return 1
            counts["trials"] += 1
            if time.monotonic() - started > given.seconds:
                break
    print(", ".join(f"{count} {name}" for name, count in counts.items()) + ": no difference")
    return 0


if __name__ == "__main__":
    sys.exit(main())

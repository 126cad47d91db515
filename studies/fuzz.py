"""Random models, methods, samplings, stop rules, aborts, streams, tasks, threads: outputs must be those of plain decoding.

    python studies/fuzz.py --seconds 60
    python studies/fuzz.py --seed 7 --only 12     # one trial again

A trial makes a tiny random model in float64, serves it by a random method under random engine settings, and lets several
threads and event loops call that one LLM at once; some trials change the method meanwhile. Plain decoding generates the
expected outputs first, one request at a time in its own engine; some of them are compared with the transformers model alone.
The seed is printed. With the same seed every trial makes the same calls; only the order in which threads take turns
differs. The exit status is 1 at the first difference.
"""

from __future__ import annotations

import argparse
import asyncio
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
from tokenizers.pre_tokenizers import WhitespaceSplit  # noqa: E402

import doubles  # noqa: E402
from foreword.api import LLM  # noqa: E402
from foreword.core.drafter import Drafter  # noqa: E402
from foreword.errors import InputError  # noqa: E402
from foreword.methods import METHODS  # noqa: E402
from foreword.model.model import Model  # noqa: E402
from foreword.requests import Prompt  # noqa: E402
from foreword.results import Result  # noqa: E402
from foreword.text import Tokenizer  # noqa: E402

HANGS_AFTER_S = 120.0  # a trial takes a few seconds
CONTEXT = doubles.CONTEXT
LETTERS = "abcdefg"  # of the tokenizer's pieces

SWITCHED = ("plain", "prompt_lookup", "token_recycling", "medusa", "clover2")  # quick to build
TEMPLATE = "{% for message in messages %}{{ message.role[0] }}b {{ message.content }} {% endfor %}aa bb"

Settings = dict[str, Any]


class Difference(Exception):
    """An output is not that of plain decoding."""


# Workloads -------------------------------------------------------------------------------------------------------------


@dataclass
class Workload:
    """Prompts, their settings, and the outputs of plain decoding."""

    prompts: list[Prompt]
    settings: Settings  # of all prompts
    each: list[Settings] | None = None  # of each prompt alone
    n: int | None = None
    expected: list[Result] = field(default_factory=list)  # one per sample, those of a prompt next to each other
    ids: list[list[int]] = field(default_factory=list)  # the encoded prompts, one per sample

    @property
    def call(self) -> Settings:
        """The keywords of a call for all prompts."""
        return {**self.settings, "settings": self.each, "n": self.n}

    def single(self, place: int) -> tuple[Prompt, Settings]:
        """Return the prompt of a sample, and the settings of a call for it alone. Each sample has its own seed."""
        prompt = place // (self.n or 1)
        own = self.each[prompt] if self.each else {}
        return self.prompts[prompt], {**self.settings, **own, "seed": self.expected[place].sampling.seed}

    def compute(self, alone: LLM) -> None:
        """Let plain decoding generate the expected outputs. Cached rows are not reused."""
        common = self.settings | {"reuse": False}
        each = [own | {"reuse": False} for own in self.each] if self.each else None
        self.expected = alone.generate(self.prompts, n=self.n, settings=each, **common)
        asked = alone._requests(self.prompts, {**common, "settings": each}, self.n)
        self.ids = [list(request.prompt) for request in asked]


def tokenizer() -> Tokenizer:
    """Return the tokenizer of the test doubles, which reads words too: two letters between spaces are a token."""
    found = doubles.tokenizer()
    found.hf.backend_tokenizer.pre_tokenizer = WhitespaceSplit()
    found.hf.chat_template = TEMPLATE
    return found


def random_tokens(random: Random, earlier: list[list[int]]) -> list[int]:
    """Return random tokens, a loop that can be looked up, or the beginning of an earlier prompt and more."""
    kind = random.choice(["noise", "noise", "loop", "more"])
    noise = [random.randrange(3, doubles.VOCABULARY) for _ in range(random.randint(1, 12))]
    if kind == "loop":
        noise = noise[:4] * random.randint(2, 6)
    if kind == "more" and earlier:
        start = random.choice(earlier)
        noise = start[: random.randint(1, len(start))] + noise
    return noise[: CONTEXT - 4]


def words(tokens: list[int]) -> str:
    return " ".join(WORDS[token] for token in tokens)


WORDS = doubles.tokenizer().pieces


def as_prompt(random: Random, tokens: list[int]) -> Prompt:
    """Return tokens as they are, as a string, or as chat messages."""
    kind = random.choice(["ids", "ids", "string", "chat"])
    if kind == "ids":
        return tokens
    if kind == "string":
        return words(tokens)
    cut = random.randint(0, len(tokens) - 1)
    said = [("user", tokens[:cut]), ("assistant", tokens[cut:]), ("user", tokens[:5])]
    return [{"role": role, "content": words(some)} for role, some in said if some]


def random_settings(random: Random) -> Settings:
    def some(chance: float, name: str, *values: Any) -> Settings:
        return {name: random.choice(values)} if random.random() < chance else {}

    stops = ["".join(random.choice(LETTERS) for _ in range(random.randint(1, 3))) for _ in range(2)]
    tokens = [random.randrange(doubles.VOCABULARY) for _ in range(random.randint(6, 30))]
    biases = {token: random.choice([-100.0, -3.0, 0.5, 4.0, 100.0]) for token in tokens[:5]}
    sequences = [[random.choice(tokens) for _ in range(random.randint(1, 3))] for _ in range(random.randint(1, 6))]
    most = random.randint(1, 16)
    return {
        "max_new_tokens": most,
        "seed": random.randrange(2**40),
        **some(0.6, "temperature", 0.3, 0.8, 1.0, 1.7),
        **some(0.3, "top_k", 1, 3, 17, 60),
        **some(0.3, "top_p", 0.2, 0.7, 0.95),
        **some(0.2, "min_p", 0.02, 0.3),
        **some(0.25, "repetition_penalty", 0.7, 1.3, 2.0),
        **some(0.2, "presence_penalty", -1.5, 0.4, 2.0),
        **some(0.2, "frequency_penalty", -0.7, 0.3, 2.0),
        **some(0.15, "logit_bias", biases),
        **some(0.1, "bad_words", [words([token]) for token in tokens[:4]], [words(sequences[0])]),
        **some(0.15, "bad_word_ids", sequences),
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
        **some(0.3, "session", "a", "b"),
        **some(0.15, "truncate_prompt_tokens", 1, 3, 7),
    }


def random_workload(random: Random, earlier: list[list[int]]) -> Workload:
    prompts = [as_prompt(random, random_tokens(random, earlier)) for _ in range(random.choice([1, 1, 2, 4]))]
    chats = any(isinstance(prompt, list) and isinstance(prompt[0], dict) for prompt in prompts)
    settings = random_settings(random) | {"chat": chats or random.random() < 0.5}
    each = None
    if random.random() < 0.3:
        each = [random_settings(random) if random.random() < 0.7 else {} for _ in prompts]
        for own in each:
            if random.random() < 0.5:
                own.pop("seed", None)
    return Workload(prompts, settings, each, random.choice([None, None, None, 1, 3, 8]))


def random_workloads(random: Random, count: int, alone: LLM) -> list[Workload]:
    """Return workloads with their expected outputs. Settings that leave no token to sample are refused, and chosen again."""
    found: list[Workload] = []
    while len(found) < count:
        one = random_workload(random, [ids for workload in found for ids in workload.ids])
        try:
            one.compute(alone)
        except InputError as error:
            if not ("allow others" in str(error) or "must have 1 to" in str(error) or "min_new_tokens" in str(error)):
                raise
        else:
            found.append(one)
    return found


# Ways to call ---------------------------------------------------------------------------------------------------------


@dataclass
class Calls:
    """One LLM that is called. If `switched`, another thread changes its method, which aborts what runs."""

    llm: LLM
    switched: bool = False


def same(calls: Calls, found: Result, expected: Result, what: str) -> None:
    if found.finish_reason == "abort" and calls.switched:
        begins(found.tokens, expected, what)
        return
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


def by_list(calls: Calls, workload: Workload, random: Random) -> None:
    for found, expected in zip(calls.llm.generate(workload.prompts, **workload.call), workload.expected, strict=True):
        same(calls, found, expected, "generate")


def one_by_one(calls: Calls, workload: Workload, random: Random) -> None:
    """Take results as they come and leave the loop early: the other requests are aborted."""
    stop = random.randint(1, len(workload.expected))
    given = workload.call | {"n": workload.n or 1}
    for place, found in enumerate(calls.llm.generate_each(workload.prompts, **given), start=1):
        same(calls, found, workload.expected[place - 1], "generate_each")
        if place == stop:
            break


def streams(calls: Calls, workload: Workload, random: Random) -> None:
    """Read streams alternately; close some early, and never begin some."""
    reading = []
    for place, expected in enumerate(workload.expected):
        prompt, settings = workload.single(place)
        stream = calls.llm.stream(prompt, **settings)
        reading.append((iter(stream), stream, expected, random.choice([None, None, random.randint(0, 4)]), Shown()))
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
            shown.check(calls, stream.result, expected, "stream")


def tasks(calls: Calls, workload: Workload, random: Random) -> None:
    """Call from tasks of an event loop, and cancel some of them."""
    asyncio.run(_tasks(calls, workload, random))


async def _tasks(calls: Calls, workload: Workload, random: Random) -> None:
    work = [_all_at_once(calls, workload)]
    for place in range(len(workload.expected)):
        work.append(_one_stream(calls, workload, place, random.choice([None, None, random.randint(0, 4)])))
    started = [asyncio.create_task(one) for one in work]
    cancelled = set()
    for task in started:
        if random.random() < 0.3:
            await asyncio.sleep(random.random() * 0.02)
            cancelled.add(task)
            task.cancel()
    for task, error in zip(started, await asyncio.gather(*started, return_exceptions=True), strict=True):
        if error is not None and not (task in cancelled and isinstance(error, asyncio.CancelledError)):
            raise error


async def _all_at_once(calls: Calls, workload: Workload) -> None:
    found = await calls.llm.agenerate(workload.prompts, **workload.call)
    for one, expected in zip(found, workload.expected, strict=True):
        same(calls, one, expected, "agenerate")


async def _one_stream(calls: Calls, workload: Workload, place: int, most: int | None) -> None:
    prompt, settings = workload.single(place)
    stream, shown, expected = calls.llm.astream(prompt, **settings), Shown(), workload.expected[place]
    async for piece in stream:
        shown.take(piece)
        begins(shown.tokens, expected, "astream")
        if shown.pieces == most:
            await stream.aclose()
            return
    shown.check(calls, await stream.result(), expected, "astream")


@dataclass
class Shown:
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    pieces: int = 0

    def take(self, piece: Any) -> None:
        self.text, self.tokens, self.pieces = self.text + piece, self.tokens + piece.tokens, self.pieces + 1

    def check(self, calls: Calls, result: Result, expected: Result, what: str) -> None:
        """Compare the result of a stream, and its pieces."""
        same(calls, result, expected, what)
        if self.text != result.text or self.tokens != result.tokens:
            raise Difference(f"{what}: its pieces are {self.text!r}, its result is {result.text!r}")


CALLERS: list[Callable[[Calls, Workload, Random], None]] = [by_list, by_list, one_by_one, streams, tasks]


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
        hf = doubles.fresh(self.family, seed=seed)
        with until_closed(LLM.of(Model(hf), tokenizer(), plain(), 1, CONTEXT)) as alone:
            workloads = random_workloads(random, random.randint(2, 7), alone)
            if random.random() < 0.3:
                self._compare_with_transformers(alone, hf, random.choice(workloads))
        fitting = [name for name, one in METHODS.items() if self.family == "foreword_looped" or not one.looped]
        self.method = random.choice([*fitting, "liar", "oracle"])
        with until_closed(self._llm(hf, workloads)) as llm:
            self._call(llm, workloads)
            if not emptied(llm):
                raise Difference("a slot is still taken after all calls have ended")
        self.counts["requests"] += sum(len(one.expected) for one in workloads)
        self.counts["tokens"] += sum(len(result.tokens) for one in workloads for result in one.expected)
        doubles.forget_truth()

    def _drafter(self, model: Model, workloads: list[Workload]) -> Drafter:
        if self.method == "liar":
            return doubles.Liar(seed=self.random.randrange(99))
        if self.method == "oracle":
            sequences = [ids + out.tokens for one in workloads for ids, out in zip(one.ids, one.expected, strict=True)]
            return doubles.Oracle(sequences, seed=self.random.randrange(99))
        return doubles.drafter(self.method, model)

    def _llm(self, hf: Any, workloads: list[Workload]) -> LLM:
        """Make an LLM of the method with random engine settings."""
        model, random = Model(hf), self.random
        drafter = self._drafter(model, workloads)
        llm = LLM.of(model, tokenizer(), ReadyDrafter(self.method, drafter), random.randint(1, 4), CONTEXT)  # type: ignore[arg-type]
        engine = llm.engine
        engine.chunk, engine.late = random.choice([1, 3, 8, 40]), random.random() < 0.5
        engine.slots.worth_a_wait = random.choice([1, 4, 32])
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
        switches = random.choice([0, 0, 0, 1, 3])
        calls, switcher = Calls(llm, switches > 0), Random(random.random())
        self.counts["changes of method"] += switches
        with ThreadPoolExecutor(threads + 1) as pool:
            switching = pool.submit(self._switch, llm, switches, switcher)
            called = [(pool.submit(way, calls, one, own), way.__name__, one) for way, one, own in jobs]
            for future, way, one in called:
                self._wait(future, f"{way} in {threads} threads\n{one}")
            self._wait(switching, "use")

    def _switch(self, llm: LLM, times: int, random: Random) -> None:
        """Change the method a few times while requests run."""
        for _ in range(times):
            time.sleep(random.random() * 0.05)
            llm.use(doubles.drafter(random.choice(SWITCHED), llm.model))

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
        for place, expected in enumerate(workload.expected):
            prompt, settings = workload.single(place)
            if {"stop", "stop_token_ids"} & settings.keys():
                continue
            (request,) = alone._requests([prompt], settings)
            true = doubles.truth(hf, request)
            if expected.tokens != true:
                raise Difference(f"plain: {request} gives {expected.tokens}, transformers {true}")
            self.counts["compared with transformers"] += 1

    def description(self) -> str:
        return f"trial {self.number}: {getattr(self, 'about', self.family)}"


def plain() -> Any:
    return ReadyDrafter("plain", doubles.drafter("plain", None))  # type: ignore[arg-type]


def emptied(llm: LLM) -> bool:
    """Return whether all slots become free: what a cancelled task asked for leaves after the current step."""
    patience = time.monotonic() + 10
    while time.monotonic() < patience:
        slots = llm.engine.slots
        if not llm.engine.busy and len(slots.free) == slots.count:
            return True
        time.sleep(0.001)
    return False


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

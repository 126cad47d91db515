"""The measuring loop. Contenders take turns on every block of prompts, so that changes of the machine affect all alike. The
clock runs over whole answers, prompt included.

In: a plan, and a function that makes the contenders for a batch size. Out: a `BlockRun` with the tokens for each block that
all contenders answered once. At batch 1 a block is one prompt; at larger batches it has twice as many prompts as slots, and
a request that ends makes room for the next. Later turns of a prompt follow the base's replies, so that all contenders read
the same. Before each repeat, contenders that learn from outputs forget them.
"""

from __future__ import annotations

import gc
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from foreword.bench.contenders import Answer, Contender, GenerationSettings, Task, longest_prompt
from foreword.bench.suites import Suite
from foreword.errors import InputError, PromptError
from foreword.text import Prompt, Tokenizer

MIXED = "mixed"
BLOCK = 2  # batches of prompts in a block
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Plan:
    """What all contenders are asked to do."""

    suites: Sequence[Suite]
    max_new_tokens: int = 128
    batches: tuple[int, ...] = (1,)
    temperatures: tuple[float, ...] = (0.0,)
    repeats: int = 1
    seed: int = 0

    @property
    def prompts(self) -> list[Prompt]:
        return [prompt for suite in self.suites for prompt in suite.prompts]

    @property
    def prompts_sha256(self) -> str:
        """Identifies a set of prompts by its content."""
        asked = [(suite.name, [asdict(prompt) for prompt in suite.prompts]) for suite in self.suites]
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()

    def check(self) -> None:
        """Refuse too few prompts before anything runs."""
        count, most = len(self.prompts), max(self.batches)
        if count < most:
            raise InputError(f"{count} prompts cannot fill a batch of {most}; give at least {most} with --prompts")
        if not count:
            raise InputError("there are no prompts to answer; give at least one")


class BlockPlace(NamedTuple):
    """The place of a block in a run."""

    batch: int
    temperature: float
    repeat: int
    turn: int
    block: int


@dataclass(frozen=True)
class BlockRun:
    """A block of prompts that all contenders answered once."""

    place: BlockPlace
    suite: str
    group: str
    tasks: list[Task]
    answers: dict[str, list[Answer]]
    seconds: dict[str, float]


@dataclass
class RunResults:
    """The results of a run so far."""

    block_runs: dict[BlockPlace, BlockRun] = field(default_factory=dict)
    warm_up_s: dict[int, dict[str, float]] = field(default_factory=dict)  # by batch size and contender, before the clock
    warm_up_failed: dict[str, str] = field(default_factory=dict)


class Item(NamedTuple):
    suite: str
    group: str
    prompt: Prompt
    number: int  # in the whole run


MakeContenders = Callable[[int], list[Contender]]
Progress = Callable[[str, int, int], None]


def run(
    make: MakeContenders,
    plan: Plan,
    tokenizer: Tokenizer,
    known: dict[BlockPlace, BlockRun] | None = None,
    on_block_run: Callable[[BlockRun], None] = lambda _: None,
    progress: Progress = lambda *_: None,
) -> RunResults:
    """Run the blocks of the plan that are not `known`. `make` returns the contenders of a batch size; they are closed after
    it. `on_block_run` receives each block that was run."""
    plan.check()
    found = RunResults(dict(known or {}))
    for batch in plan.batches:
        if all(place in found.block_runs for place in places(plan, batch)):
            continue
        contenders = make(batch)
        check_names([contender.name for contender in contenders])
        try:
            for temperature in plan.temperatures:
                temperature_run = TemperatureRun(plan, batch, temperature, contenders, tokenizer, found, progress)
                for block_run in temperature_run.block_runs():
                    on_block_run(block_run)
                    progress(temperature_run.progress_label(block_run), _done(found), _answers(plan))
        finally:
            for contender in contenders:
                contender.close()
            del contenders
            gc.collect()
            torch.cuda.empty_cache()  # the next caches are sized by the free memory
    return found


def check_names(names: Sequence[str]) -> None:
    if not names or len(set(names)) < len(names):
        raise InputError(f"contenders are {list(names)}; give at least one, and none twice")


def base_of(names: Sequence[str]) -> str:
    """Return the contender that speed-ups are over: plain decoding, or the first if plain does not run."""
    return "plain" if "plain" in names else names[0]


class TemperatureRun:
    """All repeats at one batch size and one temperature."""

    def __init__(
        self,
        plan: Plan,
        batch: int,
        temperature: float,
        contenders: list[Contender],
        tokenizer: Tokenizer,
        found: RunResults,
        progress: Progress = lambda *_: None,
    ) -> None:
        self.plan, self.batch, self.temperature, self.found = plan, batch, temperature, found
        self.tokenizer, self.progress = tokenizer, progress
        self.settings = GenerationSettings(plan.max_new_tokens, temperature, plan.seed)
        self.contenders = [one for one in contenders if not one.greedy_single or (batch == 1 and temperature == 0)]

    def block_runs(self) -> Iterator[BlockRun]:
        """Run and yield the blocks that are still missing."""
        if all(place in self.found.block_runs for place in places(self.plan, self.batch, self.temperature)):
            return
        self._warm_up()
        for repeat in range(self.plan.repeats):
            for contender in self.contenders:
                contender.forget()
            for turn in range(max(prompt.answers for prompt in self.plan.prompts)):
                for number, block in enumerate(blocks(self.plan, self.batch, turn)):
                    place = BlockPlace(self.batch, self.temperature, repeat, turn, number)
                    if place not in self.found.block_runs:
                        self.found.block_runs[place] = self._run_block(place, block)
                        yield self.found.block_runs[place]

    def progress_label(self, block_run: BlockRun) -> str:
        sampled = f", T={self.temperature:g}" if self.temperature else ""
        return f"batch {self.batch}{sampled}, run {block_run.place.repeat + 1} of {self.plan.repeats}"

    def _run_block(self, place: BlockPlace, block: list[Item]) -> BlockRun:
        """Run a block. The first contender changes from block to block, so that none always runs first."""
        given = [self._task(item, place) for item in block]
        asked = [one for one in given if isinstance(one, Task)]
        answers, seconds = {}, {}
        shift = (place.block + place.turn + place.repeat) % len(self.contenders)
        for contender in (*self.contenders[shift:], *self.contenders[:shift]):
            written, seconds[contender.name] = _timed(contender, asked, self.settings)
            left = iter(written)
            answers[contender.name] = [next(left) if isinstance(one, Task) else one for one in given]
        tasks = [
            one if isinstance(one, Task) else Task(item.prompt.id, (), item.number)
            for one, item in zip(given, block, strict=True)
        ]
        order = [contender.name for contender in self.contenders]
        suites, groups = ({getattr(item, what) for item in block} for what in ("suite", "group"))
        return BlockRun(
            place,
            suites.pop() if len(suites) == 1 else MIXED,
            groups.pop() if len(groups) == 1 else MIXED,
            tasks,
            {name: answers[name] for name in order},
            {name: seconds[name] for name in order},
        )

    def _task(self, item: Item, place: BlockPlace) -> Task | Answer:
        """Return the task of this turn, or a failed answer that says why there is none."""
        replies = []
        for turn in range(place.turn):
            reply = self._reply(item, place._replace(turn=turn))
            if reply is None:
                return Answer([], failed="there is no reply to continue from: the turn before failed")
            replies.append(reply)
        try:
            return Task(item.prompt.id, tuple(self.tokenizer.encode(item.prompt.after(replies))), item.number)
        except PromptError as error:
            return Answer.failure(error)

    def _reply(self, item: Item, place: BlockPlace) -> str | None:
        """Return the base's reply of an earlier turn in the same repeat."""
        base = base_of([contender.name for contender in self.contenders])
        for block_run in self.found.block_runs.values():
            if block_run.place[:4] == place[:4]:
                for task, answer in zip(block_run.tasks, block_run.answers[base], strict=True):
                    if task.index == item.number:
                        return None if answer.failed else self.tokenizer.decode(answer.tokens)
        return None

    def _warm_up(self) -> None:
        """Warm up: the first pass of a process, the first of each shape and the first of each captured round are slow."""
        tasks = [one for item in items(self.plan, 0) if isinstance(one := self._task(item, FIRST), Task)]
        if not tasks:
            return
        most = self.plan.max_new_tokens
        later = [Task("", (0,) * longest_prompt(self.tokenizer, item.prompt, most)) for item in items(self.plan, 1)]
        later = [task for task in later if task.ids]
        short = GenerationSettings(min(WARM_UP_TOKENS, most), self.temperature)
        spent = self.found.warm_up_s.setdefault(self.batch, {})
        for contender in self.contenders:
            self.progress(f"warming up {contender.name}", _done(self.found), _answers(self.plan))
            started = time.perf_counter()
            try:
                contender.capture([*tasks, *later], self.settings)  # first, so that compiled code fits the longest prompt
                contender.write(tasks[: self.batch], short)
            except Exception as error:  # of any kind: the others go on, and later failures are reported
                self.found.warm_up_failed[contender.name] = Answer.failure(error).failed or ""
            spent[contender.name] = spent.get(contender.name, 0.0) + time.perf_counter() - started


FIRST = BlockPlace(1, 0.0, 0, 0, 0)


def _timed(contender: Contender, tasks: list[Task], settings: GenerationSettings) -> tuple[list[Answer], float]:
    """Time a contender on tasks. If it raises, it has failed at these tasks and the benchmark goes on."""
    if not tasks:
        return [], 0.0
    broken = _attempt(contender.ready)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # exclude work that the previous contender or `ready` left running
    started = time.perf_counter()
    answers = broken or _attempt(lambda: contender.write(tasks, settings))
    seconds = time.perf_counter() - started
    return [answers] * len(tasks) if isinstance(answers, Answer) else answers, seconds


def _attempt(call: Callable[[], Any]) -> Any:
    """Return the result of a call, or a failed answer for an error of any library; the report names it."""
    try:
        return call()
    except Exception as error:
        return Answer.failure(error)


# Blocks of a plan ----------------------------------------------------------------------------------------------------------


def items(plan: Plan, turn: int) -> list[Item]:
    """Return the prompts that have this turn, suite by suite and group by group."""
    index = {id(prompt): place for place, prompt in enumerate(plan.prompts)}
    return [
        Item(suite.name, group, prompt, index[id(prompt)])
        for suite in plan.suites
        for group, members in suite.groups().items()
        for prompt in members
        if prompt.answers > turn
    ]


def blocks(plan: Plan, batch: int, turn: int) -> list[list[Item]]:
    """Return single prompts for batch 1; for larger batches blocks of about the same size, each at least a batch.

    If fewer prompts than a batch have a later turn, that turn is left out: it would be timed at a smaller batch.
    """
    asked = items(plan, turn)
    if batch == 1:
        return [[item] for item in asked]
    if len(asked) < batch:
        return []
    count = max(len(asked) // (BLOCK * batch), 1)
    edges = [len(asked) * place // count for place in range(count + 1)]
    return [asked[first:last] for first, last in pairwise(edges)]


def places(plan: Plan, batch: int, temperature: float | None = None) -> list[BlockPlace]:
    """Return the places of all blocks of a batch size, in order."""
    turns = range(max(prompt.answers for prompt in plan.prompts))
    return [
        BlockPlace(batch, one, repeat, turn, block)
        for one in (plan.temperatures if temperature is None else (temperature,))
        for repeat in range(plan.repeats)
        for turn in turns
        for block in range(len(blocks(plan, batch, turn)))
    ]


def left_out(plan: Plan) -> dict[int, int]:
    """Return, by batch size, how many later turns are left out because they are fewer than the batch."""
    turns = range(1, max(prompt.answers for prompt in plan.prompts))
    missing = {
        batch: sum(len(items(plan, turn)) for turn in turns if not blocks(plan, batch, turn)) for batch in plan.batches
    }
    return {batch: count for batch, count in missing.items() if count}


def _answers(plan: Plan) -> int:
    turns = range(max(prompt.answers for prompt in plan.prompts))
    once = sum(len(block) for batch in plan.batches for turn in turns for block in blocks(plan, batch, turn))
    return once * plan.repeats * len(plan.temperatures)


def _done(found: RunResults) -> int:
    return sum(len(block_run.tasks) for block_run in found.block_runs.values())

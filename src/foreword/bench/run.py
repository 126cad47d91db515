"""The measuring loop: one for everybody. Contenders take turns on every block of prompts, so that whatever the machine does
meanwhile falls on all of them alike; the clock runs over whole answers, the reading of the prompt included.

In: a plan, and how to make the contenders for a number of texts at once. Out: heats, each a block that everybody answered
once, with the tokens. One text at a time, a block is one prompt; with more side by side it is twice as many prompts as there
are slots, and a text that ends makes room for the next. Later turns of a prompt follow the base's replies, so that everybody
reads the same. Before each repeat, whoever learns from texts forgets them.
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

from foreword.bench.contenders import Answer, Contender, Manner, Task, longest
from foreword.bench.suites import Suite
from foreword.errors import InputError, PromptError
from foreword.text import Prompt, Tokenizer

MIXED = "mixed"
BLOCK = 2  # batches of prompts in a block
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Plan:
    """What is asked of everybody."""

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
        """Tells one set of prompts from another, also where they have the same names."""
        asked = [(suite.name, [asdict(prompt) for prompt in suite.prompts]) for suite in self.suites]
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()

    def check(self) -> None:
        """Refuse too few prompts now, and not after the first batches."""
        count, most = len(self.prompts), max(self.batches)
        if count < most:
            raise InputError(f"{count} prompts cannot fill a batch of {most}; give at least {most} with --prompts")
        if not count:
            raise InputError("there are no prompts to answer; give at least one")


class HeatPlace(NamedTuple):
    """Where a heat stands in a run."""

    batch: int
    temperature: float
    repeat: int
    turn: int
    block: int


@dataclass(frozen=True)
class Heat:
    """A block of prompts that everybody answered once."""

    place: HeatPlace
    suite: str
    group: str
    tasks: list[Task]
    answers: dict[str, list[Answer]]
    seconds: dict[str, float]


@dataclass
class Found:
    """What a run has brought so far."""

    heats: dict[HeatPlace, Heat] = field(default_factory=dict)
    warm_up_s: dict[int, dict[str, float]] = field(default_factory=dict)  # by batch and contender, before the clock
    warm_up_failed: dict[str, str] = field(default_factory=dict)


class Item(NamedTuple):
    suite: str
    group: str
    prompt: Prompt
    number: int  # in the whole run


Make = Callable[[int], list[Contender]]
Progress = Callable[[str, int, int], None]


def run(
    make: Make,
    plan: Plan,
    tokenizer: Tokenizer,
    known: dict[HeatPlace, Heat] | None = None,
    heard: Callable[[Heat], None] = lambda _: None,
    progress: Progress = lambda *_: None,
) -> Found:
    """Run what the plan has and is not `known`. `make` gives the contenders for a batch, which are closed behind it."""
    plan.check()
    found = Found(dict(known or {}))
    for batch in plan.batches:
        if all(place in found.heats for place in places(plan, batch)):
            continue
        contenders = make(batch)
        check_names([contender.name for contender in contenders])
        try:
            for temperature in plan.temperatures:
                race = Race(plan, batch, temperature, contenders, tokenizer, found, progress)
                for heat in race.heats():
                    heard(heat)
                    progress(race.words(heat), _done(found), _texts(plan))
        finally:
            for contender in contenders:
                contender.close()
            del contenders
            gc.collect()
            torch.cuda.empty_cache()  # whoever allocates a cache asks for free memory first
    return found


def check_names(names: Sequence[str]) -> None:
    if not names or len(set(names)) < len(names):
        raise InputError(f"contenders are {list(names)}; give at least one, and nobody twice")


def base_of(names: Sequence[str]) -> str:
    """Whom the others are faster than: plain decoding, or the first where it does not run."""
    return "plain" if "plain" in names else names[0]


class Race:
    """All repeats of one batch at one temperature."""

    def __init__(
        self,
        plan: Plan,
        batch: int,
        temperature: float,
        contenders: list[Contender],
        tokenizer: Tokenizer,
        found: Found,
        progress: Progress = lambda *_: None,
    ) -> None:
        self.plan, self.batch, self.temperature, self.found = plan, batch, temperature, found
        self.tokenizer, self.progress = tokenizer, progress
        self.manner = Manner(plan.max_new_tokens, temperature, plan.seed)
        self.contenders = [one for one in contenders if not one.alone or (batch == 1 and temperature == 0)]

    def heats(self) -> Iterator[Heat]:
        """Those that are still missing."""
        if all(place in self.found.heats for place in places(self.plan, self.batch, self.temperature)):
            return
        self._warm_up()
        for repeat in range(self.plan.repeats):
            for contender in self.contenders:
                contender.forget()
            for turn in range(max(prompt.answers for prompt in self.plan.prompts)):
                for number, block in enumerate(blocks(self.plan, self.batch, turn)):
                    place = HeatPlace(self.batch, self.temperature, repeat, turn, number)
                    if place not in self.found.heats:
                        self.found.heats[place] = self._heat(place, block)
                        yield self.found.heats[place]

    def words(self, heat: Heat) -> str:
        drawn = f", T={self.temperature:g}" if self.temperature else ""
        return f"batch {self.batch}{drawn}, run {heat.place.repeat + 1} of {self.plan.repeats}"

    def _heat(self, place: HeatPlace, block: list[Item]) -> Heat:
        """Who begins changes from block to block, so that nobody always follows the same neighbour."""
        given = [self._task(item, place) for item in block]
        asked = [one for one in given if isinstance(one, Task)]
        answers, seconds = {}, {}
        shift = (place.block + place.turn + place.repeat) % len(self.contenders)
        for contender in (*self.contenders[shift:], *self.contenders[:shift]):
            written, seconds[contender.name] = _timed(contender, asked, self.manner)
            left = iter(written)
            answers[contender.name] = [next(left) if isinstance(one, Task) else one for one in given]
        tasks = [
            one if isinstance(one, Task) else Task(item.prompt.id, (), item.number)
            for one, item in zip(given, block, strict=True)
        ]
        order = [contender.name for contender in self.contenders]
        suites, groups = ({getattr(item, what) for item in block} for what in ("suite", "group"))
        return Heat(
            place,
            suites.pop() if len(suites) == 1 else MIXED,
            groups.pop() if len(groups) == 1 else MIXED,
            tasks,
            {name: answers[name] for name in order},
            {name: seconds[name] for name in order},
        )

    def _task(self, item: Item, place: HeatPlace) -> Task | Answer:
        """What is asked in this turn, or why it cannot be."""
        replies = []
        for turn in range(place.turn):
            reply = self._reply(item, place._replace(turn=turn))
            if reply is None:
                return Answer([], failed="there is no reply to go on from: the turn before failed")
            replies.append(reply)
        try:
            return Task(item.prompt.id, tuple(self.tokenizer.encode(item.prompt.after(replies))), item.number)
        except PromptError as error:
            return Answer.failure(error)

    def _reply(self, item: Item, place: HeatPlace) -> str | None:
        """The base's, of an earlier turn in the same repeat."""
        base = base_of([contender.name for contender in self.contenders])
        for heat in self.found.heats.values():
            if heat.place[:4] == place[:4]:
                for task, answer in zip(heat.tasks, heat.answers[base], strict=True):
                    if task.index == item.number:
                        return None if answer.failed else self.tokenizer.decode(answer.tokens)
        return None

    def _warm_up(self) -> None:
        """The first pass of a process is slow, of a shape too, and so is the first of every captured round."""
        tasks = [one for item in items(self.plan, 0) if isinstance(one := self._task(item, FIRST), Task)]
        if not tasks:
            return
        most = self.plan.max_new_tokens
        later = [Task("", (0,) * longest(self.tokenizer, item.prompt, most)) for item in items(self.plan, 1)]
        later = [task for task in later if task.ids]
        short = Manner(min(WARM_UP_TOKENS, most), self.temperature)
        spent = self.found.warm_up_s.setdefault(self.batch, {})
        for contender in self.contenders:
            self.progress(f"warming up {contender.name}", _done(self.found), _texts(self.plan))
            started = time.perf_counter()
            try:
                contender.capture([*tasks, *later], self.manner)  # first: what is compiled fits the longest then
                contender.write(tasks[: self.batch], short)
            except Exception as error:  # whatever it is, the others can go on; what it fails at will be told again
                self.found.warm_up_failed[contender.name] = Answer.failure(error).failed or ""
            spent[contender.name] = spent.get(contender.name, 0.0) + time.perf_counter() - started


FIRST = HeatPlace(1, 0.0, 0, 0, 0)


def _timed(contender: Contender, tasks: list[Task], manner: Manner) -> tuple[list[Answer], float]:
    """A contender that breaks has failed at these tasks; the benchmark goes on."""
    if not tasks:
        return [], 0.0
    broken = _attempt(contender.ready)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # what the one before left running, and getting ready, are not this one's time
    started = time.perf_counter()
    answers = broken or _attempt(lambda: contender.write(tasks, manner))
    seconds = time.perf_counter() - started
    return [answers] * len(tasks) if isinstance(answers, Answer) else answers, seconds


def _attempt(call: Callable[[], Any]) -> Any:
    """What it gives, or a failure, of whatever library's: it is told in the report."""
    try:
        return call()
    except Exception as error:
        return Answer.failure(error)


# What there is to do ------------------------------------------------------------------------------------------------------


def items(plan: Plan, turn: int) -> list[Item]:
    """Prompts that ask for an answer in this turn, suite by suite and group by group."""
    index = {id(prompt): place for place, prompt in enumerate(plan.prompts)}
    return [
        Item(suite.name, group, prompt, index[id(prompt)])
        for suite in plan.suites
        for group, members in suite.groups().items()
        for prompt in members
        if prompt.answers > turn
    ]


def blocks(plan: Plan, batch: int, turn: int) -> list[list[Item]]:
    """One by one; or for texts side by side, blocks of about the same size, each at least a batch.

    Fewer later turns than a batch are left out: they would be timed as something that they are not.
    """
    asked = items(plan, turn)
    if batch == 1:
        return [[item] for item in asked]
    if len(asked) < batch:
        return []
    count = max(len(asked) // (BLOCK * batch), 1)
    edges = [len(asked) * place // count for place in range(count + 1)]
    return [asked[first:last] for first, last in pairwise(edges)]


def places(plan: Plan, batch: int, temperature: float | None = None) -> list[HeatPlace]:
    """All heats of a batch, in their order."""
    turns = range(max(prompt.answers for prompt in plan.prompts))
    return [
        HeatPlace(batch, heat, repeat, turn, block)
        for heat in (plan.temperatures if temperature is None else (temperature,))
        for repeat in range(plan.repeats)
        for turn in turns
        for block in range(len(blocks(plan, batch, turn)))
    ]


def left_out(plan: Plan) -> dict[int, int]:
    """By batch, how many later turns are left out, because they are fewer than the batch."""
    turns = range(1, max(prompt.answers for prompt in plan.prompts))
    missing = {
        batch: sum(len(items(plan, turn)) for turn in turns if not blocks(plan, batch, turn)) for batch in plan.batches
    }
    return {batch: count for batch, count in missing.items() if count}


def _texts(plan: Plan) -> int:
    turns = range(max(prompt.answers for prompt in plan.prompts))
    once = sum(len(block) for batch in plan.batches for turn in turns for block in blocks(plan, batch, turn))
    return once * plan.repeats * len(plan.temperatures)


def _done(found: Found) -> int:
    return sum(len(heat.tasks) for heat in found.heats.values())

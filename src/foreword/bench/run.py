"""The measuring loop: one for everybody. Contenders take turns on every block of prompts, so that whatever the machine does
meanwhile falls on all of them alike; the clock runs over whole answers, prompts included.

One text at a time, a block is one prompt. With more side by side it is twice as many prompts as there are slots: a text that
ends makes room for the next one.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch

from foreword.bench.contenders import Answer, Contender
from foreword.errors import InputError
from foreword.text import Prompt, groups, loop_share

MIXED = "mixed"
BLOCK = 2  # batches of prompts in a block


@dataclass(frozen=True)
class Timing:
    """A contender's answers to a block of prompts."""

    prompt: str
    group: str
    contender: str
    tokens: int
    rounds: int
    seconds: float
    prefill_s: float | None
    loop_share: float
    identical: int  # texts that are those of the first contender
    texts: int = 1
    batch: int = 1


@dataclass(frozen=True)
class Benchmark:
    contenders: tuple[str, ...]
    max_new_tokens: int
    timings: tuple[Timing, ...]
    batch: int = 1
    warm_up_s: dict[str, float] = field(default_factory=dict)  # by contender: warming up and capturing, before the clock

    def of(self, contender: str, wanted: Sequence[str] | None = None) -> list[Timing]:
        """A contender's timings, in all groups or in some."""
        return [t for t in self.timings if t.contender == contender and (wanted is None or t.group in wanted)]

    @property
    def base(self) -> str:
        """Whom the others are faster than: plain decoding, or the first where it does not run."""
        return "plain" if "plain" in self.contenders else self.contenders[0]

    @property
    def groups(self) -> list[str]:
        return list(dict.fromkeys(timing.group for timing in self.timings))


class Block(NamedTuple):
    group: str
    prompts: list[Prompt]


Progress = Callable[[int, int], None]


def sweep(
    make: Callable[[int], list[Contender]],
    batches: Sequence[int],
    prompts: Sequence[Prompt],
    max_new_tokens: int = 128,
    progress: Callable[[int, int, int], None] | None = None,
) -> list[Benchmark]:
    """A benchmark for each number of texts at once; `make` gives the contenders for it, which are closed behind it."""
    check_filled(prompts, batches)
    found = []
    for batch in batches:
        contenders = make(batch)
        told = None if progress is None else lambda done, total, batch=batch: progress(batch, done, total)
        try:
            found.append(run(contenders, prompts, max_new_tokens, told, batch))
        finally:
            for contender in contenders:
                contender.close()
            del contenders
            gc.collect()
            torch.cuda.empty_cache()  # whoever allocates a cache asks for free memory first
    return found


def run(
    contenders: Sequence[Contender],
    prompts: Sequence[Prompt],
    max_new_tokens: int = 128,
    progress: Progress | None = None,
    batch: int = 1,
) -> Benchmark:
    """Every contender on every prompt; the first one's tokens are what the others are compared with."""
    names = [contender.name for contender in contenders]
    if not prompts or not names or len(set(names)) < len(names):
        raise InputError(f"{len(prompts)} prompts for {names}; give at least one of each, and no contender twice")
    blocks = _blocks(prompts, batch)
    warm_up_s = {contender.name: _warm_up(contender, prompts, max_new_tokens) for contender in contenders}
    timings: list[Timing] = []
    for turn, block in enumerate(blocks):
        timings += _take_turns(contenders, turn, block, max_new_tokens, batch)
        if progress:
            progress(sum(len(done.prompts) for done in blocks[: turn + 1]), len(prompts))
    return Benchmark(tuple(names), max_new_tokens, tuple(timings), batch, warm_up_s)


def _warm_up(contender: Contender, prompts: Sequence[Prompt], max_new_tokens: int) -> float:
    """The first pass of a process is slow, and so is the first of every captured round."""
    started = time.perf_counter()
    contender.write([prompts[0].first()], min(8, max_new_tokens))
    contender.capture([prompt.first() for prompt in prompts], max_new_tokens)
    return time.perf_counter() - started


def _take_turns(contenders: Sequence[Contender], turn: int, block: Block, max_new_tokens: int, batch: int) -> list[Timing]:
    """Who begins changes from block to block, so that nobody always follows the same neighbour."""
    answers: dict[str, tuple[list[Answer], float]] = {}
    asked = [prompt.first() for prompt in block.prompts]
    shift = turn % len(contenders)
    for contender in (*contenders[shift:], *contenders[:shift]):
        started = time.perf_counter()
        written = contender.write(asked, max_new_tokens)
        answers[contender.name] = (written, time.perf_counter() - started)
    truth = answers[contenders[0].name][0]
    return [_timing(block, name, written, truth, seconds, batch) for name, (written, seconds) in answers.items()]


def _timing(block: Block, name: str, written: list[Answer], truth: list[Answer], seconds: float, batch: int) -> Timing:
    tokens = sum(len(answer.tokens) for answer in written)
    looping = sum(loop_share(answer.tokens) * len(answer.tokens) for answer in written)
    return Timing(
        prompt=" ".join(prompt.id for prompt in block.prompts),
        group=block.group,
        contender=name,
        tokens=tokens,
        rounds=sum(answer.rounds for answer in written),
        seconds=seconds,
        prefill_s=written[0].prefill_s if len(written) == 1 else None,  # side by side, one reads while others write
        loop_share=looping / max(tokens, 1),
        identical=sum(one.tokens == other.tokens for one, other in zip(written, truth, strict=True)),
        texts=len(written),
        batch=batch,
    )


def check_filled(prompts: Sequence[Prompt], batches: Sequence[int]) -> None:
    """Refuse too few prompts now, and not after the first batches."""
    if len(prompts) < (most := max(batches)):
        raise InputError(f"{len(prompts)} prompts cannot fill a batch of {most}; give at least {most} with --prompts")


def _blocks(prompts: Sequence[Prompt], batch: int) -> list[Block]:
    """Prompts by group, one by one; or for texts side by side, blocks of about the same size, each at least a batch."""
    grouped = [(name, prompt) for name, members in groups(prompts).items() for prompt in members]
    if batch == 1:
        return [Block(group, [prompt]) for group, prompt in grouped]
    check_filled(prompts, [batch])
    count = max(len(grouped) // (BLOCK * batch), 1)
    edges = [len(grouped) * place // count for place in range(count + 1)]
    parts = [grouped[first:last] for first, last in pairwise(edges)]
    return [Block(part[0][0] if len(dict(part)) == 1 else MIXED, [prompt for _, prompt in part]) for part in parts]

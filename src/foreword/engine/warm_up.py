"""Warm-up: record every round and prompt pass that sequences of known lengths can meet, before a request has to wait for it.

In: an engine, and how long sequences are at first and at last. Out: its recorded graphs. The sequences that made them are
noise, and what a drafter learned from them is forgotten. An engine that records nothing is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foreword.core.drafter import Drafter
from foreword.core.sampling import Sampling
from foreword.engine.admit import round_up
from foreword.engine.graph import LEAST_SPAN, MOST_TEXTS, padded_rows, reach
from foreword.engine.request import Request, Running

if TYPE_CHECKING:
    from foreword.engine.engine import Engine

ROUNDS = 3  # the first of a bucket runs as it is written, the second is captured, and one is replayed
TRIES = 3  # of a prompt: the same, and one that reads what the others find in the cache


def memory(drafter: Drafter) -> Callable[[], None]:
    """Puts what a drafter holds now back into its place."""
    held = {name: value.clone() for name, value in vars(drafter).items() if isinstance(value, Tensor)}

    def restore() -> None:
        for name, value in held.items():
            getattr(drafter, name).copy_(value)

    return restore


def capture_rounds(engine: Engine, shortest: int, longest: int, sampling: Sampling | None = None) -> None:
    """Record what sequences meet that begin with `shortest` tokens or more, end with `longest` or fewer, and are sampled so.
    In passes over prompts nothing is sampled: those that are recorded already are left out."""
    if not engine.loop.captured:
        return
    restore, slots = memory(engine.drafter), engine.slots.count
    sampling = sampling or Sampling(seed=0)
    generator = torch.Generator().manual_seed(0)
    texts = _noise(engine, slots, engine.max_context, generator)
    for length in lengths(shortest, longest + engine.drafter.shape.depth + 1, engine.max_context):
        for count in reversed(sizes(slots)):  # the most first: all others find their prompts in the cache
            begun = [text[:length] for text in texts[:count]]
            asked = [Request(text, sampling, engine.max_context, ignore_eos=True, reuse=True) for text in begun]
            with under_way(engine, asked, ROUNDS):
                pass
    for length in prompt_lengths(shortest, min(longest, engine.max_context - 1), engine.chunk):
        begin, rows = _last_pass(length, engine.chunk)
        known = [text[:begin] for text in texts]  # is read once, and found in the cache but for what it must not trust
        for count in range(1, min(slots, MOST_TEXTS) + 1):
            for _ in range(TRIES):
                if engine.loop.has_pass(count, begin, rows):
                    break
                new = _noise(engine, count, length - begin - (engine.slots.unsure if begin else 0), generator)
                prompts = [before + behind for before, behind in zip(known, new, strict=False)]
                engine.generate([Request(prompt, sampling, 1, ignore_eos=True, reuse=begin > 0) for prompt in prompts])
    restore()


def lengths(shortest: int, longest: int, context: int) -> list[int]:
    """Of prompts, one for each reach that rounds are captured for: just long enough for it. The last token is the root."""
    reaches = sorted({reach(length) for length in range(max(shortest - 1, 1), longest + 1)})
    found = [2 + (far // 2 if far > LEAST_SPAN else 0) for far in reaches]
    return [length for length in found if length + 1 < context]


def prompt_lengths(shortest: int, longest: int, chunk: int) -> list[int]:
    """One for each size and place of a prompt's last pass, and one for each full pass before it."""
    full = range(chunk + 1, longest, chunk)
    found = sorted({*full, *range(max(shortest, 2), longest + 1)})
    return list({_last_pass(length, chunk): length for length in found}.values())


def _last_pass(length: int, chunk: int) -> tuple[int, int]:
    """Where a prompt's last pass begins, and how many rows it is padded to. The last token is not read."""
    full, rows = divmod(length - 2, chunk)
    return full * chunk, padded_rows(rows + 1, chunk)


def sizes(slots: int) -> list[int]:
    """How many texts a captured round can have: free slots fill it up, as far as there are any."""
    return sorted({min(round_up(count), slots) for count in range(1, slots + 1)})


def _noise(engine: Engine, count: int, length: int, generator: torch.Generator) -> list[tuple[int, ...]]:
    """Texts that no model would write."""
    tokens = torch.randint(engine.target.vocab_size, (count, length), generator=generator)
    return [tuple(text) for text in tokens.tolist()]


@contextmanager
def under_way(engine: Engine, requests: list[Request], rounds: int) -> Iterator[list[Running]]:
    """Texts whose prompts are read and whose first rounds are launched, all of them together; given up in the end."""
    try:
        runs = [engine.add(request) for request in requests]
        while not all(run.ready for run in runs):
            engine.step_for(runs)
        for _ in range(rounds):
            engine.step_for(runs)
        yield runs
    finally:
        engine.give_up()

"""Warm-up: record every round and prompt pass that sequences of known lengths need, before a request has to wait for them.

In: an engine, and the shortest and longest length of sequences. Out: its recorded graphs. The sequences that are run for the
recording are random, and what a drafter learns from them is undone. An engine that records nothing stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foreword.core.drafter import Drafter
from foreword.core.sampling import Sampling
from foreword.engine.admit import round_up
from foreword.engine.graph import LEAST_SPAN, MOST_PROMPTS, padded_rows, reach
from foreword.engine.request import Request, Running

if TYPE_CHECKING:
    from foreword.engine.engine import Engine

ROUNDS = 3  # the first round of a bucket runs eagerly, the second is recorded, and one is replayed
TRIES = 3  # passes over a prompt: the first may fill the cache for the others, one runs eagerly, one is recorded


def snapshot(drafter: Drafter) -> Callable[[], None]:
    """Copy the tensors of a drafter now, and return a function that restores them in place."""
    held = {names: value.clone() for names, value in _tensors(drafter).items()}

    def restore() -> None:
        tensors = _tensors(drafter)
        for names, value in held.items():
            tensors[names].copy_(value)

    return restore


def _tensors(drafter: Drafter) -> dict[tuple[str, str], Tensor]:
    """Return the tensors of a drafter by name: its own, and those of the named tuples and dataclasses that it holds."""
    records = {"": vars(drafter)} | {name: _fields(value) for name, value in vars(drafter).items()}
    return {(of, name): one for of, record in records.items() for name, one in record.items() if isinstance(one, Tensor)}


def _fields(value: Any) -> dict[str, Any]:
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return dict(value._asdict())
    is_record = is_dataclass(value) and not isinstance(value, type)
    return {one.name: getattr(value, one.name) for one in fields(value)} if is_record else {}


def capture_rounds(engine: Engine, shortest: int, longest: int, sampling: Sampling | None = None) -> None:
    """Record the rounds and prompt passes of sequences of `shortest` to `longest` tokens under this sampling. Prompt passes
    do not sample, so those that are recorded already are skipped."""
    if not engine.loop.captured:
        return
    restore, slots = snapshot(engine.drafter), engine.slots.count
    sampling = sampling or Sampling(seed=0)
    generator = torch.Generator().manual_seed(0)
    sequences = _random_sequences(engine, slots, engine.max_context, generator)
    for length in lengths(shortest, longest + engine.drafter.shape.depth + 1, engine.max_context):
        for count in reversed(sizes(slots)):  # the largest first: the others then find their prompts in the cache
            prompts = [sequence[:length] for sequence in sequences[:count]]
            requests = [Request(prompt, sampling, engine.max_context, ignore_eos=True, reuse=True) for prompt in prompts]
            with running_requests(engine, requests, ROUNDS):
                pass
    for length in prompt_lengths(shortest, min(longest, engine.max_context - 1), engine.chunk):
        begin, rows = _last_pass(length, engine.chunk)
        cached = [sequence[:begin] for sequence in sequences]  # read once; later reused, except rows that are read again
        for count in range(1, min(slots, MOST_PROMPTS) + 1):
            for _ in range(TRIES):
                if engine.loop.has_pass(count, begin, rows):
                    break
                again = int(begin > 0 and engine.drafter.needs.follower)
                new = _random_sequences(engine, count, length - begin - again, generator)
                prompts = [before + after for before, after in zip(cached, new, strict=False)]
                engine.generate([Request(prompt, sampling, 1, ignore_eos=True, reuse=begin > 0) for prompt in prompts])
    restore()


def lengths(shortest: int, longest: int, context: int) -> list[int]:
    """Return one prompt length for each reach that rounds are captured for, just long enough for it. The last token is the
    root."""
    reaches = sorted({reach(length) for length in range(max(shortest - 1, 1), longest + 1)})
    found = [2 + (far // 2 if far > LEAST_SPAN else 0) for far in reaches]
    return [length for length in found if length + 1 < context]


def prompt_lengths(shortest: int, longest: int, chunk: int) -> list[int]:
    """Return one prompt length for each size and start of a prompt's last pass, and one for each full pass before it."""
    full = range(chunk + 1, longest, chunk)
    found = sorted({*full, *range(max(shortest, 2), longest + 1)})
    return list({_last_pass(length, chunk): length for length in found}.values())


def _last_pass(length: int, chunk: int) -> tuple[int, int]:
    """Return where a prompt's last pass begins, and how many rows it is padded to. The last token is not read."""
    full, rows = divmod(length - 2, chunk)
    return full * chunk, padded_rows(rows + 1, chunk)


def sizes(slots: int) -> list[int]:
    """Return the batch sizes of captured rounds. Free slots pad a round, as far as there are any."""
    return sorted({min(round_up(count), slots) for count in range(1, slots + 1)})


def _random_sequences(engine: Engine, count: int, length: int, generator: torch.Generator) -> list[tuple[int, ...]]:
    tokens = torch.randint(engine.target.vocab_size, (count, length), generator=generator)
    return [tuple(sequence) for sequence in tokens.tolist()]


@contextmanager
def running_requests(engine: Engine, requests: list[Request], rounds: int) -> Iterator[list[Running]]:
    """Start requests together: read their prompts and launch their first `rounds` rounds. Abort them in the end."""
    try:
        runs = [engine.add(request) for request in requests]
        while not all(run.ready for run in runs):
            engine.step_for(runs)
        for _ in range(rounds):
            engine.step_for(runs)
        yield runs
    finally:
        engine.give_up()

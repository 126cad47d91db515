"""Random requests, engines that serve them, and a loop that replays rounds without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch

from doubles.models import CONTEXT, VOCABULARY, target
from doubles.reference import GRAMMAR_COMPILER
from foreword.core.drafter import Drafter
from foreword.core.loop import InTurns
from foreword.core.sampling import Sampling
from foreword.core.sampling_table import SamplingStages, SamplingTable
from foreword.engine.engine import Engine
from foreword.engine.graph import GraphBucket, GraphedLoop, graphed
from foreword.engine.request import Request
from foreword.model.model import Model

SAMPLINGS = {"greedy": Sampling(seed=0), "T=0.8": Sampling(temperature=0.8, seed=7)}


def prompts(count: int, seed: int = 0, longest: int = 24) -> list[tuple[int, ...]]:
    """Return random prompts of different lengths; the first has one token."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [1, *torch.randint(2, longest, (count - 1,), generator=generator).tolist()]
    return [tuple(torch.randint(3, VOCABULARY, (size,), generator=generator).tolist()) for size in sizes]


def in_turns(names: Iterable[str], others: Iterable[Any]) -> list[tuple[str, Any]]:
    """Pair every name with one of the others, which come in turns: each of them is tried, and not with every name."""
    some = list(others)
    return [(name, some[place % len(some)]) for place, name in enumerate(names)]


def requests(count: int, sampling: Sampling = SAMPLINGS["greedy"], seed: int = 0, **options: Any) -> list[Request]:
    """Return requests with random prompts, each with its own seed."""
    options = {"max_new_tokens": 14} | options
    return [Request(prompt, sampling.derived(i), **options) for i, prompt in enumerate(prompts(count, seed))]


def engine(
    drafter: Drafter, model: Model | None = None, slots: int = 3, context: int = CONTEXT, late: bool = False
) -> Engine:
    """Make an engine that reads prompts in chunks of five tokens, and grammars by `json_tokenizer`. Requests that enter
    together get slots out of order (2, 0 and 1 of three), so that data in the wrong slot is noticed. With `reuse`, requests
    wait for any row that they could copy."""
    made = Engine(model or target(), drafter, slots, context, chunk=5, late=late, compiler=GRAMMAR_COMPILER)
    made.slots.free = {slot: () for slot in (slots - 1, *range(slots - 1))}
    made.slots.worth_a_wait = 1
    return made


def written(engine: Engine, asked: Iterable[Request]) -> list[list[int]]:
    return [running.tokens for running in engine.generate(asked)]


def run_to_end(engine: Engine) -> None:
    while engine.busy:
        engine.step()


def rerunning(loop: InTurns, drafter: Drafter) -> GraphedLoop:
    """Wrap a loop as on a GPU, with graph buckets. A replay calls the captured function again."""
    made = graphed(loop, drafter.captures)
    assert isinstance(made, GraphedLoop)
    made._record = _rerun  # type: ignore[method-assign]
    return made


def _rerun(bucket: GraphBucket[Any], call: Callable[[], Any]) -> None:
    """Stand in for a capture. Replays use the sampling stages of the capture: the first replay follows it at once."""
    kinds: list[SamplingStages] = []
    kind_of = SamplingTable.kind

    def settled(table: SamplingTable, ids: tuple[int, ...]) -> SamplingStages:
        if not kinds:
            kinds.append(kind_of(table, ids))
        return kinds[0]

    def replay() -> None:
        SamplingTable.kind = settled  # type: ignore[method-assign]
        try:
            recorded.answer = call()
        finally:
            SamplingTable.kind = kind_of  # type: ignore[method-assign]

    recorded = SimpleNamespace(replay=replay, answer=None)
    bucket.graph = recorded  # type: ignore[assignment]

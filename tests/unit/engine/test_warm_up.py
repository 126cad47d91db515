"""Warm-up: every bucket that requests can need is recorded before they come, and nothing else has changed."""

from typing import Any

import pytest
import torch

from doubles import CONTEXT, drafter, engine, requests, target
from foreword.core.sampling import Sampling
from foreword.engine import graph
from foreword.engine import warm_up as warm
from foreword.engine.engine import Engine
from foreword.engine.graph import GraphedLoop, _bucket, reach
from foreword.engine.request import Request
from foreword.engine.warm_up import capture_rounds, lengths, prompt_lengths, sizes
from foreword.methods import make

STEP = 16


class Counting(GraphedLoop):
    """Rounds and prompt passes run eagerly, and buckets are counted: what a GPU would have captured."""

    def __init__(self, loop: Any) -> None:
        super().__init__(loop)
        self.met: dict[Any, int] = {}

    def round(self, state: Any, constrain: Any = None) -> Any:
        self._count(_bucket(state))
        return self.loop.round(state)

    def prompt_pass(self, state: Any, chunk: Any, read: Any) -> Any:
        self._count((len(state.batch.ids), reach(state.batch.span), chunk.nodes))
        return read(state, chunk)

    def has_pass(self, sequences: int, before: int, rows: int) -> bool:
        return self.met.get(graph.prompt_bucket(sequences, before, rows), 0) > 1

    def _count(self, bucket: Any) -> None:
        self.met[bucket] = self.met.get(bucket, 0) + 1


@pytest.fixture(autouse=True)
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (graph, warm):
        monkeypatch.setattr(module, "LEAST_SPAN", STEP)
    monkeypatch.setattr(graph, "FEWEST_ROWS", 4)


def counting(method: str, slots: int, chunk: int = 256) -> tuple[Any, Counting]:
    model = target()
    made = Engine(model, drafter(method, model), slots=slots, max_context=CONTEXT, chunk=chunk)
    made.joins_prompts = True  # as on a GPU
    made.loop = Counting(made.loop)
    made.slots.pads = True
    return made, made.loop


@pytest.mark.parametrize("method", ["plain", "clover2"])
@pytest.mark.parametrize("slots", [1, 8])
@pytest.mark.parametrize(("shortest", "longest"), [(2, 30), (20, 40)])
def test_every_pass_over_prompts_is_captured(method: str, slots: int, shortest: int, longest: int) -> None:
    """For prompts longer than a chunk, or two, the full passes too; for every number of prompts that are read together."""
    made, loop = counting(method, slots, chunk=8)
    capture_rounds(made, shortest, longest)
    for length in range(shortest, longest + 1):
        ends = [*range(9, length, 8), length]  # of its passes
        for begin, rows in (warm._last_pass(end, 8) for end in ends):
            for count in range(1, min(slots, graph.MOST_PROMPTS) + 1):
                assert loop.has_pass(count, begin, rows), (length, count, begin, rows)


@pytest.mark.parametrize(("slots", "chunk"), [(1, 8), (3, 8), (1, 256), (3, 256)])
@pytest.mark.parametrize("method", ["prompt_lookup", "clover2"])
def test_nothing_is_new_afterwards(method: str, slots: int, chunk: int) -> None:
    made, loop = counting(method, slots, chunk)
    asked = requests(9, max_new_tokens=14)[1:]  # the first has one token, which no chat has
    counts = [len(request.prompt) for request in asked]
    capture_rounds(made, min(counts), max(counts) + 14)
    captured = {bucket for bucket, times in loop.met.items() if times > 1}
    loop.met.clear()
    made.generate(asked)
    assert loop.met and set(loop.met) <= captured
    assert {rows for bucket in loop.met if len(bucket) == 3 for rows in bucket[2:]} == {4, 8, *([16, 32] * (chunk > 8))}


def test_a_prompt_of_two_passes_makes_no_round_of_another_size() -> None:
    """Requests end one by one, and others enter whose prompts take one pass or two: every round has all of them."""
    made, loop = counting("plain", 8, chunk=8)
    prompts = [tuple(range(20, 20 + (6 if i % 3 else 15))) for i in range(20)]
    made.generate([Request(one, max_new_tokens=3 + i % 7, ignore_eos=True) for i, one in enumerate(prompts)])
    assert {bucket[0] for bucket in loop.met if len(bucket) == 4} == {*sizes(8)}


def test_prompts_are_read_once_for_all_samplings() -> None:
    made, loop = counting("plain", 3)
    capture_rounds(made, 2, 40)
    passes = {bucket: times for bucket, times in loop.met.items() if len(bucket) == 3}
    rounds = {bucket for bucket in loop.met if len(bucket) == 4}
    capture_rounds(made, 2, 40, Sampling(temperature=0.8, seed=1))
    again = sum(times - passes[bucket] for bucket, times in loop.met.items() if len(bucket) == 3)
    assert 0 < again < sum(passes.values()) / 2  # only those before rounds, which need a prompt
    assert len({bucket for bucket in loop.met if len(bucket) == 4}) == 2 * len(rounds) > 0


def test_what_a_drafter_learned_in_warm_up_is_undone() -> None:
    made, loop = counting("token_recycling", 2)
    before = {names: value.clone() for names, value in warm._tensors(made.drafter).items()}
    capture_rounds(made, 2, 40)
    assert loop.met and {("table", "tokens"), ("table", "chances")} <= before.keys()
    assert all(torch.equal(value, before[names]) for names, value in warm._tensors(made.drafter).items())


def test_an_engine_that_captures_nothing_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine(make("plain"))
    monkeypatch.setattr(made, "generate", lambda *_: pytest.fail("nothing was to be generated"))
    capture_rounds(made, 2, 40)


def test_lengths_reach_every_span_and_stay_inside_the_context() -> None:
    assert lengths(3, 40, CONTEXT) == [2, 18, 34]
    assert lengths(17, 40, CONTEXT) == [2, 18, 34] and lengths(18, 40, CONTEXT) == [18, 34]
    assert lengths(3, 60, 35) == [2, 18]


def test_prompt_lengths_end_in_every_size_of_pass() -> None:
    """Of 4, 8 and 16 rows, at every sixteenth row."""
    assert prompt_lengths(2, 17, 16) == [5, 9, 17]
    assert prompt_lengths(7, 22, 16) == [9, 17, 21, 22]
    assert prompt_lengths(1, 1, 16) == []


def test_sizes_are_those_that_rounds_are_padded_to() -> None:
    assert sizes(1) == [1] and sizes(6) == [1, 2, 4, 6] and sizes(32) == [1, 2, 4, 8, 16, 32]

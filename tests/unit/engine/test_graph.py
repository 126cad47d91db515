"""Replay: which rounds and prompt passes share a captured graph, and what they are captured with.

The graphs themselves need a GPU. Here a replay runs what was captured once more, on the very buffers of the capture.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from doubles import CONTEXT, drafter, prompts, run_to_end, state_of, target, truth
from foreword.core.draft import Draft
from foreword.core.drafter import Drafter
from foreword.core.sampling import Kind, Sampling
from foreword.core.scores import Emission, Scores
from foreword.core.state import Lanes, State
from foreword.engine import graph
from foreword.engine.admit import admit
from foreword.engine.engine import Engine
from foreword.engine.graph import MOST_TEXTS, Captured, Replay, padded_rows
from foreword.engine.prefill import prefill
from foreword.engine.request import Request, Running
from foreword.methods import METHODS, make
from foreword.model.model import Model

GREEDY, DRAWN = Sampling(seed=1), Sampling(temperature=0.8, seed=2)


class Spy:
    """A loop that writes down what its rounds were about."""

    def __init__(self) -> None:
        self.rounds: list[tuple[list[int], int, Kind]] = []

    def begin(self, state: State) -> None: ...

    def read(self, state: State, chunk: Draft, scores: Scores) -> None: ...

    def end(self, slots: Sequence[int]) -> None: ...

    def round(self, state: State) -> Emission:
        self.rounds.append((state.slots.tolist(), state.lanes.span, state.sampling.kind))
        one = torch.ones(len(state.lanes.ids), dtype=torch.long)
        return Emission(one.unsqueeze(1), one, one, one > 1, one > 1)


class Graph:
    replays = 0

    def replay(self) -> None:
        Graph.replays += 1

    def pool(self) -> None: ...


@contextmanager
def captures(graph: Any, pool: Any = None) -> Iterator[None]:
    yield


@pytest.fixture
def replay(monkeypatch: pytest.MonkeyPatch) -> Replay:
    """What is captured runs once, as written; replays are only counted."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", captures)
    Graph.replays = 0
    return Replay(Spy())


def state(*samplings: Sampling) -> State:
    given = state_of([[5]] * len(samplings))
    for slot, sampling in enumerate(samplings):
        given.table.set(slot, sampling)
    return given


def rounds(replay: Replay) -> list[tuple[list[int], int, Kind]]:
    return replay.loop.rounds  # type: ignore[attr-defined]


def test_the_first_round_runs_the_second_is_captured_and_the_third_replayed(replay: Replay) -> None:
    given = state(GREEDY, GREEDY)
    for ran, replays in ((1, 0), (2, 1), (2, 2)):
        replay.round(given)
        assert (len(rounds(replay)), Graph.replays) == (ran, replays)


@pytest.mark.parametrize("other", ["more sequences", "a longer text", "another way of choosing"])
def test_other_rounds_have_graphs_of_their_own(replay: Replay, other: str) -> None:
    given = state(GREEDY, GREEDY, DRAWN)
    replay.round(given.at(Lanes.of([0, 1], 10)))
    change = {"more sequences": ([0, 1, 2], 10), "a longer text": ([0, 1], 300), "another way of choosing": ([0, 2], 10)}
    replay.round(given.at(Lanes.of(*change[other])))
    assert len(replay.buckets) == 2 and Graph.replays == 0


def test_a_graph_serves_other_slots_of_the_same_kind(replay: Replay) -> None:
    given = state(GREEDY, GREEDY, GREEDY)
    for ids in ([0, 1], [0, 2], [1, 2]):
        replay.round(given.at(Lanes.of(ids, 10)))
    (captured,) = replay.buckets.values()
    assert [slots for slots, _, _ in rounds(replay)] == [[0, 1], [0, 2]]
    assert captured.lanes.slots.tolist() == [1, 2] and captured.lanes.run is None


def test_attention_looks_as_far_as_any_round_of_the_bucket_needs(replay: Replay) -> None:
    given = state(GREEDY)
    replay.round(given.at(Lanes.of([0], 3)))
    assert rounds(replay)[0][1] == 256


@pytest.mark.parametrize(("now", "meanwhile"), [(DRAWN, GREEDY), (GREEDY, DRAWN)], ids=["drawn", "greedy"])
def test_a_round_is_captured_for_those_who_are_in_it(replay: Replay, now: Sampling, meanwhile: Sampling) -> None:
    """Between the first round and the capture slot 1 went to somebody who chooses otherwise, and slot 2 came in. The
    graph must choose as slots 0 and 2 do: else a drawn text would be captured greedy."""
    given = state(GREEDY, now, now)
    replay.round(given.at(Lanes.of([0, 1], 10)))
    given.table.set(1, meanwhile)
    current = given.at(Lanes.of([0, 2], 10))
    replay.round(current)
    assert rounds(replay)[1][0] == [0, 2]
    assert rounds(replay)[1][2] == current.sampling.kind


class Again(Replay):
    """A replay runs what was captured once more."""

    def _capture(self, captured: Captured[Any], call: Callable[[], Any]) -> None:
        def replay() -> None:
            captured.answer = call()

        captured.graph = SimpleNamespace(replay=replay)  # type: ignore[assignment]


@pytest.fixture
def small_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in passes of 4, 8 and 16 rows."""
    monkeypatch.setattr(graph, "FEWEST_ROWS", 4)


def engine(method: Drafter, model: Model, captured: bool, slots: int = 1) -> Engine:
    made = Engine(model, method, slots=slots, max_context=CONTEXT, chunk=16)
    if captured:
        made.loop = Again(made.loop)
    return made


def replayed(made: Engine) -> list[int]:
    """Rows of the prompt passes that were captured."""
    assert isinstance(made.loop, Replay)
    return sorted({rows for (_, rows), captured in made.loop.chunks.items() if captured.graph})


def asked(count: int = 8, **options: Any) -> list[Request]:
    """Prompts of up to three passes."""
    return [Request(prompt, GREEDY, max_new_tokens=6, **options) for prompt in prompts(count, seed=3, longest=45)]


def history(runs: list[Running]) -> list[Any]:
    return [(run.tokens, run.accepted, run.drafted) for run in runs]


@pytest.mark.usefixtures("small_passes")
@pytest.mark.parametrize("method", METHODS)
def test_padded_and_replayed_prompts_are_read_as_written_ones(method: str) -> None:
    """The same texts, and the same drafts in every round: what a drafter reads along is the same too."""
    plain, captured = (engine(drafter(method, model := target()), model, captured) for captured in (False, True))
    expected = plain.generate(asked(10))
    assert history(captured.generate(asked(10))) == history(expected)
    assert [run.tokens for run in expected] == [truth(target().hf, request) for request in asked(10)]
    assert replayed(captured) == [8, 16]


@pytest.mark.usefixtures("small_passes")
@pytest.mark.parametrize("method", ["plain", "token_recycling", "medusa", "clover2"])
def test_several_prompts_in_one_pass(method: str) -> None:
    """As a GPU reads them: of different lengths, and some are done before others."""
    model = target()
    made = engine(drafter(method, model), model, captured=True, slots=3)
    for batch in (asked()[:3], asked()[3:6], asked()[1:4]):
        runs = [made.add(request) for request in batch]
        taken = admit(made.waiting, made.slots, made.state)
        made.loop.begin(made.state.at(Lanes.of(taken, 0)))
        while entering := [run for run in runs if not run.ready]:
            lanes = Lanes.of([run.slot for run in entering], max(run.length for run in entering))
            with torch.inference_mode():
                prefill(model, made.loop, made.drafter.needs, made.state.at(lanes), entering, made.chunk)
        run_to_end(made)
        assert [run.tokens for run in runs] == [truth(model.hf, request) for request in batch]
    assert replayed(made)


@pytest.mark.parametrize("method", ["plain", "clover2"])
def test_padding_may_lie_behind_the_last_row_of_the_cache(method: str) -> None:
    """A prompt that nearly fills the context and begins with what the slot holds: one token is read, in sixteen rows."""
    model = target()
    made = engine(drafter(method, model), model, captured=True)
    long = prompts(2, longest=3)[1] * 40
    for length in (CONTEXT - 5, CONTEXT - 3, CONTEXT - 2, CONTEXT - 1):
        request = Request(long[:length], GREEDY, reuse=True)
        (run,) = made.generate([request])
        assert run.tokens == truth(model.hf, request)
        assert run.reused > 0 or length == CONTEXT - 5
    assert replayed(made) == [16]


@pytest.mark.parametrize("count", [MOST_TEXTS, MOST_TEXTS + 1])
def test_many_prompts_at_once_are_read_as_written(count: int) -> None:
    model, requests = target(), asked(count + 1)[1:]
    made = engine(make("plain"), model, captured=True, slots=count)
    runs = [made.add(request) for request in requests]
    lanes = Lanes.of(admit(made.waiting, made.slots, made.state), 0)
    with torch.inference_mode():
        prefill(model, made.loop, made.drafter.needs, made.state.at(lanes), runs, made.chunk)
    assert isinstance(made.loop, Replay) and len(made.loop.chunks) == (count == MOST_TEXTS)


def test_sizes_of_prompt_passes() -> None:
    assert [padded_rows(rows, 1024) for rows in (1, 64, 65, 512, 513, 1024)] == [64, 64, 128, 512, 1024, 1024]
    assert [padded_rows(rows, 100) for rows in (3, 65, 100)] == [64, 100, 100]

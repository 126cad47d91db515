"""Replay: which rounds share a captured graph, and what a round is captured with. The graphs themselves need a GPU."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from doubles import state_of
from foreword.core.draft import Draft
from foreword.core.sampling import Kind, Sampling
from foreword.core.scores import Emission, Scores
from foreword.core.state import Lanes, State
from foreword.engine.graph import Replay

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

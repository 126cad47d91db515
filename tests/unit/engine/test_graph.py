"""Graphs: which rounds and prompt passes share a captured graph, and what they are captured with.

The graphs themselves need a GPU. Here a replay runs the captured function once more, on the buffers of the capture.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from doubles import CONTEXT, SAMPLINGS, drafter, prompts, rerunning, run_to_end, state_of, target, target_for, truth
from foreword.core.draft import Draft, Tree
from foreword.core.drafter import Drafter
from foreword.core.loop import Constrain
from foreword.core.sampling import Sampling
from foreword.core.sampling_table import SamplingStages
from foreword.core.scores import Emission, Scores
from foreword.core.state import Batch, State
from foreword.engine import graph
from foreword.engine.admit import admit
from foreword.engine.engine import Engine
from foreword.engine.graph import MOST_PROMPTS, GraphBucket, GraphedCheck, GraphedLoop, graphed, padded_rows
from foreword.engine.prefill import prefill
from foreword.engine.request import Request, Running
from foreword.methods import METHODS
from foreword.methods.amusd.drafter import Amusd
from foreword.model.model import Model

GREEDY, SAMPLED = Sampling(seed=1), Sampling(temperature=0.8, seed=2)


class Spy:
    """A loop that records the slots, span and sampling of its rounds."""

    captured = reads_after = False

    def __init__(self) -> None:
        self.rounds: list[tuple[list[int], int, SamplingStages]] = []

    def begin(self, state: State) -> None: ...

    def read(self, state: State, chunk: Draft, scores: Scores) -> None: ...

    def end(self, slots: Sequence[int]) -> None: ...

    def round(self, state: State, constrain: Constrain | None = None) -> Emission:
        self.rounds.append((state.slots.tolist(), state.batch.span, state.sampling.kind))
        one = torch.ones(len(state.batch.ids), dtype=torch.long)
        return Emission(one.unsqueeze(1), one, one, one > 1, one > 1)


class Graph:
    replays = 0

    def replay(self) -> None:
        Graph.replays += 1

    def pool(self) -> None: ...


@contextmanager
def captures(graph: Any, pool: Any = None, stream: Any = None, capture_error_mode: str = "global") -> Iterator[None]:
    assert capture_error_mode == "thread_local", "another thread's work would break a capture"
    yield


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured call runs once, eagerly; replays are only counted."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", captures)
    Graph.replays = 0


@pytest.fixture
def replay(counted: None) -> GraphedLoop:
    return GraphedLoop(Spy())


def state(*samplings: Sampling) -> State:
    given = state_of([[5]] * len(samplings))
    for slot, sampling in enumerate(samplings):
        given.table.set(slot, sampling)
    return given


def rounds(replay: GraphedLoop) -> list[tuple[list[int], int, SamplingStages]]:
    return replay.loop.rounds  # type: ignore[attr-defined]


def test_the_first_round_runs_the_second_is_captured_and_the_third_replayed(replay: GraphedLoop) -> None:
    given = state(GREEDY, GREEDY)
    for ran, replays in ((1, 0), (2, 1), (2, 2)):
        replay.round(given)
        assert (len(rounds(replay)), Graph.replays) == (ran, replays)


@pytest.mark.parametrize("other", ["more sequences", "a longer sequence", "another sampling"])
def test_other_rounds_have_graphs_of_their_own(replay: GraphedLoop, other: str) -> None:
    given = state(GREEDY, GREEDY, SAMPLED)
    replay.round(given.at(Batch.of([0, 1], 10)))
    change = {"more sequences": ([0, 1, 2], 10), "a longer sequence": ([0, 1], 300), "another sampling": ([0, 2], 10)}
    replay.round(given.at(Batch.of(*change[other])))
    assert len(replay.buckets) == 2 and Graph.replays == 0


def test_a_graph_serves_other_slots_of_the_same_kind(replay: GraphedLoop) -> None:
    given = state(GREEDY, GREEDY, GREEDY)
    for ids in ([0, 1], [0, 2], [1, 2]):
        replay.round(given.at(Batch.of(ids, 10)))
    (captured,) = replay.buckets.values()
    assert [slots for slots, _, _ in rounds(replay)] == [[0, 1], [0, 2]]
    assert captured.batch.slots.tolist() == [1, 2] and captured.batch.run is None


def test_attention_looks_as_far_as_any_round_of_the_bucket_needs(replay: GraphedLoop) -> None:
    given = state(GREEDY)
    replay.round(given.at(Batch.of([0], 3)))
    assert rounds(replay)[0][1] == 256


@pytest.mark.parametrize(("now", "meanwhile"), [(SAMPLED, GREEDY), (GREEDY, SAMPLED)], ids=["sampled", "greedy"])
def test_a_round_is_captured_for_the_sequences_in_it(replay: GraphedLoop, now: Sampling, meanwhile: Sampling) -> None:
    """Between the first round and the capture, slot 1 goes to a request with another sampling, and slot 2 enters. The graph
    must sample as slots 0 and 2 do: otherwise a sampled sequence would be captured as greedy."""
    given = state(GREEDY, now, now)
    replay.round(given.at(Batch.of([0, 1], 10)))
    given.table.set(1, meanwhile)
    current = given.at(Batch.of([0, 2], 10))
    replay.round(current)
    assert rounds(replay)[1][0] == [0, 2]
    assert rounds(replay)[1][2] == current.sampling.kind


def test_numbers_that_users_choose_share_graphs(replay: GraphedLoop) -> None:
    """300 requests, each with its own top_k and logprobs, and each in two rounds."""
    for number in range(1, 301):
        given = state(Sampling(0.8, top_k=number, seed=number, logprobs=number % 101))
        replay.round(given)
        replay.round(given)
    assert len(replay.buckets) <= 16 < Graph.replays


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The devices that were waited for."""
    found: list[str] = []
    monkeypatch.setattr(graph, "synchronize", lambda device: found.append(device.type))
    return found


def spans(replay: GraphedLoop) -> list[int]:
    return [span for _, span, *_ in replay.buckets]


@pytest.mark.usefixtures("counted")
def test_the_bucket_that_was_used_least_recently_makes_room(settled: list[str]) -> None:
    replay, given = GraphedLoop(Spy(), most=2), state(GREEDY)
    short, middle, long = (given.at(Batch.of([0], span)) for span in (100, 300, 600))
    for one in (short, short, middle, middle, short):
        replay.round(one)
    assert spans(replay) == [512, 256] and settled == []
    replay.round(long)
    assert spans(replay) == [256, 1024] and settled == ["cpu"], "its graph may still be running"
    ran = len(rounds(replay))
    replay.round(short)
    assert len(rounds(replay)) == ran, "the bucket that was kept is replayed as before"
    replay.round(middle)
    assert spans(replay) == [256, 512] and len(rounds(replay)) == ran + 1, "the bucket that was dropped begins again"
    assert settled == ["cpu"], "the bucket dropped this time was not captured yet"


@pytest.mark.usefixtures("counted", "settled")
def test_the_shared_memory_goes_with_the_last_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Graph, "pool", lambda graph: "memory")
    replay, given = GraphedLoop(Spy(), most=2), state(GREEDY)
    used = [given.at(Batch.of([0], span)) for span in (100, 100, 300, 300, 600)]
    for one in used:
        replay.round(one)
    assert replay.pool == "memory", "another graph has it"
    replay.round(given.at(Batch.of([0], 1200)))
    assert replay.pool is None and len(replay.buckets) == 2


def test_prompt_passes_are_bounded_too(replay: GraphedLoop, settled: list[str]) -> None:
    replay.most, given = 3, state(GREEDY)
    for rows in (4, 8, 16, 32, 64):
        chunk = Draft(torch.full((1, rows), 5), Tree.chain(rows), torch.tensor([rows]))
        for _ in range(2):
            replay.prompt_pass(given, chunk, lambda state, chunk: None)
    assert [rows for _, _, rows in replay.chunks] == [16, 32, 64] and settled == ["cpu"] * 2


class InTurns(Spy):
    """Drafts on the host, with `rows` rows; records the drafts that were checked, and counts the calls of `decided`."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.proposed, self.decisions = 3, 0, 0
        self.checked: list[Draft] = []

    def propose(self, state: State) -> Draft:
        self.proposed += 1
        tokens = torch.full((len(state.batch.ids), self.rows), self.proposed)
        return Draft(tokens, Tree.chain(self.rows), tokens[:, 0].clone())

    def check(self, state: State, draft: Draft) -> Emission:
        self.checked.append(draft)
        return self.round(state)

    def decided(self, state: State, emission: Emission) -> None:
        assert emission.count.tolist() == [1] * len(state.batch.ids)
        self.decisions += 1


@pytest.mark.usefixtures("counted")
def test_a_draft_of_the_host_is_copied_to_where_the_graph_looks() -> None:
    """`propose` and `decided` run every time; from the second time on a graph checks, and reads
    buffers of its own."""
    spy = InTurns()
    replay, given = graphed(spy, "check"), state(GREEDY, GREEDY)
    for ran, replays in ((1, 0), (2, 1), (2, 2)):
        replay.round(given)
        assert (len(spy.checked), Graph.replays) == (ran, replays)
        last = spy.checked[-1]
        assert spy.proposed == spy.decisions == last.tokens[0, 0] == last.size[1] == ran + replays - (ran > 1)
    first, fixed = spy.checked
    assert first.tokens is not fixed.tokens and first.tree is fixed.tree  # chains of a length are shared
    assert first.tokens[0, 0] == 1 and fixed.tokens[0, 0] == 3


@pytest.mark.usefixtures("counted")
def test_wider_drafts_have_a_graph_of_their_own() -> None:
    spy = InTurns()
    replay, given = GraphedCheck(spy), state(GREEDY)
    for spy.rows in (3, 5, 3, 5):
        replay.round(given)
    assert [draft.nodes for draft in spy.checked] == [3, 5, 3, 5] and len(replay.buckets) == Graph.replays == 2


def test_the_drafter_says_what_is_replayed() -> None:
    spy = InTurns()
    assert [type(graphed(spy, what)) for what in ("round", "check", "nothing")] == [GraphedLoop, GraphedCheck, InTurns]


@pytest.fixture
def small_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in passes of 4, 8 and 16 rows."""
    monkeypatch.setattr(graph, "FEWEST_ROWS", 4)


def engine(method: Drafter, model: Model, captured: bool, slots: int = 1) -> Engine:
    made = Engine(model, method, slots=slots, max_context=CONTEXT, chunk=16)
    if captured:
        made.loop = rerunning(made.loop, method)
    return made


def captured_rows(made: Engine) -> list[int]:
    """Rows of the prompt passes that were captured."""
    assert isinstance(made.loop, GraphedLoop)
    return sorted({rows for (_, _, rows), captured in made.loop.chunks.items() if captured.graph})


def asked(count: int = 8, **options: Any) -> list[Request]:
    """Prompts of up to three passes."""
    return [Request(prompt, GREEDY, max_new_tokens=6, **options) for prompt in prompts(count, seed=3, longest=45)]


def history(runs: list[Running]) -> list[Any]:
    return [(run.tokens, run.accepted, run.drafted) for run in runs]


@pytest.mark.usefixtures("small_passes")
@pytest.mark.parametrize("method", METHODS)
def test_padded_and_replayed_prompts_are_read_as_written_ones(method: str) -> None:
    """The same output, and the same drafts in every round: the prompt rows that a drafter reads are the same too."""
    plain, captured = (engine(drafter(method, model := target_for(method)), model, captured) for captured in (False, True))
    expected = plain.generate(asked(10))
    assert history(captured.generate(asked(10))) == history(expected)
    assert [run.tokens for run in expected] == [truth(target_for(method).hf, request) for request in asked(10)]
    assert captured_rows(captured) == [8, 16]


@pytest.mark.usefixtures("small_passes")
@pytest.mark.parametrize("method", ["plain", "token_recycling", "medusa", "draft_model", "amusd"])
def test_prompts_of_one_size_are_read_together(method: str) -> None:
    """As on a GPU: requests enter as others leave, some reuse what a slot holds, and chunks begin at different positions."""
    model = target()
    made = engine(drafter(method, model), model, captured=True, slots=5)
    made.joins_prompts = True
    requests = [*asked(12), *asked(12, reuse=True)]
    assert [run.tokens for run in made.generate(requests)] == [truth(model.hf, request) for request in requests]
    assert isinstance(made.loop, GraphedLoop)
    assert {count for count, _, _ in made.loop.chunks} > {1, 2}


@pytest.mark.usefixtures("small_passes")
def test_ctrl_c_in_a_replay_forgets_what_was_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes when a bucket's slots are written on the device but not yet noted on the host. The next request has the slots
    that the host knows."""
    model, (request,) = target(), asked(1)
    made = engine(drafter("plain", model), model, captured=True, slots=2)

    def written_in(slot: int) -> list[int]:
        made.slots.free = {slot: (), 1 - slot: ()}
        return made.generate([request])[0].tokens

    assert written_in(0) == written_in(0) == truth(model.hf, request)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(GraphBucket, "__setattr__", _interrupt)
        written_in(1)
    assert isinstance(made.loop, GraphedLoop) and not made.loop.buckets  # else the next request uses the other's slot
    assert written_in(0) == truth(model.hf, request)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


UNLIKE = [
    Sampling(seed=1),
    Sampling(temperature=0.8, seed=2),
    Sampling(temperature=1.2, top_k=3, seed=3),
    Sampling(temperature=1.2, top_k=30, top_p=0.9, seed=4),
    Sampling(repetition_penalty=1.5, seed=5),
    Sampling(seed=6, logprobs=4),
]


@pytest.mark.usefixtures("small_passes")
@pytest.mark.parametrize("late", [False, True], ids=["read at once", "read late"])
@pytest.mark.parametrize("most", [1, 5])
@pytest.mark.parametrize("method", ["plain", "clover2", "amusd"])
def test_graphs_that_come_and_go_change_no_output(method: str, most: int, late: bool) -> None:
    """Six samplings, one and two at a time, in more buckets than are kept: some are dropped while a round is unread."""
    model = target()
    made = engine(drafter(method, model), model, captured=True, slots=2)
    assert isinstance(made.loop, GraphedLoop)
    made.loop.most, made.late, made.slots.pads = most, late, True
    requests = [replace(one, sampling=UNLIKE[i % 6], max_new_tokens=3 + 2 * i) for i, one in enumerate(asked(12))]
    runs = made.generate(requests)
    assert [run.tokens for run in runs] == [truth(model.hf, request) for request in requests]
    assert len(made.loop.buckets) <= most and len(made.loop.chunks) <= most
    assert all(len(entry.top) == 4 for run in runs for entry in run.logprobs)


@pytest.mark.usefixtures("small_passes")
@pytest.mark.parametrize("method", ["plain", "token_recycling", "clover2", "hidden_transfer", "draft_model", "amusd"])
def test_prompt_passes_serve_requests_of_any_sampling(method: str) -> None:
    """Passes that were captured for greedy requests are replayed for sampled ones."""
    plain, captured = (engine(drafter(method, model := target_for(method)), model, captured) for captured in (False, True))
    sampled = [replace(request, sampling=Sampling(temperature=0.9, seed=3)) for request in asked(5)]
    for made in (plain, captured):
        made.generate(asked(5))
    assert isinstance(captured.loop, GraphedLoop)
    passes = len(captured.loop.chunks)
    ready = [bucket for bucket in captured.loop.chunks if captured.loop.has_pass(*bucket)]
    assert ready == [bucket for bucket, one in captured.loop.chunks.items() if one.graph] != []
    assert not captured.loop.has_pass(MOST_PROMPTS + 1, 0, 4)
    assert history(captured.generate(sampled)) == history(plain.generate(sampled))
    assert passes and len(captured.loop.chunks) == passes


@pytest.mark.usefixtures("small_passes")
@pytest.mark.parametrize("method", ["plain", "token_recycling", "medusa", "clover2", "amusd"])
def test_several_prompts_in_one_pass(method: str) -> None:
    """As a GPU reads them: prompts of different lengths, some complete before others."""
    model = target()
    made = engine(drafter(method, model), model, captured=True, slots=3)
    for requests in (asked()[:3], asked()[3:6], asked()[1:4]):
        runs = [made.add(request) for request in requests]
        taken = admit(made.waiting, made.slots, made.state)
        made.loop.begin(made.state.at(Batch.of(taken, 0)))
        while entering := [run for run in runs if not run.ready]:
            batch = Batch.of([run.slot for run in entering], max(run.length for run in entering))
            with torch.inference_mode():
                prefill(model, made.loop, made.drafter.needs, made.state.at(batch), entering, made.chunk)
        run_to_end(made)
        assert [run.tokens for run in runs] == [truth(model.hf, request) for request in requests]
    assert captured_rows(made)


@pytest.mark.parametrize("method", ["plain", "clover2"])
def test_padding_may_lie_after_the_last_row_of_the_cache(method: str) -> None:
    """A prompt that nearly fills the context and begins with what the slot holds: one token is read, in sixteen rows."""
    model = target()
    made = engine(drafter(method, model), model, captured=True)
    long = prompts(2, longest=3)[1] * 40
    for length in (CONTEXT - 5, CONTEXT - 3, CONTEXT - 2, CONTEXT - 1):
        request = Request(long[:length], GREEDY, reuse=True)
        (run,) = made.generate([request])
        assert run.tokens == truth(model.hf, request)
        assert run.reused > 0 or length == CONTEXT - 5
    assert captured_rows(made) == [16]


@pytest.mark.parametrize("method", ["plain", "amusd"])
@pytest.mark.parametrize("count", [MOST_PROMPTS, MOST_PROMPTS + 1])
def test_many_prompts_at_once_are_read_as_written(count: int, method: str) -> None:
    model, requests = target(), asked(count + 1)[1:]
    made = engine(drafter(method, model), model, captured=True, slots=count)
    runs = [made.add(request) for request in requests]
    batch = Batch.of(admit(made.waiting, made.slots, made.state), 0)
    made.loop.begin(made.state.at(batch))
    with torch.inference_mode():
        prefill(model, made.loop, made.drafter.needs, made.state.at(batch), runs, made.chunk)
    if isinstance(made.drafter, Amusd):
        read = [[*request.prompt[:-1][:16]] for request in requests]
        assert made.drafter.target_side.sequences == read, "the draft has read along"
    assert isinstance(made.loop, GraphedLoop) and len(made.loop.chunks) == (count == MOST_PROMPTS)


def test_sizes_of_prompt_passes() -> None:
    assert [padded_rows(rows, 1024) for rows in (1, 64, 65, 512, 513, 1024)] == [64, 64, 128, 512, 1024, 1024]
    assert [padded_rows(rows, 100) for rows in (3, 65, 100)] == [64, 100, 100]


def same_texts(method: Any, state: State) -> None:
    for slot in method.writing:
        assert method.target_side.sequences[slot] == state.tokens[slot, : state.lengths[slot] + 1].tolist()


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("behind", [False, True], ids=["told at once", "told a round later"])
def test_checks_of_a_draft_that_is_written_meanwhile(
    behind: bool, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: checks are replayed, free slots fill them up, and rounds are read late, by the engine and by the drafter.
    Texts come and go, one is given up on the way, one is written without guesses, and one goes on from that. What the draft
    is told is always the text."""
    model = target()
    method: Any = drafter("amusd", model)
    made = Engine(model, method, slots=3, max_context=CONTEXT, chunk=16, late=True)
    made.loop, made.slots.pads, method.behind = rerunning(made.loop, method), True, behind
    monkeypatch.setattr(method, "_draft", lambda state, draft=method._draft: (same_texts(method, state), draft(state))[1])
    asked = [Request(one, sampling.derived(i), max_new_tokens=14) for i, one in enumerate(prompts(9, seed=5, longest=20))]
    asked[-1] = replace(asked[-1], speculate=False)
    runs = [made.add(request) for request in asked]
    for _ in range(4):
        made.step()
    made.abort(runs[2])
    run_to_end(made)
    said = (*asked[-1].prompt, *runs[-1].tokens)
    turn = replace(asked[-1], prompt=(*said, 9, 30), reuse=True, speculate=True, max_new_tokens=8)
    (again,) = made.generate([turn])
    expected = [truth(model.hf, request) for request in asked]
    assert runs[2].tokens == expected[2][: len(runs[2].tokens)] and again.tokens == truth(model.hf, turn)
    assert [run.tokens for run in runs if run is not runs[2]] == expected[:2] + expected[3:]
    assert again.reused > 0 and any(one.graph for one in made.loop.buckets.values())
    found = method.counters()
    assert found["checked"] > 0 and found["tokens"] > found["rounds"] > 0

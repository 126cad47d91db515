"""The engine: what it refuses, when it admits requests, what a step returns, and that another loop can be used."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from doubles import CONTEXT, SAMPLINGS, Liar, Oracle, Recorder, engine, full_sequence, requests, target, tokenizer, truth
from foreword.core.draft import Draft
from foreword.core.loop import Constrain
from foreword.core.sampling import Sampling
from foreword.core.scores import Emission, Scores
from foreword.core.state import State
from foreword.engine.engine import Engine
from foreword.engine.lockstep import Lockstep
from foreword.engine.request import Request, Running
from foreword.errors import InputError, PromptError
from foreword.methods import make
from foreword.text import TextStream


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ((), "empty"),
        ((5,) * CONTEXT, f"{CONTEXT} tokens.*max_context"),
        ((5,) * (CONTEXT + 9), f"holds {CONTEXT}"),
        ((5, 48), "48.*vocabulary of 48"),
        ((5, -1, 5), "-1.*vocabulary"),
    ],
)
def test_prompts_that_cannot_be_served(prompt: tuple[int, ...], named: str) -> None:
    steps = engine(make("plain"))
    with pytest.raises(PromptError, match=named):
        steps.add(Request(prompt))
    assert not steps.busy


@pytest.mark.parametrize(
    ("options", "named"),
    [({"slots": 0}, "slots is 0"), ({"chunk": 0}, "chunk is 0"), ({"max_context": 0}, "max_context is 0")],
)
def test_engines_that_cannot_be(options: dict[str, int], named: str) -> None:
    with pytest.raises(InputError, match=named):
        Engine(target(), make("plain"), **options)  # type: ignore[arg-type]


def test_a_context_longer_than_the_model_was_trained_for() -> None:
    with pytest.raises(InputError, match=r"max_context is 257.*tiny-llama.*256"):
        Engine(target(), make("plain"), max_context=257)


def test_by_default_the_context_is_the_model_s() -> None:
    assert Engine(target(), make("plain")).max_context == 256


def test_the_cache_has_room_for_the_widest_pass() -> None:
    model = target()
    engine(Liar(nodes=9), model, slots=2)
    assert model.cache.rows > CONTEXT + 9 and model.cache.slots == 2


def test_requests_enter_in_their_order_as_slots_fall_free() -> None:
    steps = engine(make("plain"), slots=2)
    runs = [steps.add(replace(request, max_new_tokens=3, ignore_eos=True)) for request in requests(5)]
    order: list[int] = []
    while steps.busy:
        steps.step()
        order += [i for i, run in enumerate(runs) if run.slot >= 0 and i not in order]
        assert len(steps.slots.running) <= 2
    assert order == sorted(order) and all(run.done for run in runs)


def test_a_long_prompt_does_not_hold_up_the_others() -> None:
    """It is read one chunk per step; meanwhile requests that are ready generate."""
    steps = engine(make("plain"), slots=2)
    long = steps.add(Request(tuple(range(3, 33)), SAMPLINGS["greedy"], 4))
    short = steps.add(Request((7,), SAMPLINGS["greedy"], 4, ignore_eos=True))
    for count in range(1, 5):
        events = steps.step()
        assert [event.running for event in events] == [short]
        assert (len(short.tokens), long.prefilled) == (count, 5 * count)
    assert short.done and not long.ready


def test_events_are_the_output_piece_by_piece() -> None:
    model, asked = target(), requests(4)
    steps = engine(Oracle([full_sequence(model.hf, request) for request in asked]), model, slots=2)
    runs = [steps.add(request) for request in asked]
    pieces: dict[int, list[int]] = {id(run): [] for run in runs}
    while steps.busy:
        for event in steps.step():
            assert len(event.tokens) == event.running.accepted[-1]
            pieces[id(event.running)] += event.tokens
    assert [pieces[id(run)] for run in runs] == [run.tokens for run in runs]
    assert all(sum(run.accepted) == len(run.tokens) and len(run.accepted) == len(run.drafted) for run in runs)
    assert all(run.prefill_s >= 0 and run.decode_s > 0 for run in runs)


def test_step_for_returns_the_requests_that_ended() -> None:
    steps = engine(make("plain"), slots=3)
    runs = [steps.add(Request((7,), SAMPLINGS["greedy"], tokens, ignore_eos=True)) for tokens in (3, 1, 3)]
    ended: list[list[Running]] = []
    while steps.busy:
        ended.append(steps.step_for(()))
    assert list(map(set, ended)) == [{runs[1]}, set(), {runs[0], runs[2]}]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("rounds", [2, 5])
@pytest.mark.parametrize("method", ["plain", "prompt_lookup", "token_recycling"])
def test_rounds_that_are_read_together_bring_what_they_bring_one_by_one(method: str, rounds: int, late: bool) -> None:
    def written(together: int) -> list[Running]:
        steps = engine(make(method), slots=3, late=late)
        runs, ended = [steps.add(request) for request in requests(8)], []
        while steps.busy:
            ended += steps.step_for((), together)
        assert set(ended) == set(runs) and len(ended) == len(runs)
        return runs

    for some, single in zip(written(rounds), written(1), strict=True):
        assert (some.tokens, some.finish_reason) == (single.tokens, single.finish_reason)
        assert sum(some.accepted) == len(some.tokens) and len(some.accepted) == len(some.drafted) and some.accepted[-1] > 0
        if method != "token_recycling":  # which learns from its neighbours, and they enter later
            assert (some.accepted, some.drafted) == (single.accepted, single.drafted)


class FarEnough(Lockstep):
    """Asserts that the host knows a bound on every length."""

    def round(self, state: State, constrain: Constrain | None = None) -> Emission:
        assert int(state.length.max()) <= state.batch.span <= CONTEXT
        return super().round(state, constrain)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("rounds", [1, 2, 5])
@pytest.mark.parametrize("method", ["plain", "token_recycling"])
def test_attention_looks_as_far_as_unread_rounds_may_reach(method: str, rounds: int, late: bool) -> None:
    model, drafter = target(), make(method)
    steps = Engine(model, drafter, slots=3, max_context=CONTEXT, chunk=5, late=late, loop=FarEnough(model, drafter))
    runs = [steps.add(request) for request in requests(8, max_new_tokens=30)]
    while steps.busy:
        steps.step_for((), rounds)
    assert [run.tokens for run in runs] == [truth(model.hf, run.request) for run in runs]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("method", ["plain", "prompt_lookup"])
def test_streams_stops_logprobs_and_aborts_in_rounds_that_are_read_together(method: str, late: bool) -> None:
    def outputs(rounds: int) -> list[tuple[object, ...]]:
        steps, asked = engine(make(method), slots=3, late=late), requests(9, SAMPLINGS["T=0.8"], max_new_tokens=20)
        asked[::3] = [replace(one, stream=TextStream(tokenizer(), ("a", "e"))) for one in asked[::3]]
        asked[1::3] = [replace(one, sampling=replace(one.sampling, logprobs=2)) for one in asked[1::3]]
        runs = [steps.add(request) for request in asked]
        steps.step_for((), rounds)
        steps.abort(runs[4])
        while steps.busy:
            steps.step_for((), rounds)
        del runs[4]
        assert any(run.finish_reason == "stop" for run in runs[::3])
        pieces = ["".join(event.text for event in run.events) for run in runs]
        marks = [[(one.token, pytest.approx(one.logprob)) for one in run.logprobs] for run in runs]
        return [(run.tokens, run.text, run.finish_reason, *more) for run, *more in zip(runs, pieces, marks, strict=True)]

    assert outputs(4) == outputs(1)


def test_events_are_not_made_of_rounds_that_are_read_together() -> None:
    """An event is the output of one round."""
    steps = engine(make("plain"), late=True)
    steps.add(Request((7,), SAMPLINGS["greedy"], 9, ignore_eos=True))
    steps.step_for((), 3)
    with pytest.raises(InputError, match="read by step_for"):
        steps.step()
    steps.step_for(())
    assert steps.step()[0].tokens


def test_a_request_is_timed_by_the_rounds_it_is_in() -> None:
    """Not by those that run while its prompt is read, nor by those after its end."""
    steps = engine(make("plain"), slots=2)
    long = steps.add(Request(tuple(range(3, 33)), SAMPLINGS["greedy"], 4, ignore_eos=True))
    short = steps.add(Request((7,), SAMPLINGS["greedy"], 20, ignore_eos=True))
    gone = steps.add(Request(tuple(range(3, 33)), SAMPLINGS["greedy"], 4))
    while not long.ready:
        before = steps.clock
        steps.step()
    while not long.done:
        steps.step()
    assert before > 0 and long.decode_s == pytest.approx(steps.clock - before)
    steps.step()
    assert gone.slot >= 0 and not gone.ready
    steps.abort(gone)
    while steps.busy:
        steps.step()
    assert gone.decode_s == 0 and short.decode_s == pytest.approx(steps.clock)


def test_a_step_without_requests_returns_nothing() -> None:
    steps = engine(make("plain"))
    assert steps.step() == [] and not steps.busy


def test_generate_answers_in_order_and_leaves_others_alone() -> None:
    """A request that was queued before runs alongside, and is not aborted with the rest."""
    model, asked = target(), requests(4)
    steps = engine(make("plain"), model, slots=1)
    first = steps.add(replace(asked[0], max_new_tokens=3, ignore_eos=True))
    runs = steps.generate(asked[1:])
    assert [run.tokens for run in runs] == [truth(model.hf, request) for request in asked[1:]]
    assert first.finish_reason == "length"


def test_two_equal_requests_are_two() -> None:
    """Aborting one of them leaves the others waiting."""
    steps = engine(make("plain"), slots=1)
    asked = requests(2)[1]
    runs = [steps.add(asked) for _ in range(4)]
    steps.abort(runs[2])
    while steps.busy:
        steps.step()
    assert [run.finish_reason == "abort" for run in runs] == [False, False, True, False]


@pytest.mark.parametrize("ending", ["length", "abort"])
def test_a_finished_sequence_is_no_longer_alive(ending: str) -> None:
    """A round over fixed batch rows still includes the slot, and must not write there."""
    steps = engine(make("plain"), slots=2)
    runs = [steps.add(replace(request, max_new_tokens=2, ignore_eos=True)) for request in requests(2)]
    steps.step()
    assert steps.state.alive_slots.all()
    if ending == "abort":
        steps.abort(runs[0])
    else:
        steps.step()
    assert runs[0].finish_reason == ending
    assert not steps.state.alive_slots[runs[0].slot]


def test_a_seed_is_settled_on_entry() -> None:
    running = engine(make("plain")).add(Request((5,), Sampling(temperature=1.0)))
    assert running.request.sampling.seed is not None


class Parrot(Lockstep):
    """Another loop: every round emits 7 twice, and the output ends after the third. Records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self.rounds = 0

    def begin(self, state: State) -> None:
        self.calls.append(("begin", state.batch.ids))

    def read(self, state: State, chunk: Draft, scores: Scores) -> None:
        self.calls.append(("read", state.batch.ids))

    def round(self, state: State, constrain: Constrain | None = None) -> Emission:
        self.calls.append(("round", state.batch.ids))
        self.rounds += 1
        batch = len(state.batch.ids)
        two, ended = torch.full((batch,), 2), torch.full((batch,), self.rounds == 3)
        return Emission(torch.full((batch, 2), 7), two, two - 1, ended, torch.zeros(batch, dtype=torch.bool))

    def end(self, slots: Sequence[int]) -> None:
        self.calls.append(("end", tuple(slots)))


def test_the_loop_may_be_another() -> None:
    parrot, recorder = Parrot(), Recorder(make("token_recycling"))
    steps = Engine(target(), recorder, slots=2, max_context=CONTEXT, loop=parrot)
    (run,) = steps.generate([Request((5, 6, 8), SAMPLINGS["greedy"])])
    assert run.tokens == [7] * 6 and run.finish_reason == "length"
    assert parrot.calls == [("begin", (0,)), ("read", (0,)), *[("round", (0,))] * 3, ("end", (0,))]
    assert recorder.proposed == recorder.read_calls == [] and recorder.began == []

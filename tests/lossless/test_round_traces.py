"""Traces of rounds: with any method they show how the output was made, in requests that ask for them alone."""

import pickle
from dataclasses import replace
from typing import Any

import pytest

from doubles import (
    SAMPLINGS,
    drafter,
    engine,
    hf_logits,
    requests,
    rerunning,
    target,
    target_for,
    truth,
    with_random_weights,
)
from foreword.engine.engine import Engine
from foreword.engine.request import Request, Running
from foreword.engine.round_trace import RoundTrace
from foreword.methods import METHODS, make

ROOT, DRAFTER, LOOKUP, PREDICTION = range(4)
LOOKING_UP = [name for name, method in METHODS.items() if method.load().predicts]


def traced(steps: Engine, asked: list[Request]) -> list[tuple[Running, list[RoundTrace]]]:
    """Serve requests. Return them with the traces of their rounds."""
    runs = [steps.add(request) for request in asked]
    found: dict[Running, list[RoundTrace]] = {run: [] for run in runs}
    while steps.busy:
        for event in steps.step():
            assert (event.draft is None) == (not event.running.request.trace_rounds or not event.tokens)
            if event.draft is not None:
                found[event.running].append(event.draft)
    return list(found.items())


def check(run: Running, rounds: list[RoundTrace], vocabulary_model: Any) -> None:
    """The accepted nodes and the next token of every round are the output. Probabilities are the model's own."""
    sequence = list(run.request.prompt)
    for trace in rounds:
        assert trace.tokens[0] == sequence[-1] and trace.origins[0] == ROOT and trace.chances[0] == 1 and trace.path[0] == 0
        assert all(parent < row for row, parent in enumerate(trace.parents[1:], start=1))
        assert all(trace.parents[row] == before for before, row in zip(trace.path, trace.path[1:], strict=False))
        for row in {*trace.path[1:], len(trace.tokens) - 1} - {0}:
            before = [*sequence, *path_to(trace, row)[:-1]]
            own = hf_logits(vocabulary_model, before)[-1].softmax(-1)
            assert trace.chances[row] == pytest.approx(float(own[trace.tokens[row]]), abs=1e-8)
        sequence += [*(trace.tokens[row] for row in trace.path[1:]), trace.next]
        assert pickle.loads(pickle.dumps(trace)) == trace
    assert sequence[len(run.request.prompt) :] == run.tokens


def path_to(trace: RoundTrace, row: int) -> list[int]:
    """Return the tokens from the root's first child to a node."""
    tokens = []
    while row:
        tokens.append(trace.tokens[row])
        row = trace.parents[row]
    return tokens[::-1]


@pytest.mark.parametrize("name", METHODS)
def test_the_traces_contain_the_outputs(name: str) -> None:
    """Requests that want none share the batch, and sampled and greedy ones."""
    model = target_for(name)
    asked = requests(5, max_new_tokens=9)
    asked = [replace(request, trace_rounds=place != 2) for place, request in enumerate(asked)]
    asked[3] = replace(asked[3], sampling=SAMPLINGS["T=0.8"], prompt_logprobs=None)
    found = traced(engine(drafter(name, model), model), asked)
    for run, rounds in found:
        assert run.tokens == truth(model.hf, run.request)
        if run.request.trace_rounds:
            assert len(rounds) == sum(count > 0 for count in run.accepted)
            check(run, rounds, model.hf)
    drafted = {origin for _, rounds in found for trace in rounds for origin in trace.origins}
    assert (
        drafted == {"plain": {ROOT}, "speed": {ROOT}, "prompt_lookup": {ROOT, LOOKUP}}.get(name, drafted) and ROOT in drafted
    )
    assert DRAFTER in drafted or name in ("plain", "speed", "prompt_lookup")


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", ["medusa", "echo"])
def test_captured_rounds_are_traced(name: str, late: bool) -> None:
    """The same traces as without capture; requests without traces have captured rounds of their own."""
    plain = requests(6, SAMPLINGS["T=0.8"], ignore_eos=True)
    asked = [replace(request, trace_rounds=place != 1) for place, request in enumerate(plain)]
    found = []
    for captured in (False, True):
        model = target()
        steps = engine(drafter(name, model), model, late=late)
        if captured:
            steps.loop = loop = rerunning(steps.loop, steps.drafter)
            steps.slots.pads = True
        found.append([(run.tokens, [*map(rounded, rounds)]) for run, rounds in traced(steps, asked)])
    assert found[0] == found[1] and [bool(rounds) for _, rounds in found[1]] == [True, False, True, True, True, True]
    traced(steps, [asked[1], asked[1]])
    assert {key[2].traces for key, bucket in loop.buckets.items() if bucket.graph} == {False, True}


def test_the_origins_of_a_lookup_in_both() -> None:
    """With a prediction that is right at first. Chains are of one origin each, and the accepted ones are counted."""
    model, (request,) = target(), requests(2, max_new_tokens=40, ignore_eos=True)[1:]
    prediction = tuple(truth(model.hf, request)[:12])
    asked = replace(request, prediction=prediction, trace_rounds=True)
    ((run, rounds),) = traced(engine(make("prompt_lookup", rows=5), model), [asked])
    check(run, rounds, model.hf)
    assert all(len({*trace.origins[1:]}) <= 1 for trace in rounds)
    assert {origin for trace in rounds for origin in trace.origins} == {ROOT, LOOKUP, PREDICTION}
    accepted = [trace.origins[row] for trace in rounds for row in trace.path]
    assert accepted.count(PREDICTION) == run.predicted >= len(prediction) - 3


@pytest.mark.parametrize("predicts", [False, True])
def test_rows_that_a_tree_and_a_chain_share_count_as_the_chain_s(predicts: bool) -> None:
    """The chain's rows in a draft of echo are those that the lookup alone drafts there."""
    model, asked = target(), requests(3, max_new_tokens=30, ignore_eos=True)[2]
    prediction = tuple(truth(model.hf, asked)[4:]) if predicts else ()
    asked = replace(asked, trace_rounds=True, prediction=prediction)
    both = with_random_weights("echo", model, rows=24, heads=3, taps=(0, 2), chain=5)
    ((run, rounds),) = traced(engine(both, model, slots=1), [asked])
    ((_, alone),) = traced(engine(make("prompt_lookup", rows=6), model, slots=1), [asked])
    check(run, rounds, model.hf)
    chains = {place: trace for place, trace in places(asked, alone)}
    compared = 0
    for place, trace in places(asked, rounds):
        own = [(path_to(trace, row), origin) for row, origin in enumerate(trace.origins) if origin in (LOOKUP, PREDICTION)]
        if place in chains:
            chain = chains[place]
            assert own == [(path_to(chain, row), chain.origins[row]) for row in range(1, len(chain.tokens))]
            compared += len(own)
        assert not own or DRAFTER in trace.origins
    assert compared > 10


def rounded(trace: RoundTrace) -> RoundTrace:
    return replace(trace, chances=[round(chance, 9) for chance in trace.chances])


def places(request: Request, rounds: list[RoundTrace]) -> list[tuple[int, RoundTrace]]:
    """Return the rounds, each with the position of its root."""
    at, found = len(request.prompt) - 1, []
    for trace in rounds:
        found.append((at, trace))
        at += len(trace.path)
    return found

"""Endings inside a draft: the oracle drafts past the end, and the output still stops where plain decoding stops."""

from dataclasses import replace

import pytest

from doubles import CONTEXT, END, SAMPLINGS, Oracle, engine, fresh, full_sequence, prompts, requests, target, truth, written
from foreword.core.drafter import Drafter
from foreword.engine.engine import Engine
from foreword.engine.request import Request
from foreword.methods import make
from foreword.model.model import Model

LONG = {"max_new_tokens": 24}


def oracle_engine(model: Model, asked: list[Request], slots: int = 2) -> Engine:
    return engine(Oracle([full_sequence(model.hf, request) for request in asked], lies=3), model, slots)


def ending_requests(sampling: str) -> list[Request]:
    """Requests that sample the end token, at different positions in a draft of four."""
    found = [r for r in requests(16, SAMPLINGS[sampling], **LONG) if truth(target().hf, r)[-1] == END]
    assert len({len(truth(target().hf, request)) % 5 for request in found}) >= 3
    return found


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_an_end_token_inside_a_draft_ends_the_output(sampling: str) -> None:
    model, asked = target(), ending_requests(sampling)
    runs = oracle_engine(model, asked, slots=3).generate(asked)
    assert [run.tokens for run in runs] == [truth(model.hf, request) for request in asked]
    assert {run.finish_reason for run in runs} == {"stop"}


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_any_end_token_of_a_list_ends_the_output(sampling: str) -> None:
    hf, asked = fresh("llama"), requests(8, SAMPLINGS[sampling], **LONG)
    ends = (END, truth(hf, asked[1])[3], truth(hf, asked[2])[1])
    hf.generation_config.eos_token_id = list(ends)
    model = Model(hf)
    expected = [truth(hf, request, ends=ends) for request in asked]
    assert len({text[-1] for text in expected} & set(ends)) >= 2
    runs = oracle_engine(model, asked).generate(asked)
    assert [run.tokens for run in runs] == expected
    assert all((run.finish_reason == "stop") == (run.tokens[-1] in ends) for run in runs)


def test_a_model_without_an_end_token_generates_to_the_limit() -> None:
    hf = fresh("llama", eos_token_id=None)
    hf.generation_config.eos_token_id = None
    asked = requests(4, min_new_tokens=3)
    runs = oracle_engine(Model(hf), asked).generate(asked)
    assert [run.tokens for run in runs] == [truth(hf, request, ends=()) for request in asked]
    assert {run.finish_reason for run in runs} == {"length"}


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_ignore_eos_continues(sampling: str) -> None:
    model, asked = target(), [replace(request, ignore_eos=True) for request in ending_requests(sampling)[:4]]
    runs = oracle_engine(model, asked).generate(asked)
    assert [run.tokens for run in runs] == [truth(model.hf, request) for request in asked]
    assert all(END in run.tokens and len(run.tokens) == 24 and run.finish_reason == "length" for run in runs)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("more", [0, 1, 4])
def test_min_new_tokens_holds_the_end_back(more: int, sampling: str) -> None:
    """The floor lies at, just past and well past the position where the output would have ended."""
    model, asked = target(), ending_requests(sampling)[:5]
    floors = [len(truth(model.hf, request)) - 1 + more for request in asked]
    asked = [replace(request, min_new_tokens=min(floor, 24)) for request, floor in zip(asked, floors, strict=True)]
    runs = oracle_engine(model, asked).generate(asked)
    assert [run.tokens for run in runs] == [truth(model.hf, request) for request in asked]
    assert all(END not in run.tokens[: run.request.min_new_tokens] for run in runs)


@pytest.mark.parametrize("limit", range(1, 13))
def test_max_new_tokens_inside_a_draft(limit: int) -> None:
    model, asked = target(), requests(3, max_new_tokens=limit, ignore_eos=True)
    runs = oracle_engine(model, asked, slots=3).generate(asked)
    assert [run.tokens for run in runs] == [truth(model.hf, request) for request in asked]
    assert {(len(run.tokens), run.finish_reason) for run in runs} == {(limit, "length")}


@pytest.mark.parametrize("context", range(26, 31))
def test_the_context_limit_inside_a_draft(context: int) -> None:
    model, asked = target(), [replace(request, max_new_tokens=99, ignore_eos=True) for request in requests(5)]
    sequences = [[*r.prompt, *truth(model.hf, r, context=48)] for r in asked]
    runs = engine(Oracle(sequences), model, slots=2, context=context).generate(asked)
    assert [run.tokens for run in runs] == [truth(model.hf, request, context=context) for request in asked]
    assert all(len(run.request.prompt) + len(run.tokens) == context for run in runs)


@pytest.mark.parametrize("kind", ["plain", "oracle", "token_recycling"])
def test_a_prompt_that_leaves_room_for_one_token(kind: str) -> None:
    model, prompt = target(), tuple(prompts(40, longest=CONTEXT)[1] * 40)[: CONTEXT - 1]
    asked = [Request(prompt, SAMPLINGS["greedy"], max_new_tokens=9)]
    drafter: Drafter = Oracle([full_sequence(model.hf, asked[0])]) if kind == "oracle" else make(kind)
    (run,) = engine(drafter, model).generate(asked)
    assert run.tokens == truth(model.hf, asked[0]) and len(run.tokens) == 1


def test_a_request_may_refuse_drafts_while_others_take_them() -> None:
    model, asked = target(), requests(4, max_new_tokens=12, ignore_eos=True)
    asked = [replace(request, speculate=i % 2 == 0) for i, request in enumerate(asked)]
    runs = oracle_engine(model, asked, slots=4).generate(asked)
    assert [run.tokens for run in runs] == [truth(model.hf, request) for request in asked]
    assert all(sum(run.drafted) > 0 and max(run.accepted) > 1 for run in runs[::2])
    assert all(set(run.drafted) == {0} and set(run.accepted) == {1} for run in runs[1::2])


def test_abort_keeps_the_output_so_far_and_frees_the_slot() -> None:
    model, asked = target(), requests(3, max_new_tokens=20, ignore_eos=True)
    steps = oracle_engine(model, asked, slots=1)
    gone, waiting, last = [steps.add(request) for request in asked]
    steps.step()
    steps.abort(gone)
    steps.abort(waiting)
    steps.abort(gone)
    assert (gone.finish_reason, waiting.finish_reason, waiting.tokens) == ("abort", "abort", [])
    assert not steps.slots.running
    assert gone.tokens == truth(model.hf, asked[0])[: len(gone.tokens)] != []
    while steps.busy:
        steps.step()
    assert last.tokens == truth(model.hf, asked[2])


def test_generate_aborts_its_requests_when_it_is_interrupted() -> None:
    class Interrupted(Exception):
        pass

    class Breaks(Oracle):
        def propose(self, state):  # type: ignore[no-untyped-def]
            raise Interrupted

    steps = engine(Breaks([]), slots=1)
    with pytest.raises(Interrupted):
        written(steps, requests(3))
    assert not steps.busy


def test_a_floor_beyond_everything() -> None:
    """A huge number: the output ends where the context does."""
    (run,) = engine(make("plain")).generate([replace(requests(1)[0], max_new_tokens=2**70, min_new_tokens=2**70)])
    assert run.finish_reason == "length" and END not in run.tokens and len(run.tokens) == CONTEXT - 1

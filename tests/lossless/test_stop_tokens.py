"""Stop tokens inside a draft: tokens, text and reason are those of plain decoding, and of a slow search."""

from dataclasses import replace

import pytest

from doubles import (
    END,
    SAMPLINGS,
    Liar,
    Oracle,
    drafter,
    engine,
    full_sequence,
    in_turns,
    requests,
    target,
    target_for,
    tokenizer,
    truth,
)
from foreword.core.drafter import Drafter
from foreword.core.sampling import Sampling
from foreword.engine.request import Request, Running
from foreword.errors import InputError
from foreword.methods import METHODS, make
from foreword.text import TextStream


def slow(request: Request, name: str = "plain") -> tuple[list[int], str | int | None]:
    """Token by token: the first stop token is the last token of the output."""
    tokens = truth(target_for(name).hf, request)
    place = next((i for i, token in enumerate(tokens) if token in request.stop_token_ids), None)
    if place is None:
        return tokens, None
    heeded = tokens[place] == END and not request.ignore_eos
    return tokens[: place + 1], None if heeded else tokens[place]


def stopping(count: int, sampling: Sampling, name: str = "plain", **options: object) -> list[Request]:
    """Requests that each stop at a token of their own output, at positions 1, 2, 3, ..; every third has stop tokens that do
    not occur."""
    plain = requests(count, sampling, max_new_tokens=20, **options)
    sequences = [truth(target_for(name).hf, request) for request in plain]
    stops = [(text[min(i + 1, len(text) - 1)],) if i % 3 else (40, 41) for i, text in enumerate(sequences)]
    return [replace(request, stop_token_ids=stop) for request, stop in zip(plain, stops, strict=True)]


def check(runs: list[Running], name: str = "plain") -> None:
    assert [(run.tokens, run.stop_reason) for run in runs] == [slow(run.request, name) for run in runs]
    for run in runs:
        by_stop = run.tokens[-1] in (END, *run.request.stop_token_ids)
        assert run.finish_reason == ("stop" if by_stop else "length")


@pytest.mark.parametrize(("name", "sampling"), in_turns([*METHODS, "liar", "oracle"], SAMPLINGS))
def test_a_stop_token_ends_the_output(name: str, sampling: str) -> None:
    """Nine requests with their own stop tokens in three slots."""
    model, asked = target_for(name), stopping(9, SAMPLINGS[sampling], name)
    sequences = [full_sequence(model.hf, request) for request in asked]
    doubles: dict[str, Drafter] = {"liar": Liar(), "oracle": Oracle(sequences, lies=2)}
    runs = engine(doubles.get(name) or drafter(name, model), model).generate(asked)
    check(runs, name)
    assert sum(run.stop_reason is not None for run in runs) >= 4


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("rounds", [1, 3])
def test_rounds_that_are_read_together_or_late(late: bool, rounds: int) -> None:
    """Some have stop tokens, some stream, some have neither; a free slot is taken by the next request."""
    asked = stopping(8, SAMPLINGS["T=0.8"])
    asked[2] = replace(asked[2], stream=TextStream(tokenizer()))
    asked[5] = replace(asked[5], stop_token_ids=())
    steps = engine(Oracle([full_sequence(target().hf, request) for request in asked]), target(), slots=2, late=late)
    runs = [steps.add(request) for request in asked]
    while steps.busy:
        steps.step_for((), rounds)
    check(runs)


def test_stop_tokens_apply_with_ignore_eos() -> None:
    plain = [r for r in requests(16, max_new_tokens=24) if truth(target().hf, r)[-1] == END][:3]
    asked = [replace(request, ignore_eos=True, stop_token_ids=(END,)) for request in plain]
    asked += [replace(request, stop_token_ids=(END,)) for request in plain]
    runs = engine(Oracle([full_sequence(target().hf, request) for request in plain]), slots=3).generate(asked)
    check(runs)
    assert [run.stop_reason for run in runs] == [END] * 3 + [None] * 3


@pytest.mark.parametrize("kind", ["plain", "oracle"])
@pytest.mark.parametrize("include", [False, True])
def test_the_text_ends_before_the_stop_token_unless_it_is_asked_for(include: bool, kind: str) -> None:
    (request,) = stopping(2, SAMPLINGS["greedy"], ignore_eos=True)[1:]
    stream = TextStream(tokenizer(), include_stop=include)
    drafting = Oracle([full_sequence(target().hf, request)]) if kind == "oracle" else make("plain")
    (run,) = engine(drafting).generate([replace(request, stream=stream)])
    tokens, stop = slow(request)
    assert (run.tokens, run.stop_reason) == (tokens, stop)
    assert run.text == tokenizer().decode(tokens if include else tokens[:-1])
    assert "".join(event.text for event in run.events) == run.text


@pytest.mark.parametrize("kind", ["plain", "oracle"])
def test_a_stop_string_and_a_stop_token_of_one_round(kind: str) -> None:
    """Whichever is complete first ends the output."""
    candidates = [(one, truth(target().hf, one)) for one in requests(9, SAMPLINGS["T=0.8"], max_new_tokens=20)]
    request, tokens = next((one, found) for one, found in candidates if len(set(found[:5])) == 5)
    first, second = tokenizer().decode(tokens[2:3]), tokenizer().decode(tokens[4:5])
    for string, stop, expected in [(first, tokens[3], (3, first)), (second, tokens[3], (4, tokens[3]))]:
        asked = replace(request, stop_token_ids=(stop,), stream=TextStream(tokenizer(), string))
        drafting = Oracle([full_sequence(target().hf, request)]) if kind == "oracle" else make("plain")
        (run,) = engine(drafting).generate([asked])
        assert (len(run.tokens), run.stop_reason) == expected and run.finish_reason == "stop"


@pytest.mark.parametrize("kind", ["plain", "oracle"])
def test_a_result_says_that_the_context_was_full(kind: str) -> None:
    asked = [
        replace(request, ignore_eos=True, max_new_tokens=limit)
        for request, limit in zip(requests(3), (99, 5, 99), strict=True)
    ]
    sequences = [[*request.prompt, *truth(target().hf, request, context=48)] for request in asked]
    drafting = Oracle(sequences) if kind == "oracle" else make("plain")
    runs = engine(drafting, slots=3, context=30).generate(asked)
    assert [run.tokens for run in runs] == [truth(target().hf, request, context=30) for request in asked]
    assert {run.finish_reason for run in runs} == {"length"}
    assert [run.stop_reason for run in runs] == ["context", None, "context"]


@pytest.mark.parametrize(
    ("stop", "named"), [((48,), "48.*vocabulary of 48"), ((-1,), "-1"), (("a",), "'a'"), ((True,), "True")]
)
def test_what_is_no_stop_token_is_refused(stop: tuple[object, ...], named: str) -> None:
    with pytest.raises(InputError, match=f"stop_token_ids holds {named}"):
        engine(make("plain")).add(Request((5,), stop_token_ids=stop))  # type: ignore[arg-type]

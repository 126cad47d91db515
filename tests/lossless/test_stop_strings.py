"""Stop strings that end inside a draft: tokens, text and reason are those of plain decoding, and of a slow search."""

import pytest

from doubles import END, SAMPLINGS, Oracle, engine, full_sequence, requests, target, tokenizer, truth
from foreword.core.drafter import Drafter
from foreword.engine.request import Request, Running
from foreword.methods import make
from foreword.text import TextStream


def asked(seed: int, stop: tuple[str, ...] = ()) -> Request:
    return requests(8, max_new_tokens=20, ignore_eos=True, stream=TextStream(tokenizer(), stop))[seed]


def run(drafter: Drafter, request: Request, late: bool = False) -> Running:
    (running,) = engine(drafter, slots=2, late=late).generate([request])
    return running


def slow(request: Request, stop: str) -> tuple[list[int], str, str]:
    """Token by token: the first token with which the text contains the stop string is the last one."""
    tokens = truth(target().hf, request)
    for count in range(1, len(tokens) + 1):
        text = tokenizer().decode(tokens[:count])
        if stop in text:
            return tokens[:count], text[: text.index(stop)], "stop"
    return tokens, tokenizer().decode(tokens), "length"


def stop_at(request: Request, place: int) -> str:
    """Three letters of the true text, the last of them the first letter of the token at `place`."""
    text = tokenizer().decode(truth(target().hf, request))
    return text[2 * place - 2 : 2 * place + 1]


@pytest.mark.parametrize("place", range(1, 9))
@pytest.mark.parametrize("seed", [0, 3])
def test_a_stop_string_inside_a_draft(seed: int, place: int) -> None:
    stop = stop_at(asked(seed), place)
    expected = slow(asked(seed), stop)
    oracle = Oracle([full_sequence(target().hf, asked(seed))], lies=2)
    for drafter, late in ((make("plain"), False), (oracle, False), (oracle, True)):
        running = run(drafter, asked(seed, (stop,)), late)
        assert (running.tokens, running.text, running.finish_reason) == expected
        assert running.finish_reason == "stop"


def test_no_stop_string_gives_all_the_text() -> None:
    running = run(Oracle([full_sequence(target().hf, asked(2))]), asked(2, ("zzz",)))
    assert (running.tokens, running.text, running.finish_reason) == slow(asked(2), "zzz")
    assert running.text == tokenizer().decode(running.tokens)


def test_the_string_that_is_complete_first_wins() -> None:
    late, early = stop_at(asked(1), 7), stop_at(asked(1), 4)
    running = run(Oracle([full_sequence(target().hf, asked(1))]), asked(1, (late, early)))
    assert (running.tokens, running.text, running.finish_reason) == slow(asked(1), early)


def test_a_stop_string_before_an_end_token_of_the_same_round() -> None:
    """The draft holds both; the stop string comes first, so the end token is never emitted."""
    candidates = [(r, truth(target().hf, r)) for r in requests(24, SAMPLINGS["T=0.8"], max_new_tokens=30)]
    request, tokens = next((r, found) for r, found in candidates if found[-1] == END and len(found) % 5 in (3, 4))
    stop = tokenizer().decode(tokens[-2:-1])
    expected = slow(request, stop)
    with_stop = Request(request.prompt, request.sampling, 30, stream=TextStream(tokenizer(), (stop,)))
    running = run(Oracle([full_sequence(target().hf, request)]), with_stop)
    assert (running.tokens, running.text, running.finish_reason) == expected
    assert END not in running.tokens

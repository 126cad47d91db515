"""What a request may ask for, and how far a running one has come."""

from time import perf_counter
from typing import Any

import pytest

from foreword.core.sampling import Sampling
from foreword.engine.request import MOST_STOP_TOKENS, EngineLimits, Request, Running
from foreword.errors import InputError


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": -3}, "max_new_tokens is -3"),
        ({"min_new_tokens": -1}, "min_new_tokens is -1"),
        ({"max_new_tokens": 4, "min_new_tokens": 5}, r"min_new_tokens is 5.*max_new_tokens \(4\)"),
        ({"stop_token_ids": ("x",) * (MOST_STOP_TOKENS + 1)}, "stop_token_ids has 4097 token ids; give at most 4096"),
    ],
)
def test_what_cannot_be_asked(options: dict[str, object], named: str) -> None:
    with pytest.raises(InputError, match=named):
        Request((5,), **options)  # type: ignore[arg-type]


def test_edges_may_be_asked() -> None:
    assert Request((5,), max_new_tokens=1, min_new_tokens=1).min_new_tokens == 1


def test_how_far_it_has_come() -> None:
    running = Running(Request((5, 6, 7)))
    assert (running.ready, running.length, running.done) == (False, 0, False)
    running.prefilled = 1
    assert (running.ready, running.length) == (False, 1)
    running.prefilled = 2
    assert (running.ready, running.length) == (True, 2)
    running.tokens = [8, 9]
    assert running.length == 4
    running.finish_reason = "stop"
    assert running.done


def test_a_prompt_of_one_token_is_ready_at_once() -> None:
    assert Running(Request((5,))).ready


def limits(vocabulary: int, ends: frozenset[int] = frozenset({2})) -> EngineLimits:
    return EngineLimits(context=64, trained=64, vocabulary=vocabulary, ends=ends)


def test_checking_a_request_takes_no_longer_with_a_large_vocabulary() -> None:
    large, began = limits(10_000_000), perf_counter()
    held_back = {"min_new_tokens": 1, "stop_token_ids": (7,)}
    bad = Request((5, 6), Sampling(allowed_token_ids=(3, 4), bad_word_ids=((5, 3),)), **held_back)  # type: ignore[arg-type]
    for request in (Request((5, 6, 7)), Request((5,), **held_back), bad):  # type: ignore[arg-type]
        for _ in range(1000):
            large.check(request)
    assert perf_counter() - began < 0.5


@pytest.mark.parametrize(
    ("sampling", "options", "named"),
    [
        ({"allowed_token_ids": (2, 7)}, {"min_new_tokens": 1, "stop_token_ids": (7,)}, "every allowed token would end"),
        ({}, {"min_new_tokens": 1, "stop_token_ids": tuple(range(10))}, "every allowed token would end"),
        ({"allowed_token_ids": (3, 4), "bad_word_ids": ((3,), (5, 4))}, {}, "last one of a bad word"),
        ({"bad_word_ids": tuple((i,) for i in range(10))}, {}, "last one of a bad word"),
        ({"allowed_token_ids": (2, 3), "bad_word_ids": ((3,),)}, {"min_new_tokens": 1}, "last one of a bad word"),
        ({"allowed_token_ids": (99,) * 11}, {}, "allowed_token_ids has 11 token ids.*vocabulary has only 10"),
        ({"allowed_token_ids": (99,) * 10}, {}, "allowed_token_ids holds 99"),
        ({"bad_word_ids": ((10,),)}, {}, "bad_word_ids holds 10"),
        ({"logit_bias": {10: 1.0}}, {}, "logit_bias holds 10"),
    ],
)
def test_what_an_engine_cannot_serve(sampling: dict[str, Any], options: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        limits(10).check(Request((5,), Sampling(**sampling), **options))


@pytest.mark.parametrize(
    ("sampling", "options"),
    [
        ({"allowed_token_ids": (2, 7)}, {"stop_token_ids": (7,)}),
        ({"allowed_token_ids": (2, 7, 8)}, {"min_new_tokens": 1, "stop_token_ids": (7,)}),
        ({}, {"min_new_tokens": 1, "stop_token_ids": tuple(range(9))}),
        ({"bad_word_ids": tuple((i,) for i in range(9))}, {}),
    ],
)
def test_one_token_that_is_left_is_enough(sampling: dict[str, Any], options: dict[str, Any]) -> None:
    limits(10).check(Request((5,), Sampling(**sampling), **options))


def test_end_tokens_outside_the_vocabulary_are_not_counted() -> None:
    limits(3, ends=frozenset({1, 2, 77})).check(Request((0,), min_new_tokens=1))

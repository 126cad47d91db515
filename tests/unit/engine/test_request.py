"""What a request may ask for, and how far a running one has come."""

import pytest

from foreword.engine.request import Request, Running
from foreword.errors import InputError


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": -3}, "max_new_tokens is -3"),
        ({"min_new_tokens": -1}, "min_new_tokens is -1"),
        ({"max_new_tokens": 4, "min_new_tokens": 5}, r"min_new_tokens is 5.*max_new_tokens \(4\)"),
    ],
)
def test_what_cannot_be_asked(options: dict[str, int], named: str) -> None:
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

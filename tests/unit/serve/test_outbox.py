"""Rounds of a request go together, begin and end at once, and keep what is told of single rounds."""

import pytest

from foreword.engine.emit import Finish
from foreword.engine.request import Logprob
from foreword.engine.round_trace import RoundTrace
from foreword.serve import outbox
from foreword.serve.client import _rounds_of
from foreword.serve.messages import Begun, Ended, Progress
from foreword.serve.outbox import MOST_PER_S, SEND_EVERY_S, Outbox


def progress(number: int, *tokens: int, drafted: int = 4, **more: object) -> Progress:
    return Progress(number, [*tokens], [len(tokens)], [drafted], **more)  # type: ignore[arg-type]


def test_rounds_of_a_request_become_one() -> None:
    box, entry = Outbox(), Logprob(5, -0.5, (), "", ())
    for one in (progress(1, 5, 6), progress(2, 7), progress(1, 8, drafted=3, logprobs=[entry]), progress(1)):
        box.add(one)
    first, second = box.taken()
    assert (first.tokens, first.accepted, first.drafted, first.logprobs) == ([5, 6, 8], [2, 1, 0], [4, 3, 4], [entry])
    assert second.tokens == [7] and box.taken() == []


def test_rounds_that_are_told_of_stay_apart() -> None:
    trace = RoundTrace([1], [0], [0], [1.0], [0], 5)
    for first, second in (({}, {"draft": trace}), ({"draft": trace}, {}), ({}, {"predicted": 1})):
        box = Outbox()
        box.add(progress(1, 5, **first))
        box.add(progress(1, 6, **second))
        assert [one.tokens for one in box.taken()] == [[5], [6]]


def test_what_is_sent_is_not_changed_later() -> None:
    box = Outbox()
    box.add(progress(1, 5))
    (sent,) = box.taken()
    box.add(progress(1, 6))
    assert sent.tokens == [5]


@pytest.mark.parametrize("urgent", [{"begun": Begun(0.0, 0, 0.0)}, {"ended": Ended(Finish("length"))}])
def test_beginnings_and_ends_go_at_once(urgent: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox.time, "monotonic", lambda: 10.0)
    box = Outbox()
    box.taken()
    assert not box.is_due(1)
    box.add(progress(1, 5))
    assert not box.is_due(1)
    box.add(progress(1, 6, **urgent))
    assert box.is_due(1)
    assert [one.ended for one in box.taken()] == [urgent.get("ended")] and not box.is_urgent


@pytest.mark.parametrize("running", [1, 8, 32, 400])
def test_many_requests_are_told_of_less_often(running: int, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 10.0
    monkeypatch.setattr(outbox.time, "monotonic", lambda: now)
    box = Outbox()
    box.taken()
    box.add(progress(1, 5))
    pause = max(SEND_EVERY_S, running / MOST_PER_S)
    now += 0.9 * pause
    assert not box.is_due(running)
    now += 0.2 * pause
    assert box.is_due(running)


def test_a_stop_string_leaves_out_the_rounds_after_it() -> None:
    together = Progress(1, [5, 6, 7, 8, 9, 10], [2, 0, 3, 1], [4, 4, 4, 4])
    assert [_rounds_of(kept, together) for kept in (1, 2, 3, 5, 6)] == [1, 1, 3, 3, 4]

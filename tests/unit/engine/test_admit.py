"""Which request gets which slot: free slots, the sequences they still hold, and the columns that a new request
overwrites."""

from collections import deque

import pytest
import torch

from doubles import CONTEXT, END, SAMPLINGS
from foreword.core.needs import Needs
from foreword.core.sampling import Sampling
from foreword.core.state import State
from foreword.engine.admit import Slots, admit
from foreword.engine.request import Request, Running

CPU = torch.device("cpu")


def running(prompt: tuple[int, ...], **options: object) -> Running:
    return Running(Request(prompt, SAMPLINGS["greedy"], **options))  # type: ignore[arg-type]


def free_slots(*held: tuple[int, ...]) -> Slots:
    """Slots that are all free and still hold these tokens."""
    slots = Slots(len(held))
    slots.free = dict(enumerate(held))
    return slots


def test_an_empty_slot_is_taken_first_then_the_oldest() -> None:
    slots = free_slots((5, 6), (), (7,))
    assert [slots.take(running((5, 6, 7))) for _ in range(3)] == [1, 0, 2]
    assert slots.free == {}


def test_the_slot_left_longest_ago_is_the_oldest() -> None:
    slots = Slots(2)
    first, second = running((3, 4)), running((5, 6))
    assert (slots.take(first), slots.take(second)) == (0, 1)
    slots.leave(1)
    slots.leave(0)
    first.prefilled = second.prefilled = 1
    slots.free = {1: (5,), 0: (3,)}
    assert slots.take(running((9,))) == 1


def test_without_reuse_nothing_is_reused() -> None:
    slots, entering = free_slots((5, 6, 7)), running((5, 6, 7, 8))
    slots.take(entering)
    assert entering.reused == entering.prefilled == 0


@pytest.mark.parametrize(
    ("prompt", "slot", "reused"),
    [((5, 6, 7, 8), 0, 3), ((5, 6, 9, 8), 0, 2), ((4, 4, 4), 1, 2), ((4, 4), 1, 1), ((4,), 2, 0), ((8, 8), 2, 0)],
)
def test_reuse_takes_the_slot_that_helps_most(prompt: tuple[int, ...], slot: int, reused: int) -> None:
    """The prompt's last token is never reused: it is the root, and stays out of the cache. If no slot helps, an empty
    one."""
    slots, entering = free_slots((5, 6, 7), (4, 4, 4), ()), running(prompt, reuse=True)
    assert slots.take(entering) == slot and entering.slot == slot
    assert entering.reused == entering.prefilled == reused


def test_a_free_slot_remembers_what_its_cache_holds() -> None:
    """Prompt and output without the last token; of a prompt that was not completely read, the tokens that were."""
    slots = Slots(2)
    done, cut = running((5, 6, 7)), running((1, 2, 3, 4))
    assert (slots.take(done), slots.take(cut)) == (0, 1)
    done.prefilled, done.tokens = 2, [8, 9]
    cut.prefilled = 2
    slots.leave(0)
    slots.leave(1)
    assert slots.free == {0: (5, 6, 7, 8), 1: (1, 2)} and slots.running == {}


def test_rows_that_are_always_read() -> None:
    """A drafter that wants to see the row before the root sees it, though the slot holds it already."""
    for prompt, reused in (((5, 6, 7, 8), 2), ((5, 6, 9, 8), 2), ((5, 6), 0), ((5,), 0)):
        slots, entering = free_slots((5, 6, 7)), running(prompt, reuse=True)
        slots.needs = Needs(prompt="last")
        slots.take(entering)
        assert entering.reused == entering.prefilled == reused


@pytest.mark.parametrize(("prompt", "reused"), [((5, 6, 7, 8, 9, 1), 3), ((5, 6, 7, 8, 4), 3), ((5, 6, 7, 4), 2)])
def test_rows_that_the_drafter_lacks_are_read_again(prompt: tuple[int, ...], reused: int) -> None:
    """It has not read the two rows of the last round, and the last common row may have another follower now."""
    slots, first, entering = Slots(1, Needs(follower=True, deferred=True)), running((5, 6, 7)), running(prompt, reuse=True)
    slots.take(first)
    first.prefilled, first.tokens, first.accepted = 2, [8, 9, 2], [1, 2]
    slots.leave(0)
    assert slots.free == {0: (5, 6, 7, 8, 9)}
    slots.take(entering)
    assert entering.reused == entering.prefilled == reused


def test_a_spoilt_slot_is_not_built_upon() -> None:
    slots, sick = Slots(1), running((5, 6, 7))
    slots.take(sick)
    sick.prefilled = 2
    slots.leave(0, keep=False)
    assert slots.free == {0: ()}


def test_groups_are_the_requests_that_are_ready_and_the_others() -> None:
    slots = Slots(4)
    for prompt, prefilled in (((5,), 0), ((5, 6, 7), 1), ((5, 6, 7), 2), ((5, 6), 0)):
        entering = running(prompt)
        slots.take(entering)
        entering.prefilled = prefilled
    slots.running[2].tokens = [1, 2, 3]
    ready = slots.batch(CPU)
    assert ready is not None and (ready.ids, ready.span) == ((0, 2), 5)
    assert slots.group(ready=False).ids == (1, 3)
    assert Slots(2).batch(CPU) is None


def test_groups_follow_requests_that_enter_leave_and_become_ready() -> None:
    slots = Slots(2)
    first, second = running((5, 6)), running((5, 6, 7))
    slots.take(first)
    slots.take(second)
    first.prefilled = 1

    def found() -> tuple[tuple[int, ...], int, tuple[int, ...]]:
        ready = slots.batch(CPU)
        assert ready is not None
        return ready.ids, ready.span, slots.group(ready=False).ids

    assert found() == ((0,), 1, (1,))
    second.prefilled = 2
    assert found() == ((0, 1), 2, ())
    first.tokens += [8, 9]
    assert found() == ((0, 1), 3, ())
    slots.leave(0)
    assert found() == ((1,), 2, ())
    slots.take(running((5,)))
    assert found() == ((0, 1), 2, ())


def empty_state(slots: int = 3) -> State:
    return State.empty(slots, CONTEXT, torch.zeros(slots, dtype=torch.long), torch.tensor([END]))


def test_as_many_enter_as_there_are_slots() -> None:
    waiting = deque(running((5, i)) for i in range(3, 8))
    slots, state = Slots(3), empty_state()
    assert admit(waiting, slots, state) == [0, 1, 2] and len(waiting) == 2
    assert admit(waiting, slots, state) == []
    slots.leave(1)
    assert admit(waiting, slots, state) == [1]
    assert [slots.running[slot].request.prompt for slot in range(3)] == [(5, 3), (5, 6), (5, 5)]


def test_an_entering_request_overwrites_its_columns_and_no_others() -> None:
    state, slots = empty_state(), Slots(3)
    columns = (state.tokens, state.roots, state.lengths, state.limits, state.heeds_ends, state.speculates)
    for column in columns:
        column.fill_(1)
    slots.free = {1: ()}
    asked = Request((5, 6, 7), Sampling(0.5, seed=3), max_new_tokens=9, ignore_eos=True, speculate=False)
    admit(deque([Running(asked)]), slots, state)
    assert state.tokens[1, :3].tolist() == [5, 6, 7] and int(state.roots[1]) == 7 and int(state.lengths[1]) == 0
    assert int(state.limits[1]) == 12 and not state.heeds_ends[1] and not state.speculates[1]
    assert state.alive_slots.tolist() == [False, True, False]
    assert all((column[[0, 2]] == 1).all() for column in columns)
    assert state.table.columns["temperature"].tolist() == [0.0, 0.5, 0.0]


def test_the_context_bounds_the_sequence() -> None:
    state, slots = empty_state(), Slots(1)
    admit(deque([running((5, 6, 7), max_new_tokens=10**6)]), slots, state)
    assert int(state.limits[0]) == CONTEXT

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


# Sessions and copies ---------------------------------------------------------------------------------------------------


def left(slots: Slots, prompt: tuple[int, ...], **options: object) -> int:
    """Let a request take a slot and leave it. Return the slot."""
    gone = running(prompt, **options)
    slot = slots.take(gone)
    gone.prefilled = gone.rows
    gone.tokens = [9]
    slots.leave(slot)
    return slot


def test_a_session_returns_to_its_slot() -> None:
    """Even if another slot holds as much of its prompt, or it has nothing to reuse there."""
    slots = Slots(3, copies=True)
    first, second = left(slots, (5, 6, 7), session="a"), left(slots, (5, 6, 7))
    assert first != second
    for prompt in ((5, 6, 7, 8), (4, 4, 4)):
        assert left(slots, prompt, session="a", reuse=True) == first


def test_slots_of_sessions_are_taken_last_and_the_oldest_first() -> None:
    slots = Slots(4)
    for name in ("a", "b"):
        left(slots, (5, 6), session=name)
    left(slots, (5, 6))
    assert list(slots.sessions) == [0, 1]
    assert [slots.take(running((8, 8))) for _ in range(4)] == [3, 2, 0, 1]
    assert slots.sessions == {}


def test_only_the_slot_that_a_session_used_last_is_kept_for_it() -> None:
    slots = Slots(3)
    both = [running((5, 6, token), session="a") for token in (1, 2)]
    for one in both:
        slots.take(one)
        one.prefilled = 2
    slots.leave(0)
    slots.leave(1)
    assert slots.sessions == {1: ("", "a")}
    assert slots.take(running((8, 8))) == 2 and slots.take(running((8, 8))) == 0


def test_a_session_under_another_salt_is_another_session() -> None:
    slots = Slots(2)
    left(slots, (5, 6, 7), session="a", cache_salt="ada")
    entering = running((5, 6, 7, 8), session="a", cache_salt="bob", reuse=True)
    assert slots.take(entering) == 1 and entering.reused == 0


def test_a_slot_with_no_tokens_is_kept_for_no_session() -> None:
    slots, sick = Slots(1), running((5, 6), session="a")
    slots.take(sick)
    slots.leave(0, keep=False)
    assert slots.sessions == {}


def copies_of(slots: Slots, entering: Running) -> list[tuple[int, int, int]]:
    found: list[tuple[int, int, int]] = []
    slots.take(entering, lambda *copied: found.append(copied))
    return found


def test_rows_of_a_session_are_copied_and_not_taken_over() -> None:
    slots = Slots(3, copies=True)
    left(slots, (5, 6, 7, 8), session="a")
    entering = running((5, 6, 9), reuse=True)
    assert copies_of(slots, entering) == [(0, 1, 2)] and entering.reused == entering.prefilled == 2
    assert slots.sessions == {0: ("", "a")} and slots.free[0] == (5, 6, 7, 8)


def test_rows_of_a_running_request_are_copied_when_a_token_depends_on_them() -> None:
    slots, source = Slots(3, copies=True, worth_a_wait=2), running((5, 6, 7, 8))
    slots.take(source)
    source.prefilled = 3
    assert copies_of(slots, running((5, 6, 7, 9), reuse=True)) == []
    assert slots.should_wait(Request((5, 6, 7, 9), reuse=True))
    source.tokens = [1]
    assert not slots.should_wait(Request((5, 6, 7, 9), reuse=True))
    assert copies_of(slots, running((5, 6, 7, 8, 1, 4), reuse=True)) == [(0, 2, 4)], "the root is not cached"


def test_a_copy_of_a_copy_is_found_before_its_prompt_is_read() -> None:
    slots = Slots(3, copies=True)
    left(slots, (5, 6, 7, 8), session="a")
    slots.take(running((5, 6, 7, 1, 2), reuse=True))
    slots.take(running((1, 1), session="a"))
    assert copies_of(slots, running((5, 6, 7, 1, 3), reuse=True)) == [(1, 2, 3)]


@pytest.mark.parametrize(
    "asked",
    [
        Request((5, 6, 7, 9)),
        Request((5, 6, 7, 9), reuse=True, cache_salt="other"),
        Request((5, 6, 7, 9), reuse=True, prompt_logprobs=1),
        Request((5, 9, 7, 9), reuse=True),
        Request((5, 6), reuse=True),
    ],
    ids=["without reuse", "another salt", "prompt_logprobs", "little in common", "a short prompt"],
)
def test_what_does_not_wait(asked: Request) -> None:
    slots = Slots(3, copies=True, worth_a_wait=2)
    slots.take(running((5, 6, 7, 8)))
    assert not slots.should_wait(asked)


def test_nobody_waits_for_rows_that_a_slot_has() -> None:
    slots = Slots(3, copies=True, worth_a_wait=2)
    left(slots, (5, 6, 7, 8))
    slots.take(running((5, 6, 7, 9)))
    assert not slots.should_wait(Request((5, 6, 7, 9, 9), reuse=True))


def test_a_request_that_waits_lets_others_pass_but_keeps_its_turn() -> None:
    slots, state = Slots(3, copies=True, worth_a_wait=2), empty_state()
    same = [running((5, 6, 7, token), reuse=True) for token in (8, 9)]
    others = [running((4, token)) for token in (8, 9)]
    waiting = deque([*same, *others])
    assert admit(waiting, slots, state) == [0, 1] and list(waiting) == [same[1], others[1]]
    assert admit(waiting, slots, state) == []
    same[0].prefilled, same[0].tokens = 3, [1]
    assert admit(waiting, slots, state) == [2] and list(waiting) == [others[1]]

"""Both sides of a text, with messages that take as long as they like: nothing is lost, doubled or mistaken."""

from collections import deque
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from foreword.methods.amusd.epochs import DraftSide, DraftTokens, Job, TargetSide, Update

SLOTS, AHEAD, LONGEST = 2, 5, 60


def guess(text: list[int]) -> int:
    """The draft's model."""
    return (text[-1] * 7 + len(text) * 3) % 11


def true(text: list[int]) -> int:
    """The target: of the draft's opinion most of the time."""
    return guess(text) if (text[-1] + len(text)) % 4 else (guess(text) + 1) % 11


class Play:
    """A target and a draft with mail between them, which is delivered when the test says so."""

    def __init__(self) -> None:
        self.target_side, self.draft_side = TargetSide(SLOTS, AHEAD, LONGEST), DraftSide(SLOTS, chunk=4)
        self.to_draft: deque[Update] = deque()
        self.to_target: deque[DraftTokens] = deque()
        self.running: Job | None = None
        self.read: list[list[int]] = [[] for _ in range(SLOTS)]  # what the draft's cache holds
        self.used = 0
        for slot in range(SLOTS):
            self.begin(slot)

    def begin(self, slot: int, kept: int = 0) -> None:
        self.to_draft.append(self.target_side.begin(slot, kept, (0.0, 0, 0)))
        kept = len(self.target_side.sequences[slot])
        self.to_draft.append(self.target_side.extend(slot, [slot + 1, kept % 11, 3, 4, 5, 6], write=False)[0])
        self.to_draft.append(self.target_side.extend(slot, [], write=True)[0])

    def deliver_to_draft(self) -> None:
        if self.to_draft and self.running is None:  # it listens between passes
            said = self.draft_side.receive(self.to_draft.popleft())
            self.to_target.extend([said] if said else [])

    def deliver_to_target(self) -> None:
        if self.to_target:
            self.target_side.receive(self.to_target.popleft())

    def draft_begins(self) -> None:
        self.running = self.running or self.draft_side.job()

    def draft_ends(self) -> None:
        job, self.running = self.running, None
        if job is None:
            return
        for slot, rows, cached in zip(job.slots, job.rows, job.cached, strict=True):
            self.read[slot][cached:] = rows
            sequence = self.draft_side.sequences[slot]
            assert self.read[slot] == sequence.tokens[: cached + len(rows)], "the cache holds another text"
        tokens = [guess(self.read[slot]) for slot in job.slots] if job.writes else []
        self.to_target.extend(self.draft_side.finished(job, tokens))

    def round(self, slot: int) -> None:
        text, written = self.target_side.sequences[slot], self.target_side.written[slot][:]
        whole = list(text)
        for token in written:
            assert token == guess(whole), "a guess stands at another place than it was made for"
            whole.append(token)
        assert len(written) <= AHEAD
        if len(text) + AHEAD >= LONGEST:
            return
        decided = [true(text)]
        while len(decided) <= len(written) and decided[-1] == written[len(decided) - 1]:
            decided.append(true(text + decided))
        self.used += len(decided) - 1
        self.to_draft.append(self.target_side.extend(slot, decided, write=True)[0])

    def settle(self) -> None:
        """All mail delivered, and the draft as far ahead as it may be."""
        while self.to_draft or self.to_target or self.running or self.draft_side.job():
            self.draft_ends()
            self.deliver_to_draft()
            self.deliver_to_target()
            self.draft_begins()


moves = st.one_of(
    st.sampled_from(["deliver_to_draft", "deliver_to_target", "draft_begins", "draft_ends"]).map(lambda name: (name,)),
    st.tuples(st.just("round"), st.integers(0, SLOTS - 1)),
    st.tuples(st.just("begin"), st.integers(0, SLOTS - 1), st.integers(0, 9)),
)


@given(st.lists(moves, max_size=300))
def test_any_order_of_events(given_moves: list[Any]) -> None:
    """`TargetSide.receive` itself refuses a guess that does not stand directly behind the text."""
    play = Play()
    for name, *more in given_moves:
        getattr(play, name)(*more)
    play.settle()
    for slot in range(SLOTS):
        text = play.target_side.sequences[slot]
        assert play.draft_side.sequences[slot].tokens == text + play.target_side.written[slot]
        assert len(play.target_side.written[slot]) == min(AHEAD, LONGEST - len(text))


def test_a_draft_that_is_right_is_never_disturbed() -> None:
    play = Play()
    play.settle()
    for _ in range(6):
        epoch, text = play.target_side.epochs[0], play.target_side.sequences[0]
        right = play.target_side.written[0][:2]
        update, refused = play.target_side.extend(0, right, write=True)
        assert not refused and update.epoch == epoch == play.target_side.epochs[0] and text[-2:] == right
        assert play.draft_side.receive(update) is None
        play.settle()


def test_a_token_that_the_draft_had_yet_to_write_costs_it_nothing_if_it_writes_the_same() -> None:
    play = Play()
    play.settle()
    play.target_side.written[0] = play.target_side.written[0][:1]  # the rest is still on its way
    first, second = play.draft_side.sequences[0].tokens[6:8]
    update, refused = play.target_side.extend(0, [first, second], write=True)
    said = play.draft_side.receive(update)
    assert refused and said is not None and said.dropped == 0 and len(said.tokens) == AHEAD - 2


def test_what_is_refused_goes_and_is_counted() -> None:
    play = Play()
    play.settle()
    cached = play.draft_side.sequences[0].cached
    update, refused = play.target_side.extend(0, [play.target_side.written[0][0], 99], write=True)
    said = play.draft_side.receive(update)
    sequence = play.draft_side.sequences[0]
    assert refused and said is not None and said.dropped == AHEAD - 1 and said.tokens == []
    assert sequence.tokens[-1] == 99 and sequence.cached == len(sequence.tokens) - 1 < cached


def test_an_epoch_that_is_over_is_not_heard() -> None:
    play = Play()
    play.settle()
    late = DraftTokens(0, play.target_side.epochs[0], len(play.target_side.sequences[0]) + AHEAD, [7])
    play.target_side.extend(0, [99], write=True)
    assert not play.target_side.receive(late) and play.target_side.written[0] == []


def test_rows_are_read_again_from_where_a_text_parts() -> None:
    """However many decided tokens come behind that place."""
    play = Play()
    play.settle()
    sequence, known = play.draft_side.sequences[0], len(play.target_side.sequences[0])
    wrong = [token + 1 for token in sequence.tokens[known : known + 3]]
    play.draft_side.receive(Update(0, 99, known, wrong, 0))
    assert sequence.tokens[known:] == wrong and sequence.cached == known

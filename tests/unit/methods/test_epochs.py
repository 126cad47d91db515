"""Both sides of a text, with messages that take as long as they like: nothing is lost, doubled or mistaken."""

from collections import deque
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from foreword.methods.amusd.epochs import Follower, Guesses, Job, News, Teller

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
        self.teller, self.follower = Teller(SLOTS, AHEAD, LONGEST), Follower(SLOTS, chunk=4)
        self.to_draft: deque[News] = deque()
        self.to_target: deque[Guesses] = deque()
        self.running: Job | None = None
        self.read: list[list[int]] = [[] for _ in range(SLOTS)]  # what the draft's cache holds
        self.used = 0
        for slot in range(SLOTS):
            self.begin(slot)

    def begin(self, slot: int, kept: int = 0) -> None:
        self.to_draft.append(self.teller.begin(slot, kept, (0.0, 0, 0)))
        kept = len(self.teller.texts[slot])
        self.to_draft.append(self.teller.grew(slot, [slot + 1, kept % 11, 3, 4, 5, 6], write=False)[0])
        self.to_draft.append(self.teller.grew(slot, [], write=True)[0])

    def deliver_to_draft(self) -> None:
        if self.to_draft and self.running is None:  # it listens between passes
            said = self.follower.hear(self.to_draft.popleft())
            self.to_target.extend([said] if said else [])

    def deliver_to_target(self) -> None:
        if self.to_target:
            self.teller.hear(self.to_target.popleft())

    def draft_begins(self) -> None:
        self.running = self.running or self.follower.job()

    def draft_ends(self) -> None:
        job, self.running = self.running, None
        if job is None:
            return
        for slot, rows, cached in zip(job.slots, job.rows, job.cached, strict=True):
            self.read[slot][cached:] = rows
            page = self.follower.pages[slot]
            assert self.read[slot] == page.text[: cached + len(rows)], "the cache holds another text"
        tokens = [guess(self.read[slot]) for slot in job.slots] if job.writes else []
        self.to_target.extend(self.follower.did(job, tokens))

    def round(self, slot: int) -> None:
        text, written = self.teller.texts[slot], self.teller.written[slot][:]
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
        self.to_draft.append(self.teller.grew(slot, decided, write=True)[0])

    def settle(self) -> None:
        """All mail delivered, and the draft as far ahead as it may be."""
        while self.to_draft or self.to_target or self.running or self.follower.job():
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
    """`Teller.hear` itself refuses a guess that does not stand directly behind the text."""
    play = Play()
    for name, *more in given_moves:
        getattr(play, name)(*more)
    play.settle()
    for slot in range(SLOTS):
        text = play.teller.texts[slot]
        assert play.follower.pages[slot].text == text + play.teller.written[slot]
        assert len(play.teller.written[slot]) == min(AHEAD, LONGEST - len(text))


def test_a_draft_that_is_right_is_never_disturbed() -> None:
    play = Play()
    play.settle()
    for _ in range(6):
        epoch, text = play.teller.epochs[0], play.teller.texts[0]
        right = play.teller.written[0][:2]
        news, refused = play.teller.grew(0, right, write=True)
        assert not refused and news.epoch == epoch == play.teller.epochs[0] and text[-2:] == right
        assert play.follower.hear(news) is None
        play.settle()


def test_a_token_that_the_draft_had_yet_to_write_costs_it_nothing_if_it_writes_the_same() -> None:
    play = Play()
    play.settle()
    play.teller.written[0] = play.teller.written[0][:1]  # the rest is still on its way
    first, second = play.follower.pages[0].text[6:8]
    news, refused = play.teller.grew(0, [first, second], write=True)
    said = play.follower.hear(news)
    assert refused and said is not None and said.dropped == 0 and len(said.tokens) == AHEAD - 2


def test_what_is_refused_goes_and_is_counted() -> None:
    play = Play()
    play.settle()
    cached = play.follower.pages[0].cached
    news, refused = play.teller.grew(0, [play.teller.written[0][0], 99], write=True)
    said = play.follower.hear(news)
    page = play.follower.pages[0]
    assert refused and said is not None and said.dropped == AHEAD - 1 and said.tokens == []
    assert page.text[-1] == 99 and page.cached == len(page.text) - 1 < cached


def test_an_epoch_that_is_over_is_not_heard() -> None:
    play = Play()
    play.settle()
    late = Guesses(0, play.teller.epochs[0], len(play.teller.texts[0]) + AHEAD, [7])
    play.teller.grew(0, [99], write=True)
    assert not play.teller.hear(late) and play.teller.written[0] == []


def test_rows_are_read_again_from_where_a_text_parts() -> None:
    """However many decided tokens come behind that place."""
    play = Play()
    play.settle()
    page, known = play.follower.pages[0], len(play.teller.texts[0])
    wrong = [token + 1 for token in page.text[known : known + 3]]
    play.follower.hear(News(0, 99, known, wrong, 0))
    assert page.text[known:] == wrong and page.cached == known

"""Two sides of a text, for a draft that is written while the target checks: what is decided, and what runs ahead of it.

`Teller` stands with the target, `Follower` with the draft. All that the target knows of the draft bears the number of an
epoch. A new one begins with a text, and whenever the target decided something that the draft had not written; what still
comes with an older number is dropped unread. So of the current epoch it always holds: what the draft wrote stands directly
behind what is decided, no token is missing and none comes twice, however long the messages take. Neither side has to wait.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

Draw = tuple[float, int, int]
"""How the text's tokens are drawn: its temperature, and the two words of its key."""

GREEDY: Draw = (0.0, 0, 0)
ALONE = 8  # rows: who has more than this to read is read by itself, so that others are not padded to its length


class News(NamedTuple):
    """Target to draft: of the slot's text the first `known` tokens are as told before, then come `tokens`."""

    slot: int
    epoch: int
    known: int
    tokens: list[int]
    most: int  # the draft writes until the text is so long; of one that is longer it only reads
    draw: Draw = GREEDY
    anew: bool = False  # another text: nothing behind `known` counts


class Guesses(NamedTuple):
    """Draft to target: from `place` on the draft's text goes on with `tokens`."""

    slot: int
    epoch: int
    place: int
    tokens: list[int]
    dropped: int = 0  # tokens that were written and had to go


class Teller:
    """The target's side: the decided texts, root included, and what the draft has written behind them."""

    def __init__(self, slots: int, ahead: int, longest: int) -> None:
        """`ahead`: the draft runs at most so many tokens ahead; `longest`: no text is longer."""
        self.ahead, self.longest = ahead, longest
        self.texts: list[list[int]] = [[] for _ in range(slots)]
        self.written: list[list[int]] = [[] for _ in range(slots)]
        self.epochs, self.heard = [0] * slots, [0] * slots
        self.draws = [GREEDY] * slots

    def begin(self, slot: int, kept: int, draw: Draw) -> News:
        """Another text, which has the first `kept` tokens of the one before."""
        self.texts[slot] = self.texts[slot][:kept]
        self.draws[slot] = draw
        self._turn(slot)
        return News(slot, self.epochs[slot], len(self.texts[slot]), [], 0, draw, anew=True)

    def grew(self, slot: int, tokens: list[int], write: bool) -> tuple[News, bool]:
        """Tokens were decided, or read as prompt. Also: whether the draft had written others, or none yet."""
        known, agreed = len(self.texts[slot]), self.written[slot][: len(tokens)] == tokens
        self.texts[slot] += tokens
        if agreed:
            self.written[slot] = self.written[slot][len(tokens) :]
        else:
            self._turn(slot)
        most = min(len(self.texts[slot]) + self.ahead, self.longest) if write else 0
        return News(slot, self.epochs[slot], known, tokens, most, self.draws[slot]), not agreed

    def hear(self, guesses: Guesses) -> bool:
        """False: of an epoch that is over."""
        slot = guesses.slot
        if guesses.epoch != self.epochs[slot]:
            return False
        assert guesses.place == len(self.texts[slot]) + len(self.written[slot]), "a token is missing or comes twice"
        self.written[slot] += guesses.tokens
        self.heard[slot] = guesses.epoch
        return True

    def wants(self, slot: int, least: int) -> bool:
        """Whether fewer than `least` guesses are there, and more may come."""
        room = min(self.ahead, self.longest - len(self.texts[slot]))
        return len(self.written[slot]) < min(least, room)

    def _turn(self, slot: int) -> None:
        self.epochs[slot] += 1
        self.written[slot] = []


@dataclass
class Page:
    """The draft's side of one text: it begins with all that is decided."""

    text: list[int] = field(default_factory=list)
    decided: int = 0
    cached: int = 0  # rows of it that the draft's cache holds
    epoch: int = 0
    most: int = 0
    draw: Draw = GREEDY

    @property
    def writes(self) -> bool:
        return len(self.text) < self.most

    @property
    def unread(self) -> int:
        """Rows to read now. The last is read only to write behind it: what is decided next may replace it."""
        return len(self.text) - self.cached - (0 if self.writes else 1)


class Job(NamedTuple):
    """A pass of the draft: rows to read of each slot, behind `cached` ones, and whether a token is written behind them."""

    slots: list[int]
    rows: list[list[int]]
    cached: list[int]
    draws: list[Draw]
    writes: bool


class Follower:
    """The draft's side of all texts."""

    def __init__(self, slots: int, chunk: int) -> None:
        """`chunk`: rows of a pass, at most."""
        self.chunk = chunk
        self.pages = [Page() for _ in range(slots)]

    def hear(self, news: News) -> Guesses | None:
        """What was written stays where the target has decided the same; where not, it goes at once."""
        page, dropped = self.pages[news.slot], 0
        if news.anew:
            del page.text[news.known :]
        goal = news.known + len(news.tokens)
        place = _parting(page.text, news.tokens, news.known)
        if place < goal:
            dropped = len(page.text) - max(place, page.decided)
            page.text[place:] = news.tokens[place - news.known :]
        page.cached = max(0, min(page.cached, place if place < goal else len(page.text), len(page.text) - 1))
        page.decided, page.most, page.draw = goal, news.most, news.draw
        if news.epoch == page.epoch:
            return None
        page.epoch = news.epoch
        return Guesses(news.slot, news.epoch, goal, page.text[goal:], max(dropped, 0))

    def job(self) -> Job | None:
        """What to read next: a long text by itself, else all that may be written on together, else what is only read."""
        ready = [slot for slot, page in enumerate(self.pages) if page.unread > 0]
        long = [slot for slot in ready if self.pages[slot].unread > min(ALONE, self.chunk)]
        writing = [slot for slot in ready if self.pages[slot].writes]
        chosen = long[:1] or writing or ready
        return self._over(chosen) if chosen else None

    def _over(self, slots: list[int]) -> Job:
        pages = [self.pages[slot] for slot in slots]
        counts = [min(page.unread, self.chunk) for page in pages]
        rows = [page.text[page.cached : page.cached + count] for page, count in zip(pages, counts, strict=True)]
        writes = all(page.writes and page.unread == count for page, count in zip(pages, counts, strict=True))
        return Job(slots, rows, [page.cached for page in pages], [page.draw for page in pages], writes)

    def did(self, job: Job, tokens: list[int]) -> list[Guesses]:
        """The pass was made; `tokens`: what was written, one for each slot, or nothing."""
        for slot, rows in zip(job.slots, job.rows, strict=True):
            self.pages[slot].cached += len(rows)
        said = []
        for slot, token in zip(job.slots, tokens, strict=False):
            page = self.pages[slot]
            said.append(Guesses(slot, page.epoch, len(page.text), [token]))
            page.text.append(token)
        return said


def _parting(text: list[int], tokens: list[int], start: int) -> int:
    """Where a text ends, or goes on otherwise than with `tokens` from `start` on."""
    place = start
    for ours, theirs in zip(text[start:], tokens, strict=False):
        if ours != theirs:
            break
        place += 1
    return place

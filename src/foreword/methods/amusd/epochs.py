"""The protocol between a target and a draft model that runs ahead of it: decided tokens go one way, draft tokens the other.

`TargetSide` belongs to the target, `DraftSide` to the draft. Every message carries the number of an epoch. A new epoch
begins with a sequence, and whenever the target decides something that the draft had not written. Messages of an older epoch
are dropped. So within an epoch the draft tokens always stand directly after the decided ones; none is missing and none comes
twice, however long the messages take. Neither side has to wait.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

SamplingKey = tuple[float, int, int]
"""How the sequence is sampled: its temperature, and the two words of its noise key."""

GREEDY: SamplingKey = (0.0, 0, 0)
ALONE = 8  # rows: a sequence with more rows to read is read alone, so that others are not padded to its length


class Update(NamedTuple):
    """Target to draft: the first `known` tokens of the slot's sequence are unchanged, then come `tokens`."""

    slot: int
    epoch: int
    known: int
    tokens: list[int]
    most: int  # the draft writes up to this length; a longer sequence is only read
    sampling_key: SamplingKey = GREEDY
    new_sequence: bool = False  # another sequence: nothing after `known` counts


class DraftTokens(NamedTuple):
    """Draft to target: from `place` on, the draft continues with `tokens`."""

    slot: int
    epoch: int
    place: int
    tokens: list[int]
    dropped: int = 0  # tokens that were written and thrown away


class TargetSide:
    """The target's side: the decided tokens of each slot, root included, and what the draft has written after them."""

    def __init__(self, slots: int, ahead: int, longest: int) -> None:
        """`ahead`: how many tokens the draft may run ahead. `longest`: the length of the longest sequence."""
        self.ahead, self.longest = ahead, longest
        self.sequences: list[list[int]] = [[] for _ in range(slots)]
        self.written: list[list[int]] = [[] for _ in range(slots)]
        self.epochs, self.acknowledged = [0] * slots, [0] * slots
        self.sampling_keys = [GREEDY] * slots

    def begin(self, slot: int, kept: int, sampling_key: SamplingKey) -> Update:
        """Start another sequence, which keeps the first `kept` tokens of the last one."""
        self.sequences[slot] = self.sequences[slot][:kept]
        self.sampling_keys[slot] = sampling_key
        self._new_epoch(slot)
        return Update(slot, self.epochs[slot], len(self.sequences[slot]), [], 0, sampling_key, new_sequence=True)

    def extend(self, slot: int, tokens: list[int], write: bool) -> tuple[Update, bool]:
        """Append tokens that were decided or read as prompt. Also says whether the draft had written others, or none."""
        known, agreed = len(self.sequences[slot]), self.written[slot][: len(tokens)] == tokens
        self.sequences[slot] += tokens
        if agreed:
            self.written[slot] = self.written[slot][len(tokens) :]
        else:
            self._new_epoch(slot)
        most = min(len(self.sequences[slot]) + self.ahead, self.longest) if write else 0
        return Update(slot, self.epochs[slot], known, tokens, most, self.sampling_keys[slot]), not agreed

    def receive(self, drafted: DraftTokens) -> bool:
        """Take draft tokens. Returns False if their epoch is over."""
        slot = drafted.slot
        if drafted.epoch != self.epochs[slot]:
            return False
        assert drafted.place == len(self.sequences[slot]) + len(self.written[slot]), "a token is missing or comes twice"
        self.written[slot] += drafted.tokens
        self.acknowledged[slot] = drafted.epoch
        return True

    def needs_more(self, slot: int, least: int) -> bool:
        """Whether fewer than `least` draft tokens are there, and more may come."""
        room = min(self.ahead, self.longest - len(self.sequences[slot]))
        return len(self.written[slot]) < min(least, room)

    def _new_epoch(self, slot: int) -> None:
        self.epochs[slot] += 1
        self.written[slot] = []


@dataclass
class DraftSequence:
    """The draft's side of one sequence. It begins with the decided tokens."""

    tokens: list[int] = field(default_factory=list)
    decided: int = 0
    cached: int = 0  # rows of it that the draft's cache holds
    epoch: int = 0
    most: int = 0
    sampling_key: SamplingKey = GREEDY

    @property
    def writes(self) -> bool:
        return len(self.tokens) < self.most

    @property
    def unread(self) -> int:
        """Rows to read now. The last is read only to write after it, because what is decided next may replace it."""
        return len(self.tokens) - self.cached - (0 if self.writes else 1)


class Job(NamedTuple):
    """A pass of the draft: rows to read of each slot after `cached` ones, and whether to write a token after them."""

    slots: list[int]
    rows: list[list[int]]
    cached: list[int]
    sampling_keys: list[SamplingKey]
    writes: bool


class DraftSide:
    """The draft's side of all slots."""

    def __init__(self, slots: int, chunk: int) -> None:
        """`chunk`: at most this many rows per pass."""
        self.chunk = chunk
        self.sequences = [DraftSequence() for _ in range(slots)]

    def receive(self, update: Update) -> DraftTokens | None:
        """Apply an update. Draft tokens that the target decided too stay; from the first other one on they are dropped."""
        sequence, dropped = self.sequences[update.slot], 0
        if update.new_sequence:
            del sequence.tokens[update.known :]
        goal = update.known + len(update.tokens)
        place = _divergence(sequence.tokens, update.tokens, update.known)
        if place < goal:
            dropped = len(sequence.tokens) - max(place, sequence.decided)
            sequence.tokens[place:] = update.tokens[place - update.known :]
        sequence.cached = max(
            0, min(sequence.cached, place if place < goal else len(sequence.tokens), len(sequence.tokens) - 1)
        )
        sequence.decided, sequence.most, sequence.sampling_key = goal, update.most, update.sampling_key
        if update.epoch == sequence.epoch:
            return None
        sequence.epoch = update.epoch
        return DraftTokens(update.slot, update.epoch, goal, sequence.tokens[goal:], max(dropped, 0))

    def job(self) -> Job | None:
        """What to read next: one long sequence alone, else all that may be continued, else those that are only read."""
        ready = [slot for slot, sequence in enumerate(self.sequences) if sequence.unread > 0]
        long = [slot for slot in ready if self.sequences[slot].unread > min(ALONE, self.chunk)]
        writing = [slot for slot in ready if self.sequences[slot].writes]
        chosen = long[:1] or writing or ready
        return self._over(chosen) if chosen else None

    def _over(self, slots: list[int]) -> Job:
        sequences = [self.sequences[slot] for slot in slots]
        counts = [min(sequence.unread, self.chunk) for sequence in sequences]
        rows = [
            sequence.tokens[sequence.cached : sequence.cached + count]
            for sequence, count in zip(sequences, counts, strict=True)
        ]
        writes = all(sequence.writes and sequence.unread == count for sequence, count in zip(sequences, counts, strict=True))
        return Job(
            slots,
            rows,
            [sequence.cached for sequence in sequences],
            [sequence.sampling_key for sequence in sequences],
            writes,
        )

    def finished(self, job: Job, tokens: list[int]) -> list[DraftTokens]:
        """Record a pass. `tokens`: what it wrote, one per slot, or nothing."""
        for slot, rows in zip(job.slots, job.rows, strict=True):
            self.sequences[slot].cached += len(rows)
        answers = []
        for slot, token in zip(job.slots, tokens, strict=False):
            sequence = self.sequences[slot]
            answers.append(DraftTokens(slot, sequence.epoch, len(sequence.tokens), [token]))
            sequence.tokens.append(token)
        return answers


def _divergence(written: list[int], decided: list[int], start: int) -> int:
    """Where `written` ends, or diverges from the tokens `decided` from `start` on."""
    place = start
    for ours, theirs in zip(written[start:], decided, strict=False):
        if ours != theirs:
            break
        place += 1
    return place

"""ADMIT: requests -> slots. A new request overwrites the columns of its slot and nothing else."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import compress, count, islice
from operator import ne
from typing import NamedTuple

import torch

from foreword.core.needs import Needs
from foreword.core.sampling_table import SlotOptions
from foreword.core.state import Batch, State
from foreword.engine.request import Request, Running
from foreword.ops.sending import sent

WORTH_A_WAIT = 32  # rows; reading fewer takes about as long as the rounds until they can be copied

Session = tuple[str, str]  # cache_salt and name
Copy = Callable[[int, int, int], None]  # from a slot, to a slot, this many rows


def copy_nothing(source: int, slot: int, rows: int) -> None:
    """Stand in where no slot has a cache."""


@dataclass(frozen=True)
class Group:
    """The requests of a pass, in the order of their slots."""

    runs: list[Running]
    ids: tuple[int, ...]  # their slots, then the slots that pad the round
    padded: int  # length of the longest sequence that a padding slot holds


class Held(NamedTuple):
    """What a slot holds that another prompt may start from."""

    tokens: tuple[int, ...]  # all that are known
    rows: int  # how many of them are cached, finite, and read by the drafter


@dataclass
class Slots:
    """Which request has which slot. A free slot still holds its last sequence, and a later prompt may start from it."""

    count: int
    needs: Needs = Needs()  # what the drafter wants to see; it decides which rows may be reused
    copies: bool = False  # the drafter can follow if a prompt starts from rows of another slot
    worth_a_wait: int = WORTH_A_WAIT
    running: dict[int, Running] = field(default_factory=dict)
    free: dict[int, tuple[int, ...]] = field(default_factory=dict)  # slot -> the tokens it still holds, oldest slot first
    salts: dict[int, str] = field(default_factory=dict)  # slot -> cache_salt of the request that wrote its tokens
    sessions: dict[int, Session] = field(default_factory=dict)  # free slot -> the session that would return to it
    unread: dict[int, int] = field(default_factory=dict)  # slot -> how many of its last rows the drafter has not read
    groups: dict[bool, Group] = field(default_factory=dict)  # by `ready`; cleared when a request enters or leaves
    last: Batch | None = None  # the batch of the last round
    pads: bool = False  # rounds are captured, so free slots pad them to one of a few batch sizes
    predicts: bool = False  # the drafter looks up in the predictions of requests

    def __post_init__(self) -> None:
        self.free = {slot: () for slot in range(self.count)}

    def take(self, running: Running, copy: Copy = copy_nothing) -> int:
        """Take a free slot and return it. With reuse the request starts from the longest beginning of its prompt that a
        slot holds; `copy` copies it if that is another slot."""
        slot = self._chosen(running.request)
        source, rows = self._best(running.request, slot)
        self.groups.clear()
        running.slot = slot
        self.running[slot] = running  # first: whatever interrupts this, a slot is in both dicts and never in neither
        del self.free[slot]
        self.sessions.pop(slot, None)
        if source != slot:
            copy(source, slot, rows)
        running.reused = running.prefilled = rows  # last: an interrupted request holds no rows that were not copied yet
        return slot

    def _chosen(self, request: Request) -> int:
        """Choose a free slot: the one of the request's session; else one to which no session returns, the one with the most
        rows to start from, or an empty or the oldest one; else the oldest of all."""
        session = _session(request)

        def order(slot: int) -> tuple[bool, bool, int, bool]:
            if slot in self.sessions:
                return self.sessions[slot] != session, True, 0, True
            return True, False, -self._reusable_rows(slot, request), bool(self.free[slot])

        return min(self.free, key=order)

    def _best(self, request: Request, slot: int) -> tuple[int, int]:
        """Return where a request finds the most rows to start from, and how many: in `slot`, or in one to copy from."""
        others = (*self.free, *self.running) if self.copies else ()
        rows = {one: self._reusable_rows(one, request) for one in (slot, *others)}
        best = max(rows, key=lambda one: rows[one])
        return (best, rows[best]) if rows[best] else (slot, 0)

    def _reusable_rows(self, slot: int, request: Request) -> int:
        """Return how many rows of a slot a request may start from."""
        if not self._may_reuse(request, self._salt(slot)):
            return 0
        held = self._held(slot)
        return max(min(self._shared(held.tokens, request.prompt), held.rows), 0)

    def _shared(self, tokens: tuple[int, ...], prompt: tuple[int, ...]) -> int:
        """Return how many rows a prompt shares with a sequence. Its last token is the root and stays out of the cache. A
        drafter that reads prompts reads at least the row before the root."""
        paired = _common_prefix(tokens, prompt) - self.needs.follower
        before_root = len(prompt) - 1 - (self.needs.prompt != "none")
        return min(paired, before_root)

    def _may_reuse(self, request: Request, salt: str) -> bool:
        """Whether a request may start from rows that were written under this salt."""
        reads_all = request.prompt_logprobs is not None  # a row that is not read gives no log-probabilities
        return request.reuse and not reads_all and salt == request.cache_salt

    def _salt(self, slot: int) -> str:
        return self.running[slot].request.cache_salt if slot in self.running else self.salts.get(slot, "")

    def _held(self, slot: int) -> Held:
        if slot in self.free:
            return Held(self.free[slot], len(self.free[slot]) - self.unread.get(slot, 0))
        running = self.running[slot]
        return Held(running.sequence, running.proven - self._unread(running))

    def _unread(self, running: Running) -> int:
        """Return how many of the last rows of a sequence the drafter has not read."""
        return running.accepted[-1] if self.needs.deferred and running.accepted else 0

    def should_wait(self, request: Request) -> bool:
        """Whether another request reads enough of the same prompt now, so that copying its rows is worth a wait."""
        if not self.copies:
            return False
        reading = [one.request for one in self.running.values() if not one.tokens]
        shared = (self._shared(one.prompt, request.prompt) for one in reading if self._may_reuse(request, one.cache_salt))
        coming = max(shared, default=0)
        if coming < self.worth_a_wait:
            return False
        return coming - self._best(request, self._chosen(request))[1] >= self.worth_a_wait

    def leave(self, slot: int, keep: bool = True) -> None:
        """Free a slot. If `keep`, a later prompt may start from the tokens it holds."""
        running = self.running[slot]
        self.groups.clear()
        self.free[slot] = running.sequence[: running.length] if keep else ()
        self.salts[slot] = running.request.cache_salt
        self.unread[slot] = self._unread(running)
        if self.free[slot] and (session := _session(running.request)):
            self.sessions = {other: held for other, held in self.sessions.items() if held != session} | {slot: session}
        del self.running[slot]

    def forget(self) -> None:
        """Forget the tokens that free slots hold."""
        self.free = dict.fromkeys(self.free, ())
        self.sessions.clear()
        self.groups.clear()

    def group(self, ready: bool) -> Group:
        """Return the requests whose prompt is completely read (`ready`), or those whose prompt is not."""
        if not self.groups or self.groups[False].runs:  # a prompt that was being read may be complete by now
            active = [self.running[slot] for slot in sorted(self.running)]
            entering = [running for running in active if not running.ready]
            self.groups[True] = self._padded([running for running in active if running.ready] if entering else active)
            self.groups[False] = Group(entering, tuple(running.slot for running in entering), 0)
        return self.groups[ready]

    def _padded(self, runs: list[Running]) -> Group:
        padding: list[int] = []
        if self.pads and runs:
            padding = sorted(self.free, key=lambda free: len(self.free[free]))[: round_up(len(runs)) - len(runs)]
        ids = (*(running.slot for running in runs), *padding)
        return Group(runs, ids, max((len(self.free[slot]) for slot in padding), default=0))

    def batch(self, device: torch.device, unread: int = 0) -> Batch | None:
        """Return the slots of all requests whose prompt is read; None if there are none.

        `unread`: by how many tokens a sequence on the device may be longer than the host knows.
        """
        group = self.group(ready=True)
        if not group.runs:
            return None
        longest = max([running.prefilled + len(running.tokens) for running in group.runs])
        span, last = max(longest + unread, group.padded), self.last
        # Usually the slots are those of the last round: then nothing has to be sent to the device.
        self.last = replace(last, span=span) if last and last.ids == group.ids else Batch.of(group.ids, span, device)
        return self.last


def admit(waiting: deque[Running], slots: Slots, state: State, copy: Copy = copy_nothing) -> list[int]:
    """Give free slots to waiting requests, in their order. Return the slots taken. A request that waits for the prompt of
    another one leaves its slot free until then; it lets no more requests pass than there are other free slots."""
    taken = []
    for running in list(islice(waiting, len(slots.free))):
        if not slots.should_wait(running.request):
            slots.take(running, copy)
            waiting.remove(running)
            taken.append(running)
    if taken:
        _write_columns(state, taken, slots.predicts)
    return [running.slot for running in taken]


def _write_columns(state: State, taken: list[Running], predicts: bool) -> None:
    """Write the columns of all new requests at once, which takes a GPU no longer than the columns of one request."""
    device, context = state.tokens.device, state.tokens.shape[1] - 1
    slots = sent([running.slot for running in taken], device)
    prompts = [running.request.prompt for running in taken]
    longest = max(map(len, prompts))
    padded = sent([prompt + (0,) * (longest - len(prompt)) for prompt in prompts], device)
    state.tokens[:, :longest].index_copy_(0, slots, padded)
    columns = [state.roots, state.lengths, state.limits, state.heeds_ends, state.speculates, state.alive_slots]
    values = sent([_values(running, context) for running in taken], device)
    for column, value in zip(columns, values.unbind(1), strict=True):
        column.index_copy_(0, slots, value.to(column.dtype))
    state.table.set_all({running.slot: _options(running, context, predicts) for running in taken}, slots)
    for running, prompt in zip(taken, prompts, strict=True):
        if running.request.sampling.repetition_penalty != 1:
            state.seen[running.slot] = torch.tensor(prompt).bincount(minlength=state.seen.shape[1]).to(state.seen)


def _values(running: Running, context: int) -> tuple[int, ...]:
    """Return a slot's values in the order of the columns: root, length, limit, heeds ends, speculates, alive."""
    request = running.request
    limit = min(len(request.prompt) + request.max_new_tokens, context)
    return request.prompt[-1], running.prefilled, limit, not request.ignore_eos, request.speculate, True


def _options(running: Running, context: int, predicts: bool) -> SlotOptions:
    """Return what the rounds of a request depend on. `predicts`: the drafter looks up in its prediction."""
    request = running.request
    prediction = request.prediction if predicts and request.speculate else ()
    return SlotOptions(
        request.sampling,
        _floor(running, context),
        request.stop_token_ids,
        request.prompt,
        prediction,
        request.trace_rounds,
        constrained=request.grammar is not None,
    )


def _floor(running: Running, context: int) -> int:
    """Return the length below which end tokens and stop tokens are held back."""
    request = running.request
    return min(len(request.prompt) + request.min_new_tokens, context) if request.min_new_tokens else 0


def round_up(count: int) -> int:
    """Return the batch size that a round is padded to. Each size needs a graph of its own, and an idle row costs little."""
    return 1 << (count - 1).bit_length() if count <= 64 else -(-count // 64) * 64


def _session(request: Request) -> Session | None:
    """Return the session of a request. Under another salt, the same name is another session."""
    return (request.cache_salt, request.session) if request.session else None


def _common_prefix(cached: tuple[int, ...], prompt: tuple[int, ...]) -> int:
    return next(compress(count(), map(ne, cached, prompt)), min(len(cached), len(prompt)))

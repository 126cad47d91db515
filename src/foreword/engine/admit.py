"""ADMIT: requests -> slots. A new request overwrites the columns of its slot and nothing else."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

import torch

from foreword.core.needs import Needs
from foreword.core.sampling_table import SlotOptions
from foreword.core.state import Batch, State
from foreword.engine.request import Request, Running
from foreword.ops.sending import sent


@dataclass(frozen=True)
class Group:
    """The requests of a pass, in the order of their slots."""

    runs: list[Running]
    ids: tuple[int, ...]  # their slots, then the slots that pad the round
    padded: int  # length of the longest sequence that a padding slot holds


@dataclass
class Slots:
    """Which request has which slot. A free slot still holds its last sequence, and a later prompt may start from it."""

    count: int
    needs: Needs = Needs()  # what the drafter wants to see; it decides which rows may be reused
    running: dict[int, Running] = field(default_factory=dict)
    free: dict[int, tuple[int, ...]] = field(default_factory=dict)  # slot -> the tokens it still holds, oldest slot first
    salts: dict[int, str] = field(default_factory=dict)  # slot -> cache_salt of the request that wrote its tokens
    unread: dict[int, int] = field(default_factory=dict)  # slot -> how many of its last rows the drafter has not read
    groups: dict[bool, Group] = field(default_factory=dict)  # by `ready`; cleared when a request enters or leaves
    last: Batch | None = None  # the batch of the last round
    pads: bool = False  # rounds are captured, so free slots pad them to one of a few batch sizes
    predicts: bool = False  # the drafter looks up in the predictions of requests

    def __post_init__(self) -> None:
        self.free = {slot: () for slot in range(self.count)}

    def take(self, running: Running) -> int:
        """Take a free slot and return it: with reuse, the one with the most rows to start from; else an empty or the oldest
        one."""
        rows = {slot: self._reusable_rows(slot, running.request.prompt) for slot in self._reusable_slots(running.request)}
        slot = max(rows, key=lambda free: rows[free], default=-1)
        if rows.get(slot):
            running.reused = running.prefilled = rows[slot]
        else:
            slot = next((free for free, tokens in self.free.items() if not tokens), next(iter(self.free)))
        running.slot = slot
        self.groups.clear()
        self.running[slot] = running  # first: whatever interrupts this, a slot is in both dicts and never in neither
        del self.free[slot]
        return slot

    def _reusable_slots(self, request: Request) -> list[int]:
        """Return the free slots whose tokens this request may start from: those written under the same `cache_salt`."""
        if not request.reuse or request.prompt_logprobs is not None:  # a row that is not read gives no log-probabilities
            return []
        return [slot for slot in self.free if self.salts.get(slot, "") == request.cache_salt]

    def _reusable_rows(self, slot: int, prompt: tuple[int, ...]) -> int:
        """Return how many rows of a free slot a prompt may start from. Its last token is the root and stays out of the
        cache. A drafter that reads prompts reads at least the row before the root."""
        held = self.free[slot]
        paired = _common_prefix(held, prompt) - self.needs.follower
        read = len(held) - self.unread.get(slot, 0)
        before_root = len(prompt) - 1 - (self.needs.prompt != "none")
        return max(min(paired, read, before_root), 0)

    def leave(self, slot: int, keep: bool = True) -> None:
        """Free a slot. If `keep`, a later prompt may start from the tokens it holds."""
        running = self.running[slot]
        written = (*running.request.prompt, *running.tokens)
        self.groups.clear()
        self.free[slot] = written[: running.length] if keep else ()
        self.salts[slot] = running.request.cache_salt
        self.unread[slot] = running.accepted[-1] if self.needs.deferred and running.accepted else 0
        del self.running[slot]

    def forget(self) -> None:
        """Forget the tokens that free slots hold."""
        self.free = dict.fromkeys(self.free, ())
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


def admit(waiting: deque[Running], slots: Slots, state: State) -> list[int]:
    """Give free slots to waiting requests. Return the slots taken."""
    taken = []
    while waiting and slots.free:
        slots.take(waiting[0])
        taken.append(waiting.popleft())
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


def _common_prefix(cached: tuple[int, ...], prompt: tuple[int, ...]) -> int:
    longest = min(len(cached), len(prompt))
    return next((i for i in range(longest) if cached[i] != prompt[i]), longest)

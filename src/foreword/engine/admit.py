"""ADMIT: requests -> slots. A request that enters overwrites its slot's columns and nothing else."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

import torch

from foreword.core.state import Batch, State
from foreword.engine.request import Request, Running
from foreword.ops.sending import sent


@dataclass(frozen=True)
class Group:
    """The requests of a pass, in the order of their slots."""

    runs: list[Running]
    ids: tuple[int, ...]  # their slots, then those that pad the round
    padded: int  # length of the longest sequence that a padding slot holds


@dataclass
class Slots:
    """Which request has which slot. A free slot still holds its last sequence, which a later prompt may begin with."""

    count: int
    running: dict[int, Running] = field(default_factory=dict)
    left: dict[int, tuple[int, ...]] = field(default_factory=dict)  # oldest first
    salts: dict[int, str] = field(default_factory=dict)  # of the request that wrote what a slot holds
    groups: dict[bool, Group] = field(default_factory=dict)  # by `ready`, until somebody enters or leaves
    last: Batch | None = None  # of a round
    pads: bool = False  # rounds are captured: free slots fill them up to one of few sizes
    unsure: int = 0  # kept rows that are read again: 1 if the drafter pairs a row with the token after it
    reread: int = 0  # prompt rows that are read in any case: 1 if the drafter wants to see the row before the root

    def __post_init__(self) -> None:
        self.left = {slot: () for slot in range(self.count)}

    def take(self, running: Running) -> int:
        """The free slot to use: the one that helps most if reuse is asked for, else an empty or the oldest one."""
        request = running.request
        common = {slot: _common(self.left[slot], request.prompt) for slot in self._reusable(request)}
        slot = max(common, key=lambda free: common[free], default=-1)
        if common.get(slot):
            most = max(len(request.prompt) - 1 - self.reread, 0)
            running.reused = running.prefilled = min(max(common[slot] - self.unsure, 0), most)
        else:
            slot = next((free for free, tokens in self.left.items() if not tokens), next(iter(self.left)))
        running.slot = slot
        self.groups.clear()
        self.running[slot] = running  # whatever breaks off, a slot is in one of the two at least
        del self.left[slot]
        return slot

    def _reusable(self, request: Request) -> list[int]:
        """Free slots whose tokens this request may start from: those that its own caller left there."""
        if not request.reuse or request.prompt_logprobs is not None:  # what is not read has no log-probabilities
            return []
        return [slot for slot in self.left if self.salts.get(slot, "") == request.cache_salt]

    def leave(self, slot: int, keep: bool = True) -> None:
        """Free a slot; what it holds may serve a later prompt if `keep`."""
        running = self.running[slot]
        written = (*running.request.prompt, *running.tokens)
        self.groups.clear()
        self.left[slot] = written[: running.length] if keep else ()
        self.salts[slot] = running.request.cache_salt
        del self.running[slot]

    def forget(self) -> None:
        """What free slots hold."""
        self.left = dict.fromkeys(self.left, ())
        self.groups.clear()

    def group(self, ready: bool) -> Group:
        """The requests whose prompt is read, or those whose prompt is not."""
        if not self.groups or self.groups[False].runs:  # whose prompt was being read may be ready by now
            seated = [self.running[slot] for slot in sorted(self.running)]
            entering = [running for running in seated if not running.ready]
            self.groups[True] = self._padded([running for running in seated if running.ready] if entering else seated)
            self.groups[False] = Group(entering, tuple(running.slot for running in entering), 0)
        return self.groups[ready]

    def _padded(self, runs: list[Running]) -> Group:
        padding: list[int] = []
        if self.pads and runs:
            padding = sorted(self.left, key=lambda free: len(self.left[free]))[: round_up(len(runs)) - len(runs)]
        ids = (*(running.slot for running in runs), *padding)
        return Group(runs, ids, max((len(self.left[slot]) for slot in padding), default=0))

    def batch(self, device: torch.device, unread: int = 0) -> Batch | None:
        """The slots of those whose prompt is read, or None where there is nobody.

        `unread` is how many tokens a text may be longer than the host knows.
        """
        group = self.group(ready=True)
        if not group.runs:
            return None
        longest = max([running.prefilled + len(running.tokens) for running in group.runs])
        span, last = max(longest + unread, group.padded), self.last
        # Mostly the same ones as in the round before: then nothing has to be sent to the device.
        self.last = replace(last, span=span) if last and last.ids == group.ids else Batch.of(group.ids, span, device)
        return self.last


def admit(waiting: deque[Running], slots: Slots, state: State) -> list[int]:
    """Give free slots to waiting requests. Returns the slots taken."""
    taken = []
    while waiting and slots.left:
        slots.take(waiting[0])
        taken.append(waiting.popleft())
    if taken:
        _write_columns(state, taken)
    return [running.slot for running in taken]


def _write_columns(state: State, taken: list[Running]) -> None:
    """Write the columns of all new requests at once: that takes a GPU no longer than one request."""
    device, context = state.tokens.device, state.tokens.shape[1] - 1
    slots = sent([running.slot for running in taken], device)
    prompts = [running.request.prompt for running in taken]
    longest = max(map(len, prompts))
    texts = sent([prompt + (0,) * (longest - len(prompt)) for prompt in prompts], device)
    state.tokens[:, :longest].index_copy_(0, slots, texts)
    columns = [state.roots, state.lengths, state.limits, state.heeds_ends, state.speculates, state.alive_slots]
    values = sent([_values(running, context) for running in taken], device)
    for column, value in zip(columns, values.unbind(1), strict=True):
        column.index_copy_(0, slots, value.to(column.dtype))
    samplings = {running.slot: (running.request.sampling, _floor(running, context)) for running in taken}
    state.table.set_all(samplings, slots, {running.slot: running.request.stop_token_ids for running in taken})
    for running, prompt in zip(taken, prompts, strict=True):
        if running.request.sampling.repetition_penalty != 1:
            state.seen[running.slot] = torch.tensor(prompt).bincount(minlength=state.seen.shape[1]).to(state.seen)


def _values(running: Running, context: int) -> tuple[int, ...]:
    """Root, length, limit, heeds ends, speculates, alive."""
    request = running.request
    limit = min(len(request.prompt) + request.max_new_tokens, context)
    return request.prompt[-1], running.prefilled, limit, not request.ignore_eos, request.speculate, True


def _floor(running: Running, context: int) -> int:
    """The length below which end tokens and stop tokens are held back."""
    request = running.request
    return min(len(request.prompt) + request.min_new_tokens, context) if request.min_new_tokens else 0


def round_up(count: int) -> int:
    """The batch size that a round is padded to: each size is a graph to record, and an idle row costs little."""
    return 1 << (count - 1).bit_length() if count <= 64 else -(-count // 64) * 64


def _common(left: tuple[int, ...], prompt: tuple[int, ...]) -> int:
    """Tokens that both begin with; the prompt's last one is the root and stays out of the cache."""
    longest = min(len(left), len(prompt) - 1)
    return next((i for i in range(longest) if left[i] != prompt[i]), longest)

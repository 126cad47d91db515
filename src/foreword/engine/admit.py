"""ADMIT: requests -> slots. A request that enters overwrites its slot's columns and nothing else."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

import torch

from foreword.core.state import Lanes, State, sent
from foreword.engine.request import Running


@dataclass
class Slots:
    """Who sits where. A slot that was left still holds its text, which a later prompt may begin with."""

    count: int
    running: dict[int, Running] = field(default_factory=dict)
    left: dict[int, tuple[int, ...]] = field(default_factory=dict)  # oldest first
    last: dict[bool, Lanes | None] = field(default_factory=lambda: {True: None, False: None})  # by `ready`
    pads: bool = False  # rounds are captured: free slots fill them up to one of few sizes
    unsure: int = 0  # kept rows that are read again: 1 if the drafter pairs a row with the token after it
    reread: int = 0  # prompt rows that are read in any case: 1 if the drafter wants to see the row before the root

    def __post_init__(self) -> None:
        self.left = {slot: () for slot in range(self.count)}

    def take(self, running: Running) -> int:
        """The free slot to use: the one that helps most if reuse is asked for, else an empty or the oldest one."""
        prompt = running.request.prompt
        if running.request.reuse:
            slot = max(self.left, key=lambda free: _common(self.left[free], prompt))
            most = max(len(prompt) - 1 - self.reread, 0)
            kept = max(_common(self.left[slot], prompt) - self.unsure, 0)
            running.reused = running.prefilled = min(kept, most)
        else:
            slot = min(self.left, key=lambda free: len(self.left[free]) > 0)
        del self.left[slot]
        self.running[slot] = running
        running.slot = slot
        return slot

    def leave(self, slot: int, keep: bool = True) -> None:
        """Free a slot; what it holds may serve a later prompt if `keep`."""
        running = self.running.pop(slot)
        written = (*running.request.prompt, *running.tokens)
        self.left[slot] = written[: running.length] if keep else ()

    def lanes(self, device: torch.device, ready: bool, unread: int = 0) -> Lanes | None:
        """The slots whose prompt is read (or not yet), or None where there are none; behind them, what pads the round.

        `unread` is how many tokens a text may be longer than the host knows.
        """
        lengths = {slot: running.length for slot, running in self.running.items() if running.ready == ready}
        if not lengths:
            return None
        ids, span = sorted(lengths), max(lengths.values()) + unread
        if ready and self.pads:
            padding = sorted(self.left, key=lambda free: len(self.left[free]))[: round_up(len(ids)) - len(ids)]
            span = max([span, *(len(self.left[slot]) for slot in padding)])
            ids += padding
        last = self.last[ready]
        # Mostly the same ones as in the round before: then nothing has to be sent to the device.
        self.last[ready] = replace(last, span=span) if last and last.ids == tuple(ids) else Lanes.of(ids, span, device)
        return self.last[ready]


def admit(waiting: deque[Running], slots: Slots, state: State) -> list[int]:
    """Seat as many waiting requests as there are free slots; returns the slots taken."""
    taken = []
    while waiting and slots.left:
        running = waiting.popleft()
        slots.take(running)
        taken.append(running)
    if taken:
        _write_columns(state, taken)
    return [running.slot for running in taken]


def _write_columns(state: State, taken: list[Running]) -> None:
    """Everybody's at once: a GPU is told of a hundred texts as quickly as of one."""
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
    state.table.set_all({running.slot: (running.request.sampling, _floor(running, context)) for running in taken}, slots)
    for running, prompt in zip(taken, prompts, strict=True):
        if running.request.sampling.repetition_penalty != 1:
            state.seen[running.slot] = torch.tensor(prompt).bincount(minlength=state.seen.shape[1]).to(state.seen)


def _values(running: Running, context: int) -> tuple[int, ...]:
    """Root, length, limit, heeds ends, speculates, alive."""
    request = running.request
    limit = min(len(request.prompt) + request.max_new_tokens, context)
    return request.prompt[-1], running.prefilled, limit, not request.ignore_eos, request.speculate, True


def _floor(running: Running, context: int) -> int:
    """End tokens are held back until the text is that long."""
    request = running.request
    return min(len(request.prompt) + request.min_new_tokens, context) if request.min_new_tokens else 0


def round_up(count: int) -> int:
    """The sizes that rounds come in: every one of them is a graph to capture, and an idle row costs little."""
    return 1 << (count - 1).bit_length() if count <= 64 else -(-count // 64) * 64


def _common(left: tuple[int, ...], prompt: tuple[int, ...]) -> int:
    """Tokens that both begin with; the prompt's last one is the root and stays out of the cache."""
    longest = min(len(left), len(prompt) - 1)
    return next((i for i in range(longest) if left[i] != prompt[i]), longest)

"""DRAFT: a small model that never stops. It drafts in a worker of its own, on another device or alongside on the same one,
while the target verifies the draft tokens that were there when its pass began.

The small model and its weights are those of `draft_model`. Worker and target share nothing but a channel. Every draft token
carries the number of its epoch, and a rejection begins a new epoch (`methods/amusd/epochs.py`). If the worker dies, a
warning says so, and the sequences continue without drafts.
Paper: AMUSD (arXiv 2410.17375).
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast, get_args

import torch

from foreword.core.draft import Draft, Shape, Tree
from foreword.core.drafter import Drafter
from foreword.core.needs import Needs
from foreword.core.scores import Emission, Scores
from foreword.core.state import State
from foreword.core.target import Target
from foreword.drafting.small_model import FirstLayers, check_layers, check_other
from foreword.drafting.standalone import standalone_model
from foreword.errors import ForewordWarning, InputError
from foreword.methods.amusd.epochs import TargetSide, Update
from foreword.methods.amusd.worker import Worker, WorkerConfig, start_process, start_thread, stock_copy
from foreword.model.cores import ReservedCores
from foreword.model.loading import choose_device
from foreword.model.model import Model
from foreword.model.widening import NORM, layers_at
from foreword.ops.sending import sent

WorkerKind = Literal["auto", "process", "thread"]


@dataclass
class Tally:
    """Counters of both sides since the drafter was bound. Seconds are of the clock that both share."""

    rounds: int = 0  # summed over sequences
    tokens: int = 0  # decided in these rounds
    checked: int = 0  # draft tokens that the target verified
    refusals: int = 0  # rounds that decided something that the draft had not written
    dropped: int = 0  # tokens that the draft wrote in vain
    late: int = 0  # messages of an epoch that was over
    wall_s: float = 0.0
    target_s: float = 0.0  # the target was busy
    draft_s: float = 0.0  # the draft was busy
    both_s: float = 0.0  # both were busy
    waited_s: float = 0.0  # the target waited for draft tokens
    rollback_s: float = 0.0  # of waited_s: until the draft had acknowledged a rejection
    passes: int = 0  # of the draft


@dataclass
class LaunchedRound:
    """A launched round: which batch row is whose, what it decides, and on CUDA when it starts and ends."""

    waiting: dict[int, int]  # by slot
    emission: Emission
    started: torch.cuda.Event | None
    ended_at: torch.cuda.Event | None

    def wait(self) -> float | None:
        """Wait until it has finished. Returns the seconds that the device took, where events measure them."""
        if self.started is None or self.ended_at is None:
            return None
        self.ended_at.synchronize()
        return self.started.elapsed_time(self.ended_at) / 1000


def _event(device: torch.device) -> torch.cuda.Event | None:
    """An event at this point of the device's work; None on a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class Amusd(Drafter):
    paper = "AMUSD, arXiv 2410.17375"
    copies = True
    needs = Needs(prompt="all")
    captures = "check"
    wide = {"norm": NORM, **layers_at("layers")}
    module: FirstLayers

    def __init__(
        self,
        rows: int | None = None,
        layers: int = 2,
        ahead: int = 15,
        least: int = 1,
        patience: float = 1.0,
        draft_device: str | None = None,
        worker: WorkerKind = "auto",
        draft_threads: int = 1,
        model: Model | None = None,
    ) -> None:
        """`layers` and `model`: as in draft_model. The draft runs at most `ahead` tokens ahead. The target waits until
        `least` draft tokens are there, but no longer than `patience` seconds. `draft_device`: where the draft model runs;
        None: on a second GPU, or on the target's device. `worker`: a "process", or a "thread", which on CUDA has a stream
        of its own; "auto": a thread if both share a GPU. `draft_threads`: CPU threads of the draft model."""
        if ahead < 1 or least < 0 or draft_threads < 1:
            raise InputError(
                f"amusd: ahead and draft_threads are at least 1, least at least 0; got {ahead}, {draft_threads} and {least}"
            )
        if patience < 0:
            raise InputError(f"amusd: patience is {patience}; it is a number of seconds")
        if worker not in get_args(WorkerKind):
            raise InputError(f"amusd: worker is {worker!r}; choose from {', '.join(get_args(WorkerKind))}")
        self.rows, self.layers, self.ahead, self.least, self.patience = rows, layers, ahead, least, patience
        self.draft_device, self.kind, self.threads, self.other = draft_device, worker, draft_threads, model
        if layers < 1:
            raise InputError(f"amusd: layers is {layers}; a model has at least 1")
        self.config: dict[str, Any] = {"layers": layers}
        self.worker: Worker | None = None

    def build(self, target: Target) -> None:
        if self.other is None:
            check_layers("amusd", self.layers, target)
            stack = target.stack(0, self.layers, init=range(self.layers))  # the worker has a cache of its own
            self.module = FirstLayers(target, stack.layers)

    def bind(self, target: Target, slots: int) -> None:
        """The worker starts with the first request, because trained weights are loaded after `bind`."""
        self.close()
        self.target, self.slots = cast(Model, target), slots
        nodes = min(self.rows or 1 + self.ahead, 1 + self.ahead)
        self.shape = Shape(nodes, nodes - 1)
        if self.other is not None:
            check_other("amusd", self.other, target)
        self.worker_config = WorkerConfig(str(self._device()), slots, target.context, target.vocab_size, self.threads)
        here = self.worker_config.device == "cpu" == target.device.type and self.kind != "thread"
        self.cores = ReservedCores(self.threads if here else 0)  # while the target works
        self.worker_lost = False
        self.reads_late = target.device.type == "cuda"  # the host continues when a round is launched, not when it ends
        self.target_side = TargetSide(slots, self.ahead, target.context)
        self.tally, self.clock = Tally(), Clock()
        self.roots: dict[int, int] = {}  # of sequences before their first round
        self.writing: set[int] = set()  # slots that the draft may continue
        self.in_flight: LaunchedRound | None = None
        self.started: torch.cuda.Event | None = None

    def _device(self) -> torch.device:
        own = self.target.device
        if self.draft_device is not None:
            found = choose_device(self.draft_device)
            return own if found.type == own.type and found.index is None else found
        if own.type == "cuda" and torch.cuda.device_count() > 1:
            return torch.device("cuda", 1 if own.index in (None, 0) else 0)
        return own

    def close(self) -> None:
        if self.worker is not None:
            self.worker.close()
        self.worker = None

    def _start(self) -> None:
        device, kind = torch.device(self.worker_config.device), self.kind
        if kind == "auto":
            kind = "thread" if device == self.target.device and device.type == "cuda" else "process"
        here = device if kind == "thread" else torch.device("cpu")  # a process loads it to its own device
        small = standalone_model(self.target, self.module, here) if self.other is None else stock_copy(self.other).to(here)
        worker = start_thread(small, self.worker_config) if kind == "thread" else start_process(small, self.worker_config)
        worker.wait()
        self.worker = worker

    def copy(self, source: int, slot: int, rows: int) -> None:
        """Forget what the slot held: `begin` sends the worker all tokens of the new sequence."""
        self.target_side.sequences[slot] = []

    def begin(self, state: State) -> None:
        if self.worker is None and not self.worker_lost and self.shape.depth:
            self._start()
        self.clock.reset()
        if self.worker is None:
            return
        keys, temperatures = state.table.columns["key"][state.slots], state.table.columns["temperature"][state.slots]
        facts = torch.stack([state.length, state.root, state.speculates[state.slots].long(), *keys.unbind(1)], dim=1)
        for slot, temperature, (kept, root, writes, *key) in zip(
            state.batch.ids, temperatures.tolist(), facts.tolist(), strict=True
        ):
            self.end([slot])
            self._send(self.target_side.begin(slot, kept, (temperature, key[0], key[1])))
            known = len(self.target_side.sequences[slot])
            if known < kept:  # the slot holds more than the draft knows: it continued without drafts
                self._extend(slot, state.tokens[slot, known:kept].tolist(), write=False)
            if writes:
                self.roots[slot] = root

    def read(self, state: State, chunk: Draft, scores: Scores) -> None:
        if self.worker is not None:
            rows = torch.cat([chunk.size.unsqueeze(1), chunk.tokens], dim=1).tolist()
            for slot, (size, *tokens) in zip(state.batch.ids, rows, strict=True):
                self._extend(slot, tokens[:size], write=False)

    def propose(self, state: State) -> Draft:
        self._apply_last_round()
        if self.worker is None:
            return Draft.nothing(state.root)
        self.clock.finish(time.monotonic())
        for slot in [slot for slot in state.batch.ids if slot in self.roots]:
            self.writing.add(slot)
            self._extend(slot, [self.roots.pop(slot)], write=True)
        self._wait([slot for slot in state.batch.ids if slot in self.writing])
        draft = self._draft(state)
        self.clock.launch(time.monotonic())
        self.started = _event(state.slots.device)
        if self.writing:
            self.cores.reserve()
        return draft

    def decided(self, state: State, emission: Emission) -> None:
        """On CUDA the result is read when the next draft is proposed: by then the device is done, or we wait for it."""
        self.cores.release()
        if self.worker is None:
            return
        waiting = {slot: index for index, slot in enumerate(state.batch.ids) if slot in self.writing}
        self.in_flight = LaunchedRound(waiting, emission.fetched(), self.started, _event(emission.count.device))
        if not self.reads_late:
            self._apply_last_round()

    def end(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.roots.pop(slot, None)
            if self.in_flight is not None:
                self.in_flight.waiting.pop(slot, None)
            if slot in self.writing:
                self.writing.remove(slot)
                self._send(self.target_side.extend(slot, [], write=False)[0])
        self.cores.release()  # in case a round broke

    def _apply_last_round(self) -> None:
        """Tell the draft what the last round decided, unless it was told. On CUDA this waits for the round."""
        in_flight, self.in_flight = self.in_flight, None
        if in_flight is None:
            return
        device_seconds = in_flight.wait()
        self.clock.finish(time.monotonic(), device_seconds)
        self._receive(0.0)  # tokens that arrived meanwhile may be what was decided
        emission = in_flight.emission
        columns = (emission.tokens, emission.count, emission.ended, emission.broken)
        tokens, counts, ended, broken = (column.tolist() for column in columns)
        for slot, index in in_flight.waiting.items():
            over = ended[index] or broken[index]  # a sequence whose draft led to NaN continues without drafts
            if over:
                self.writing.remove(slot)
            refused = self._extend(slot, tokens[index][: counts[index]], write=not over)
            self.tally.rounds += counts[index] > 0
            self.tally.tokens += counts[index]
            self.tally.refusals += refused

    def _extend(self, slot: int, tokens: list[int], write: bool) -> bool:
        """Send decided tokens to the draft. Returns whether it had written others, or fewer."""
        update, refused = self.target_side.extend(slot, tokens, write)
        self._send(update)
        return refused

    def _send(self, update: Update) -> None:
        if self.worker is not None:
            self.worker.channel.send(update)

    def _receive(self, seconds: float) -> bool:
        """Take what the worker sent within `seconds`. Returns whether anything came."""
        if self.worker is None:
            return False
        acknowledged = self.worker.channel.receive(seconds)
        for began, ended, drafted in acknowledged:
            self.clock.drafted(began, ended)
            self.tally.passes += ended > began
            for one in drafted:
                self.tally.late += not self.target_side.receive(one)
                self.tally.dropped += one.dropped
        if self.worker.channel.closed:
            self._continue_without_worker()
        return bool(acknowledged)

    def _wait(self, slots: list[int]) -> None:
        """Wait until there are enough draft tokens, or patience is over."""
        began, until = time.monotonic(), time.monotonic() + self.patience
        reads_late = any(self.target_side.acknowledged[slot] != self.target_side.epochs[slot] for slot in slots)
        while self.worker is not None and any(self.target_side.needs_more(slot, self.least) for slot in slots):
            left = until - time.monotonic()
            if left <= 0 or not self._receive(left):
                break
            if reads_late and all(self.target_side.acknowledged[slot] == self.target_side.epochs[slot] for slot in slots):
                reads_late = False
                self.tally.rollback_s += time.monotonic() - began
        self.tally.waited_s += time.monotonic() - began

    def _draft(self, state: State) -> Draft:
        """Build the draft. Tokens and sizes go to the device in one copy."""
        sequences, count, nodes = self.target_side.sequences, len(state.batch.ids), self.shape.nodes
        rows = [self.target_side.written[slot][: nodes - 1] if slot in self.writing else [] for slot in state.batch.ids]
        self.tally.checked += sum(map(len, rows))
        numbers: list[int] = []
        for slot, row in zip(state.batch.ids, rows, strict=True):
            numbers += [*sequences[slot][-1:], *row, *[0] * nodes][:nodes]
        block = sent(numbers + [1 + len(row) for row in rows], state.slots.device)
        tokens, size = block.split([count * nodes, count])
        return Draft(tokens.view(count, nodes), Tree.chain(nodes, block.device), size)

    def _continue_without_worker(self) -> None:
        assert self.worker is not None
        reason = self.worker.exit_reason()
        self.close()
        self.worker_lost = True
        for written in self.target_side.written:
            written.clear()
        warnings.warn(
            f"amusd: the draft's worker is gone: {reason}. Outputs stay the same, without drafts; load again for a new one",
            ForewordWarning,
            stacklevel=2,
        )

    def counters(self) -> dict[str, float]:
        """Counters since it was bound: see `Tally`. `overlap` is the share of time in which both were busy."""
        self._receive(0.0)
        tally, clock = self.tally, self.clock
        tally.wall_s, tally.target_s, tally.draft_s, tally.both_s = clock.wall, clock.target, clock.draft, clock.both
        shares = {"overlap": clock.both / max(clock.wall, 1e-9), "tokens_per_verify": tally.tokens / max(tally.rounds, 1)}
        return asdict(tally) | shares


class Clock:
    """How long target and draft were busy. A span of the target lies between `launch` and `finish`; spans of the draft are
    reported later."""

    def __init__(self) -> None:
        self.wall = self.target = self.draft = self.both = 0.0
        self.launched: float | None = None
        self.returned: float | None = None
        self.spans: deque[tuple[float, float]] = deque(
            maxlen=64
        )  # of the target: the draft may still report passes during them

    def reset(self) -> None:
        """Count no time until the next round."""
        self.launched = self.returned = None

    def launch(self, now: float) -> None:
        """The target starts a pass."""
        if self.returned is not None:
            self.wall += now - self.returned
        self.launched, self.returned = now, None

    def finish(self, now: float, device_seconds: float | None = None) -> None:
        """The target has finished, if it was busy. `device_seconds`: how long the pass took, if the device measured it."""
        if self.launched is not None:
            ended_at = now if device_seconds is None else min(now, self.launched + device_seconds)
            self.spans.append((self.launched, ended_at))
            self.target += ended_at - self.launched
            self.wall += now - self.launched
            self.launched = None
        self.returned = self.returned or now

    def drafted(self, began: float, ended: float) -> None:
        """The draft reports a pass, in order."""
        self.draft += ended - began
        while self.spans and self.spans[0][1] < began and ended > began:
            self.spans.popleft()
        self.both += sum(max(0.0, min(ended, stop) - max(began, start)) for start, stop in self.spans)

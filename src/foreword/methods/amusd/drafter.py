"""DRAFT: a small model that never stops. It writes on in a worker of its own, on another device or another part of this one,
while the target checks what was there when it began.

The small model and its weights are those of `draft_model`. Worker and target share nothing but a line; every guess bears
the number of the epoch it belongs to, and what is refused begins another (`methods/amusd/epochs.py`). A worker that dies is
missed, said so, and not needed: the texts go on without guesses.
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
from foreword.methods.amusd.epochs import News, Teller
from foreword.methods.amusd.worker import Place, Worker, alone, in_a_process, in_a_thread
from foreword.model.cores import ReservedCores
from foreword.model.loading import choose_device
from foreword.model.model import Model
from foreword.model.widening import NORM, layers_at
from foreword.ops.sending import sent

Kind = Literal["auto", "process", "thread"]


@dataclass
class Tally:
    """What both did since the drafter was bound. Seconds are of the clock that both share."""

    rounds: int = 0  # of each text
    tokens: int = 0  # that these decided
    checked: int = 0  # guesses that the target was handed
    refusals: int = 0  # rounds that decided what the draft had not written
    dropped: int = 0  # tokens that the draft wrote for nothing
    late: int = 0  # messages of an epoch that was over
    wall_s: float = 0.0
    target_s: float = 0.0  # the target was at work
    draft_s: float = 0.0  # the draft was
    both_s: float = 0.0  # both were
    waited_s: float = 0.0  # the target waited for guesses
    rollback_s: float = 0.0  # of that: until the draft had heard of a refusal
    passes: int = 0  # of the draft


@dataclass
class Away:
    """A launched round: which batch row is whose, what it decides, and on CUDA when it starts and ends."""

    waiting: dict[int, int]  # by slot
    emission: Emission
    set_out: torch.cuda.Event | None
    back: torch.cuda.Event | None

    def wait(self) -> float | None:
        """Until it is back; the seconds that the device took for it."""
        if self.set_out is None or self.back is None:
            return None
        self.back.synchronize()
        return self.set_out.elapsed_time(self.back) / 1000


def _event(device: torch.device) -> torch.cuda.Event | None:
    """Where the device's work is now."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class Amusd(Drafter):
    paper = "AMUSD, arXiv 2410.17375"
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
        worker: Kind = "auto",
        draft_threads: int = 1,
        model: Model | None = None,
    ) -> None:
        """`layers` and `model`: as of draft_model. The draft runs at most `ahead` tokens ahead. The target waits until
        `least` guesses are there, but no longer than `patience` seconds. `draft_device`: where the draft is written; None:
        on a second GPU, or where the target is. `worker`: a process, or a thread, which on CUDA has a stream of its own;
        "auto": a thread where both share a GPU. `draft_threads`: of the CPU."""
        if ahead < 1 or least < 0 or draft_threads < 1:
            raise InputError(
                f"amusd: ahead and draft_threads are 1 at least, least 0, got {ahead}, {draft_threads} and {least}"
            )
        if patience < 0:
            raise InputError(f"amusd: patience is {patience}; it is a number of seconds")
        if worker not in get_args(Kind):
            raise InputError(f"amusd: worker is {worker!r}; choose from {', '.join(get_args(Kind))}")
        self.rows, self.layers, self.ahead, self.least, self.patience = rows, layers, ahead, least, patience
        self.wanted, self.kind, self.threads, self.other = draft_device, worker, draft_threads, model
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
        """The worker starts with the first request: by then the weights are those that were trained."""
        self.close()
        self.target, self.slots = cast(Model, target), slots
        nodes = min(self.rows or 1 + self.ahead, 1 + self.ahead)
        self.shape = Shape(nodes, nodes - 1)
        if self.other is not None:
            check_other("amusd", self.other, target)
        self.place = Place(str(self._device()), slots, target.context, target.vocab_size, self.threads)
        here = self.place.device == "cpu" == target.device.type and self.kind != "thread"
        self.cores = ReservedCores(self.threads if here else 0)  # while the target is away
        self.lost = False
        self.behind = target.device.type == "cuda"  # a round has only been launched when the host goes on
        self.teller = Teller(slots, self.ahead, target.context)
        self.tally, self.clock = Tally(), Clock()
        self.roots: dict[int, int] = {}  # of texts whose first round is yet to come
        self.writing: set[int] = set()  # slots whose texts the draft may write on
        self.away: Away | None = None
        self.set_out: torch.cuda.Event | None = None

    def _device(self) -> torch.device:
        own = self.target.device
        if self.wanted is not None:
            found = choose_device(self.wanted)
            return own if found.type == own.type and found.index is None else found
        if own.type == "cuda" and torch.cuda.device_count() > 1:
            return torch.device("cuda", 1 if own.index in (None, 0) else 0)
        return own

    def close(self) -> None:
        if self.worker is not None:
            self.worker.close()
        self.worker = None

    def _start(self) -> None:
        device, kind = torch.device(self.place.device), self.kind
        if kind == "auto":
            kind = "thread" if device == self.target.device and device.type == "cuda" else "process"
        here = device if kind == "thread" else torch.device("cpu")  # a process loads it to where it belongs
        small = standalone_model(self.target, self.module, here) if self.other is None else alone(self.other).to(here)
        worker = in_a_thread(small, self.place) if kind == "thread" else in_a_process(small, self.place)
        worker.wait()
        self.worker = worker

    def begin(self, state: State) -> None:
        if self.worker is None and not self.lost and self.shape.depth:
            self._start()
        self.clock.rest()
        if self.worker is None:
            return
        keys, heat = state.table.columns["key"][state.slots], state.table.columns["temperature"][state.slots]
        facts = torch.stack([state.length, state.root, state.speculates[state.slots].long(), *keys.unbind(1)], dim=1)
        for slot, warm, (kept, root, writes, *key) in zip(state.batch.ids, heat.tolist(), facts.tolist(), strict=True):
            self.end([slot])
            self._say(self.teller.begin(slot, kept, (warm, key[0], key[1])))
            known = len(self.teller.texts[slot])
            if known < kept:  # the slot holds more than was told: its text went on without guesses, or one round longer
                self._grew(slot, state.tokens[slot, known:kept].tolist(), write=False)
            if writes:
                self.roots[slot] = root

    def read(self, state: State, chunk: Draft, scores: Scores) -> None:
        if self.worker is not None:
            rows = torch.cat([chunk.size.unsqueeze(1), chunk.tokens], dim=1).tolist()
            for slot, (size, *tokens) in zip(state.batch.ids, rows, strict=True):
                self._grew(slot, tokens[:size], write=False)

    def propose(self, state: State) -> Draft:
        self._settle()
        if self.worker is None:
            return Draft.nothing(state.root)
        self.clock.meet(time.monotonic())
        for slot in [slot for slot in state.batch.ids if slot in self.roots]:
            self.writing.add(slot)
            self._grew(slot, [self.roots.pop(slot)], write=True)
        self._wait([slot for slot in state.batch.ids if slot in self.writing])
        draft = self._draft(state)
        self.clock.part(time.monotonic())
        self.set_out = _event(state.slots.device)
        if self.writing:
            self.cores.reserve()
        return draft

    def decided(self, state: State, emission: Emission) -> None:
        """On CUDA it is told when the next draft is wanted: by then the device has come this far, or is waited for."""
        self.cores.release()
        if self.worker is None:
            return
        waiting = {slot: index for index, slot in enumerate(state.batch.ids) if slot in self.writing}
        self.away = Away(waiting, emission.fetched(), self.set_out, _event(emission.count.device))
        if not self.behind:
            self._settle()

    def end(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.roots.pop(slot, None)
            if self.away is not None:
                self.away.waiting.pop(slot, None)
            if slot in self.writing:
                self.writing.remove(slot)
                self._say(self.teller.grew(slot, [], write=False)[0])
        self.cores.release()  # should a round have broken

    def _settle(self) -> None:
        """What the round before decided, if it was not told yet. On CUDA this waits for it, once a round."""
        away, self.away = self.away, None
        if away is None:
            return
        worked = away.wait()
        self.clock.meet(time.monotonic(), worked)
        self._listen(0.0)  # what came meanwhile may be just what was decided
        emission = away.emission
        columns = (emission.tokens, emission.count, emission.ended, emission.broken)
        tokens, counts, ended, broken = (column.tolist() for column in columns)
        for slot, index in away.waiting.items():
            over = ended[index] or broken[index]  # a text whose draft led to NaN goes on without guesses
            if over:
                self.writing.remove(slot)
            refused = self._grew(slot, tokens[index][: counts[index]], write=not over)
            self.tally.rounds += counts[index] > 0
            self.tally.tokens += counts[index]
            self.tally.refusals += refused

    def _grew(self, slot: int, tokens: list[int], write: bool) -> bool:
        """Whether the draft had written otherwise, or not so far."""
        news, refused = self.teller.grew(slot, tokens, write)
        self._say(news)
        return refused

    def _say(self, news: News) -> None:
        if self.worker is not None:
            self.worker.line.say(news)

    def _listen(self, seconds: float) -> bool:
        """Whether anything came."""
        if self.worker is None:
            return False
        heard = self.worker.line.hear(seconds)
        for began, ended, guesses in heard:
            self.clock.drafted(began, ended)
            self.tally.passes += ended > began
            for one in guesses:
                self.tally.late += not self.teller.hear(one)
                self.tally.dropped += one.dropped
        if self.worker.line.cut:
            self._go_on_alone()
        return bool(heard)

    def _wait(self, slots: list[int]) -> None:
        """Until there are guesses enough; as long as they come in time."""
        began, until = time.monotonic(), time.monotonic() + self.patience
        behind = any(self.teller.heard[slot] != self.teller.epochs[slot] for slot in slots)
        while self.worker is not None and any(self.teller.wants(slot, self.least) for slot in slots):
            left = until - time.monotonic()
            if left <= 0 or not self._listen(left):
                break
            if behind and all(self.teller.heard[slot] == self.teller.epochs[slot] for slot in slots):
                behind = False
                self.tally.rollback_s += time.monotonic() - began
        self.tally.waited_s += time.monotonic() - began

    def _draft(self, state: State) -> Draft:
        """Tokens and sizes go to the device in one copy."""
        texts, count, nodes = self.teller.texts, len(state.batch.ids), self.shape.nodes
        rows = [self.teller.written[slot][: nodes - 1] if slot in self.writing else [] for slot in state.batch.ids]
        self.tally.checked += sum(map(len, rows))
        numbers: list[int] = []
        for slot, row in zip(state.batch.ids, rows, strict=True):
            numbers += [*texts[slot][-1:], *row, *[0] * nodes][:nodes]
        block = sent(numbers + [1 + len(row) for row in rows], state.slots.device)
        tokens, size = block.split([count * nodes, count])
        return Draft(tokens.view(count, nodes), Tree.chain(nodes, block.device), size)

    def _go_on_alone(self) -> None:
        assert self.worker is not None
        told = self.worker.fate()
        self.close()
        self.lost = True
        for written in self.teller.written:
            written.clear()
        warnings.warn(
            f"amusd: the draft's worker is gone: {told}. Texts go on without guesses, unchanged; load again for new ones",
            ForewordWarning,
            stacklevel=2,
        )

    def counters(self) -> dict[str, float]:
        """Since it was bound; see `Tally`. Overlap is the share of the time in which both were busy."""
        self._listen(0.0)
        tally, clock = self.tally, self.clock
        tally.wall_s, tally.target_s, tally.draft_s, tally.both_s = clock.wall, clock.target, clock.draft, clock.both
        shares = {"overlap": clock.both / max(clock.wall, 1e-9), "tokens_per_verify": tally.tokens / max(tally.rounds, 1)}
        return asdict(tally) | shares


class Clock:
    """When target and draft were at work. The target's spans lie between `part` and `meet`; the draft's are told later."""

    def __init__(self) -> None:
        self.wall = self.target = self.draft = self.both = 0.0
        self.parted: float | None = None
        self.met: float | None = None
        self.spans: deque[tuple[float, float]] = deque(maxlen=64)  # of the target: the draft may not have told all of them

    def rest(self) -> None:
        """Nobody is asked for anything until the next round."""
        self.parted = self.met = None

    def part(self, now: float) -> None:
        """The target sets out on a pass."""
        if self.met is not None:
            self.wall += now - self.met
        self.parted, self.met = now, None

    def meet(self, now: float, worked: float | None = None) -> None:
        """It is back, if it was away. `worked`: for so many seconds from its setting out, where that is known better."""
        if self.parted is not None:
            back = now if worked is None else min(now, self.parted + worked)
            self.spans.append((self.parted, back))
            self.target += back - self.parted
            self.wall += now - self.parted
            self.parted = None
        self.met = self.met or now

    def drafted(self, began: float, ended: float) -> None:
        """A pass of the draft; they are told in their order."""
        self.draft += ended - began
        while self.spans and self.spans[0][1] < began and ended > began:
            self.spans.popleft()
        self.both += sum(max(0.0, min(ended, stop) - max(began, start)) for start, stop in self.spans)

"""Engine: requests in, tokens out. Sequences enter and leave at any round; each has its own slot, length and sampling."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Iterable
from dataclasses import replace

import torch

from foreword.core.drafter import Drafter
from foreword.core.loop import Loop
from foreword.core.sampling import Sampling
from foreword.core.state import Batch, State
from foreword.engine.admit import Slots, admit
from foreword.engine.ctrl_c import HeldBack
from foreword.engine.emit import Launched, all_events, emit
from foreword.engine.graph import graphed
from foreword.engine.lockstep import Lockstep
from foreword.engine.prefill import parted, prefill
from foreword.engine.request import Event, Request, Room, Running
from foreword.engine.warm_up import capture_rounds
from foreword.errors import ForewordWarning, InputError
from foreword.model.model import Model
from foreword.ops.device import joins_prompts, prefill_chunk, reads_late, replays_graphs
from foreword.ops.sending import sent


class Engine:
    def __init__(
        self,
        target: Model,
        drafter: Drafter,
        slots: int = 4,
        max_context: int | None = None,
        chunk: int | None = None,
        loop: Loop | None = None,
        graph: bool = True,
        late: bool | None = None,
    ) -> None:
        """The drafter is bound first: its shape says how many scratch rows the cache needs.

        `graph`: replay rounds on a CUDA device as captured graphs. `late`: read a round while the next one runs, which
        is what a GPU wants; a CPU has nothing to do meanwhile.
        """
        self.target, self.drafter = target, drafter
        self.max_context = _checked_context(max_context, target)
        self.chunk = prefill_chunk(target.device) if chunk is None else chunk
        _check_positive(slots=slots, chunk=self.chunk)
        self.room = Room(self.max_context, target.max_context, target.vocab_size, frozenset(target.ends.tolist()))
        target.limit_context(self.max_context)
        drafter.prepare(target, slots)
        scratch = drafter.shape.nodes + drafter.needs.grafted_rows
        cache = target.allocate(slots, self.max_context, scratch)
        self.loop: Loop = loop or Lockstep(target, drafter)
        if graph and replays_graphs(target.device):
            self.loop = graphed(self.loop, drafter.captures)
        self.late = reads_late(target.device) if late is None else late
        self.together = joins_prompts(target.device)
        self.unread: Launched | None = None
        needs = drafter.needs
        self.slots = Slots(slots, pads=self.loop.captured, unsure=int(needs.follower), reread=int(needs.prompt != "none"))
        self.waiting: deque[Running] = deque()
        self.state = State.empty(slots, self.max_context, cache.length, target.ends, target.vocab_size)
        self.clock = 0.0  # seconds spent in rounds, which is what texts are timed by
        self._ends = set(target.ends.tolist())

    def add(self, request: Request) -> Running:
        """Queue a request; it enters when a slot is free."""
        running = self.checked(request)
        self.queue([running])
        return running

    def checked(self, request: Request) -> Running:
        """A request that this engine can serve, not queued yet. Any thread may ask: nothing of the engine changes."""
        self.room.check(request)
        return Running(replace(request, sampling=request.sampling.seeded()))

    def queue(self, runs: Iterable[Running]) -> None:
        """Queue what `checked` gave."""
        for running in runs:
            if running.request.sampling.repetition_penalty != 1:
                self._count_tokens()
            self.waiting.append(running)

    def _count_tokens(self) -> None:
        """Make room for how often each token stands in each sequence, which only penalties need."""
        if self.state.seen.shape[1] == 0:
            counts = torch.zeros(self.slots.count, self.target.vocab_size, dtype=torch.int32, device=self.target.device)
            self.state = replace(self.state, seen=counts)

    def abort(self, *given: Running) -> None:
        """Give requests up, wherever they stand."""
        gone = dict.fromkeys(given)  # once, though a step that broke may have left one waiting and seated
        with HeldBack():
            for running in gone:
                if not running.done:
                    running.finish_reason = "abort"
            if self.waiting:
                self.waiting = deque(running for running in self.waiting if running not in gone)
            self._release([running for running in gone if self.slots.running.get(running.slot) is running])

    def warm_up(self, shortest: int = 2, longest: int | None = None, sampling: Sampling | None = None) -> None:
        """Record on CUDA what sequences of `shortest` to `longest` tokens will need, so that the first of them waits for
        nothing; None: up to the whole context. It takes seconds to minutes. Elsewhere there is nothing to record."""
        capture_rounds(self, shortest, longest or self.max_context, sampling)

    def give_up(self) -> None:
        """Abort everything, before the cache goes away or to another engine."""
        self.abort(*self.waiting, *self.slots.running.values())

    def take_berth(self) -> None:
        """Where its cache lies in memory that engines share: before it writes again, when another may have written there."""
        assert not self.busy, "texts under way would be lost"
        if self.target.cache.claim():
            self.slots.forget()

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.slots.running)

    def step(self) -> list[Event]:
        """Admit, read a chunk or two of each new prompt, then one round for everybody whose prompt is read.

        A request that fails has its event too, with the reason in `running.error`; the others go on."""
        if self.unread is not None and len(self.unread.emissions) > 1:
            raise InputError("rounds that step_for launched together are read by step_for; call it once more before step")
        read, told = self.advance()
        return [] if read is None else all_events(read, told)

    def step_for(self, wanted: Iterable[Running], rounds: int = 1) -> list[Running]:
        """A step on behalf of some requests; returns whoever it ended. What breaks another request than the wanted ones is
        raised for those who wait for that. Of several `rounds` the host reads all at once, which with hundreds of texts is
        what it has time for; who ends in one of them rests in the others."""
        _, told = self.advance(rounds)
        for one in wanted:
            if one.error:
                raise one.error
        return [running for running in told if running.done]

    @torch.inference_mode()
    def advance(self, rounds: int = 1) -> tuple[Launched | None, dict[Running, Event]]:
        """The step itself, with that many rounds. Gives the rounds that the host read, and the events that they brought;
        errors are in the requests."""
        with HeldBack():
            return self._completed(rounds)

    def _completed(self, rounds: int) -> tuple[Launched | None, dict[Running, Event]]:
        """A step that completes, or gives all requests up. Ctrl-C is held back around it, in a function of its own: a line
        between the two could break off with Ctrl-C still held back."""
        try:
            self._admit()
            self._prefill()
            return self._round(rounds)
        except BaseException as error:
            self._break_off(error)
            raise

    def _break_off(self, error: BaseException) -> None:
        """A step broke half-way, for want of memory perhaps: how far a text has come nobody can tell, nor what of a round is
        captured."""
        for running in (*self.slots.running.values(), *self.waiting):
            running.finish_reason, running.error = "abort", error  # of one that had just ended, not all may have been told
        try:
            self.give_up()
        finally:
            self.unread = None
            self.loop.forget()

    def _admit(self) -> None:
        taken = admit(self.waiting, self.slots, self.state)  # PROMPT
        for slot in taken:
            self.slots.running[slot].began = self.clock
        if taken:
            self.loop.begin(self.state.at(Batch.of(taken, self._span(taken), self.target.device)))

    def generate(self, requests: Iterable[Request]) -> list[Running]:
        """Run requests to their ends, in their order."""
        running = [self.checked(request) for request in requests]  # all or nothing: what waits is written by the next call
        try:
            self.queue(running)
            for one in running:
                while not one.done:
                    self.step_for(running)
        finally:
            self.abort(*running)
        return running

    def _prefill(self) -> None:
        """A chunk of each new prompt. Where rounds are captured, another behind it: one that is missing from a round, and
        that no free slot stands in for, makes it a round of a size that was not captured."""
        for _ in range(2 if self.slots.pads else 1):
            entering = self.slots.group(ready=False).runs
            if not entering:
                return
            for part in parted(entering, self.loop, self.chunk, self.together):
                self._read(part)

    def _read(self, part: list[Running]) -> None:
        ids = [running.slot for running in part]
        started = time.perf_counter()
        state = self.state.at(Batch.of(ids, self._span(ids), self.target.device))
        prefill(self.target, self.loop, self.drafter.needs, state, part, self.chunk)
        for running in part:
            running.prefill_s += time.perf_counter() - started
            running.began = self.clock

    def _round(self, rounds: int) -> tuple[Launched | None, dict[Running, Event]]:
        started = time.perf_counter()
        launched = self._launch(rounds)
        read, self.unread = (self.unread, launched) if self.late else (launched, None)
        told = emit(read, self._ends) if read is not None else {}  # EMIT
        self.clock += time.perf_counter() - started
        self._release([running for running in told if running.done], 1 if read is None else len(read.emissions))
        for running in told:
            if not running.done and running.spoiled and self.state.speculates[running.slot]:
                self._go_on_alone(running)
        return read, told

    def _go_on_alone(self, running: Running) -> None:
        """A guess made the target answer NaN. The text must not depend on guesses, so it goes on without them."""
        self.state.speculates[running.slot] = False
        self.target.cache.wipe_scratch(running.slot)
        warnings.warn(
            f"{self.target.name} answered NaN to a draft; this text goes on without speculation. A wider dtype helps",
            ForewordWarning,
            stacklevel=2,
        )

    def _launch(self, rounds: int) -> Launched | None:
        """Rounds of everybody whose prompt is read."""
        batch = self.slots.batch(self.target.device, self._unread)
        if batch is None:
            return None
        launched = Launched(self.slots.group(ready=True).runs)
        for before in range(rounds):
            span = min(batch.span + before * self._most, self.max_context)
            launched.take(self.loop.round(self.state.at(replace(batch, span=span))))
        return launched

    @property
    def _unread(self) -> int:
        """How many tokens a text may be longer than the host knows."""
        return 0 if self.unread is None else len(self.unread.emissions) * self._most

    @property
    def _most(self) -> int:
        """Tokens that a round may bring a text."""
        return self.drafter.shape.depth + 1

    def _release(self, finished: list[Running], read: int = 1) -> None:
        """Free slots, after so many rounds were read at once, in any of which a text may have ended. One that was given up
        may have left NaN in its rows, which must not reach the next."""
        if not finished:
            return
        sound = [False] * len(finished)
        try:
            sound = self._let_go(finished, (read - 1) * self._most + self._unread)
        finally:  # also where the device had no memory left to look at them
            for running, fine in zip(finished, sound, strict=True):
                running.decode_s = self.clock - running.began if running.ready else 0.0
                self.state.table.forget(running.slot)
                self.slots.leave(running.slot, keep=fine)

    def _let_go(self, finished: list[Running], beyond: int) -> list[bool]:
        """Of each text whether what the cache holds may stay. On the device they may be so many tokens longer."""
        ids = [running.slot for running in finished]
        slots = sent(ids, self.target.device)
        self.state.alive_slots.index_fill_(0, slots, False)
        self.loop.end(ids)
        sound = [self._clear(running, beyond) for running in finished]
        if self.slots.pads:  # what a padding row writes must not touch what is kept, nor look beyond it
            kept = [running.length * fine for running, fine in zip(finished, sound, strict=True)]
            self.state.lengths.index_copy_(0, slots, sent(kept, self.target.device))
        return sound

    def _clear(self, running: Running, beyond: int) -> bool:
        """Whether what the cache holds of a text may stay, which on the device may be so many tokens longer."""
        cache = self.target.cache
        scratch, ahead = cache.rows - cache.context, running.length + beyond
        if beyond:  # rounds behind its end, read or under way, write what nobody will read, NaN too
            cache.wipe(running.slot, running.length, ahead + scratch)
        sound = running.finish_reason != "abort" or cache.is_sound(running.slot, ahead + max(self.chunk, scratch))
        if not sound:
            cache.wipe(running.slot)
        return sound

    def _span(self, ids: Iterable[int]) -> int:
        return max(self.slots.running[slot].length for slot in ids)


def _checked_context(wanted: int | None, target: Model) -> int:
    if wanted is None:
        return min(target.max_context, 4096)
    _check_positive(max_context=wanted)
    if wanted > target.max_context:
        raise InputError(
            f"max_context is {wanted}, but {target.name} was trained for {target.max_context} positions; ask for no more"
        )
    return wanted


def _check_positive(**values: int) -> None:
    for name, value in values.items():
        if type(value) is not int or value < 1:
            raise InputError(f"{name} is {value!r}; it must be a whole number, 1 or more")

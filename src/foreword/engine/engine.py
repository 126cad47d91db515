"""Engine: requests in, tokens out. Requests enter and leave at any round; each has its own slot, length and sampling."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Iterable
from dataclasses import replace

import torch

from foreword.core.drafter import Drafter
from foreword.core.loop import InTurns, Loop
from foreword.core.sampling import Sampling
from foreword.core.state import Batch, State
from foreword.engine.admit import Slots, admit
from foreword.engine.ctrl_c import DelayedCtrlC
from foreword.engine.emit import Launched, all_events, emit
from foreword.engine.grammar import Grammars
from foreword.engine.graph import graphed
from foreword.engine.lockstep import Lockstep
from foreword.engine.pipeline import Pipeline
from foreword.engine.prefill import prefill, prompt_groups
from foreword.engine.request import EngineLimits, Event, Request, Running
from foreword.engine.warm_up import capture_rounds
from foreword.errors import ForewordWarning, InputError
from foreword.model.model import Model
from foreword.ops.device import joins_prompts, prefill_chunk, reads_late, replays_graphs
from foreword.ops.sending import sent
from foreword.ranks.group import fail
from foreword.text.grammar import GrammarCompiler


class Engine:
    def __init__(
        self,
        target: Model,
        drafter: Drafter,
        slots: int = 4,
        max_context: int | None = None,
        chunk: int | None = None,
        loop: InTurns | None = None,
        graph: bool = True,
        late: bool | None = None,
        compiler: GrammarCompiler | None = None,
    ) -> None:
        """Bind the drafter, whose shape decides how many scratch rows the cache needs, then allocate the cache.

        `chunk`: the most prompt rows per sequence and pass. `graph`: replay rounds on a CUDA device as captured graphs.
        `late`: read a round while the next one runs, which keeps a GPU busy; on a CPU nothing could run meanwhile.
        `compiler`: of grammars, for the target's vocabulary; None: requests with a grammar are refused.
        """
        self.target, self.drafter = target, drafter
        self.max_context = _checked_context(max_context, target)
        self.chunk = prefill_chunk(target.device) if chunk is None else chunk
        _check_positive(slots=slots, chunk=self.chunk)
        self.limits = EngineLimits(self.max_context, target.max_context, target.vocab_size, frozenset(target.ends.tolist()))
        target.limit_context(self.max_context)
        drafter.prepare(target, slots)
        cache = target.allocate(slots, self.max_context, drafter.scratch)
        eager = loop or _loop_of(target, drafter)
        self.loop: Loop = graphed(eager, drafter.captures) if graph and replays_graphs(target.device) else eager
        self.late = reads_late(target.device) if late is None else late
        self.joins_prompts = joins_prompts(target.device)
        self.unread: Launched | None = None
        self.slots = Slots(slots, drafter.needs, drafter.copies, pads=self.loop.captured, predicts=drafter.predicts)
        self.waiting: deque[Running] = deque()
        self.state = State.empty(slots, self.max_context, cache.length, target.ends, target.vocab_size)
        self.grammars = Grammars(compiler, target.vocab_size)
        self.clock = 0.0  # seconds spent in rounds; requests are timed by it
        self._ends = set(target.ends.tolist())

    def add(self, request: Request) -> Running:
        """Queue a request. It enters when a slot is free."""
        running = self.checked(request)
        self.queue([running])
        return running

    def checked(self, request: Request) -> Running:
        """Check that this engine can serve a request, without queueing it. Any thread may call this: the engine does not
        change."""
        self.limits.check(request)
        if request.grammar is not None:
            self.grammars.check(request.grammar)
        return Running(replace(request, sampling=request.sampling.seeded()))

    def queue(self, runs: Iterable[Running]) -> None:
        """Queue requests that `checked` returned."""
        for running in runs:
            if running.request.sampling.repetition_penalty != 1:
                self._count_tokens()
            self.waiting.append(running)

    def _count_tokens(self) -> None:
        """Allocate the counts of each token in each sequence, which only penalties need."""
        if self.state.seen.shape[1] == 0:
            counts = torch.zeros(self.slots.count, self.target.vocab_size, dtype=torch.int32, device=self.target.device)
            self.state = replace(self.state, seen=counts)

    def abort(self, *given: Running) -> None:
        """Abort requests, waiting or running."""
        gone = dict.fromkeys(given)  # each once, though a broken step may have left one both waiting and in a slot
        with DelayedCtrlC():
            for running in gone:
                if not running.done:
                    running.finish_reason = "abort"
            if self.waiting:
                self.waiting = deque(running for running in self.waiting if running not in gone)
            self._release([running for running in gone if self.slots.running.get(running.slot) is running])

    def warm_up(self, shortest: int = 2, longest: int | None = None, sampling: Sampling | None = None) -> None:
        """Record on CUDA the graphs that sequences of `shortest` to `longest` tokens need, so that no request waits for a
        recording. None: up to the whole context. It takes seconds to minutes. Other devices record nothing."""
        capture_rounds(self, shortest, longest or self.max_context, sampling)

    def give_up(self) -> None:
        """Abort all requests, before the cache is freed or passed to another engine."""
        self.abort(*self.waiting, *self.slots.running.values())

    def claim_cache(self) -> None:
        """Claim the shared cache memory; forget what free slots hold if another engine used it."""
        assert not self.busy, "running requests would be lost"
        if self.target.cache.claim():
            self.slots.forget()

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.slots.running)

    def step(self) -> list[Event]:
        """Admit requests, read a chunk or two of each new prompt, then run one round for all whose prompt is read.

        A request that fails has an event too, with the reason in `running.error`; the others continue."""
        if self.unread is not None and len(self.unread.emissions) > 1:
            raise InputError("rounds that step_for launched together are read by step_for; call it once more before step")
        read, events = self.advance()
        return [] if read is None else all_events(read, events)

    def step_for(self, awaited: Iterable[Running], rounds: int = 1) -> list[Running]:
        """Run a step on behalf of some requests, and return all that it ended. An error is raised only if it is of an
        awaited request. With several `rounds` the host reads all of them at once, to save its time when hundreds of requests
        run; a request that ends in one of them stays idle in the rest."""
        _, events = self.advance(rounds)
        for one in awaited:
            if one.error:
                raise one.error
        return [running for running in events if running.done]

    @torch.inference_mode()
    def advance(self, rounds: int = 1) -> tuple[Launched | None, dict[Running, Event]]:
        """Run a step with that many rounds. Return the rounds that the host read, and their events; errors are in the
        requests."""
        with DelayedCtrlC():
            return self._complete_step(rounds)

    def _complete_step(self, rounds: int) -> tuple[Launched | None, dict[Running, Event]]:
        """Complete a step, or abort all requests. It is a function of its own, so that no line lies between `DelayedCtrlC`
        and the `try`: an interrupt in such a line could leave Ctrl-C delayed."""
        try:
            self._admit()
            self._prefill()
            return self._round(rounds)
        except BaseException as error:
            self._abort_all(error)
            raise

    def _abort_all(self, error: BaseException) -> None:
        """Abort all requests after a step broke half-way, for lack of memory perhaps: their lengths are unknown, and a graph
        may be half recorded. With several ranks all of them end: those that wait in a sum cannot be called back."""
        fail(error)
        for running in (*self.slots.running.values(), *self.waiting):
            running.finish_reason, running.error = "abort", error  # even one that just ended: its output may be incomplete
        try:
            self.give_up()
        finally:
            self.unread = None
            self.loop.forget()

    def _admit(self) -> None:
        taken = admit(self.waiting, self.slots, self.state, self.loop.copy)  # PROMPT
        for slot in taken:
            self.slots.running[slot].began = self.clock
            self.grammars.begin(slot, self.slots.running[slot].request.grammar)
        if taken:
            self.loop.begin(self.state.at(Batch.of(taken, self._span(taken), self.target.device)))

    def generate(self, requests: Iterable[Request]) -> list[Running]:
        """Run requests until all are done, and return them in their order."""
        running = [self.checked(request) for request in requests]  # check all before any is queued
        try:
            self.queue(running)
            for one in running:
                while not one.done:
                    self.step_for(running)
        finally:
            self.abort(*running)
        return running

    def _prefill(self) -> None:
        """Read a chunk of each new prompt. If rounds are captured, read a second one, so that more requests join the next
        round: if no free slot can take the place of a missing one, the round has a size that was not captured."""
        for _ in range(2 if self.slots.pads else 1):
            entering = self.slots.group(ready=False).runs
            if not entering:
                return
            for group in prompt_groups(entering, self.loop, self.chunk, self.joins_prompts):
                self._read(group)

    def _read(self, group: list[Running]) -> None:
        ids = [running.slot for running in group]
        started = time.perf_counter()
        state = self.state.at(Batch.of(ids, self._span(ids), self.target.device))
        prefill(self.target, self.loop, self.drafter.needs, state, group, self.chunk)
        for running in group:
            running.prefill_s += time.perf_counter() - started
            running.began = self.clock

    def _round(self, rounds: int) -> tuple[Launched | None, dict[Running, Event]]:
        started = time.perf_counter()
        read = self._launch_and_take(rounds)
        events = emit(read, self._ends, self.grammars) if read is not None else {}  # EMIT
        self.clock += time.perf_counter() - started
        self._release([running for running in events if running.done], 1 if read is None else len(read.emissions))
        for running in events:
            if not running.done and running.draft_was_nan and self.state.speculates[running.slot]:
                self._stop_speculating(running)
        return read, events

    def _launch_and_take(self, rounds: int) -> Launched | None:
        """Launch rounds, and return those that the host reads now. A matcher reads the tokens of a round before the next
        draft, so a round with a grammar is read at once, and launched when nothing is unread."""
        if self._constrained:
            launched, self.unread = self.unread or self._launch(1), None
            return launched
        launched = self._launch(rounds)
        read, self.unread = (self.unread, launched) if self.late else (launched, None)
        return read

    @property
    def _constrained(self) -> bool:
        """Whether a request of the next round has a grammar."""
        return bool(self.grammars.matchers) and self.state.table.kind(self.slots.group(ready=True).ids).grammar

    def _stop_speculating(self, running: Running) -> None:
        """Continue a request without drafts after the target answered NaN to one: its output must not depend on drafts."""
        self.state.speculates[running.slot] = False
        self.target.cache.wipe_scratch(running.slot)
        self.loop.restart([running.slot])
        warnings.warn(
            f"{self.target.name} answered NaN to a draft; this request continues without speculation. A wider dtype helps",
            ForewordWarning,
            stacklevel=2,
        )

    def _launch(self, rounds: int) -> Launched | None:
        """Launch rounds for all requests whose prompt is read."""
        batch = self.slots.batch(self.target.device, self._unread)
        if batch is None:
            return None
        launched = Launched(self.slots.group(ready=True).runs)
        constrain = self.grammars.constrain if self._constrained else None
        for before in range(rounds):
            span = min(batch.span + before * self._most, self.max_context)
            launched.take(self.loop.round(self.state.at(replace(batch, span=span)), constrain))
        return launched

    @property
    def _unread(self) -> int:
        """By how many tokens a sequence on the device may be longer than the host knows."""
        return 0 if self.unread is None else len(self.unread.emissions) * self._most

    @property
    def _most(self) -> int:
        """The most tokens that a round may append to a sequence."""
        return self.drafter.shape.depth + 1

    def _release(self, finished: list[Running], read: int = 1) -> None:
        """Free the slots of finished requests. `read`: the number of rounds that were read at once; a request may have ended
        in any of them. An aborted request may have left NaN in its rows, which must not reach the next one."""
        if not finished:
            return
        sound = [False] * len(finished)
        try:
            sound = self._free_rows(finished, (read - 1) * self._most + self._unread)
        finally:  # also if the device had no memory left to check the rows
            for running, fine in zip(finished, sound, strict=True):
                running.decode_s = self.clock - running.began if running.ready else 0.0
                self.state.table.forget(running.slot)
                self.grammars.end(running.slot)
                self.slots.leave(running.slot, keep=fine)

    def _free_rows(self, finished: list[Running], beyond: int) -> list[bool]:
        """Freeze finished sequences, and return for each whether its cached rows may be reused. On the device a sequence may
        be `beyond` tokens longer than the host knows."""
        ids = [running.slot for running in finished]
        slots = sent(ids, self.target.device)
        self.state.alive_slots.index_fill_(0, slots, False)
        self.loop.end(ids)
        sound = [self._clear(running, beyond) for running in finished]
        if self.slots.pads:  # a padding row must not overwrite the rows that are kept, nor attend to rows after them
            kept = [running.length * fine for running, fine in zip(finished, sound, strict=True)]
            self.state.lengths.index_copy_(0, slots, sent(kept, self.target.device))
        return sound

    def _clear(self, running: Running, beyond: int) -> bool:
        """Wipe the rows of a sequence that must not be reused, up to `beyond` tokens after its end. Return whether the
        others may be."""
        cache = self.target.cache
        scratch, ahead = cache.rows - cache.context, running.length + beyond
        if beyond:  # rounds after its end, read or still running, write rows that nobody will read, NaN too
            cache.wipe(running.slot, running.length, ahead + scratch)
        sound = running.finish_reason != "abort" or cache.is_sound(running.slot, ahead + max(self.chunk, scratch))
        if not sound:
            cache.wipe(running.slot)
        return sound

    def _span(self, ids: Iterable[int]) -> int:
        return max(self.slots.running[slot].length for slot in ids)


def _loop_of(target: Model, drafter: Drafter) -> InTurns:
    """Return the loop that a drafter declares."""
    if drafter.pipelining is not None:
        return Pipeline(target, drafter, drafter.pipelining)
    return Lockstep(target, drafter)


def _checked_context(max_context: int | None, target: Model) -> int:
    if max_context is None:
        return min(target.max_context, 4096)
    _check_positive(max_context=max_context)
    if max_context > target.max_context:
        raise InputError(
            f"max_context is {max_context}, but {target.name} was trained for {target.max_context} positions; give no more"
        )
    return max_context


def _check_positive(**values: int) -> None:
    for name, value in values.items():
        if type(value) is not int or value < 1:
            raise InputError(f"{name} is {value!r}; it must be a whole number, 1 or more")

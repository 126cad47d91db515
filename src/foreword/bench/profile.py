"""Where the time of a round goes on this machine: the sections of `foreword profile`.

In: a `Subject` (a model, and how to make an engine for it) and `ProfileSettings`. Out: plain dictionaries, section by
section, ready for a table or for JSON. What fails leaves {"failed": why} in place of its figures, and the rest goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from foreword.api import LLM
from foreword.bench.parts import busy_ms, parts_of_pass
from foreword.bench.parts import kernels as seen_on_gpu
from foreword.bench.passes import Probe, between_marks, bytes_of_pass, milliseconds, replayed
from foreword.drafters.resolve import Wanted
from foreword.engine.engine import Engine
from foreword.engine.request import Request, Running
from foreword.engine.warm_up import under_way
from foreword.errors import InputError
from foreword.model.cores import cpu_name
from foreword.model.linears import read_bytes
from foreword.model.loading import choose_device, choose_dtype
from foreword.model.model import Model
from foreword.model.shapes import random_model
from foreword.ops.device import free_memory, synchronize
from foreword.ops.graph import RecordedCall

GPU_BUFFER, CPU_BUFFER = 2 * 2**30, 512 * 10**6  # bytes: far more than any cache holds
PARTS_ROWS = (1, 64)
WARM_UP_TEXTS = 2  # a bucket of rounds that a text meets once only is captured by the second
WARM_UP_ROUNDS = 2
PROFILED_ROUNDS = 8
TRACED_ROUNDS = 4  # of which the last is shown


@dataclass(frozen=True)
class ProfileSettings:
    rows: tuple[int, ...] = (1, 4, 16, 64)
    contexts: tuple[int, ...] = (128, 512, 2048)
    methods: tuple[str, ...] = ("plain", "token_recycling")
    context: int = 512  # of rounds, and of the pass that is taken apart
    tokens: int = 96
    repeats: int = 30  # of a captured pass; a plain call is repeated a sixth as often

    def quick(self) -> ProfileSettings:
        """The same in a few seconds: fewest and most rows, one context, short texts."""
        ends = tuple(dict.fromkeys((min(self.rows), max(self.rows))))
        return replace(self, rows=ends, contexts=self.contexts[:1], tokens=min(self.tokens, 32), repeats=6)

    def repeats_on(self, device: torch.device) -> int:
        return self.repeats if device.type == "cuda" else max(self.repeats // 6, 2)


@dataclass(frozen=True)
class Subject:
    """What is profiled. `engine` takes the name of a method; what it made before is of no more use."""

    model: Model
    engine: Callable[[str], Engine]

    @staticmethod
    def of(llm: LLM, rows: int | None = None) -> Subject:
        """`rows`: at most so many candidates in a round; None: as many as pay."""
        return Subject(llm.model, lambda method: llm.use(method, rows).engine)


def drawn(
    shape: str,
    slots: int,
    device: str | None = None,
    dtype: str | None = None,
    threads: int | None = None,
    max_context: int | None = None,
    fused_layers: bool = True,
    cuda_graphs: bool = True,
    rows: int | None = None,
) -> Subject:
    """A model of known shapes with random weights; the options are those of `foreword.load`."""
    if threads is not None:
        torch.set_num_threads(threads)
    place = choose_device(device)
    hf = random_model(shape, place, choose_dtype(dtype, place), rebuild=fused_layers)
    model = Model(hf, f"random weights of {shape} shapes")

    def engine(method: str) -> Engine:
        _, drafter = Wanted.of(method, rows=rows).on(model)
        return Engine(model, drafter, slots, max_context, graph=cuda_graphs)

    return Subject(model, engine)


def attempt(section: Callable[[], Any]) -> Any:
    """What a section found, or why it found nothing."""
    try:
        return section()
    except Exception as error:  # whatever it is, the other sections can still be of use
        words = " ".join(str(error).split())
        return {"failed": f"{type(error).__name__}: {words}"[:500]}


def failures(found: Any) -> list[str]:
    """Why anything in a section, or in all of them, failed."""
    if isinstance(found, dict):
        own = [found["failed"]] if "failed" in found else []
        return own + [why for part in found.values() for why in failures(part)]
    return [why for part in found for why in failures(part)] if isinstance(found, list) else []


class Profile:
    """The sections of one model. The first measures the bandwidth that later ones give their shares of."""

    def __init__(self, subject: Subject, settings: ProfileSettings) -> None:
        self.subject, self.settings = subject, settings
        self.model, self.device = subject.model, subject.model.device
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # where events are recorded and graphs captured
        self.bandwidth: float | None = None
        self.repeats = settings.repeats_on(self.device)

    @property
    def sections(self) -> dict[str, Callable[[], Any]]:
        """In the order to run them in."""
        return {"machine": self.machine, "passes": self.passes, "rounds": self.rounds, "parts": self.parts}

    def machine(self) -> dict[str, Any]:
        on_gpu = self.device.type == "cuda"
        self.bandwidth = bandwidth(self.device)
        return {
            "device": torch.cuda.get_device_name(self.device) if on_gpu else cpu_name(),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "model": self.model.name,
            "weight_bytes": read_bytes(self.model.hf),
            "bytes_per_second": self.bandwidth,
        }

    def passes(self) -> list[dict[str, Any]]:
        """One verify pass by rows and context."""
        rows = sorted({1, *self.settings.rows})
        room = self._room(max(rows))
        found = []
        for context in sorted({min(context, room) for context in self.settings.contexts}):
            first = None
            for count in rows:
                entry = attempt(lambda count=count, context=context: self._pass(count, context))  # type: ignore[misc]
                first = first or entry.get("ms")
                ratio = {"over_one_row": entry["ms"] / first} if "ms" in entry and first else {}
                found.append({"rows": count, "context": context, **entry, **ratio})
        return found

    def _pass(self, rows: int, context: int) -> dict[str, Any]:
        ms = milliseconds(Probe(self.model, rows, context).score, self.device, self.repeats)
        size = bytes_of_pass(self.model, rows, context)
        share = size / (ms / 1e3) / self.bandwidth if self.bandwidth else None
        return {"ms": ms, "bytes": size, "share": share}

    def rounds(self) -> list[dict[str, Any]]:
        """Rounds of a real engine, by method."""
        return [{"method": name, **attempt(lambda name=name: self._rounds(name))} for name in self.settings.methods]  # type: ignore[misc]

    def _rounds(self, method: str) -> dict[str, Any]:
        engine = self.subject.engine(method)
        tokens = min(self.settings.tokens, engine.max_context // 2)
        writing = Writing(engine, min(self.settings.context, engine.max_context - tokens - 1), tokens)
        for _ in range(WARM_UP_TEXTS):
            writing.wall()
        wall, per_round = writing.wall()
        first = writing.first_token()
        device = writing.device_ms(self.repeats) if self.device.type == "cuda" else None
        kernels = writing.kernels() if self.device.type == "cuda" else None
        return {
            "texts": engine.slots.count,
            "context": writing.context,
            "wall_ms": wall,
            "device_ms": device,
            "host_share": None if device is None else max(1 - device / wall, 0.0),
            "tokens_per_round": per_round,
            "kernels": kernels,
            "first_token_ms": first,
            "prefill_ms": max(first - wall, 0.0),
        }

    def parts(self) -> list[dict[str, Any]]:
        """A pass of one row and of many, taken apart."""
        context, repeats = min(self.settings.context, self._room(max(PARTS_ROWS))), max(self.repeats // 3, 2)

        def one(rows: int) -> dict[str, Any]:
            return attempt(lambda: parts_of_pass(self.model, rows, context, repeats))

        return [{"rows": rows, "context": context, **one(rows)} for rows in PARTS_ROWS]

    def _room(self, rows: int) -> int:
        """Tokens that may stand before a pass of so many rows."""
        room = self.model.max_context - rows
        if room < 1:
            raise InputError(f"{self.model.name} has {self.model.max_context} positions, too few for a pass of {rows} rows")
        return room


class Writing:
    """Texts of one engine, in all its slots: random prompts of `context` tokens, each followed by `tokens` more."""

    def __init__(self, engine: Engine, context: int, tokens: int) -> None:
        self.engine, self.context, self.tokens = engine, context, tokens
        self.device = engine.target.device
        self.generator = torch.Generator().manual_seed(0)

    def _requests(self, tokens: int) -> list[Request]:
        """Never the same prompts twice: a drafter that learns would know what follows."""
        shape = (self.engine.slots.count, self.context)
        prompts = torch.randint(self.engine.target.vocab_size, shape, generator=self.generator).tolist()
        return [Request(tuple(one), max_new_tokens=tokens, ignore_eos=True) for one in prompts]

    @contextmanager
    def under_way(self) -> Iterator[list[Running]]:
        """Texts whose prompts are read and whose first rounds are done; nothing runs on the device."""
        with under_way(self.engine, self._requests(self.tokens), WARM_UP_ROUNDS) as runs:
            synchronize(self.device)
            yield runs

    def wall(self) -> tuple[float, float]:
        """Milliseconds of a round while all texts go on, and tokens that it decides for each."""
        with self.under_way() as runs:
            rounds, started = 0, time.perf_counter()
            while not any(run.done for run in runs):
                self.engine.step_for(runs)
                rounds += 1
            synchronize(self.device)
            seconds = time.perf_counter() - started
            counts = [count for run in runs for count in run.accepted]
        if not rounds:
            raise InputError(f"{self.tokens} tokens were written before a round could be timed; ask for more with --tokens")
        return seconds * 1e3 / rounds, sum(counts) / len(counts)

    def first_token(self) -> float:
        """Milliseconds from the prompts to a token for each of them."""
        requests = self._requests(1)
        synchronize(self.device)
        started = time.perf_counter()
        self.engine.generate(requests)
        return (time.perf_counter() - started) * 1e3

    def device_ms(self, repeats: int) -> float:
        """Milliseconds that a CUDA device needs for a round: of a captured one without the host, else what it was busy."""
        with self.under_way() as runs:
            if captured := self._captured(runs):
                return replayed(captured, repeats)
            with profile(activities=[ProfilerActivity.CUDA]) as session:
                rounds = 0
                while rounds < PROFILED_ROUNDS and not any(run.done for run in runs):
                    self.engine.step_for(runs)
                    rounds += 1
                synchronize(self.device)
        return busy_ms(session) / max(rounds, 1)

    def kernels(self) -> list[dict[str, Any]] | None:
        """Those of a captured round in their order, with when each started: one may start before the one ahead has ended."""
        with self.under_way() as runs:
            captured = self._captured(runs)
            if captured is None:
                return None
            captured.replay()
            synchronize(self.device)
            with profile(activities=[ProfilerActivity.CUDA]) as session:
                for _ in range(TRACED_ROUNDS):
                    captured.replay()
                synchronize(self.device)
        found = seen_on_gpu(session)
        last = found[-(len(found) // TRACED_ROUNDS) :]
        times = [one.time_range for one in last]
        return [
            {"at_us": round(time.start - times[0].start, 1), "us": round(time.elapsed_us(), 1), "name": one.name[:100]}
            for one, time in zip(last, times, strict=True)
        ]

    def _captured(self, runs: list[Running]) -> RecordedCall[Any] | None:
        """The graph that the next round would replay."""
        found: RecordedCall[Any] | None = self.engine.loop.recorded(len(runs), max(run.length for run in runs))
        return found


def bandwidth(device: torch.device) -> float:
    """Bytes a second that this device moves at best: reading a large buffer, or on CUDA also copying it, read and write."""
    if device.type == "cpu":
        buffer = torch.ones(CPU_BUFFER // 4)
        return CPU_BUFFER / min(_seconds(buffer.sum) for _ in range(5))
    found = _gpu_bandwidth(device)
    torch.cuda.empty_cache()  # whoever allocates a KV cache asks for free memory first
    return found


def _gpu_bandwidth(device: torch.device) -> float:
    size = min(GPU_BUFFER, (free_memory(device) or GPU_BUFFER) // 4)
    buffer = torch.ones(size // 4, device=device)
    other = torch.empty_like(buffer)
    reading = between_marks(buffer.sum, 10, best=True)
    copying = between_marks(lambda: other.copy_(buffer), 10, best=True)
    return max(size / reading, 2 * size / copying) * 1e3


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started

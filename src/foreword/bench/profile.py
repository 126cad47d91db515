"""The sections of `foreword profile`: where the time of a round goes on this machine.

In: a `Subject` (a model, and how to make an engine for it) and `ProfileSettings`. Out: plain dictionaries, section by
section, ready for a table or for JSON. A section that fails leaves {"failed": why} instead of its figures; the rest goes on.
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
from foreword.bench.pass_breakdown import break_down_pass, busy_ms, gpu_events
from foreword.bench.passes import Probe, bytes_of_pass, cuda_milliseconds, milliseconds, replay_milliseconds
from foreword.drafters.resolve import DrafterRequest
from foreword.engine.engine import Engine
from foreword.engine.request import Request, Running
from foreword.engine.warm_up import running_requests
from foreword.errors import InputError
from foreword.model.cores import cpu_name
from foreword.model.linears import read_bytes
from foreword.model.loading import choose_device, choose_dtype
from foreword.model.model import Model
from foreword.model.shapes import random_model
from foreword.ops.cuda_graph import RecordedCall
from foreword.ops.device import free_memory, synchronize

GPU_BUFFER, CPU_BUFFER = 2 * 2**30, 512 * 10**6  # bytes: far more than any cache of the processor holds
BREAKDOWN_ROWS = (1, 64)
WARM_UP_GENERATIONS = 2  # the second captures buckets that a generation meets only once
WARM_UP_ROUNDS = 2
PROFILED_ROUNDS = 8
TRACED_ROUNDS = 4  # the last one is shown


@dataclass(frozen=True)
class ProfileSettings:
    rows: tuple[int, ...] = (1, 4, 16, 64)
    contexts: tuple[int, ...] = (128, 512, 2048)
    methods: tuple[str, ...] = ("plain", "token_recycling")
    context: int = 512  # of rounds, and of the pass that is broken down
    tokens: int = 96
    repeats: int = 30  # of a captured pass; a plain call is repeated a sixth as often

    def quick(self) -> ProfileSettings:
        """Return settings that take a few seconds: fewest and most rows, one context, few tokens."""
        ends = tuple(dict.fromkeys((min(self.rows), max(self.rows))))
        return replace(self, rows=ends, contexts=self.contexts[:1], tokens=min(self.tokens, 32), repeats=6)

    def repeats_on(self, device: torch.device) -> int:
        return self.repeats if device.type == "cuda" else max(self.repeats // 6, 2)


@dataclass(frozen=True)
class Subject:
    """What is profiled. `engine(method)` makes an engine; the engine it made before can no longer be used."""

    model: Model
    engine: Callable[[str], Engine]

    @staticmethod
    def of(llm: LLM, rows: int | None = None) -> Subject:
        """`rows`: candidates in a round, at most; None: as many as pay off on this machine."""
        return Subject(llm.model, lambda method: llm.use(method, rows).engine)


def random_subject(
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
    """Make a model of known shapes with random weights. Options: those of `foreword.load`."""
    if threads is not None:
        torch.set_num_threads(threads)
    place = choose_device(device)
    hf = random_model(shape, place, choose_dtype(dtype, place), rebuild=fused_layers)
    model = Model(hf, f"random weights of {shape} shapes")

    def engine(method: str) -> Engine:
        _, drafter = DrafterRequest.of(method, rows=rows).resolve(model)
        return Engine(model, drafter, slots, max_context, graph=cuda_graphs)

    return Subject(model, engine)


def attempt(section: Callable[[], Any]) -> Any:
    """Return what a section measured, or {"failed": why}."""
    try:
        return section()
    except Exception as error:  # of any kind: the other sections can still be useful
        message = " ".join(str(error).split())
        return {"failed": f"{type(error).__name__}: {message}"[:500]}


def failures(found: Any) -> list[str]:
    """Return the reasons of all failures in a section or in all of them."""
    if isinstance(found, dict):
        own = [found["failed"]] if "failed" in found else []
        return own + [why for one in found.values() for why in failures(one)]
    return [why for one in found for why in failures(one)] if isinstance(found, list) else []


class Profile:
    """The sections of one model. The first measures the bandwidth, of which later ones report shares."""

    def __init__(self, subject: Subject, settings: ProfileSettings) -> None:
        self.subject, self.settings = subject, settings
        self.model, self.device = subject.model, subject.model.device
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # the device where events are recorded and graphs captured
        self.bandwidth: float | None = None
        self.repeats = settings.repeats_on(self.device)

    @property
    def sections(self) -> dict[str, Callable[[], Any]]:
        """The sections, in the order to run them. `parts` is the JSON key of the breakdown."""
        return {"machine": self.machine, "passes": self.passes, "rounds": self.rounds, "parts": self.breakdown}

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
        """Time one verify pass by rows and context."""
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
        """Time rounds of a real engine, by method."""
        return [{"method": name, **attempt(lambda name=name: self._rounds(name))} for name in self.settings.methods]  # type: ignore[misc]

    def _rounds(self, method: str) -> dict[str, Any]:
        engine = self.subject.engine(method)
        tokens = min(self.settings.tokens, engine.max_context // 2)
        timer = GenerationTimer(engine, min(self.settings.context, engine.max_context - tokens - 1), tokens)
        for _ in range(WARM_UP_GENERATIONS):
            timer.wall()
        wall, per_round = timer.wall()
        first = timer.first_token()
        device = timer.device_ms(self.repeats) if self.device.type == "cuda" else None
        kernels = timer.kernels() if self.device.type == "cuda" else None
        return {
            "texts": engine.slots.count,
            "context": timer.context,
            "wall_ms": wall,
            "device_ms": device,
            "host_share": None if device is None else max(1 - device / wall, 0.0),
            "tokens_per_round": per_round,
            "kernels": kernels,
            "first_token_ms": first,
            "prefill_ms": max(first - wall, 0.0),
        }

    def breakdown(self) -> list[dict[str, Any]]:
        """Break down the time of a pass of one row and of many."""
        context, repeats = min(self.settings.context, self._room(max(BREAKDOWN_ROWS))), max(self.repeats // 3, 2)

        def one(rows: int) -> dict[str, Any]:
            return attempt(lambda: break_down_pass(self.model, rows, context, repeats))

        return [{"rows": rows, "context": context, **one(rows)} for rows in BREAKDOWN_ROWS]

    def _room(self, rows: int) -> int:
        """Return how many tokens may come before a pass of `rows` rows."""
        room = self.model.max_context - rows
        if room < 1:
            raise InputError(f"{self.model.name} has {self.model.max_context} positions, too few for a pass of {rows} rows")
        return room


class GenerationTimer:
    """Time one engine with all its slots busy: random prompts of `context` tokens, `tokens` new tokens each."""

    def __init__(self, engine: Engine, context: int, tokens: int) -> None:
        self.engine, self.context, self.tokens = engine, context, tokens
        self.device = engine.target.device
        self.generator = torch.Generator().manual_seed(0)

    def _requests(self, tokens: int) -> list[Request]:
        """Make new random prompts each time: a drafter that learns would know how old ones continue."""
        shape = (self.engine.slots.count, self.context)
        prompts = torch.randint(self.engine.target.vocab_size, shape, generator=self.generator).tolist()
        return [Request(tuple(one), max_new_tokens=tokens, ignore_eos=True) for one in prompts]

    @contextmanager
    def running(self) -> Iterator[list[Running]]:
        """Start requests and run their prompts and first rounds; yield them when the device is idle."""
        with running_requests(self.engine, self._requests(self.tokens), WARM_UP_ROUNDS) as runs:
            synchronize(self.device)
            yield runs

    def wall(self) -> tuple[float, float]:
        """Return milliseconds of a round while all requests run, and the tokens per round of each."""
        with self.running() as runs:
            rounds, started = 0, time.perf_counter()
            while not any(run.done for run in runs):
                self.engine.step_for(runs)
                rounds += 1
            synchronize(self.device)
            seconds = time.perf_counter() - started
            counts = [count for run in runs for count in run.accepted]
        if not rounds:
            raise InputError(f"all {self.tokens} tokens came before a round could be timed; ask for more with --tokens")
        return seconds * 1e3 / rounds, sum(counts) / len(counts)

    def first_token(self) -> float:
        """Return milliseconds from the prompts until each request has a token."""
        requests = self._requests(1)
        synchronize(self.device)
        started = time.perf_counter()
        self.engine.generate(requests)
        return (time.perf_counter() - started) * 1e3

    def device_ms(self, repeats: int) -> float:
        """Return milliseconds that a CUDA device needs for a round: a replay of a captured round, or else its busy time."""
        with self.running() as runs:
            if captured := self._captured(runs):
                return replay_milliseconds(captured, repeats)
            with profile(activities=[ProfilerActivity.CUDA]) as session:
                rounds = 0
                while rounds < PROFILED_ROUNDS and not any(run.done for run in runs):
                    self.engine.step_for(runs)
                    rounds += 1
                synchronize(self.device)
        return busy_ms(session) / max(rounds, 1)

    def kernels(self) -> list[dict[str, Any]] | None:
        """Return the kernels of a captured round with their start times; one may start before the previous one has ended."""
        with self.running() as runs:
            captured = self._captured(runs)
            if captured is None:
                return None
            captured.replay()
            synchronize(self.device)
            with profile(activities=[ProfilerActivity.CUDA]) as session:
                for _ in range(TRACED_ROUNDS):
                    captured.replay()
                synchronize(self.device)
        found = gpu_events(session)
        last = found[-(len(found) // TRACED_ROUNDS) :]
        times = [one.time_range for one in last]
        return [
            {"at_us": round(time.start - times[0].start, 1), "us": round(time.elapsed_us(), 1), "name": one.name[:100]}
            for one, time in zip(last, times, strict=True)
        ]

    def _captured(self, runs: list[Running]) -> RecordedCall[Any] | None:
        """Return the graph that the next round would replay, if any."""
        found: RecordedCall[Any] | None = self.engine.loop.recorded(len(runs), max(run.length for run in runs))
        return found


def bandwidth(device: torch.device) -> float:
    """Return the best bytes per second of this device: reading a large buffer; on CUDA also copying it (read and write)."""
    if device.type == "cpu":
        buffer = torch.ones(CPU_BUFFER // 4)
        return CPU_BUFFER / min(_seconds(buffer.sum) for _ in range(5))
    found = _gpu_bandwidth(device)
    torch.cuda.empty_cache()  # a later KV cache is sized by the free memory
    return found


def _gpu_bandwidth(device: torch.device) -> float:
    size = min(GPU_BUFFER, (free_memory(device) or GPU_BUFFER) // 4)
    buffer = torch.ones(size // 4, device=device)
    other = torch.empty_like(buffer)
    reading = cuda_milliseconds(buffer.sum, 10, best=True)
    copying = cuda_milliseconds(lambda: other.copy_(buffer), 10, best=True)
    return max(size / reading, 2 * size / copying) * 1e3


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started

"""The time of a pass by kind of work: its kernels (CUDA) or operators (CPU), as torch's profiler sees them.

Layers, head and acceptance are profiled separately, so that a product of the head does not count as one of the layers.
Within the layers, the name of a kernel decides. Kernels that overlap count in full, so their sum may exceed the time of the
pass. Loops compiled by Numba are not operators: on the CPU they are in the remainder, `unseen_ms`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from foreword.bench.passes import Probe, milliseconds
from foreword.core.sampling import Sampling
from foreword.core.state import State
from foreword.engine.accept import accept
from foreword.model.model import Model
from foreword.ops.device import synchronize

TOP = 12
JOIN = "_join"  # the last step of split products and of split attention: it belongs to the kernel before it

# The first match decides; names of our Triton kernels, of libraries, and of torch's operators. Operators that only
# call others (aten::linear, aten::matmul) are not the product that they call.
_PATTERNS = (
    ("attention", r"^_attend|flash|fmha|sdpa|efficient_attention|softmax|bmm"),
    ("rotary and store", r"^_turn|index_copy|cos_kernel|sin_kernel|neg_kernel|::(cos|sin|neg)$"),
    ("products", r"^_one_row|^_few_rows|gemm|gemv|nvjet|cutlass|splitk|_linear|addmm|::mm$"),
    ("norms", r"norm|rsqrt|pow_tensor|mean|::pow$"),
    ("copies", r"copy|memcpy|memset|catarray|clone|contiguous|::(to|cat|index_select|fill_|zero_)$"),
)
GROUPS = ("products", "head", "attention", "rotary and store", "norms", "sampling and accept", "copies", "other")


@dataclass(frozen=True)
class KernelCall:
    """One run of a kernel or operator."""

    name: str
    group: str
    ms: float


def group_of(name: str) -> str:
    return next((group for group, pattern in _PATTERNS if re.search(pattern, name.lower())), "other")


def assign_groups(events: Iterable[tuple[str, float]], stage: str) -> list[KernelCall]:
    """Assign the events (name, ms) of one stage of a pass to groups, in the order they ran."""
    seen: list[KernelCall] = []
    for name, ms in events:
        group = seen[-1].group if name.startswith(JOIN) and seen else group_of(name)
        if stage == "accept":
            group = "sampling and accept"
        elif stage == "head" and group != "norms":
            group = "head"
        seen.append(KernelCall(name, group, ms))
    return seen


def break_down_pass(model: Model, rows: int, context: int, repeats: int) -> dict[str, Any]:
    """Break down the time of a pass of `rows` rows, and of the acceptance of its tokens."""
    probe = Probe(model, rows, context)
    stages = _stages(probe, context)
    seen, wall = [], 0.0
    for stage, call in stages.items():
        events, seconds = profile_calls(call, model.device, repeats)
        seen += assign_groups(events, stage)
        wall += seconds * 1e3 / repeats
    if model.device.type == "cuda":  # calls from Python wait for the host; a captured pass does not
        wall = milliseconds(lambda: [call() for call in stages.values()], model.device, repeats)
    return {"rows": rows, "context": context, "device": model.device.type, **summary(seen, repeats, wall)}


@torch.inference_mode()
def _stages(probe: Probe, context: int) -> dict[str, Callable[[], object]]:
    model, draft = probe.model, probe.draft
    state = State.empty(1, context + draft.nodes + 1, model.cache.length, model.ends).at(probe.batch)
    state.limits.fill_(context + draft.nodes + 1)
    state.alive_slots.fill_(True)
    state.table.set(0, Sampling(seed=0))
    hidden, scores, depth = probe.walk(), probe.score(), int(draft.tree.depth.max())
    return {
        "layers": probe.walk,
        "head": torch.inference_mode()(lambda: model.head(model.norm(hidden))),
        "accept": torch.inference_mode()(lambda: accept(state, draft, scores, depth)),
    }


def profile_calls(call: Callable[[], object], device: torch.device, repeats: int) -> tuple[list[tuple[str, float]], float]:
    """Return what ran in `repeats` calls, as (name, ms) in order, and the seconds they took."""
    on_gpu = device.type == "cuda"
    call()
    synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as session:
        started = time.perf_counter()
        for _ in range(repeats):
            call()
        synchronize(device)
        seconds = time.perf_counter() - started
    if on_gpu:
        return [(event.name, event.time_range.elapsed_us() / 1e3) for event in gpu_events(session)], seconds
    return [(event.name, event.self_cpu_time_total / 1e3) for event in session.events() or ()], seconds


def gpu_events(session: profile) -> list[Any]:
    """Return the events of a profiled GPU by their start."""
    found = [event for event in session.events() or () if event.device_type == DeviceType.CUDA]
    if not found:
        raise RuntimeError("torch's profiler saw nothing on the GPU; another profiler may hold it, or the driver forbids it")
    return sorted(found, key=lambda event: event.time_range.start)


def busy_ms(session: profile) -> float:
    """Return how long a profiled GPU was busy; overlapping kernels count once."""
    busy, until = 0.0, float("-inf")
    for event in gpu_events(session):
        start, end = event.time_range.start, event.time_range.end
        busy += max(end - max(start, until), 0.0)
        until = max(until, end)
    return busy / 1e3


def summary(seen: list[KernelCall], passes: int, wall_ms: float) -> dict[str, Any]:
    """Return times and counts of one pass, by group and for the names that took longest."""
    groups: dict[str, list[float]] = {group: [] for group in GROUPS}
    names: dict[tuple[str, str], list[float]] = {}
    for one in seen:
        groups[one.group].append(one.ms)
        names.setdefault((one.group, one.name), []).append(one.ms)
    longest = sorted(names.items(), key=lambda item: -sum(item[1]))[:TOP]
    total = sum(one.ms for one in seen) / passes
    return {
        "wall_ms": wall_ms,
        "unseen_ms": wall_ms - total,
        "groups": {group: _figures(times, passes) for group, times in groups.items()},
        "top": [{"name": name, "group": group, **_figures(times, passes)} for (group, name), times in longest],
    }


def _figures(times: list[float], passes: int) -> dict[str, float]:
    return {"ms": sum(times) / passes, "count": len(times) / passes}

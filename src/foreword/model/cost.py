"""What a pass costs by its number of rows, on this machine: measured once per model, device, dtype and thread count.

Tree sizes follow the machine: on a GPU 64 rows cost little more than one, on a small CPU every row costs. The curve is
kept under `place()/costs`, so only the first load pays the seconds that measuring takes; what may be of a busy machine is
kept for an hour. What a drafter's own work costs, which is no pass of the target, is measured and kept in the same way,
under `place()/drafts`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from foreword.core.draft import Draft, Tree
from foreword.core.drafter import Drafter
from foreword.core.needs import Needs
from foreword.core.sampling import Sampling
from foreword.core.scores import Accepted
from foreword.core.state import Batch, State
from foreword.errors import CapacityError
from foreword.model import linears as pack
from foreword.model.busy import Waits, read_speed
from foreword.model.measured import Facts, file_of, machine_facts, read_kept, recall
from foreword.ops.device import batch_changes_cost, captures, host_computes, is_bound_by_reading, layer_seconds, synchronize
from foreword.ops.graph import record

if TYPE_CHECKING:
    from foreword.model.model import Model

Batches = dict[int, tuple[int, ...]]  # rows of each text, by number of texts

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
MORE_ROWS = (128, 256, 512)  # on a GPU, where trees of several texts may have as many
TILE = 64  # rows that a GPU's products take at a time, where there are more
TEXTS: Batches = {8: (1, 4, 8, 16, 32, 64), 32: (1, 2, 4, 8, 16, 32)}
CONTEXT = 256
REPEATS = 5
SPREAD = 1.3  # by how much the usual try of a quiet machine may be slower than the best
FLOOR_TIMES = 4.0  # a pass that reads its weights well takes up to twice as long as reading does, stock layers three times
SLOWER = 1.5  # than before: no two measurements of a quiet machine are that far apart
IN_A_ROW = 4  # captured passes in one try: rounds follow each other, and only the first would wait for its launch
FEWEST, ENOUGH_S = 2, 4.0  # tries, where more would take longer: a large model, or a busy machine


@dataclass(frozen=True)
class CostCurve:
    """Seconds of a pass at a few row counts, rising; straight lines between them. Rows of several texts cost otherwise than
    as many of one: each text is looked back at, by fewer rows. So a few batches have curves of their own, and as products
    take rows by tiles on a GPU, rows that fill none of them cost there as if they did."""

    rows: tuple[int, ...]  # of all texts together
    seconds: tuple[float, ...]
    steady: bool = True  # nothing else kept the machine busy meanwhile, as far as can be told
    texts: int = 1
    batches: tuple[CostCurve, ...] = ()  # of more and more texts
    suspect: str = field(default="", compare=False)  # why it is not steady

    def __post_init__(self) -> None:
        rising = all(low < high for low, high in pairwise(self.rows))
        if not self.rows or len(self.rows) != len(self.seconds) or not rising or not all(time > 0 for time in self.seconds):
            raise ValueError(f"no cost curve: {self.rows} rows took {self.seconds} seconds")
        if not all(fewer.texts < more.texts for fewer, more in pairwise((self, *self.batches))):
            raise ValueError(f"no cost curve: {[one.texts for one in self.batches]} texts of its batches do not rise")

    def at(self, rows: int, texts: int = 1) -> float:
        """Of a pass over so many rows, which so many texts have together. More than any batch has count as its number."""
        curves = (self, *self.batches)
        seconds = tuple(_between(one.rows, one.seconds, rows if one.texts == 1 else _tiled(rows)) for one in curves)
        return _between(tuple(one.texts for one in curves), seconds, min(texts, curves[-1].texts))

    @staticmethod
    def read(kept: dict[str, Any]) -> CostCurve:
        """From what `asdict` made of one, by way of JSON."""
        batches = tuple(map(CostCurve.read, kept["batches"]))
        rows, seconds, suspect = tuple(kept["rows"]), tuple(kept["seconds"]), str(kept.get("suspect", ""))
        return CostCurve(rows, seconds, kept["steady"], kept["texts"], batches, suspect)

    def relative(self, rows: int, texts: int = 1) -> float:
        return self.at(rows, texts) / self.at(1)


def _between(places: tuple[int, ...], seconds: tuple[float, ...], place: int) -> float:
    points = list(zip(places, seconds, strict=True))
    for (low, before), (high, after) in pairwise(points):
        if place <= high:
            return before + (after - before) * max(place - low, 0) / (high - low)
    return seconds[-1] * place / places[-1]


def _tiled(rows: int) -> int:
    return 1 << (rows - 1).bit_length() if rows <= TILE else -(-rows // TILE) * TILE


def curve_for(model: Model, quiet: bool = False) -> CostCurve:
    """The curve of this model on this machine, from the cache or measured now. `quiet`: what a busy machine showed is not
    believed, however recent it is."""

    def judged(earlier: CostCurve | None) -> CostCurve:
        curve = measure(model).curve()
        return _doubted(curve, curve.suspect or _too_slow(model, curve.at(1)), earlier)

    return recall("costs", facts_of(model), judged, CostCurve.read, quiet)


def kept_curve(model: Model) -> CostCurve | None:
    """What is known of this model on this machine, without measuring."""
    return read_kept(file_of("costs", facts_of(model)), CostCurve.read)


def draft_cost(model: Model, name: str, make: Callable[[], Drafter]) -> CostCurve:
    """What a drafter does in a round next to the target's pass, from the cache under this name or measured now: a curve of
    one point."""

    def judged(earlier: CostCurve | None) -> CostCurve:
        curve = measure_draft(model, make()).curve()
        return _doubted(curve, curve.suspect, earlier)

    return recall(f"drafts/{name}", facts_of(model), judged, CostCurve.read)


def _doubted(curve: CostCurve, doubt: str, earlier: CostCurve | None) -> CostCurve:
    """With what speaks against it. `earlier` may be of a busy machine: time can only be added to what a pass takes, so the
    quicker of the two is nearer to the truth."""
    if earlier is not None and not earlier.steady:  # a steady one is measured anew only where somebody asks for it
        if curve.at(1) > SLOWER * earlier.at(1):
            before = f"{earlier.at(1) * 1e3:.1f} when it was measured before"
            doubt = doubt or f"it took {curve.at(1) * 1e3:.1f} ms, and {before}"
        if doubt and earlier.at(1) < curve.at(1):
            curve = earlier
    return replace(curve, steady=not doubt, suspect=doubt)


def _too_slow(model: Model, seconds: float) -> str:
    """Why a pass over one row cannot take so long on a quiet machine; nothing where it can."""
    if not is_bound_by_reading(model.device, model.dtype):
        return ""
    held = sum(one.numel() * one.itemsize for one in (*model.hf.parameters(), *model.hf.buffers()))
    reading = max(pack.read_bytes(model.hf), held) / read_speed(model.device)
    most = FLOOR_TIMES * reading + model.layers * layer_seconds(model.device)
    if seconds <= most:
        return ""
    return f"a pass over one row took {seconds * 1e3:.0f} ms, where reading the weights takes {reading * 1e3:.0f}"


@dataclass(frozen=True)
class Tries:
    """Seconds of several passes at each row count, and the same of batches."""

    rows: tuple[int, ...]
    seconds: list[list[float]]
    texts: int = 1
    batches: tuple[Tries, ...] = ()
    waited: str = ""  # what our threads waited for meanwhile, if it was long

    @property
    def doubt(self) -> str:
        """Why something else may have kept the machine busy; nothing where the usual try was not much slower than the best,
        and no thread of ours waited."""
        all_tries = [tries for one in (self, *self.batches) for tries in one.seconds]
        usual = sum(map(median, all_tries)) / sum(map(min, all_tries))
        if usual > SPREAD:
            return f"the usual try took {usual:.1f} times as long as the best"
        return next((one.waited for one in (self, *self.batches) if one.waited), "")

    @property
    def steady(self) -> bool:
        return not self.doubt

    def curve(self) -> CostCurve:
        """The quickest of each: whatever else the machine does can only add time. Fewer rows never cost more than more of
        them, which could take their place; nor do many cost more than passes of the fewest."""
        best = [*accumulate((min(tries) for tries in reversed(self.seconds)), min)][::-1]
        seconds = tuple(min(time, rows / self.rows[0] * best[0]) for rows, time in zip(self.rows, best, strict=True))
        batches, suspect = tuple(one.curve() for one in self.batches), "" if self.steady else self.doubt or "it was busy"
        return CostCurve(self.rows, seconds, self.steady, self.texts, batches, suspect)


@torch.inference_mode()
def measure(model: Model, rows: tuple[int, ...] | None = None, batches: Batches | None = None) -> Tries:
    """Time passes over a short text, and over several, in caches of their own. A CPU is as slow with the rows of one text as
    with those of several."""
    several = batch_changes_cost(model.device)
    tries = _tried(model, 1, rows or (ROWS + MORE_ROWS if several else ROWS))
    with suppress(CapacityError, torch.OutOfMemoryError):  # then there will be no such batch either
        for texts, each in (batches or (TEXTS if several else {})).items():
            tries = replace(tries, batches=(*tries.batches, _tried(model, texts, each)))
    return tries


def _tried(model: Model, texts: int, rows: tuple[int, ...]) -> Tries:
    """Of passes over so many texts, by rows of each."""
    rows = tuple(count for count in rows if CONTEXT + count <= model.max_context) or (1,)
    with model.aside(texts, CONTEXT, max(rows)) as cache:
        cache.length.fill_(CONTEXT - 1)
        passes = [_pass(model, texts, count) for count in rows]
        with Waits() as waits:
            seconds = _in_turns(passes, model.device)
    return Tries(tuple(texts * count for count in rows), seconds, texts, waited=_on_cpu(model, waits))


def _on_cpu(model: Model, waits: Waits) -> str:
    """Whose threads have to be there all the time: the host of a GPU may well come late."""
    return waits.doubt if host_computes(model.device) else ""


def _in_turns(passes: list[Callable[[], object]], device: torch.device) -> list[list[float]]:
    """Seconds of each, several times: what the machine does meanwhile falls on all of them alike."""
    found: list[list[float]] = [[] for _ in passes]
    started = time.perf_counter()
    for turn in range(REPEATS):
        if turn >= FEWEST and time.perf_counter() - started > ENOUGH_S:
            break
        for seconds, one in zip(found, passes, strict=True):
            seconds.append(_time(one, device))
    return found


@torch.inference_mode()
def measure_draft(model: Model, drafter: Drafter) -> Tries:
    """Time `propose` and `observe` on a made-up text, of which a round accepts the root alone."""
    device = model.device
    with model.aside(1, CONTEXT, 1):
        drafter.prepare(model, 1)
        cache = model.allocate(1, CONTEXT, drafter.shape.nodes + drafter.needs.grafted_rows)
        state = State.empty(1, CONTEXT, cache.length, model.ends)
        state.table.set(0, Sampling(seed=0))
        cache.length.fill_(CONTEXT // 2)
        state = state.at(replace(Batch.of([0], CONTEXT // 2, device), changes=captures(device)))
        drafter.begin(state)
        draft = drafter.propose(state)
        scores = model.score(state.batch, draft, drafter.needs)
        path = torch.zeros(1, min(drafter.shape.depth + 1, draft.nodes), dtype=torch.long, device=device)
        accepted = Accepted(path, torch.ones_like(path[:, 0]), state.root)

        def work() -> None:
            drafter.propose(state)
            drafter.observe(state, draft, scores, accepted)

        once = _ready(work, device, drafter.captures == "round")
        with Waits() as waits:
            seconds = _in_turns([once], device)
        return Tries((1,), seconds, waited=_on_cpu(model, waits))


def _pass(model: Model, texts: int, rows: int) -> Callable[[], object]:
    """A pass over so many rows of each text, each with two behind it, ready to be timed. A chain would cost less."""
    device = model.device
    tokens = torch.zeros(texts, rows, dtype=torch.long, device=device)
    draft = Draft(tokens, Tree.forked(rows, device), torch.full((texts,), rows, device=device))
    batch = replace(Batch.of(list(range(texts)), CONTEXT - 1, device), changes=captures(device))

    def score() -> object:
        return model.score(batch, draft, Needs())

    return _ready(score, device)


def _ready(call: Callable[[], object], device: torch.device, capturable: bool = True) -> Callable[[], object]:
    """Warmed up; on CUDA captured, as rounds are."""
    if captures(device) and capturable:
        return record(call).replay
    call()
    return call


def _time(one: Callable[[], object], device: torch.device) -> float:
    calls = IN_A_ROW if captures(device) else 1
    synchronize(device)
    started = time.perf_counter()
    for _ in range(calls):
        one()
    synchronize(device)
    return (time.perf_counter() - started) / calls


def facts_of(model: Model) -> Facts:
    """What a pass of a model costs by, and is the same at every load."""
    config = model.hf.config
    return {
        "model": config.model_type,
        "shape": [config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.vocab_size],
        "heads": [config.num_attention_heads, config.num_key_value_heads],
        "layers": [type(layer).__name__ for layer in [*(model.layer_stack.fused or model.layer_stack.layers)][:1]],
        "linears": pack.kinds(model.hf),
        "dtype": str(model.dtype),
        **machine_facts(model.device),
    }

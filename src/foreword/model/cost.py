"""What a pass costs on this machine, by its number of rows: measured once per model, device, dtype and thread count.

Tree sizes follow the machine: on a GPU 64 rows cost little more than one, on a small CPU every row costs. The curve is
kept in `costs` of the cache folder, so only the first load spends the seconds that measuring takes. A measurement of a
machine that may have been busy is kept for an hour. The cost of a drafter's own work, outside the target's pass, and that of
half-layers are measured and kept in the same way, in `drafts` and `halves` of that folder.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from foreword.core.draft import Draft, Tree
from foreword.core.drafter import Drafter
from foreword.core.needs import Needs, Skip
from foreword.core.sampling import Sampling
from foreword.core.scores import Accepted
from foreword.core.state import Batch, State
from foreword.errors import CapacityError
from foreword.model import linears
from foreword.model.busy import Waits, read_speed
from foreword.model.families import experts_of
from foreword.model.family import key_heads
from foreword.model.measured import Facts, file_of, machine_facts, read_kept, recall
from foreword.ops.cuda_graph import record
from foreword.ops.device import batch_changes_cost, captures, host_computes, is_bound_by_reading, layer_seconds, synchronize
from foreword.ranks.group import agreed

if TYPE_CHECKING:
    from foreword.model.model import Model

Batches = dict[int, tuple[int, ...]]  # rows per sequence, by number of sequences

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
MORE_ROWS = (128, 256, 512)  # on a GPU, where the trees of several sequences may have that many
TILE = 64  # rows that a GPU's products compute at a time, if there are more
BATCHES: Batches = {8: (1, 4, 8, 16, 32, 64), 32: (1, 2, 4, 8, 16, 32)}
CONTEXT = 256
REPEATS = 5
MAX_SPREAD = 1.3  # ratio of the median timing to the best one on a quiet machine
MAX_READ_TIMES = 4.0  # a pass takes up to twice as long as reading its weights, stock layers three times
SLOWER = 1.5  # ratio to an earlier measurement: two measurements of a quiet machine never differ by that much
CALLS_PER_TIMING = 4  # captured passes in a timing: rounds follow each other, and only the first would wait for its launch
MIN_REPEATS, TIME_BUDGET_S = 2, 4.0  # fewer repeats if they take longer: a large model, or a busy machine


@dataclass(frozen=True)
class CostCurve:
    """Seconds of a pass at a few row counts, in rising order, with linear interpolation between them.

    The same number of rows has another cost if it is spread over several sequences: more caches are read, each by fewer
    rows. So some batch sizes have curves of their own. There, a GPU's products compute rows in tiles, so a row count
    costs as much as the full tiles that it needs."""

    rows: tuple[int, ...]  # of all sequences together
    seconds: tuple[float, ...]
    steady: bool = True  # no sign that the machine was busy with something else
    sequences: int = 1
    batches: tuple[CostCurve, ...] = ()  # curves of larger batches, in rising order
    suspect: str = field(default="", compare=False)  # why it is not steady

    def __post_init__(self) -> None:
        rising = all(low < high for low, high in pairwise(self.rows))
        if not self.rows or len(self.rows) != len(self.seconds) or not rising or not all(time > 0 for time in self.seconds):
            raise ValueError(f"no cost curve: {self.rows} rows took {self.seconds} seconds")
        if not all(fewer.sequences < more.sequences for fewer, more in pairwise((self, *self.batches))):
            raise ValueError(
                f"no cost curve: {[one.sequences for one in self.batches]} sequences of its batches do not rise"
            )

    def at(self, rows: int, sequences: int = 1) -> float:
        """Return the seconds of a pass over `rows` rows of all `sequences` together. Larger batches use the largest measured
        curve."""
        curves = (self, *self.batches)
        seconds = tuple(
            _interpolated(one.rows, one.seconds, rows if one.sequences == 1 else _rounded_to_tiles(rows)) for one in curves
        )
        return _interpolated(tuple(one.sequences for one in curves), seconds, min(sequences, curves[-1].sequences))

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it. The number of sequences is stored under its old name, `texts`."""
        batches = tuple(one.to_dict() for one in self.batches)
        kept = {"rows": self.rows, "seconds": self.seconds, "steady": self.steady, "texts": self.sequences}
        return {**kept, "batches": batches, "suspect": self.suspect}

    @staticmethod
    def read(kept: dict[str, Any]) -> CostCurve:
        """Read what `to_dict` made, from JSON."""
        batches = tuple(map(CostCurve.read, kept["batches"]))
        rows, seconds, suspect = tuple(kept["rows"]), tuple(kept["seconds"]), str(kept.get("suspect", ""))
        return CostCurve(rows, seconds, kept["steady"], kept["texts"], batches, suspect)

    def relative(self, rows: int, sequences: int = 1) -> float:
        return self.at(rows, sequences) / self.at(1)


def _interpolated(places: tuple[int, ...], seconds: tuple[float, ...], place: int) -> float:
    """Return the seconds at a place: on a line between two measured places, proportional beyond the last one."""
    points = list(zip(places, seconds, strict=True))
    for (low, before), (high, after) in pairwise(points):
        if place <= high:
            return before + (after - before) * max(place - low, 0) / (high - low)
    return seconds[-1] * place / places[-1]


def _rounded_to_tiles(rows: int) -> int:
    return 1 << (rows - 1).bit_length() if rows <= TILE else -(-rows // TILE) * TILE


def curve_for(model: Model, quiet: bool = False) -> CostCurve:
    """Return the curve of this model on this machine, stored or measured now. `quiet`: do not use a measurement of a busy
    machine, however recent it is."""

    def measured(earlier: CostCurve | None) -> CostCurve:
        curve = agreed(measure(model).curve())
        return _checked(curve, curve.suspect or _too_slow(model, curve.at(1)), earlier)

    return recall("costs", facts_of(model), measured, CostCurve.read, quiet)


def kept_curve(model: Model) -> CostCurve | None:
    """Return the stored curve of this model on this machine, or None. It measures nothing."""
    return read_kept(file_of("costs", facts_of(model)), CostCurve.read)


def draft_cost(model: Model, name: str, make: Callable[[], Drafter]) -> CostCurve:
    """Return the cost of a drafter's own work in a round, outside the target's pass, stored under this name or measured now:
    a curve of one point."""

    def measured(earlier: CostCurve | None) -> CostCurve:
        curve = agreed(measure_draft(model, make()).curve())
        return _checked(curve, curve.suspect, earlier)

    return recall(f"drafts/{name}", facts_of(model), measured, CostCurve.read)


def _checked(curve: CostCurve, doubt: str, earlier: CostCurve | None) -> CostCurve:
    """Return the curve, marked as suspect if there is a doubt. `earlier` may be from a busy machine: other work can only add
    time to a pass, so the faster of the two is nearer to the truth."""
    if earlier is not None and not earlier.steady:  # a steady one is measured again only on request
        if curve.at(1) > SLOWER * earlier.at(1):
            before = f"{earlier.at(1) * 1e3:.1f} when it was measured before"
            doubt = doubt or f"it took {curve.at(1) * 1e3:.1f} ms, and {before}"
        if doubt and earlier.at(1) < curve.at(1):
            curve = earlier
    return replace(curve, steady=not doubt, suspect=doubt)


def _too_slow(model: Model, seconds: float) -> str:
    """Return why a pass over one row cannot take that long on a quiet machine, or an empty string if it can."""
    if not is_bound_by_reading(model.device, model.dtype):
        return ""
    held = sum(one.numel() * one.itemsize for one in (*model.hf.parameters(), *model.hf.buffers()))
    reading = max(linears.read_bytes(model.hf), held) / read_speed(model.device)
    most = MAX_READ_TIMES * reading + model.layers * layer_seconds(model.device)
    if seconds <= most:
        return ""
    return f"a pass over one row took {seconds * 1e3:.0f} ms, where reading the weights takes {reading * 1e3:.0f}"


@dataclass(frozen=True)
class PassTimings:
    """Seconds of several passes at each row count, and the same for batches."""

    rows: tuple[int, ...]
    seconds: list[list[float]]
    sequences: int = 1
    batches: tuple[PassTimings, ...] = ()
    waited: str = ""  # what our threads waited for during the timings, if they waited long

    @property
    def doubt(self) -> str:
        """Why something else may have kept the machine busy. Empty if the median timing was not much slower than the best
        and no thread of ours waited."""
        timings = [seconds for one in (self, *self.batches) for seconds in one.seconds]
        spread = sum(map(median, timings)) / sum(map(min, timings))
        if spread > MAX_SPREAD:
            return f"the median timing took {spread:.1f} times as long as the best"
        return next((one.waited for one in (self, *self.batches) if one.waited), "")

    @property
    def steady(self) -> bool:
        return not self.doubt

    def curve(self) -> CostCurve:
        """Return the fastest timing of each row count, since other work can only add time. Fewer rows never cost more than a
        larger pass, which could replace them. Many rows never cost more than repeated passes of the fewest rows."""
        best = [*accumulate((min(seconds) for seconds in reversed(self.seconds)), min)][::-1]
        seconds = tuple(min(time, rows / self.rows[0] * best[0]) for rows, time in zip(self.rows, best, strict=True))
        batches, suspect = tuple(one.curve() for one in self.batches), "" if self.steady else self.doubt or "it was busy"
        return CostCurve(self.rows, seconds, self.steady, self.sequences, batches, suspect)


@torch.inference_mode()
def measure(model: Model, rows: tuple[int, ...] | None = None, batches: Batches | None = None) -> PassTimings:
    """Time passes over one short sequence and over several, in caches of their own. On a CPU, several sequences cost as much
    as one with the same number of rows, so only one is timed."""
    several = batch_changes_cost(model.device)
    timings = _time_passes(model, 1, rows or (ROWS + MORE_ROWS if several else ROWS))
    with suppress(CapacityError, torch.OutOfMemoryError):  # then no such batch will run either
        for sequences, each in (batches or (BATCHES if several else {})).items():
            timings = replace(timings, batches=(*timings.batches, _time_passes(model, sequences, each)))
    return timings


def _time_passes(model: Model, sequences: int, rows: tuple[int, ...]) -> PassTimings:
    """Time passes over that many sequences, by rows per sequence."""
    rows = tuple(count for count in rows if CONTEXT + count <= model.max_context) or (1,)
    with model.temporary_cache(sequences, CONTEXT, max(rows)) as cache:
        cache.length.fill_(CONTEXT - 1)
        passes = [_pass(model, sequences, count) for count in rows]
        with Waits() as waits:
            seconds = _interleaved(passes, model.device)
    return PassTimings(
        tuple(sequences * count for count in rows), seconds, sequences, waited=_waits_that_count(model, waits)
    )


def _waits_that_count(model: Model, waits: Waits) -> str:
    """Return the doubt from waiting threads if the host computes the passes. The host of a GPU may be late."""
    return waits.doubt if host_computes(model.device) else ""


def _interleaved(passes: list[Callable[[], object]], device: torch.device) -> list[list[float]]:
    """Time each pass several times, in turns, so that other work on the machine affects all of them alike."""
    found: list[list[float]] = [[] for _ in passes]
    started = time.perf_counter()
    for turn in range(REPEATS):
        if turn >= MIN_REPEATS and agreed(time.perf_counter() - started > TIME_BUDGET_S):
            break
        for seconds, one in zip(found, passes, strict=True):
            seconds.append(_time(one, device))
    return found


@torch.inference_mode()
def measure_draft(model: Model, drafter: Drafter) -> PassTimings:
    """Time `propose` and `observe` on a made-up sequence, in a round that accepts only the root."""
    device = model.device
    with model.temporary_cache(1, CONTEXT, 1):
        drafter.prepare(model, 1)
        cache = model.allocate(1, CONTEXT, drafter.scratch)
        state = State.empty(1, CONTEXT, cache.length, model.ends)
        state.table.set(0, Sampling(seed=0))
        for column in (state.alive_slots, state.speculates):
            column.fill_(True)
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
            seconds = _interleaved([once], device)
        return PassTimings((1,), seconds, waited=_waits_that_count(model, waits))


@dataclass(frozen=True)
class HalfCosts:
    """The cost of one layer's attention and of one layer's MLP in a pass over one row. The whole pass costs 1."""

    attention: float
    mlp: float
    steady: bool = True
    suspect: str = ""

    def of(self, skip: Skip) -> float:
        """Return the cost of a pass over one row without these half-layers."""
        return 1 - len(skip.attention) * self.attention - len(skip.mlp) * self.mlp

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def read(kept: dict[str, Any]) -> HalfCosts:
        """Read what `to_dict` made, from JSON."""
        return HalfCosts(float(kept["attention"]), float(kept["mlp"]), bool(kept["steady"]), str(kept["suspect"]))


def half_costs(model: Model) -> HalfCosts:
    """Return what half-layers of this model cost on this machine, stored or measured now."""
    return recall("halves", facts_of(model), lambda _: measure_halves(model), HalfCosts.read)


@torch.inference_mode()
def measure_halves(model: Model) -> HalfCosts:
    """Time passes over one row: whole ones, ones without any attention, and ones without any MLP."""
    layers = tuple(range(model.layers))
    with model.temporary_cache(1, CONTEXT, 1) as cache:
        cache.length.fill_(CONTEXT - 1)
        passes = [_pass(model, 1, 1, skip) for skip in (None, Skip.of(attention=layers), Skip.of(mlp=layers))]
        with Waits() as waits:
            timings = PassTimings((1, 1, 1), _interleaved(passes, model.device))
    doubt = replace(timings, waited=_waits_that_count(model, waits)).doubt
    whole, without_attention, without_mlp = map(min, timings.seconds)
    attention, mlp = (max(0.0, 1 - seconds / whole) / model.layers for seconds in (without_attention, without_mlp))
    return HalfCosts(attention, mlp, steady=not doubt, suspect=doubt)


def _pass(model: Model, sequences: int, rows: int, skip: Skip | None = None) -> Callable[[], object]:
    """Return a pass over that many rows of each sequence, ready to be timed. In its tree every row has two children, where
    the model takes trees; a chain would cost less."""
    device = model.device
    tokens = torch.zeros(sequences, rows, dtype=torch.long, device=device)
    tree = Tree.chain(rows, device) if model.slow else Tree.forked(rows, device)
    draft = Draft(tokens, tree, torch.full((sequences,), rows, device=device))
    batch = replace(Batch.of(list(range(sequences)), CONTEXT - 1, device), changes=captures(device))

    def score() -> object:
        return model.score(batch, draft, Needs(), skip=skip)

    return _ready(score, device)


def _ready(call: Callable[[], object], device: torch.device, capturable: bool = True) -> Callable[[], object]:
    """Return the call warmed up, and on CUDA captured, as rounds are."""
    if captures(device) and capturable:
        return record(call).replay
    call()
    return call


def _time(one: Callable[[], object], device: torch.device) -> float:
    calls = CALLS_PER_TIMING if captures(device) else 1
    synchronize(device)
    started = time.perf_counter()
    for _ in range(calls):
        one()
    synchronize(device)
    return (time.perf_counter() - started) / calls


def facts_of(model: Model) -> Facts:
    """Return what the cost of a model's pass depends on and every load finds again."""
    if model.slow:
        sizes = sum(one.numel() for one in model.hf.parameters())
        about = {"model": model.hf.config.model_type, "slow": model.slow, "parameters": sizes, "dtype": str(model.dtype)}
        return about | machine_facts(model.device)
    config = model.hf.config
    # Only a mixture has these, so that what was measured for others stays known.
    experts = {"experts": experts_of(config), "computed": config._experts_implementation} if model.family.has_experts else {}
    ranks = {"ranks": model.ranks} if model.ranks > 1 else {}
    shape = [config.hidden_size, getattr(config, "intermediate_size", None), config.num_hidden_layers, config.vocab_size]
    of_model = {
        "model": config.model_type,
        "shape": shape,
        "heads": [config.num_attention_heads, key_heads(config)],
        "layers": [type(layer).__name__ for layer in [*(model.layer_stack.fused or model.layer_stack.layers)][:1]],
        "linears": linears.kinds(model.hf),
        "dtype": str(model.dtype),
    }
    return experts | ranks | of_model | machine_facts(model.device)

"""What a pass costs by its number of rows, on this machine: measured once per model, device, dtype and thread count.

Tree sizes follow the machine: on a GPU 64 rows cost little more than one, on a small CPU every row costs. The curve is
kept under `place()/costs`, so only the first load pays the seconds that measuring takes; what a busy machine showed is
kept for an hour. What a drafter's own work costs, which is no pass of the target, is measured and kept in the same way,
under `place()/drafts`.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from foreword.core.draft import Draft, Tree
from foreword.core.drafter import Drafter
from foreword.core.needs import Needs
from foreword.core.sampling import Sampling
from foreword.core.scores import Accepted
from foreword.core.state import Lanes, State
from foreword.errors import CapacityError, ForewordWarning, StorageError
from foreword.model.capture import Captured, settle
from foreword.model.storage import home, place

if TYPE_CHECKING:
    from foreword.model.model import Model

Batches = dict[int, tuple[int, ...]]  # rows of each text, by number of texts

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
MORE_ROWS = (128, 256, 512)  # on a GPU, where trees of several texts may have as many
TILE = 64  # rows that a GPU's products take at a time, where there are more
TEXTS: Batches = {8: (1, 4, 8, 16, 32, 64), 32: (1, 2, 4, 8, 16, 32)}
CONTEXT = 256
REPEATS = 5
UNSTEADY_S = 3600.0  # how long that is trusted which was measured while the machine was busy
IN_A_ROW = 4  # captured passes in one try: rounds follow each other, and only the first would wait for its launch
FEWEST, ENOUGH_S = 2, 4.0  # tries, where more would take longer: a large model, or a busy machine


@dataclass(frozen=True)
class CostCurve:
    """Seconds of a pass at a few row counts, rising; straight lines between them. Rows of several texts cost otherwise than
    as many of one: each text is looked back at, by fewer rows. So a few batches have curves of their own, and as products
    take rows by tiles on a GPU, rows that fill none of them cost there as if they did."""

    rows: tuple[int, ...]  # of all texts together
    seconds: tuple[float, ...]
    steady: bool = True  # nothing else kept the machine busy meanwhile
    texts: int = 1
    batches: tuple[CostCurve, ...] = ()  # of more and more texts

    def __post_init__(self) -> None:
        rising = all(low < high for low, high in pairwise(self.rows))
        if not self.rows or len(self.rows) != len(self.seconds) or not rising or not all(time > 0 for time in self.seconds):
            raise ValueError(f"no cost curve: {self.rows} rows took {self.seconds} seconds")

    def at(self, rows: int, texts: int = 1) -> float:
        """Of a pass over so many rows, which so many texts have together. More than any batch has count as its number."""
        curves = (self, *self.batches)
        seconds = tuple(_between(one.rows, one.seconds, rows if one.texts == 1 else _tiled(rows)) for one in curves)
        return _between(tuple(one.texts for one in curves), seconds, min(texts, curves[-1].texts))

    @staticmethod
    def read(kept: dict[str, Any]) -> CostCurve:
        """From what `asdict` made of one, by way of JSON."""
        batches = tuple(map(CostCurve.read, kept["batches"]))
        return CostCurve(tuple(kept["rows"]), tuple(kept["seconds"]), kept["steady"], kept["texts"], batches)

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
    return _remembered(model, "costs", lambda: measure(model), 0.0 if quiet else UNSTEADY_S)


def draft_seconds(model: Model, name: str, make: Callable[[], Drafter]) -> float:
    """What a drafter does in a round beside the target's pass, from the cache under this name or measured now."""
    return _remembered(model, f"drafts/{name}", lambda: measure_draft(model, make())).at(1)


def _remembered(model: Model, folder: str, measured: Callable[[], Tries], unsteady_for: float = UNSTEADY_S) -> CostCurve:
    file = place() / folder / f"{_mark(model)}.json"
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        if kept["steady"] or time.time() - file.stat().st_mtime < unsteady_for:
            return CostCurve.read(kept)
    except (OSError, ValueError, KeyError, TypeError):
        pass  # nothing that could be used: as if it were not there
    curve = measured().curve()
    _keep(file, {"what": _description(model), **asdict(curve)})
    return curve


def _keep(file: Path, content: dict[str, object]) -> None:
    """For the next load. Where nothing can be written the curve in hand is as good, so that is no error."""
    written = file.with_suffix(f".{os.getpid()}")
    try:
        home()
        file.parent.mkdir(parents=True, exist_ok=True)
        written.write_text(json.dumps(content, indent=1), encoding="utf-8")
        os.replace(written, file)
    except (OSError, StorageError) as error:
        warnings.warn(f"costs are measured at every load: {error}", ForewordWarning, stacklevel=2)
        with suppress(OSError):
            written.unlink()


@dataclass(frozen=True)
class Tries:
    """Seconds of several passes at each row count, and the same of batches."""

    rows: tuple[int, ...]
    seconds: list[list[float]]
    texts: int = 1
    batches: tuple[Tries, ...] = ()

    @property
    def steady(self) -> bool:
        """The usual try was not much slower than the best: nothing else kept the machine busy."""
        all_tries = [tries for one in (self, *self.batches) for tries in one.seconds]
        return sum(map(median, all_tries)) <= 1.3 * sum(map(min, all_tries))

    def curve(self) -> CostCurve:
        """The quickest of each: whatever else the machine does can only add time. Fewer rows never cost more than more of
        them, which could take their place; nor do many cost more than passes of the fewest."""
        best = [*accumulate((min(tries) for tries in reversed(self.seconds)), min)][::-1]
        seconds = tuple(min(time, rows / self.rows[0] * best[0]) for rows, time in zip(self.rows, best, strict=True))
        return CostCurve(self.rows, seconds, self.steady, self.texts, tuple(one.curve() for one in self.batches))


@torch.inference_mode()
def measure(model: Model, rows: tuple[int, ...] | None = None, batches: Batches | None = None) -> Tries:
    """Time passes over a short text, and over several, in caches of their own. A CPU is as slow with the rows of one text as
    with those of several."""
    several = model.device.type == "cuda"
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
        seconds = _in_turns([_pass(model, texts, count) for count in rows], model.device)
    return Tries(tuple(texts * count for count in rows), seconds, texts)


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
        drafter.bind(model, 1)
        cache = model.allocate(1, CONTEXT, drafter.shape.nodes + drafter.needs.grafted_rows)
        state = State.empty(1, CONTEXT, cache.length, model.ends)
        state.table.set(0, Sampling(seed=0))
        cache.length.fill_(CONTEXT // 2)
        state = state.at(replace(Lanes.of([0], CONTEXT // 2, device), changes=device.type == "cuda"))
        drafter.begin(state)
        draft = drafter.propose(state)
        scores = model.score(state.lanes, draft, drafter.needs)
        path = torch.zeros(1, min(drafter.shape.depth + 1, draft.nodes), dtype=torch.long, device=device)
        accepted = Accepted(path, torch.ones_like(path[:, 0]), state.root)

        def work() -> None:
            drafter.propose(state)
            drafter.observe(state, draft, scores, accepted)

        once = _ready(work, device, drafter.captures == "round")
        return Tries((1,), _in_turns([once], device))


def _pass(model: Model, texts: int, rows: int) -> Callable[[], object]:
    """A pass over so many rows of each text, each with two behind it, ready to be timed. A chain would cost less."""
    device = model.device
    tokens = torch.zeros(texts, rows, dtype=torch.long, device=device)
    draft = Draft(tokens, Tree.forked(rows, device), torch.full((texts,), rows, device=device))
    lanes = replace(Lanes.of(list(range(texts)), CONTEXT - 1, device), changes=device.type == "cuda")

    def score() -> object:
        return model.score(lanes, draft, Needs())

    return _ready(score, device)


def _ready(call: Callable[[], object], device: torch.device, capturable: bool = True) -> Callable[[], object]:
    """Warmed up; on CUDA captured, as rounds are."""
    if device.type == "cuda" and capturable:
        return Captured(call).replay
    call()
    return call


def _time(one: Callable[[], object], device: torch.device) -> float:
    calls = IN_A_ROW if device.type == "cuda" else 1
    settle(device)
    started = time.perf_counter()
    for _ in range(calls):
        one()
    settle(device)
    return (time.perf_counter() - started) / calls


def _description(model: Model) -> dict[str, object]:
    config = model.hf.config
    device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else platform.processor()
    return {
        "model": config.model_type,
        "shape": [config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.vocab_size],
        "heads": [config.num_attention_heads, config.num_key_value_heads],
        "layers": [type(layer).__name__ for layer in [*(model.layer_stack.lean or model.layer_stack.layers)][:1]],
        "linear": [type(model.hf.lm_head).__name__, getattr(model.hf.lm_head, "rows_stock", None)],
        "dtype": str(model.dtype),
        "device": [model.device.type, device, platform.node(), os.cpu_count()],
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _mark(model: Model) -> str:
    return hashlib.sha256(json.dumps(_description(model), sort_keys=True).encode()).hexdigest()[:16]

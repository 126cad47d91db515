"""`method="auto"`: what is expected to be fastest for one text at a time, on this target and this machine.

Expected speed-up over plain decoding = tokens a round / what a round costs in passes of one row. The tokens are measured
figures, by rows: of a shipped drafter its record's, of a method that has no record of its own those in `YIELDS`. The cost is
this machine's: a pass over so many rows, and the drafter's own work beside it. Both are cached, so that the choice is the
same at every load. Texts differ: `foreword bench` says what is fastest on yours.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from foreword.core.trees import TRAINED_BEND, share_of_gain
from foreword.errors import DrafterError
from foreword.methods import METHODS, make, trained_as
from foreword.methods.saved import read_config, restore, trained_for
from foreword.methods.shipped import shipped
from foreword.model.cost import ROWS, CostCurve, curve_for, draft_seconds
from foreword.model.fingerprint import Fingerprint
from foreword.model.model import Model


@dataclass(frozen=True)
class Yield:
    """Tokens that a round decides where so many rows are checked."""

    rows: int
    tokens: float
    source: str


# Of the default model on 48 prompts of Spec-Bench, greedy. A CPU checks as many rows as pay: where a further one costs much
# about 3 (results/bench_cpu, results/prove_cpu), where it costs little those that results/bench_cpu_48 had in the mean.
YIELDS: dict[str, tuple[Yield, ...]] = {
    "prompt_lookup": (
        Yield(3, 1.70, "results/bench_cpu"),
        Yield(6, 1.85, "results/bench_cpu_48"),
        Yield(16, 1.94, "results/bench_cuda_48"),
    ),
    "echo": (Yield(10, 2.90, "results/bench_cpu_48"), Yield(64, 3.92, "results/bench_cuda_48")),
    "token_recycling": (
        Yield(3, 1.47, "results/bench_cpu"),
        Yield(5, 1.72, "results/bench_cpu_48"),
        Yield(64, 2.56, "results/bench_cuda_48"),
    ),
}


@dataclass(frozen=True)
class Expected:
    method: str
    rows: int
    tokens_per_round: float
    round_cost: float  # one being a pass over one row, which is what plain decoding does
    source: str

    @property
    def speedup(self) -> float:
        return self.tokens_per_round / self.round_cost


PLAIN = Expected("plain", 1, 1.0, 1.0, "by definition")


def fitting(model: Model) -> dict[str, Path]:
    """The shipped drafters that were trained for this model: method -> folder."""
    there = shipped()
    found = Fingerprint.of_function(model) if there else None
    return {method: folder for method, folder in there.items() if found and trained_for(folder).matches(found)}


def expectations(model: Model, rows: int | None = None) -> list[Expected]:
    """Of every method that can serve this model with at most `rows` rows, the fastest first."""
    model.curve = model.curve or curve_for(model)
    found = [PLAIN]
    for method, known in YIELDS.items():
        if not METHODS[method].trained and (usable := _usable(known, rows, model)):
            own = draft_seconds(model, _mark(method, rows), partial(make, method, rows))
            found.append(_best(method, usable, model.curve, own))
    for method, folder in fitting(model).items():
        # What stands in the record was measured with its own method's trees; on a GPU too they check as many rows as pay.
        own_trees = trained_as(method) == method
        usable = _allowed(recorded(folder), rows) if own_trees else _usable(YIELDS.get(method, ()), rows, model)
        if usable:
            about = read_config(folder)
            mark = _mark(method, rows, [about["config"], about.get("words")])
            own = draft_seconds(model, mark, partial(restore, folder, model, rows, method))
            found.append(_best(method, usable, model.curve, own))
    return sorted(found, key=lambda one: -one.speedup)


def recorded(folder: Path) -> tuple[Yield, ...]:
    """What a trained drafter's record promises, for fewer rows than it was measured with too.

    Clover-2 on the default model has 2.19, 2.74 and 3.16 tokens a round with 5, 16 and 64 rows (results/trees_cuda), the
    rule 2.18, 2.76 and 3.16.
    """
    file = folder / "record.json"
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        tokens, most = float(record.get("stored", record["best"])["tokens_per_round"]), int(record["settings"]["rows"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        told = f"{file} does not say how many tokens a round brings, and with how many rows ({error!r})"
        raise DrafterError(f"{told}; train the drafter again") from error
    counts = [*(count for count in ROWS if 1 < count < most), most]
    gains = [(tokens - 1) * share_of_gain(count, most, TRAINED_BEND) for count in counts]
    return tuple(Yield(count, 1 + gain, "record.json") for count, gain in zip(counts, gains, strict=True))


def _allowed(known: tuple[Yield, ...], rows: int | None) -> tuple[Yield, ...]:
    return tuple(one for one in known if rows is None or one.rows <= rows)


def _usable(known: tuple[Yield, ...], rows: int | None, model: Model) -> tuple[Yield, ...]:
    """A CPU may check fewer rows than a method could; on a GPU only the most rows were measured."""
    allowed = _allowed(known, rows)
    return allowed[-1:] if model.device.type == "cuda" else allowed


def _best(method: str, usable: tuple[Yield, ...], curve: CostCurve, own: float) -> Expected:
    def at(one: Yield) -> Expected:
        return Expected(method, one.rows, one.tokens, (curve.at(one.rows) + own) / curve.at(1), one.source)

    return max(map(at, usable), key=lambda one: one.speedup)


def _mark(method: str, rows: int | None, config: object = None) -> str:
    """A name for the cost of a method as it is set up here."""
    about = json.dumps([rows, config], sort_keys=True)
    return f"{method}-{hashlib.sha256(about.encode()).hexdigest()[:8]}"

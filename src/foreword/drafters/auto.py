"""`method="auto"`: what is expected to be fastest for one text at a time, on this target and this machine.

Expected speed-up over plain decoding = tokens per round / what a round costs in passes of one row. The tokens are measured
figures, by rows: of a shipped drafter its record's, of a method that has no record of its own those in `TOKENS_PER_ROUND`. The cost is
this machine's: a pass over so many rows, and the drafter's own work next to it. Costs are kept, and so is the choice: where
two methods are about as fast it stays, whatever a later measurement says. Texts differ: `foreword bench` measures yours.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from foreword.drafters.saved import read_config, restore, trained_for
from foreword.drafters.shipped import shipped
from foreword.drafting.trees import TRAINED_BEND, share_of_gain
from foreword.errors import DrafterError
from foreword.files import read_json
from foreword.methods import METHODS, make, trained_as
from foreword.model.cost import ROWS, CostCurve, curve_for, draft_cost, facts_of
from foreword.model.fingerprint import Fingerprint
from foreword.model.measured import file_of, keep, read_kept
from foreword.model.model import Model
from foreword.ops.device import fixes_shapes

SAME_SPEED = 0.05  # of a speed-up: measurements of a quiet machine differ by as much


@dataclass(frozen=True)
class TokensPerRound:
    """Tokens that a round decides where so many rows are checked."""

    rows: int
    tokens: float
    source: str


# Of the default model on 48 prompts of Spec-Bench, greedy. A CPU checks as many rows as pay: where a further one costs much
# about 3 (results/bench_cpu, results/prove_cpu), where it costs little those that results/bench_cpu_48 had in the mean.
TOKENS_PER_ROUND: dict[str, tuple[TokensPerRound, ...]] = {
    "prompt_lookup": (
        TokensPerRound(3, 1.70, "results/bench_cpu"),
        TokensPerRound(6, 1.85, "results/bench_cpu_48"),
        TokensPerRound(16, 1.94, "results/bench_cuda_48"),
    ),
    "echo": (TokensPerRound(10, 2.90, "results/bench_cpu_48"), TokensPerRound(64, 3.92, "results/bench_cuda_48")),
    "token_recycling": (
        TokensPerRound(3, 1.47, "results/bench_cpu"),
        TokensPerRound(5, 1.72, "results/bench_cpu_48"),
        TokensPerRound(64, 2.56, "results/bench_cuda_48"),
    ),
}


@dataclass(frozen=True)
class Expected:
    method: str
    rows: int
    tokens_per_round: float
    round_cost: float  # one being a pass over one row, which is what plain decoding does
    source: str
    steady: bool = field(default=True, compare=False)  # nothing kept the machine busy when its costs were measured

    @property
    def speedup(self) -> float:
        return self.tokens_per_round / self.round_cost


PLAIN = Expected("plain", 1, 1.0, 1.0, "by definition")


def shipped_for(model: Model) -> dict[str, Path]:
    """The shipped drafters that were trained for this model: method -> folder."""
    there = shipped()
    found = Fingerprint.of_function(model) if there else None
    return {method: folder for method, folder in there.items() if found and trained_for(folder).matches(found)}


def expectations(model: Model, rows: int | None = None) -> list[Expected]:
    """Of every method that can serve this model with at most `rows` rows, the fastest first."""
    curve = model.curve or curve_for(model)
    model.use_costs(curve)
    found = [PLAIN]
    for method, known in TOKENS_PER_ROUND.items():
        if not METHODS[method].trained and (usable := _usable(known, rows, model)):
            own = draft_cost(model, _mark(method, rows), partial(make, method, rows))
            found.append(_best(method, usable, curve, own))
    for method, folder in shipped_for(model).items():
        # What stands in the record was measured with its own method's trees; on a GPU too they check as many rows as pay.
        own_trees = trained_as(method) == method
        usable = (
            _allowed(recorded_tokens(folder), rows) if own_trees else _usable(TOKENS_PER_ROUND.get(method, ()), rows, model)
        )
        if usable:
            about = read_config(folder)
            mark = _mark(method, rows, [about["config"], about.get("words")])
            own = draft_cost(model, mark, partial(restore, folder, model, rows, method))
            found.append(_best(method, usable, curve, own))
    return sorted(found, key=lambda one: -one.speedup)


@dataclass(frozen=True)
class Choice:
    """What was taken, and whether the costs it was taken by are of a quiet machine."""

    method: str
    steady: bool = True
    suspect: str = ""
    expected: dict[str, float] = field(default_factory=dict)  # speed-ups, at that time

    @staticmethod
    def read(kept: dict[str, Any]) -> Choice:
        return Choice(str(kept["method"]), bool(kept["steady"]), str(kept["suspect"]), dict(kept["expected"]))


def choose(model: Model, expected: list[Expected], rows: int | None = None) -> Choice:
    """What `auto` takes: the fastest, or what it took before on this machine where that is about as fast. What was decided
    on a quiet machine stays when it is busy."""
    best, by_name = expected[0], {one.method: one for one in expected}
    steady = all(one.steady for one in expected)
    file = file_of("choices", facts_of(model) | {"rows": rows, "candidates": sorted(by_name)})
    before = read_kept(file, Choice.read)
    if before is not None and before.method in by_name:
        known = by_name[before.method]
        if best.speedup <= known.speedup * (1 + SAME_SPEED) or (before.steady and not steady):
            if before.steady:
                return before
            best = known
    doubt = "" if steady else "costs were measured while the machine was busy"
    chosen = Choice(best.method, steady, doubt, {one.method: round(one.speedup, 3) for one in expected})
    keep(file, asdict(chosen))
    return chosen


def recorded_tokens(folder: Path) -> tuple[TokensPerRound, ...]:
    """What a trained drafter's record promises, for fewer rows than it was measured with too.

    The drafters that ship have figures of the prompts that `TOKENS_PER_ROUND` are of, with the weights as they are stored; training
    leaves those of prompts kept apart, which are easier by up to a tenth. Clover-2 on the default model has 2.19, 2.74 and
    3.16 tokens per round with 5, 16 and 64 rows (results/trees_cuda, before it guessed among fewer tokens), the rule 2.13,
    2.65 and 3.02.
    """
    file = folder / "record.json"
    try:
        record = read_json(file, strict=False)
        known = sorted((int(one["rows"]), float(one["tokens_per_round"])) for one in _figures(record))
        for rows, tokens in known:
            if not (1 <= tokens <= rows and rows > 1):
                raise ValueError(f"{tokens} tokens with {rows} rows")
        most = max(int(record["settings"]["rows"]), known[-1][0])
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        told = f"{file} does not say how many tokens a round brings, and with how many rows ({error!r})"
        raise DrafterError(f"{told}; train the drafter again") from error
    counts = [*(count for count in ROWS if 1 < count < most), most]
    # The gain is the rule's times a factor that is known at a few numbers of rows.
    factors = [(rows, (tokens - 1) / share_of_gain(rows, most, TRAINED_BEND)) for rows, tokens in known]
    gains = [_between(factors, count) * share_of_gain(count, most, TRAINED_BEND) for count in counts]
    return tuple(TokensPerRound(count, 1 + gain, "record.json") for count, gain in zip(counts, gains, strict=True))


def _figures(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows and tokens per round: of a benchmark, else as the weights are stored, else as they were before that."""
    own = record.get("stored", record["best"])["tokens_per_round"]
    return record.get("benchmark") or [{"rows": record["settings"]["rows"], "tokens_per_round": own}]


def _between(points: list[tuple[int, float]], place: int) -> float:
    """On straight lines between points, and level beyond them."""
    for (low, before), (high, after) in pairwise(points):
        if low <= place <= high:
            return before + (after - before) * (place - low) / (high - low)
    return points[0][1] if place < points[0][0] else points[-1][1]


def _allowed(known: tuple[TokensPerRound, ...], rows: int | None) -> tuple[TokensPerRound, ...]:
    return tuple(one for one in known if rows is None or one.rows <= rows)


def _usable(known: tuple[TokensPerRound, ...], rows: int | None, model: Model) -> tuple[TokensPerRound, ...]:
    """A CPU may check fewer rows than a method could; on a GPU only the most rows were measured."""
    allowed = _allowed(known, rows)
    return allowed[-1:] if fixes_shapes(model.device) else allowed


def _best(method: str, usable: tuple[TokensPerRound, ...], curve: CostCurve, own: CostCurve) -> Expected:
    steady = curve.steady and own.steady

    def at(one: TokensPerRound) -> Expected:
        return Expected(method, one.rows, one.tokens, (curve.at(one.rows) + own.at(1)) / curve.at(1), one.source, steady)

    return max(map(at, usable), key=lambda one: one.speedup)


def _mark(method: str, rows: int | None, config: object = None) -> str:
    """A name for the cost of a method as it is set up here."""
    about = json.dumps([rows, config], sort_keys=True)
    return f"{method}-{hashlib.sha256(about.encode()).hexdigest()[:8]}"

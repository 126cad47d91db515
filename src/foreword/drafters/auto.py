"""`method="auto"`: choose the method that is expected to be fastest for one sequence at a time, on this target and machine.

Expected speed-up over plain decoding = tokens per round / cost of a round, in passes over one row. Tokens per round were
measured, for several numbers of rows: a shipped drafter has them in its record, other methods in `TOKENS_PER_ROUND`. Costs
are measured on this machine: a pass over that many rows, plus the drafter's own work. Costs and the choice are stored, and
the choice stays while no method is clearly faster. Prompts differ: `foreword bench` measures yours.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from foreword.drafters.saved import VOCABULARY, read_config, restore, trained_for
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
from foreword.ranks.group import agreed

SAME_SPEED = 0.05  # relative difference of two speed-ups that counts as none: measurements vary as much on a quiet machine


@dataclass(frozen=True)
class TokensPerRound:
    """The mean number of tokens that a round decides if the target checks `rows` rows."""

    rows: int
    tokens: float
    source: str  # the result that it was measured in


# Measured with the default model on 48 prompts of Spec-Bench, greedy. A CPU checks as many rows as pay off: about 3 if a
# further row is expensive (results/bench_cpu, results/prove_cpu), otherwise the mean of results/bench_cpu_48.
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
    """The expected speed of a method."""

    method: str
    rows: int
    tokens_per_round: float
    round_cost: float  # 1.0 is a pass over one row, a round of plain decoding
    source: str  # where `tokens_per_round` comes from
    steady: bool = field(default=True, compare=False)  # nothing else kept the machine busy while its costs were measured

    @property
    def speedup(self) -> float:
        return self.tokens_per_round / self.round_cost


PLAIN = Expected("plain", 1, 1.0, 1.0, "by definition")


def shipped_for(model: Model) -> dict[str, Path]:
    """Return the shipped drafters that were trained for this model: method -> folder."""
    folders = shipped()
    found = Fingerprint.of_function(model) if folders else None
    return {method: folder for method, folder in folders.items() if found and trained_for(folder).matches(found)}


def expectations(model: Model, rows: int | None = None) -> list[Expected]:
    """Return the expected speed of every method that can serve this model with at most `rows` rows, the fastest first."""
    curve = model.curve or curve_for(model)
    model.use_costs(curve)
    found = [PLAIN]
    for method, known in TOKENS_PER_ROUND.items():
        if not METHODS[method].trained and (usable := _usable(known, rows, model)):
            own = draft_cost(model, _mark(method, rows), partial(make, method, rows))
            found.append(_best(method, usable, curve, own))
    for method, folder in shipped_for(model).items():
        # A record was measured with the trees of its own method; those check as many rows as pay off, on a GPU too.
        own_trees = trained_as(method) == method
        measured = TOKENS_PER_ROUND.get(method, ())
        usable = _allowed(recorded_tokens(folder), rows) if own_trees else _usable(measured, rows, model)
        if usable:
            about = read_config(folder)
            mark = _mark(method, rows, [about["config"], about.get(VOCABULARY)])
            own = draft_cost(model, mark, partial(restore, folder, model, rows, method))
            found.append(_best(method, usable, curve, own))
    return sorted(found, key=lambda one: -one.speedup)


@dataclass(frozen=True)
class Choice:
    """The chosen method, and whether its costs were measured on a quiet machine."""

    method: str
    steady: bool = True
    suspect: str = ""  # why its costs are doubtful, if they are
    expected: dict[str, float] = field(default_factory=dict)  # method -> expected speed-up when it was chosen

    @staticmethod
    def read(kept: dict[str, Any]) -> Choice:
        return Choice(str(kept["method"]), bool(kept["steady"]), str(kept["suspect"]), dict(kept["expected"]))


def choose(model: Model, expected: list[Expected], rows: int | None = None) -> Choice:
    """Choose the fastest method, or keep the earlier choice on this machine if it is about as fast. A choice made on a quiet
    machine is kept while the machine is busy."""
    best, by_name = expected[0], {one.method: one for one in expected}
    steady = all(one.steady for one in expected)
    file = file_of("choices", facts_of(model) | {"rows": rows, "candidates": sorted(by_name)})
    before = agreed(read_kept(file, Choice.read))
    if before is not None and before.method in by_name:
        known = by_name[before.method]
        if best.speedup <= known.speedup * (1 + SAME_SPEED) or (before.steady and not steady):
            if before.steady:
                return before
            best = known
    suspect = "" if steady else "costs were measured while the machine was busy"
    chosen = Choice(best.method, steady, suspect, {one.method: round(one.speedup, 3) for one in expected})
    keep(file, asdict(chosen))
    return chosen


def recorded_tokens(folder: Path) -> tuple[TokensPerRound, ...]:
    """Return the tokens per round that a trained drafter's record promises, also for fewer rows than it was measured with.

    Shipped drafters have figures of the same prompts as `TOKENS_PER_ROUND`, measured with the stored weights. The figures
    that training writes are of held-out prompts, which are up to a tenth easier. The rule for fewer rows, checked on
    Clover-2 with the default model: measured 2.19, 2.74 and 3.16 tokens per round with 5, 16 and 64 rows
    (results/trees_cuda, before it had a draft vocabulary), predicted 2.13, 2.65 and 3.02.
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
        reason = f"{file} does not say how many tokens a round decides, and with how many rows ({error!r})"
        raise DrafterError(f"{reason}; train the drafter again") from error
    counts = [*(count for count in ROWS if 1 < count < most), most]
    # The gain is that of the rule times a factor, which is known at the measured numbers of rows.
    factors = [(rows, (tokens - 1) / share_of_gain(rows, most, TRAINED_BEND)) for rows, tokens in known]
    gains = [_interpolated(factors, count) * share_of_gain(count, most, TRAINED_BEND) for count in counts]
    return tuple(TokensPerRound(count, 1 + gain, "record.json") for count, gain in zip(counts, gains, strict=True))


def _figures(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return rows and tokens per round, of the first that exists: a benchmark, the stored weights, the weights before
    that."""
    own = record.get("stored", record["best"])["tokens_per_round"]
    return record.get("benchmark") or [{"rows": record["settings"]["rows"], "tokens_per_round": own}]


def _interpolated(points: list[tuple[int, float]], at: int) -> float:
    """Interpolate linearly between points, and stay constant outside them."""
    for (low, before), (high, after) in pairwise(points):
        if low <= at <= high:
            return before + (after - before) * (at - low) / (high - low)
    return points[0][1] if at < points[0][0] else points[-1][1]


def _allowed(known: tuple[TokensPerRound, ...], rows: int | None) -> tuple[TokensPerRound, ...]:
    return tuple(one for one in known if rows is None or one.rows <= rows)


def _usable(known: tuple[TokensPerRound, ...], rows: int | None, model: Model) -> tuple[TokensPerRound, ...]:
    """Return the figures that hold on this device: a CPU may check fewer rows; a GPU was measured with the most rows
    only."""
    allowed = _allowed(known, rows)
    return allowed[-1:] if fixes_shapes(model.device) else allowed


def _best(method: str, usable: tuple[TokensPerRound, ...], curve: CostCurve, own: CostCurve) -> Expected:
    steady = curve.steady and own.steady

    def at(one: TokensPerRound) -> Expected:
        return Expected(method, one.rows, one.tokens, (curve.at(one.rows) + own.at(1)) / curve.at(1), one.source, steady)

    return max(map(at, usable), key=lambda one: one.speedup)


def _mark(method: str, rows: int | None, config: object = None) -> str:
    """Return the name under which the cost of a method with these options is stored."""
    about = json.dumps([rows, config], sort_keys=True)
    return f"{method}-{hashlib.sha256(about.encode()).hexdigest()[:8]}"

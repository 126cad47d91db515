"""Costs of serving from results of `foreword bench`.

A round at batch size 1 is timed there: the time after the first token over the rounds. What it takes beyond the pass is the
cost of drafting, which grows with the batch as a pass over one row per sequence does. At larger batches a round is the pass
that the cost curve has, plus drafting. A prompt is a pass of the cost curve. Several results of one model and machine
complete each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from foreword.bench.report import Content, read_results
from foreword.drafters.spec import parse_spec
from foreword.errors import InputError
from foreword.methods import all_methods
from foreword.model.cost import CostCurve
from foreword.simulate.costs import MethodCosts, RoundCost, Scheduling, ServingCosts

SAME = ("model", "machine", "dtype")  # of results that complete each other


@dataclass(frozen=True)
class Pooled:
    """All runs of a method at one batch size."""

    batch: int
    rounds: int
    decided: tuple[float, ...]
    drafted: float  # draft tokens per round
    seconds: float | None  # of a round, where one request ran alone


def costs_of_results(files: Sequence[Path], temperature: float = 0.0) -> ServingCosts:
    """Return the costs of all methods in some results."""
    found = [(file, read_results(file)) for file in files]
    about = found[0][1]["about"]
    for file, one in found[1:]:
        if differing := [name for name in SAME if one["about"].get(name) != about.get(name)]:
            raise InputError(
                f"{file} and {found[0][0]} differ in {', '.join(differing)}; give results of one model and machine"
            )
    curve = _curve(found)
    timings = [timing for _, one in found for timing in one["timings"] if timing.get("temperature", 0.0) == temperature]
    if not timings:
        raise InputError(
            f"no results of {_names(files)} are at temperature {temperature:g}; name another with --temperature"
        )
    usable = [name for name in dict.fromkeys(one["contender"] for one in timings) if _is_usable(timings, name)]
    if not usable:
        raise InputError(f"{_names(files)} has no runs of one request at a time, whose rounds are known; add such results")
    device = torch.device("cuda" if curve.batches else "cpu")  # only a GPU has curves of larger batches
    return ServingCosts(
        model=about["model"],
        machine=about["machine"],
        dtype=about["dtype"],
        temperature=temperature,
        scheduling=Scheduling.on(device, about["dtype"]),
        methods={
            name: _method(name, [one for one in timings if one["contender"] == name], curve, _names(files))
            for name in usable
        },
        reading_share=_reading_share([one for _, one in found]),
        notes=[
            f"batches of {', '.join(sorted({str(timing.get('batch', 1)) for timing in timings}, key=int))} were measured; "
            "costs and drafts of others lie on lines between them",
            "prompts are passes of the cost curve, as long as it was measured; longer ones in proportion",
        ],
    )


def _names(files: Sequence[Path]) -> str:
    return ", ".join(map(str, files))


def _curve(found: Sequence[tuple[Path, Content]]) -> CostCurve:
    """Return the cost curve with the most batch sizes."""
    curves = [CostCurve.read(one["costs"]) for _, one in found if one.get("costs")]
    if not curves:
        raise InputError(
            f"{_names([file for file, _ in found])} holds no cost curve; results of `foreword bench` have one "
            "if a method sized its drafts by it"
        )
    return max(curves, key=lambda one: len(one.batches))


def _reading_share(found: Sequence[Content]) -> float | None:
    """Return which share of a pass over one row is reading weights at the speed of the memory."""
    passes = [one for content in found for one in content.get("roofline", {}).get("passes", [])]
    return next((min(one["bandwidth_share"], 1.0) for one in passes if one["rows"] == 1), None)


def _is_usable(timings: Sequence[Content], name: str) -> bool:
    """Return whether it is a method of ours that was timed with one request at a time."""
    alone = any(one["contender"] == name and one.get("batch", 1) == 1 and one.get("first_s") for one in timings)
    return alone and parse_spec(name).name in all_methods()


def _method(name: str, timings: Sequence[Content], curve: CostCurve, source: str) -> MethodCosts:
    batches = sorted({one.get("batch", 1) for one in timings})
    pooled = [_pooled(batch, [one for one in timings if one.get("batch", 1) == batch]) for batch in batches]
    alone = pooled[0].seconds
    assert alone is not None, "`_is_usable` has seen a run alone"
    drafting = max(alone - curve.at(1 + round(pooled[0].drafted)), 0.0)
    rounds = []
    for one in pooled:
        rows = one.batch * (1 + one.drafted)
        grown = curve.at(one.batch, one.batch) / curve.at(1)
        seconds = alone if one.batch == 1 else curve.at(round(rows), one.batch) + drafting * grown
        rounds.append(RoundCost(one.batch, seconds, rows, one.decided))
    if name == "plain":
        rounds = _plain_rounds(rounds[0], curve, drafting)
    prompts = CostCurve(curve.rows, curve.seconds)
    return MethodCosts(name, tuple(rounds), prompts, f"{source} (`foreword bench`)", curve.steady, curve.suspect)


def _plain_rounds(alone: RoundCost, curve: CostCurve, drafting: float) -> list[RoundCost]:
    """Return the rounds of plain decoding: the curve has them at every batch size that it was measured at."""
    batches = [one.sequences for one in curve.batches] or [rows for rows in curve.rows if rows > 1]
    return [alone, *(RoundCost(batch, curve.at(batch, batch) + drafting, batch, (1.0,)) for batch in batches)]


def _pooled(batch: int, timings: Sequence[Content]) -> Pooled:
    rounds, drafted = sum(one["rounds"] for one in timings), sum(one.get("drafted", 0) for one in timings)
    kept = [0] * max((len(one.get("kept", [])) for one in timings), default=0)
    for one in timings:
        for count, times in enumerate(one.get("kept", [])):
            kept[count] += times
    undrafted = rounds - sum(kept)
    counts = [undrafted + (kept[0] if kept else 0), *kept[1:]]
    alone = [one for one in timings if one.get("first_s") and one["rounds"] > 1]
    later = sum(one["rounds"] - 1 for one in alone)
    seconds = sum(one["seconds"] - one["first_s"] for one in alone) / later if later else None
    return Pooled(batch, rounds, tuple(count / rounds for count in counts), drafted / rounds, seconds)

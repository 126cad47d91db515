"""Cost curves: straight lines between what was measured, measured once and kept."""

import json
import math
import os
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from doubles import TRAINED, LastHidden, fresh, target
from foreword.core.draft import Draft
from foreword.core.scores import Accepted, Scores
from foreword.core.state import State
from foreword.errors import CapacityError, ForewordWarning
from foreword.methods import METHODS, make, untrained
from foreword.model import cost
from foreword.model.cost import CostCurve, Tries, curve_for, draft_seconds, measure, measure_draft
from foreword.model.model import Model
from foreword.model.pack import fuse

CURVE = CostCurve((1, 4, 8), (2.0, 5.0, 6.0))


@pytest.mark.parametrize(("rows", "seconds"), [(1, 2.0), (2, 3.0), (4, 5.0), (6, 5.5), (8, 6.0), (16, 12.0)])
def test_between_and_beyond_the_points(rows: int, seconds: float) -> None:
    assert CURVE.at(rows) == pytest.approx(seconds)
    assert CURVE.relative(rows) == pytest.approx(seconds / 2)


def test_a_curve_of_one_point() -> None:
    assert CostCurve((1,), (3.0,)).relative(5) == pytest.approx(5.0)


def test_batches_have_curves_of_their_own() -> None:
    """Eight texts have a curve of their own, fewer lie between that and the curve of one, more are taken for eight."""
    curve = CostCurve((1, 4, 8), (2.0, 5.0, 6.0), batches=(CostCurve((8, 16), (9.0, 11.0), texts=8),))
    assert curve.at(8, 8) == pytest.approx(9.0) and curve.at(16, 8) == pytest.approx(11.0)
    assert curve.at(8) == curve.at(8, 1) == pytest.approx(6.0)
    assert curve.at(12, 8) == curve.at(12, 16) == curve.at(16, 8), "a tile costs what it costs"
    assert curve.at(8, 4) == pytest.approx(6.0 + 3.0 * 3 / 7)
    assert CURVE.at(8, 8) == CURVE.at(8)


def test_rows_of_a_batch_are_counted_by_tiles() -> None:
    eight = CostCurve((8, 64, 128, 256), (1.0, 2.0, 3.0, 5.0), texts=8)
    curve = CostCurve((1, 256), (1.0, 5.0), batches=(eight,))
    found = [curve.at(rows, 8) for rows in (8, 33, 64, 65, 128, 132, 192, 193, 256)]
    assert found == pytest.approx([1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0, 5.0, 5.0])
    assert curve.at(9, 8) < curve.at(17, 8) < curve.at(33, 8), "few rows of many texts are no tile of sixty-four"


def test_passes_over_several_texts_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "CONTEXT", 16)
    tries = measure(target(), rows=(1, 3), batches={2: (1, 4), 4: (1,)})
    assert [(one.texts, one.rows) for one in (tries, *tries.batches)] == [(1, (1, 3)), (2, (2, 8)), (4, (4,))]
    curve = tries.curve()
    assert [one.texts for one in curve.batches] == [2, 4] and curve.at(4, 4) == min(tries.batches[1].seconds[0])
    assert CostCurve.read(json.loads(json.dumps(asdict(curve)))) == curve


@pytest.mark.parametrize("error", [CapacityError("no room"), torch.OutOfMemoryError("no room")], ids=repr)
def test_batches_that_find_no_memory_are_left_out(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(model: Model, texts: int, rows: tuple[int, ...]) -> Tries:
        if texts > 2:
            raise error
        return Tries(tuple(texts * count for count in rows), [[1.0] for _ in rows], texts)

    monkeypatch.setattr(cost, "_tried", full)
    curve = measure(target(), rows=(1, 3), batches={2: (1, 4), 3: (1,)}).curve()
    assert curve.rows == (1, 3) and [one.texts for one in curve.batches] == [2]


def test_a_measured_curve_never_falls() -> None:
    curve = Tries((1, 2, 4, 8), [[3.0, 2.0], [1.5, 9.0], [5.0, 5.5], [99.0, 17.0]]).curve()
    assert curve == CostCurve((1, 2, 4, 8), (1.5, 1.5, 5.0, 12.0), steady=False)


def test_a_busy_machine_is_noticed() -> None:
    assert Tries((1, 2), [[1.0, 1.2, 1.1], [2.0, 2.1, 9.0]]).steady
    assert not Tries((1, 2), [[1.0, 1.2, 1.1], [2.0, 2.9, 9.0]]).steady


@pytest.mark.parametrize(("seconds", "tries"), [(0.1, cost.REPEATS), (0.8, 3), (60.0, cost.FEWEST)])
def test_slow_passes_are_tried_less_often(seconds: float, tries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(cost.time, "perf_counter", lambda: clock[0])

    def one() -> None:
        clock[0] += seconds

    assert cost._in_turns([one, one], torch.device("cpu")) == [[pytest.approx(seconds)] * tries] * 2


STEADY, SHAKY = Tries((1, 4), [[1.0, 1.0], [2.0, 2.1]]), Tries((1, 4), [[1.0, 9.0], [2.0, 9.0]])


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Tries]:
    """What the machine will show, one entry for each time it is measured; nothing is left when it is measured too often."""
    coming: list[Tries] = []
    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path))
    monkeypatch.setattr(cost, "measure", lambda model: coming.pop(0))
    return coming


def test_a_curve_is_measured_once_and_kept(measured: list[Tries]) -> None:
    measured.append(STEADY)
    assert curve_for(target()) == curve_for(target()) == STEADY.curve()


def test_what_a_busy_machine_shows_is_trusted_for_a_while(measured: list[Tries], tmp_path: Path) -> None:
    measured += [SHAKY, STEADY]
    assert curve_for(target()) == curve_for(target()) == SHAKY.curve()
    (file,) = (tmp_path / "costs").glob("*.json")
    for age, shown in ((cost.UNSTEADY_S + 1, STEADY), (10 * cost.UNSTEADY_S, STEADY)):
        os.utime(file, (time.time() - age,) * 2)
        assert curve_for(target()) == shown.curve()


def test_who_times_for_others_believes_no_busy_machine(measured: list[Tries]) -> None:
    """Not even for a while; and what it measures instead is everybody's."""
    measured += [SHAKY, SHAKY, STEADY]
    assert not curve_for(target()).steady
    assert curve_for(target(), quiet=True) == SHAKY.curve()  # busy still: there is nothing better
    assert curve_for(target(), quiet=True) == curve_for(target()) == STEADY.curve() and measured == []
    assert curve_for(target(), quiet=True).steady


def test_another_kind_of_model_has_another_curve(measured: list[Tries]) -> None:
    measured += [STEADY, Tries((1, 4), [[1.0, 1.0], [3.0, 3.1]])]
    assert curve_for(target("llama")) != curve_for(target("qwen3"))


def test_other_layers_have_another_curve(measured: list[Tries]) -> None:
    """The same model, rebuilt: its passes cost otherwise."""
    measured += [STEADY, Tries((1, 4), [[1.0, 1.0], [3.0, 3.1]])]
    stock, rebuilt = (Model(fresh("llama", torch.float32, head_dim=16)) for _ in range(2))
    fuse(rebuilt.hf)
    assert curve_for(stock) != curve_for(Model(rebuilt.hf))


def test_a_damaged_file_is_measured_anew(measured: list[Tries], tmp_path: Path) -> None:
    measured += [STEADY, STEADY]
    curve_for(target())
    (file,) = (tmp_path / "costs").glob("*.json")
    file.write_text("{")
    assert curve_for(target()) == STEADY.curve() and measured == [] and file.read_text() != "{"


def test_measuring_times_every_number_of_rows() -> None:
    tries = measure(target(), rows=(1, 3))
    assert len(tries.seconds) == len(tries.rows) >= 1
    assert all(second > 0 for seconds in tries.seconds for second in seconds)


@pytest.mark.parametrize(
    "kept",
    [
        {"steady": True, "rows": [1, 4], "seconds": [1.0, 2.0], "texts": [8], "together": [1.5]},  # as it once was
        {"steady": True, "rows": [], "seconds": []},
        {"steady": True, "rows": [1, 4], "seconds": [1.0]},
        {"steady": True, "rows": [4, 1], "seconds": [1.0, 2.0]},
        {"steady": True, "rows": [1, 4], "seconds": [0.0, 2.0]},
        {"steady": True, "rows": [1, 4], "seconds": [1.0, math.nan]},
        {"steady": True, "rows": ["1", "4"], "seconds": ["a", "b"]},
        {"steady": True, "rows": 1, "seconds": 2.0},
        [],
    ],
    ids=str,
)
def test_a_file_that_holds_no_curve_is_measured_anew(kept: object, measured: list[Tries], tmp_path: Path) -> None:
    measured += [STEADY, STEADY]
    curve_for(target())
    (file,) = (tmp_path / "costs").glob("*.json")
    file.write_text(json.dumps(kept))
    assert curve_for(target()) == curve_for(target()) == STEADY.curve() and measured == []


@pytest.mark.parametrize("blocked", ["", "costs"])
def test_a_curve_that_cannot_be_kept_is_used_all_the_same(
    blocked: str, measured: list[Tries], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file stands where the folder should be, so that not even the superuser can write."""
    (tmp_path / "home" / blocked).parent.mkdir(exist_ok=True)
    (tmp_path / "home" / blocked).write_text("")
    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path / "home"))
    measured.append(STEADY)
    with pytest.warns(ForewordWarning, match="costs are measured at every load: .*home"):
        assert curve_for(target()) == STEADY.curve()


def test_nothing_half_written_is_left(measured: list[Tries], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cost.os, "replace", full)
    measured.append(STEADY)
    with pytest.warns(ForewordWarning, match="No space left"):
        curve_for(target())
    assert list((tmp_path / "costs").iterdir()) == []


def test_measuring_leaves_the_engine_its_cache() -> None:
    model = target()
    held = model.allocate(2, 40, 4)
    measure(model, rows=(1,))
    assert model.cache is held and model.context == 40


# Drafts -------------------------------------------------------------------------------------------------------------------


class Slow(LastHidden):
    """Takes its time in both halves of a round."""

    def propose(self, state: State) -> Draft:
        time.sleep(0.01)
        return super().propose(state)

    def observe(self, state: State, draft: Draft, scores: Scores, accepted: Accepted) -> None:
        time.sleep(0.02)
        super().observe(state, draft, scores, accepted)


def test_a_drafters_own_work_is_timed() -> None:
    """Both halves of a round, and not the pass between them."""
    tries = measure_draft(target(), Slow())
    assert tries.rows == (1,) and 0.03 <= min(tries.seconds[0]) < 0.1


@pytest.mark.parametrize("name", METHODS)
def test_every_drafter_can_be_timed(name: str) -> None:
    model = target()
    drafter = untrained(name, **TRAINED[name]) if name in TRAINED else make(name)
    assert measure_draft(model, drafter).curve().at(1) > 0
    assert model.context == model.max_context  # what was there before is back


def test_what_a_draft_costs_is_kept_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path))
    monkeypatch.setattr(Tries, "steady", True)
    first = draft_seconds(target(), "slow", Slow)
    assert draft_seconds(target(), "slow", lambda: pytest.fail("measured again")) == first
    assert draft_seconds(target(), "quick", LastHidden) < first
    assert len(list((tmp_path / "drafts").rglob("*.json"))) == 2 and not (tmp_path / "costs").exists()

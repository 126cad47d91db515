"""Cost curves: interpolated between measured points, measured once and kept."""

import json
import math
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from doubles import OPTIONS, LastHidden, fresh, target, target_for
from foreword.core.draft import Draft
from foreword.core.needs import Skip
from foreword.core.scores import Accepted, Scores
from foreword.core.state import State
from foreword.errors import CapacityError, ForewordWarning
from foreword.methods import METHODS, untrained
from foreword.model import cost
from foreword.model import linears as linears_module
from foreword.model import measured as measured_module
from foreword.model.cost import CostCurve, PassTimings, curve_for, draft_cost, facts_of, half_costs, measure, measure_draft
from foreword.model.linears import fuse
from foreword.model.measured import remeasuring
from foreword.model.model import Model

CURVE = CostCurve((1, 4, 8), (2.0, 5.0, 6.0))


@pytest.mark.parametrize(("rows", "seconds"), [(1, 2.0), (2, 3.0), (4, 5.0), (6, 5.5), (8, 6.0), (16, 12.0)])
def test_between_and_beyond_the_points(rows: int, seconds: float) -> None:
    assert CURVE.at(rows) == pytest.approx(seconds)
    assert CURVE.relative(rows) == pytest.approx(seconds / 2)


def test_a_curve_of_one_point() -> None:
    assert CostCurve((1,), (3.0,)).relative(5) == pytest.approx(5.0)


def test_batches_have_curves_of_their_own() -> None:
    """Eight sequences have a curve; fewer are interpolated between it and the curve of one; more count as eight."""
    curve = CostCurve((1, 4, 8), (2.0, 5.0, 6.0), batches=(CostCurve((8, 16), (9.0, 11.0), sequences=8),))
    assert curve.at(8, 8) == pytest.approx(9.0) and curve.at(16, 8) == pytest.approx(11.0)
    assert curve.at(8) == curve.at(8, 1) == pytest.approx(6.0)
    assert curve.at(12, 8) == curve.at(12, 16) == curve.at(16, 8), "rows that share a tile cost the same"
    assert curve.at(8, 4) == pytest.approx(6.0 + 3.0 * 3 / 7)
    assert CURVE.at(8, 8) == CURVE.at(8)


def test_rows_of_a_batch_are_counted_by_tiles() -> None:
    eight = CostCurve((8, 64, 128, 256), (1.0, 2.0, 3.0, 5.0), sequences=8)
    curve = CostCurve((1, 256), (1.0, 5.0), batches=(eight,))
    found = [curve.at(rows, 8) for rows in (8, 33, 64, 65, 128, 132, 192, 193, 256)]
    assert found == pytest.approx([1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0, 5.0, 5.0])
    assert curve.at(9, 8) < curve.at(17, 8) < curve.at(33, 8), "few rows of many sequences do not cost a tile of 64"


def test_passes_over_several_sequences_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "CONTEXT", 16)
    timings = measure(target(), rows=(1, 3), batches={2: (1, 4), 4: (1,)})
    assert [(one.sequences, one.rows) for one in (timings, *timings.batches)] == [(1, (1, 3)), (2, (2, 8)), (4, (4,))]
    curve = timings.curve()
    assert [one.sequences for one in curve.batches] == [2, 4] and curve.at(4, 4) == min(timings.batches[1].seconds[0])
    assert CostCurve.read(json.loads(json.dumps(curve.to_dict()))) == curve


def test_stored_curves_keep_their_keys() -> None:
    """Files and results name the number of sequences `texts`."""
    curve = replace(CURVE, batches=(CostCurve((8, 16), (9.0, 11.0), sequences=8),))
    assert list(curve.to_dict()) == ["rows", "seconds", "steady", "texts", "batches", "suspect"]
    assert [curve.to_dict()["texts"], curve.to_dict()["batches"][0]["texts"]] == [1, 8]


@pytest.mark.parametrize("error", [CapacityError("no room"), torch.OutOfMemoryError("no room")], ids=repr)
def test_batches_that_do_not_fit_in_memory_are_left_out(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(model: Model, sequences: int, rows: tuple[int, ...]) -> PassTimings:
        if sequences > 2:
            raise error
        return PassTimings(tuple(sequences * count for count in rows), [[1.0] for _ in rows], sequences)

    monkeypatch.setattr(cost, "_time_passes", full)
    curve = measure(target(), rows=(1, 3), batches={2: (1, 4), 3: (1,)}).curve()
    assert curve.rows == (1, 3) and [one.sequences for one in curve.batches] == [2]


def test_a_measured_curve_never_falls() -> None:
    curve = PassTimings((1, 2, 4, 8), [[3.0, 2.0], [1.5, 9.0], [5.0, 5.5], [99.0, 17.0]]).curve()
    assert curve == CostCurve((1, 2, 4, 8), (1.5, 1.5, 5.0, 12.0), steady=False)


def test_a_busy_machine_shows_in_the_spread_of_timings() -> None:
    assert PassTimings((1, 2), [[1.0, 1.2, 1.1], [2.0, 2.1, 9.0]]).steady
    assert not PassTimings((1, 2), [[1.0, 1.2, 1.1], [2.0, 2.9, 9.0]]).steady


@pytest.mark.parametrize(("seconds", "repeats"), [(0.1, cost.REPEATS), (0.8, 3), (60.0, cost.MIN_REPEATS)])
def test_slow_passes_are_repeated_less_often(seconds: float, repeats: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(cost.time, "perf_counter", lambda: clock[0])

    def one() -> None:
        clock[0] += seconds

    assert cost._interleaved([one, one], torch.device("cpu")) == [[pytest.approx(seconds)] * repeats] * 2


def test_an_evenly_busy_machine_shows_in_the_waits_of_our_threads() -> None:
    even = PassTimings((1, 2), [[1.0, 1.1, 1.0], [2.0, 2.1, 2.0]], waited="a thread waited for a core half of the time")
    assert not even.steady and even.curve().suspect == even.waited
    batch = PassTimings((8,), [[1.0, 1.0]], sequences=8, waited="a thread waited")
    assert not PassTimings((1,), [[1.0, 1.0]], batches=(batch,)).steady


def test_waits_of_our_threads_are_recorded_while_passes_and_drafts_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    class LongWaits(cost.Waits):
        doubt = "a thread waited for a core"

    monkeypatch.setattr(cost, "Waits", LongWaits)
    assert measure(target(), rows=(1,)).waited == measure_draft(target(), LastHidden()).waited == LongWaits.doubt
    model = target()
    monkeypatch.setattr(model, "device", torch.device("cuda"))
    assert cost._waits_that_count(model, LongWaits()) == "", "the host of a GPU may be late"


STEADY, SHAKY = PassTimings((1, 4), [[1.0, 1.0], [2.0, 2.1]]), PassTimings((1, 4), [[1.0, 9.0], [2.0, 9.0]])


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[PassTimings]:
    """Return the timings to come, one for each measurement. Measuring more often than that fails."""
    coming: list[PassTimings] = []
    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path))
    monkeypatch.setattr(cost, "measure", lambda model: coming.pop(0))
    monkeypatch.setattr(cost, "read_speed", lambda device: 1.0)  # bytes per second: no pass is too slow for this machine
    return coming


def test_a_curve_is_measured_once_and_kept(measured: list[PassTimings]) -> None:
    measured.append(STEADY)
    assert curve_for(target()) == curve_for(target()) == STEADY.curve()


def test_a_curve_of_a_busy_machine_is_used_for_a_while(measured: list[PassTimings], tmp_path: Path) -> None:
    measured += [SHAKY, STEADY]
    assert curve_for(target()) == curve_for(target()) == SHAKY.curve()
    (file,) = (tmp_path / "costs").glob("*.json")
    for age, shown in ((measured_module.SUSPECT_S + 1, STEADY), (10 * measured_module.SUSPECT_S, STEADY)):
        os.utime(file, (time.time() - age,) * 2)
        assert curve_for(target()) == shown.curve()


def test_quiet_does_not_use_a_curve_of_a_busy_machine(measured: list[PassTimings]) -> None:
    """Not even for a while. What it measures instead is stored for all."""
    measured += [SHAKY, SHAKY, STEADY]
    assert not curve_for(target()).steady
    assert curve_for(target(), quiet=True) == SHAKY.curve()  # still busy: there is nothing better
    assert curve_for(target(), quiet=True) == curve_for(target()) == STEADY.curve() and measured == []
    assert curve_for(target(), quiet=True).steady


EVENLY_BUSY = PassTimings((1, 4), [[0.27, 0.27], [0.54, 0.54]])


def test_a_pass_much_slower_than_reading_its_weights_is_suspect(
    measured: list[PassTimings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every timing takes 270 ms, for a pass that reads a few kilobytes."""
    measured += [EVENLY_BUSY, PassTimings((1, 4), [[0.0003, 0.0003], [0.0006, 0.0006]])]
    monkeypatch.setattr(cost, "read_speed", lambda device: 10e9)
    busy = curve_for(target())
    assert not busy.steady and "270 ms" in busy.suspect
    assert curve_for(target(), quiet=True).steady and measured == []


def test_a_large_model_may_take_long(measured: list[PassTimings], monkeypatch: pytest.MonkeyPatch) -> None:
    measured.append(EVENLY_BUSY)
    monkeypatch.setattr(cost, "read_speed", lambda device: 10e9)
    monkeypatch.setattr(cost.linears, "read_bytes", lambda model: 10**9)
    assert curve_for(target()).steady


def test_a_faster_earlier_curve_is_not_replaced_for_good(measured: list[PassTimings], tmp_path: Path) -> None:
    """The machine is unevenly busy first, then evenly busy: the earlier curve shows it, and is kept."""
    uneven = PassTimings((1, 4), [[0.04, 0.9], [0.05, 0.9]])
    measured += [uneven, EVENLY_BUSY, EVENLY_BUSY, PassTimings((1, 4), [[0.033, 0.033], [0.04, 0.04]])]
    assert not curve_for(target()).steady
    for _ in range(2):
        again = curve_for(target(), quiet=True)
        assert again.at(1) == 0.04 and not again.steady and "40.0 when it was measured before" in again.suspect
    assert curve_for(target(), quiet=True).at(1) == curve_for(target()).at(1) == 0.033


def test_a_slower_machine_may_be_measured_again(measured: list[PassTimings]) -> None:
    """If only the earlier curve contradicts it, and that one was steady."""
    measured += [PassTimings((1, 4), [[0.033, 0.033], [0.04, 0.04]]), EVENLY_BUSY]
    assert curve_for(target()).at(1) == 0.033
    with remeasuring():
        assert curve_for(target()).at(1) == 0.27
    assert curve_for(target()).steady and curve_for(target()).at(1) == 0.27


def test_the_key_is_the_same_at_every_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever layout of linears was measured to be faster for few rows."""
    keys = []
    for rows in (0, 1, 3):
        monkeypatch.setattr(linears_module, "max_stock_rows", lambda _, rows=rows: rows)
        hf = fresh("llama", torch.float32, head_dim=16)
        linears_module.rebuild(hf, hf.device, hf.dtype)
        keys.append(facts_of(Model(hf)))
    assert keys[0] == keys[1] == keys[2]


def test_the_key_depends_on_device_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    model = target()
    first = facts_of(model)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert facts_of(model) != first
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(model, "device", torch.device("cuda"))
    assert facts_of(model) != first


def test_another_number_of_threads_has_another_curve(measured: list[PassTimings], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is measured once and kept, in whatever order they are used."""
    measured += [STEADY, PassTimings((1, 4), [[1.0, 1.0], [3.0, 3.1]])]
    one = curve_for(target())
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 77)
        many = curve_for(target())
        assert curve_for(target()) == many != one
    assert curve_for(target()) == one


def test_linears_of_another_kind_have_another_key() -> None:
    hf = fresh("llama", torch.float32, head_dim=16)
    kinds = [linears_module.kinds(hf)]
    linears_module.fuse(hf)
    kinds.append(linears_module.kinds(hf))
    linears_module.pack(hf)
    kinds.append(linears_module.kinds(hf))
    hf.lm_head.weight = None  # as in a model that is too large to keep in both layouts
    kinds.append(linears_module.kinds(hf))
    assert len(set(map(tuple, kinds))) == 4


def test_another_kind_of_model_has_another_curve(measured: list[PassTimings]) -> None:
    measured += [STEADY, PassTimings((1, 4), [[1.0, 1.0], [3.0, 3.1]])]
    assert curve_for(target("llama")) != curve_for(target("qwen3"))


def test_other_layers_have_another_curve(measured: list[PassTimings]) -> None:
    """The passes of the same model cost something else once it is rebuilt."""
    measured += [STEADY, PassTimings((1, 4), [[1.0, 1.0], [3.0, 3.1]])]
    stock, rebuilt = (Model(fresh("llama", torch.float32, head_dim=16)) for _ in range(2))
    fuse(rebuilt.hf)
    assert curve_for(stock) != curve_for(Model(rebuilt.hf))


@pytest.mark.parametrize(
    "damaged", ["{", "[" * 100_000, '{"steady": ' + "1" * 5000 + "}", "\xff"], ids=["cut", "nested", "digits", "bytes"]
)
def test_a_damaged_file_is_measured_again(damaged: str, measured: list[PassTimings], tmp_path: Path) -> None:
    measured += [STEADY, STEADY]
    curve_for(target())
    (file,) = (tmp_path / "costs").glob("*.json")
    file.write_text(damaged, encoding="latin-1")
    assert curve_for(target()) == curve_for(target()) == STEADY.curve() and measured == []


def test_measuring_times_every_row_count() -> None:
    timings = measure(target(), rows=(1, 3))
    assert len(timings.seconds) == len(timings.rows) >= 1
    assert all(second > 0 for seconds in timings.seconds for second in seconds)


@pytest.mark.parametrize(
    "kept",
    [
        {"steady": True, "rows": [1, 4], "seconds": [1.0, 2.0], "texts": [8], "together": [1.5]},  # an earlier format
        {"steady": True, "rows": [], "seconds": []},
        {"steady": True, "rows": [1, 4], "seconds": [1.0]},
        {"steady": True, "rows": [4, 1], "seconds": [1.0, 2.0]},
        {"steady": True, "rows": [1, 4], "seconds": [0.0, 2.0]},
        {"steady": True, "rows": [1, 4], "seconds": [1.0, math.nan]},
        {"steady": True, "rows": ["1", "4"], "seconds": ["a", "b"]},
        {"steady": True, "rows": 1, "seconds": 2.0},
        {"steady": True, "rows": [1, 4], "seconds": [1.0, math.inf], "texts": 1, "batches": []},
        CURVE.to_dict() | {"batches": [CURVE.to_dict()]},  # a batch of one sequence
        [],
    ],
    ids=str,
)
def test_a_file_that_holds_no_curve_is_measured_again(kept: object, measured: list[PassTimings], tmp_path: Path) -> None:
    measured += [STEADY, STEADY]
    curve_for(target())
    (file,) = (tmp_path / "costs").glob("*.json")
    file.write_text(json.dumps(kept))
    assert curve_for(target()) == curve_for(target()) == STEADY.curve() and measured == []


@pytest.mark.parametrize("blocked", ["", "costs"])
def test_a_curve_that_cannot_be_stored_is_still_used(
    blocked: str, measured: list[PassTimings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is a file in place of the folder, so that not even the superuser can write."""
    (tmp_path / "home" / blocked).parent.mkdir(exist_ok=True)
    (tmp_path / "home" / blocked).write_text("")
    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path / "home"))
    measured.append(STEADY)
    with pytest.warns(ForewordWarning, match="costs are measured by every process: .*home"):
        assert curve_for(target()) == STEADY.curve()


def test_nothing_half_written_is_left(measured: list[PassTimings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(measured_module.os, "replace", full)
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
    """A drafter that is slow in both halves of a round."""

    def propose(self, state: State) -> Draft:
        time.sleep(0.01)
        return super().propose(state)

    def observe(self, state: State, draft: Draft, scores: Scores, accepted: Accepted) -> None:
        time.sleep(0.02)
        super().observe(state, draft, scores, accepted)


def test_a_drafters_own_work_is_timed() -> None:
    """Both halves of a round, and not the pass between them."""
    timings = measure_draft(target(), Slow())
    assert timings.rows == (1,) and 0.03 <= min(timings.seconds[0]) < 0.1


@pytest.mark.parametrize("name", METHODS)
def test_every_drafter_can_be_timed(name: str) -> None:
    model = target_for(name)
    drafter = untrained(name, **OPTIONS[name])
    assert measure_draft(model, drafter).curve().at(1) > 0
    assert model.context == model.max_context  # as before


def test_the_cost_of_a_draft_is_stored_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path))
    monkeypatch.setattr(PassTimings, "steady", True)
    first = draft_cost(target(), "slow", Slow)
    assert draft_cost(target(), "slow", lambda: pytest.fail("measured again")) == first
    assert draft_cost(target(), "quick", LastHidden).at(1) < first.at(1)
    assert len(list((tmp_path / "drafts").rglob("*.json"))) == 2 and not (tmp_path / "costs").exists()


def test_half_layers_are_timed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass without any attention costs as much less as all attention halves cost."""
    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path))
    model, skips = target(), []
    score = model.score
    monkeypatch.setattr(
        model, "score", lambda *given, skip=None, **more: skips.append(skip) or score(*given, skip=skip, **more)
    )
    seconds = {None: 1.0, Skip.of(attention=(0, 1, 2, 3)): 0.4, Skip.of(mlp=(0, 1, 2, 3)): 0.8}
    monkeypatch.setattr(cost.Waits, "doubt", "")  # other tests may keep this machine busy
    monkeypatch.setattr(cost, "_time", lambda one, _: (one(), seconds[skips[-1]])[1])
    found = half_costs(model)
    assert (found.attention, found.mlp) == (pytest.approx(0.15), pytest.approx(0.05)) and found.steady
    assert found.of(Skip.of((1, 2), (3,))) == pytest.approx(0.65) and found.of(Skip()) == 1
    monkeypatch.setattr(cost, "_time", lambda *_: pytest.fail("measured again"))
    assert half_costs(model) == found and model.context == model.max_context

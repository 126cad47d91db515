"""Cost curves: straight lines between what was measured, measured once and kept."""

import pytest
from doubles import target

from foreword.model import cost
from foreword.model.cost import CostCurve, curve_for, measure

CURVE = CostCurve((1, 4, 8), (2.0, 5.0, 6.0))


@pytest.mark.parametrize(("rows", "seconds"), [(1, 2.0), (2, 3.0), (4, 5.0), (6, 5.5), (8, 6.0), (16, 12.0)])
def test_between_and_beyond_the_points(rows: int, seconds: float) -> None:
    assert CURVE.at(rows) == pytest.approx(seconds)
    assert CURVE.relative(rows) == pytest.approx(seconds / 2)


def test_a_curve_of_one_point() -> None:
    assert CostCurve((1,), (3.0,)).relative(5) == pytest.approx(5.0)


def test_a_measured_curve_never_falls() -> None:
    curve = measure(target(), rows=(1, 2, 8, 64))
    assert len(curve.seconds) == len(curve.rows) >= 1
    assert list(curve.seconds) == sorted(curve.seconds) and curve.seconds[0] > 0


def test_a_curve_is_measured_once_and_kept(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path))
    model = target()
    first = curve_for(model)
    monkeypatch.setattr(cost, "measure", lambda model: pytest.fail("measured again"))
    assert curve_for(model) == first
    assert curve_for(target()) == first


def test_a_damaged_file_is_measured_anew(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path))
    curve_for(target())
    (file,) = (tmp_path / "costs").glob("*.json")
    file.write_text("{")
    assert curve_for(target()).seconds[0] > 0 and file.read_text() != "{"

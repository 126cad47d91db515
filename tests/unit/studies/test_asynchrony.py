"""The simulator of amusd agrees with closed formulas and with the published figures."""

from dataclasses import replace

import pytest
from typer.testing import CliRunner

import asynchrony
from asynchrony import PUBLISHED, Times, app, asynchronous, best_in_turns, expected, in_turns, mean_gain

EVEN = Times(draft=0.25, spread=0.0, least=2)


def test_a_draft_that_is_always_right_sets_the_speed() -> None:
    """If drafting is the bottleneck, the speed is the draft's; otherwise the rows of a pass limit it."""
    assert asynchronous(replace(EVEN, right=1.0)) == pytest.approx(0.25, rel=0.01)
    assert asynchronous(replace(EVEN, right=1.0, draft=0.7)) == pytest.approx(0.7, rel=0.01)
    assert asynchronous(replace(EVEN, right=1.0, draft=0.001, ahead=4, least=4)) == pytest.approx(1 / 5, rel=0.02)


def test_a_draft_that_is_never_right_costs_what_the_target_waits() -> None:
    """The target waits for two draft tokens after each rejection, and for the draft pass that was running."""
    never = replace(EVEN, right=0.0)
    assert asynchronous(replace(never, least=0)) == pytest.approx(1.0)
    assert asynchronous(never) == pytest.approx(1.5, rel=0.01)
    assert asynchronous(replace(never, hand_over=0.1)) == pytest.approx(1.7, rel=0.05)


def test_in_turns_matches_the_known_formula() -> None:
    assert in_turns(replace(EVEN, right=0.5), 2) == pytest.approx(1.5 / 1.75)
    assert in_turns(replace(EVEN, right=1.0), 3) == pytest.approx(1.75 / 4)
    assert best_in_turns(replace(EVEN, right=0.0)) == (1.25, 1)


def test_a_longer_hand_over_is_slower() -> None:
    usual = Times(draft=0.2)
    found = [asynchronous(replace(usual, hand_over=late)) for late in (0.0, 0.1, 0.3, 1.0)]
    assert found == sorted(found) and found[-1] > 1.3 * found[0]


def test_the_figures_of_the_paper() -> None:
    """Published is 1.29 on average. Between the ratio of the models' parameters, 0.154, and that of their layers, 0.5, the
    simulator gives 1.17 to 1.26; for two of the three sets its time per token is within 6%."""
    assert sum(one.gain for one in PUBLISHED) / 3 == pytest.approx(1.29, abs=0.005)
    assert mean_gain(0.154) == pytest.approx(1.17, abs=0.02)
    assert mean_gain(0.36) == pytest.approx(1.26, abs=0.02)
    human_eval, mt_bench, refactor = (expected(one, 0.36)[1] / one.same_time for one in PUBLISHED)
    assert human_eval == pytest.approx(1, abs=0.06) and mt_bench == pytest.approx(1, abs=0.06)
    assert refactor > 1.08


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asynchrony, "TOKENS", 4000)
    run = CliRunner().invoke
    table = run(app, ["--right", "0.7"]).stdout.splitlines()
    gains, waits = ([float(line.split()[column]) for line in table[2:]] for column in (-2, -1))
    assert max(gains) > 1.05 and gains[-1] < 1 and "draft/target" in table[1]
    assert waits[0] > 3 and waits[-1] == 0
    assert len(run(app, ["--draft-ms", "3", "--target-ms", "20", "--plain-ms", "15"]).stdout.splitlines()) == 3
    assert "published: 1.29" in run(app, ["--paper"]).stdout

"""What drafting with a part of the target is expected to bring, against sums by hand and a simulation."""

from random import Random

import pytest

from foreword.drafting.self_drafting import best_length, break_even, expected_speedup, expected_tokens


def free(rows: int) -> float:
    """Rows cost nothing."""
    return 1.0


def dear(rows: int) -> float:
    return 0.5 + 0.5 * rows


@pytest.mark.parametrize("agreement", [0.0, 0.4, 0.9])
def test_tokens_of_a_round_are_those_of_a_simulation(agreement: float) -> None:
    random, decided = Random(0), 0
    for _ in range(20_000):
        decided += 1
        for _ in range(4):
            if random.random() >= agreement:
                break
            decided += 1
    assert expected_tokens(agreement, 4) == pytest.approx(decided / 20_000, abs=0.03)
    assert expected_tokens(agreement, 0) == 1 and expected_tokens(1.0, 4) == 5


def test_the_best_length() -> None:
    assert best_length(0.8, 0.5, free, 12) == (2, pytest.approx(2.44 / 2))
    assert best_length(0.8, 0.5, free, 1) == (1, pytest.approx(1.8 / 1.5))
    assert best_length(0.8, 0.9, free, 12) == (0, 1.0)
    assert best_length(0.8, 0.9, free, 12, least=1) == (1, pytest.approx(1.8 / 1.9))


@pytest.mark.parametrize("verify", [free, dear])
@pytest.mark.parametrize("draft_cost", [0.1, 0.3, 0.45])
def test_at_break_even_the_speed_is_that_of_plain_decoding(draft_cost: float, verify: object) -> None:
    found = break_even(draft_cost, verify, 12)  # type: ignore[arg-type]
    assert found is not None
    speeds = [max(expected_speedup(found + more, n, draft_cost, verify) for n in range(1, 13)) for more in (-1e-3, 0, 1e-3)]  # type: ignore[arg-type]
    assert speeds[0] < 1 <= speeds[1] < speeds[2] and speeds[1] == pytest.approx(1, abs=1e-6)
    if verify is free:
        assert found == pytest.approx(draft_cost, abs=1e-6)  # one draft token: (1 + a) / (1 + cost)


def test_drafting_that_cannot_pay_off() -> None:
    assert break_even(0.6, dear, 12) is None and break_even(1.0, free, 12) == pytest.approx(1.0, abs=1e-6)

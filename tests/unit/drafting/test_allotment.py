"""Rows divided between nodes and what they carry: against rounds played out, and against every other division."""

import random
from itertools import product

import pytest

from foreword.drafting.allotment import Allotment, Ways, best_allotment, paying_allotment
from foreword.drafting.trees import USUAL_RATES, greedy_paths, promise

RATES = ((0.5, 0.2, 0.1), (0.4, 0.2, 0.1), (0.3, 0.1, 0.1))


def played(carries: tuple[int, ...], rounds: int = 40_000) -> float:
    """Tokens per round of a player that guesses as often right as the rates say."""
    draws, steps, tokens = random.Random(0), len(RATES), 0
    for _ in range(rounds):
        paths = greedy_paths(RATES[:steps], len(carries) - 1)
        true = [draws.choices([0, 1, 2, 3], [*row, 1 - sum(row)])[0] for row in RATES]
        right = [(), *(path for path in paths if path == tuple(true[: len(path)]))]
        deepest = max(right, key=len)
        tokens += 1 + len(deepest)
        steps = carries[0 if not deepest else 1 + paths.index(deepest)]
    return tokens / rounds


@pytest.mark.parametrize("rows", [3, 8, 20])
def test_the_tokens_it_promises_come(rows: int) -> None:
    found = best_allotment(RATES, 3, rows)
    assert found.rows == rows
    assert found.tokens == pytest.approx(played(found.carries), rel=0.02)


@pytest.mark.parametrize("rows", [3, 4, 5, 6, 7, 8])
def test_hardly_any_division_is_better(rows: int) -> None:
    """Of all of them, by the same count of tokens."""
    ways = Ways(RATES, 3, rows)
    every = [carries for nodes in range(1, rows + 1) for carries in product(range(4), repeat=nodes)]
    most = max(ways._mean(carries) for carries in every if len(carries) + sum(carries) <= rows)
    assert best_allotment(RATES, 3, rows).tokens > 0.98 * most > 1


def test_ends_are_shares_of_all_rounds() -> None:
    ways = Ways(RATES, 3, 9)
    for steps, nodes in product(range(4), (1, 4, 9)):
        ends = ways.ends(steps, nodes)
        assert sum(ends) == pytest.approx(1) and min(ends) >= 0
        paths = greedy_paths(RATES[:steps], nodes - 1)
        assert ways.tokens(steps, nodes) == pytest.approx(1 + sum(promise(path, RATES) for path in paths))


def test_likely_nodes_carry_more() -> None:
    found = best_allotment(USUAL_RATES, 3, 40)
    assert found.rows == 40 and list(found.carries) == sorted(found.carries, reverse=True)
    assert found.carries[0] > found.carries[-1]
    everybody = Ways(USUAL_RATES, 3, 64).all_carry(10)
    assert everybody.rows == 40 and set(everybody.carries) == {3} and found.tokens > everybody.tokens


@pytest.mark.parametrize("rows", [1, 2])
def test_too_few_rows_for_a_guess(rows: int) -> None:
    assert best_allotment(RATES, 3, rows).depth == 0


def test_rows_that_cost_are_fewer() -> None:
    free = paying_allotment(USUAL_RATES, 3, lambda one: 1.0)
    dear = paying_allotment(USUAL_RATES, 3, lambda one: 1 + 0.05 * one.rows)
    ruin = paying_allotment(USUAL_RATES, 3, lambda one: one.rows)
    assert free.rows == 64 > dear.rows > ruin.rows == 1
    assert paying_allotment(USUAL_RATES, 3, lambda one: 1 + 0.05 * one.nodes).nodes < free.nodes


def test_depth_is_bounded_by_both() -> None:
    assert Allotment((3, 3), 1.0).depth == 1 and Allotment((1, 0, 0, 0), 1.0).depth == 1

"""Rows divided between nodes and pseudo rows: against simulated rounds, and against every other division."""

import random
from itertools import product

import pytest

from foreword.drafting.allotment import Allotment, LikelyTrees, best_allotment, paying_allotment
from foreword.drafting.trees import USUAL_RATES, greedy_paths, path_rate

RATES = ((0.5, 0.2, 0.1), (0.4, 0.2, 0.1), (0.3, 0.1, 0.1))


def simulated(carries: tuple[int, ...], rounds: int = 40_000) -> float:
    """Simulate rounds in which candidates are right as often as the rates say. Return the tokens per round."""
    generator, steps, tokens = random.Random(0), len(RATES), 0
    for _ in range(rounds):
        paths = greedy_paths(RATES[:steps], len(carries) - 1)
        true = [generator.choices([0, 1, 2, 3], [*row, 1 - sum(row)])[0] for row in RATES]
        right = [(), *(path for path in paths if path == tuple(true[: len(path)]))]
        deepest = max(right, key=len)
        tokens += 1 + len(deepest)
        steps = carries[0 if not deepest else 1 + paths.index(deepest)]
    return tokens / rounds


@pytest.mark.parametrize("rows", [3, 8, 20])
def test_the_expected_tokens_come(rows: int) -> None:
    found = best_allotment(RATES, 3, rows)
    assert found.rows == rows
    assert found.tokens == pytest.approx(simulated(found.carries), rel=0.02)


@pytest.mark.parametrize("rows", [3, 4, 5, 6, 7, 8])
def test_hardly_any_division_is_better(rows: int) -> None:
    """Compare with all divisions, by the same expected tokens."""
    trees = LikelyTrees(RATES, 3, rows)
    every = [carries for nodes in range(1, rows + 1) for carries in product(range(4), repeat=nodes)]
    most = max(trees._mean(carries) for carries in every if len(carries) + sum(carries) <= rows)
    assert best_allotment(RATES, 3, rows).tokens > 0.98 * most > 1


def test_ends_sum_to_all_rounds() -> None:
    trees = LikelyTrees(RATES, 3, 9)
    for steps, nodes in product(range(4), (1, 4, 9)):
        ends = trees.ends(steps, nodes)
        assert sum(ends) == pytest.approx(1) and min(ends) >= 0
        paths = greedy_paths(RATES[:steps], nodes - 1)
        assert trees.tokens(steps, nodes) == pytest.approx(1 + sum(path_rate(path, RATES) for path in paths))


def test_likely_nodes_carry_more() -> None:
    found = best_allotment(USUAL_RATES, 3, 40)
    assert found.rows == 40 and list(found.carries) == sorted(found.carries, reverse=True)
    assert found.carries[0] > found.carries[-1]
    all_carry = LikelyTrees(USUAL_RATES, 3, 64).all_carry(10)
    assert all_carry.rows == 40 and set(all_carry.carries) == {3} and found.tokens > all_carry.tokens


@pytest.mark.parametrize("rows", [1, 2])
def test_too_few_rows_for_a_candidate(rows: int) -> None:
    assert best_allotment(RATES, 3, rows).depth == 0


def test_expensive_rows_are_fewer() -> None:
    free = paying_allotment(USUAL_RATES, 3, lambda one: 1.0)
    expensive = paying_allotment(USUAL_RATES, 3, lambda one: 1 + 0.05 * one.rows)
    prohibitive = paying_allotment(USUAL_RATES, 3, lambda one: one.rows)
    assert free.rows == 64 > expensive.rows > prohibitive.rows == 1
    assert paying_allotment(USUAL_RATES, 3, lambda one: 1 + 0.05 * one.nodes).nodes < free.nodes


def test_depth_is_bounded_by_both() -> None:
    assert Allotment((3, 3), 1.0).depth == 1 and Allotment((1, 0, 0, 0), 1.0).depth == 1

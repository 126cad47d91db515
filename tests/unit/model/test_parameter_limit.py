"""A limit on the parameters of modules that are built."""

from copy import deepcopy
from threading import Thread

import pytest
from torch import nn

from foreword.model.parameter_limit import TooManyParameters, at_most_parameters


def stacked(count: int, made: list[int]) -> nn.Module:
    """Build `count` layers, and note each in `made`."""

    def one(number: int) -> nn.Module:
        made.append(number)
        return nn.Sequential(nn.Linear(3, 3, bias=False))

    return nn.ModuleList(one(number) for number in range(count))


def test_building_stops_soon_after_the_limit() -> None:
    with at_most_parameters(9 * 4):
        stacked(4, [])
    made: list[int] = []
    with pytest.raises(TooManyParameters), at_most_parameters(9 * 4):
        stacked(100_000, made)
    assert len(made) == 5
    stacked(6, [])  # the limit ends with its block


def test_a_weight_in_two_places_counts_once() -> None:
    with at_most_parameters(9):
        twice = nn.ModuleList([nn.Linear(3, 3, bias=False)])
        nn.ModuleList([twice, nn.ModuleList(twice)])


def test_copies_count_like_new_modules() -> None:
    layer = nn.Linear(3, 3, bias=False)
    with pytest.raises(TooManyParameters), at_most_parameters(9 * 2):
        nn.ModuleList(deepcopy(layer) for _ in range(3))


def test_other_threads_are_not_limited() -> None:
    with at_most_parameters(1):
        other = Thread(target=stacked, args=(5, made := []))
        other.start()
        other.join()
    assert len(made) == 5

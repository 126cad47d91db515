"""Costs of two made-up methods."""

import pytest

from doubles.serving_costs import costs_of
from foreword.simulate.costs import MethodCosts


@pytest.fixture
def plain() -> MethodCosts:
    return costs_of("plain", (1.0,))


@pytest.fixture
def drafting() -> MethodCosts:
    return costs_of("drafting", (0.4, 0.2, 0.4), slower=1.3)

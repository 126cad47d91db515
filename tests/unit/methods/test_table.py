"""The table of methods: every name makes a drafter, and a wrong one is answered with the nearest."""

import pytest

from foreword.core.drafter import Drafter
from foreword.errors import InputError, UnknownMethod
from foreword.methods import METHODS, find, make


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if not method.trained])
def test_every_name_makes_a_drafter(name: str) -> None:
    for rows in (None, 1, 8):
        assert isinstance(make(name, rows=rows), Drafter)


def test_a_wrong_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownMethod, match="'token_recycling'.*there are: plain"):
        find("token-recyclin")
    with pytest.raises(UnknownMethod, match="there are: plain"):
        find("zzzz")


@pytest.mark.parametrize("name", METHODS)
def test_a_pass_has_at_least_the_root(name: str) -> None:
    with pytest.raises(InputError, match="rows is 0"):
        make(name, rows=0)


@pytest.mark.parametrize("name", METHODS)
def test_an_unknown_option_is_named(name: str) -> None:
    with pytest.raises(InputError, match=f"{name}.*colour"):
        make(name, colour="red")

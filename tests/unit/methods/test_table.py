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


@pytest.mark.parametrize("rows", [0, -3, 1025, 10**9, 2.0, "8", True])
@pytest.mark.parametrize("name", METHODS)
def test_a_pass_has_at_least_the_root_and_an_end(name: str, rows: object) -> None:
    """Before anything of that size is built."""
    with pytest.raises(InputError, match=f"rows is {rows!r}.*at least 1 row, the root, and at most 1024"):
        make(name, rows=rows)  # type: ignore[arg-type]


OPTIONS = {
    "plain": "rows",
    "prompt_lookup": "rows, max_match, min_match, trust",
    "token_recycling": "rows, table, fade",
}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_unknown_option_is_answered_with_those_there_are(name: str) -> None:
    with pytest.raises(InputError, match=f"^{name}: no option is called 'colour'; there are: {OPTIONS[name]}$"):
        make(name, colour="red")


def test_an_option_of_the_wrong_type_is_shown() -> None:
    with pytest.raises(InputError, match="^prompt_lookup: an option is of the wrong type in max_match='many' "):
        make("prompt_lookup", max_match="many")

"""The table of methods: every name makes a drafter, and a wrong one is answered with the nearest."""

import pytest

from foreword.core.drafter import Drafter
from foreword.errors import InputError, UnknownMethod
from foreword.methods import METHODS, find, make, untrained


@pytest.mark.parametrize(
    "name", [name for name, method in METHODS.items() if not method.trained]
)  # and searched ones, before a plan
def test_every_name_makes_a_drafter(name: str) -> None:
    for rows in (None, 1, 8):
        assert isinstance(make(name, rows=rows), Drafter)


def test_a_wrong_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownMethod, match="'token_recycling'.*there are: plain"):
        find("token-recyclin")
    with pytest.raises(UnknownMethod, match="there are: plain"):
        find("zzzz")


@pytest.mark.parametrize("name", ["nonsense", "eagle", "ngram", "beam_search"])
def test_a_name_that_is_near_to_none_is_answered_without_a_suggestion(name: str) -> None:
    with pytest.raises(UnknownMethod, match=f"^no method is called '{name}'; there are: plain"):
        find(name)


@pytest.mark.parametrize(
    ("name", "meant"), [("lookup", "prompt_lookup"), ("recycling", "token_recycling"), ("draft", "draft_model")]
)
def test_a_part_of_a_name_is_enough(name: str, meant: str) -> None:
    with pytest.raises(UnknownMethod, match=f"did you mean '{meant}'"):
        find(name)


@pytest.mark.parametrize("name", METHODS)
def test_a_pass_has_at_least_the_root_and_an_end(name: str) -> None:
    """Before anything of that size is built."""
    for rows in (0, -3, 1025, 10**9, 2.0, "8", True):
        with pytest.raises(InputError, match=f"rows is {rows!r}.*at least 1 row, the root, and at most 1024"):
            make(name, rows=rows)  # type: ignore[arg-type]


OPTIONS = {
    "plain": "rows",
    "prompt_lookup": "rows, max_match, min_match, trust",
    "token_recycling": "rows, table, fade, tree",
}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_unknown_option_is_answered_with_those_there_are(name: str) -> None:
    with pytest.raises(InputError, match=f"^{name}: no option is called 'colour'; there are: {OPTIONS[name]}$"):
        make(name, colour="red")


@pytest.mark.parametrize(
    ("name", "option", "value", "wanted"),
    [
        ("prompt_lookup", "max_match", "many", "a whole number"),
        ("medusa", "heads", 1.5, "a whole number"),
        ("clover2", "heads", True, "a whole number"),
        ("clover2", "regression", "much", "a number"),
        ("hydra", "prefix", 3, "True or False"),
    ],
)
def test_an_option_of_the_wrong_type_is_shown(name: str, option: str, value: object, wanted: str) -> None:
    with pytest.raises(InputError, match=f"^{name}: {option} is {value!r}; it must be {wanted}$"):
        untrained(name, **{option: value})


def test_a_whole_number_is_a_number() -> None:
    assert untrained("clover2", regression=1).regression == 1  # type: ignore[attr-defined]

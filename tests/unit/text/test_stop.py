"""Stop strings: which text is shown, which is held back, and that the cut does not depend on the pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.errors import InputError
from foreword.text import StopStrings

LETTERS = st.text("ab\n", max_size=12)


def shown(stop: StopStrings, pieces: list[str]) -> tuple[str, bool]:
    text = "".join(stop.push(piece)[0] for piece in pieces)
    return text + stop.flush(), stop.found


def test_text_before_the_stop_is_shown_and_the_rest_is_not() -> None:
    stop = StopStrings(["END"])
    assert stop.push("one E") == ("one ", False)
    assert stop.push("ight EN") == ("Eight ", False)
    assert stop.push("D two") == ("", True)
    assert stop.push("three") == ("", True)
    assert stop.flush() == ""


def test_a_beginning_that_leads_nowhere_is_shown_in_the_end() -> None:
    stop = StopStrings(["END"])
    assert stop.push("the EN") == ("the ", False)
    assert stop.flush() == "EN"
    assert not stop.found


def test_the_stop_string_is_kept_on_request() -> None:
    stop = StopStrings(["END"], include_stop=True)
    assert [stop.push("one E"), stop.push("ND two")] == [("one ", False), ("END", True)]


def test_the_string_complete_first_wins() -> None:
    stop = StopStrings(["abcd", "bc"])
    assert stop.match is None and stop.push("xabcd") == ("xa", True) and stop.match == "bc"
    assert StopStrings(["c", "abc"]).push("xabcd") == ("x", True)


def test_a_string_alone_is_one_stop() -> None:
    assert StopStrings("no").push("on and no") == ("on and ", True)


def test_without_stops_all_is_shown_at_once() -> None:
    assert StopStrings([]).push("text") == ("text", False)


@pytest.mark.parametrize("strings", [[""], ["a", ""], "", [None], [3]])
def test_what_is_no_stop_string_is_refused(strings: list) -> None:
    with pytest.raises(InputError, match="not empty"):
        StopStrings(strings)


@given(pieces=st.lists(LETTERS, max_size=8), strings=st.lists(LETTERS.filter(bool), max_size=3), include=st.booleans())
def test_the_cut_does_not_depend_on_the_pieces(pieces: list[str], strings: list[str], include: bool) -> None:
    text = "".join(pieces)
    got = shown(StopStrings(strings, include), pieces)
    assert got == shown(StopStrings(strings, include), list(text))
    ends = [n for n in range(len(text) + 1) if text[:n].endswith(tuple(strings))]
    assert got[1] == bool(ends)
    if not ends:
        assert got[0] == text
    elif include:
        assert got[0] == text[: ends[0]]
    else:
        assert got[0] == text[: min(text.find(string) for string in strings if text[: ends[0]].endswith(string))]


@given(pieces=st.lists(LETTERS, max_size=8), strings=st.lists(LETTERS.filter(bool), min_size=1, max_size=3))
def test_only_a_possible_beginning_is_held_back(pieces: list[str], strings: list[str]) -> None:
    stop, text, out = StopStrings(strings), "", ""
    for piece in pieces:
        text += piece
        out += stop.push(piece)[0]
        held = text[len(out) :]
        assert stop.found or not held or any(string.startswith(held) for string in strings)

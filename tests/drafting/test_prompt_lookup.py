"""prompt_lookup against a slow search: the longest match of the text's ending, of those the latest, gone round."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from doubles import SAMPLINGS, state_of, target
from foreword.core.draft import Draft
from foreword.errors import InputError
from foreword.methods import make
from foreword.methods.prompt_lookup import KEPT, PromptLookup
from foreword.model.cost import CostCurve

TRUST = (0.2, 0.5, 0.7, 0.85)
TEXT = st.lists(st.integers(0, 3), min_size=1, max_size=30)


def bound(slots: int = 4, curve: CostCurve | None = None, **options: object) -> PromptLookup:
    model = target()
    model.curve = curve
    drafter = PromptLookup(**options)  # type: ignore[arg-type]
    drafter.prepare(model, slots)
    return drafter


def slow_match(text: list[int], longest: int) -> tuple[int, int]:
    """How many tokens of the ending stand earlier, at most `longest`, and where they end the last time."""
    best = (0, -1)
    for end in range(len(text) - 1):
        count = 0
        while count < longest and count <= end and text[end - count] == text[-1 - count]:
            count += 1
        if count and count >= best[0]:
            best = (count, end)
    return best


def slow_chain(text: list[int], end: int, count: int) -> list[int]:
    """What follows the match, going round where it runs into the end of the text."""
    behind = text[end + 1 :]
    return [behind[i % len(behind)] for i in range(count)]


def drafted(draft: Draft, row: int = 0) -> list[int]:
    return draft.tokens[row, : int(draft.size[row])].tolist()


@given(texts=st.lists(TEXT, min_size=1, max_size=4), longest=st.integers(1, 5), rows=st.integers(2, 9))
def test_the_longest_and_latest_match_is_continued(texts: list[list[int]], longest: int, rows: int) -> None:
    """Texts of different lengths together in one batch."""
    trust = (0.5,) * longest
    draft = bound(rows=rows, max_match=longest, trust=trust).propose(state_of(texts))
    for row, text in enumerate(texts):
        count, end = slow_match(text, longest)
        expected = [text[-1], *slow_chain(text, end, rows - 1)] if count else [text[-1]]
        assert drafted(draft, row) == expected
    assert draft.tree.is_chain and draft.nodes == rows


@given(text=TEXT, shortest=st.integers(1, 4))
def test_a_match_that_is_too_short_does_not_count(text: list[int], shortest: int) -> None:
    draft = bound(rows=6, max_match=4, min_match=shortest).propose(state_of([text]))
    assert (len(drafted(draft)) > 1) == (slow_match(text, 4)[0] >= shortest)


def test_a_loop_is_continued_as_that_loop() -> None:
    draft = bound(rows=9).propose(state_of([[9, 5, 6, 7, 5, 6, 7, 5]]))
    assert drafted(draft) == [5, 6, 7, 5, 6, 7, 5, 6, 7]


def test_old_text_behind_the_root_is_not_read() -> None:
    """A slot's earlier text lies behind the new one; a match there would be a match with another request."""
    state = state_of([[1, 2, 3, 1]])
    state.tokens[0, 4:8] = torch.tensor([3, 1, 8, 8])
    assert drafted(bound(rows=3).propose(state)) == [1, 2, 3]


def test_a_dear_row_is_not_spent_on_a_weak_match() -> None:
    """Rows that cost nothing are all used; where each costs a whole pass, none is; between them, trust decides."""
    weak, strong = [4, 9, 8, 4], [5, 6, 7, 4, 9, 5, 6, 7, 4]
    free, dear = CostCurve((1, 64), (1.0, 1.0)), CostCurve((1, 64), (1.0, 64.0))
    between = CostCurve((1, 64), (1.0, 1 + 63 * 0.3))
    sizes = {
        name: bound(curve=curve, max_match=4, trust=TRUST).propose(state_of([weak, strong])).size.tolist()
        for name, curve in {"free": free, "dear": dear, "between": between}.items()
    }
    assert sizes["free"] == [16, 16] and sizes["dear"] == [1, 1]
    assert sizes["between"][0] == 1 < sizes["between"][1] < 16


def test_the_size_that_pays_depends_on_the_batch() -> None:
    """Sixteen rows are free here, and every further one costs: eight sequences get two each, two get eight."""
    curve = CostCurve((1, 16, 17, 64), (1.0, 1.0, 3.0, 60.0))
    text = [5, 6, 7, 4, 9, 5, 6, 7, 4]
    sizes = {
        count: bound(8, curve, max_match=4, trust=TRUST).propose(state_of([text] * count)).size.tolist()
        for count in (1, 2, 8)
    }
    assert sizes == {1: [16], 2: [8] * 2, 8: [2] * 8}


def test_the_gain_is_worked_out_by_hand() -> None:
    """The first token after a match of 1 is right with 0.3; it makes the match 2 long, and all others come with 0.9."""
    promised = [1, 1.3, 1.3 + 0.27, 1.3 + 0.27 + 0.243, 1.3 + 0.27 + 0.243 + 0.2187]
    for price in (0.0, 0.25, 0.35, 0.5):
        curve = CostCurve((1, 101), (1.0, 1 + 100 * price))
        drafter = bound(rows=None, curve=curve, max_match=2, trust=(0.3, 0.9))
        gains = [tokens / (1 + i * price) for i, tokens in enumerate(promised)]
        size = int(drafter.propose(state_of([[3, 4, 3]])).size)
        assert size == {0.0: 16, 0.25: 1 + gains.index(max(gains))}.get(price, 1)


def test_rows_of_a_fixed_round_are_those_that_usually_pay() -> None:
    """Whatever matches: rows that are not used cost as much. Who asks for a number gets it."""
    price = 0.03
    drafter = bound(curve=CostCurve((1, 64), (1.0, 1 + 63 * price)), min_match=2)
    gains = [(1 + sum(KEPT[:more])) / (1 + more * price) for more in range(16)]
    rows = 1 + gains.index(max(gains))
    assert 1 < rows < 16 and drafter._rows(1, fixed=True) == (rows, [1, 1, *[rows] * 4])
    assert drafter._rows(4, fixed=True)[0] < rows, "four texts have four times the rows"
    assert drafter._rows(1, fixed=False)[0] == 16 and len({*drafter._rows(1, fixed=False)[1]}) > 2
    assert bound(rows=7, max_match=2)._rows(1, fixed=True) == (7, [1, 7, 7])


def test_sampling_makes_no_difference() -> None:
    text = [3, 4, 5, 3, 4]
    greedy, drawn = (bound(rows=4).propose(state_of([text], sampling)) for sampling in SAMPLINGS.values())
    assert drafted(greedy) == drafted(drawn) == [4, 5, 3, 4]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"min_match": 0}, "min_match"),
        ({"min_match": 5, "max_match": 4}, "max_match"),
        ({"max_match": 9}, "trust"),
        ({"trust": (0.5, 0.5, 0.5, 1.0)}, "trust"),
        ({"trust": (-0.1, 0.5, 0.5, 0.5)}, "trust"),
        ({"rows": 0}, "rows"),
        ({"roes": 3}, "roes"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, object], named: str) -> None:
    with pytest.raises(InputError, match=named):
        make("prompt_lookup", **options)  # type: ignore[arg-type]

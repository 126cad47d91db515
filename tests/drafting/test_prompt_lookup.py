"""prompt_lookup against a slow search: the latest of the longest matches of the sequence's end, repeated as a loop."""

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
SEQUENCE = st.lists(st.integers(0, 3), min_size=1, max_size=30)


def bound(slots: int = 4, curve: CostCurve | None = None, **options: object) -> PromptLookup:
    model = target()
    model.curve = curve
    drafter = PromptLookup(**options)  # type: ignore[arg-type]
    drafter.prepare(model, slots)
    return drafter


def slow_match(sequence: list[int], longest: int) -> tuple[int, int]:
    """Return how many of the last tokens occur earlier, at most `longest`, and where they last end."""
    best = (0, -1)
    for end in range(len(sequence) - 1):
        count = 0
        while count < longest and count <= end and sequence[end - count] == sequence[-1 - count]:
            count += 1
        if count and count >= best[0]:
            best = (count, end)
    return best


def slow_chain(sequence: list[int], end: int, count: int) -> list[int]:
    """Return what follows the match, repeated from its start at the end of the sequence."""
    following = sequence[end + 1 :]
    return [following[i % len(following)] for i in range(count)]


def drafted(draft: Draft, row: int = 0) -> list[int]:
    return draft.tokens[row, : int(draft.size[row])].tolist()


@given(sequences=st.lists(SEQUENCE, min_size=1, max_size=4), longest=st.integers(1, 5), rows=st.integers(2, 9))
def test_the_longest_and_latest_match_is_continued(sequences: list[list[int]], longest: int, rows: int) -> None:
    """Sequences of different lengths share a batch."""
    trust = (0.5,) * longest
    draft = bound(rows=rows, max_match=longest, trust=trust).propose(state_of(sequences))
    for row, sequence in enumerate(sequences):
        count, end = slow_match(sequence, longest)
        expected = [sequence[-1], *slow_chain(sequence, end, rows - 1)] if count else [sequence[-1]]
        assert drafted(draft, row) == expected
    assert draft.tree.is_chain and draft.nodes == rows


@given(sequence=SEQUENCE, shortest=st.integers(1, 4))
def test_a_match_that_is_too_short_does_not_count(sequence: list[int], shortest: int) -> None:
    draft = bound(rows=6, max_match=4, min_match=shortest).propose(state_of([sequence]))
    assert (len(drafted(draft)) > 1) == (slow_match(sequence, 4)[0] >= shortest)


def test_a_loop_is_continued_as_that_loop() -> None:
    draft = bound(rows=9).propose(state_of([[9, 5, 6, 7, 5, 6, 7, 5]]))
    assert drafted(draft) == [5, 6, 7, 5, 6, 7, 5, 6, 7]


def test_old_tokens_after_the_root_are_not_read() -> None:
    """Tokens of the slot's earlier request lie after the new ones; a match there would be with another request."""
    state = state_of([[1, 2, 3, 1]])
    state.tokens[0, 4:8] = torch.tensor([3, 1, 8, 8])
    assert drafted(bound(rows=3).propose(state)) == [1, 2, 3]


def test_an_expensive_row_is_not_spent_on_a_weak_match() -> None:
    """Free rows are all used. If each row costs a whole pass, none is. In between, `trust` decides."""
    weak, strong = [4, 9, 8, 4], [5, 6, 7, 4, 9, 5, 6, 7, 4]
    free, expensive = CostCurve((1, 64), (1.0, 1.0)), CostCurve((1, 64), (1.0, 64.0))
    between = CostCurve((1, 64), (1.0, 1 + 63 * 0.3))
    sizes = {
        name: bound(curve=curve, max_match=4, trust=TRUST).propose(state_of([weak, strong])).size.tolist()
        for name, curve in {"free": free, "expensive": expensive, "between": between}.items()
    }
    assert sizes["free"] == [16, 16] and sizes["expensive"] == [1, 1]
    assert sizes["between"][0] == 1 < sizes["between"][1] < 16


def test_the_best_size_depends_on_the_batch() -> None:
    """Sixteen rows are free here, and every further one costs: each of eight sequences gets two, each of two gets eight."""
    curve = CostCurve((1, 16, 17, 64), (1.0, 1.0, 3.0, 60.0))
    sequence = [5, 6, 7, 4, 9, 5, 6, 7, 4]
    sizes = {
        count: bound(8, curve, max_match=4, trust=TRUST).propose(state_of([sequence] * count)).size.tolist()
        for count in (1, 2, 8)
    }
    assert sizes == {1: [16], 2: [8] * 2, 8: [2] * 8}


def test_the_gain_computed_by_hand() -> None:
    """The first token after a match of 1 is right with probability 0.3. It makes the match 2 long; the others have 0.9."""
    promised = [1, 1.3, 1.3 + 0.27, 1.3 + 0.27 + 0.243, 1.3 + 0.27 + 0.243 + 0.2187]
    for price in (0.0, 0.25, 0.35, 0.5):
        curve = CostCurve((1, 101), (1.0, 1 + 100 * price))
        drafter = bound(rows=None, curve=curve, max_match=2, trust=(0.3, 0.9))
        gains = [tokens / (1 + i * price) for i, tokens in enumerate(promised)]
        size = int(drafter.propose(state_of([[3, 4, 3]])).size)
        assert size == {0.0: 16, 0.25: 1 + gains.index(max(gains))}.get(price, 1)


def test_a_fixed_round_has_the_rows_that_usually_pay_off() -> None:
    """This does not depend on the match, because unused rows cost as much. A given number of rows is used as given."""
    price = 0.03
    drafter = bound(curve=CostCurve((1, 64), (1.0, 1 + 63 * price)), min_match=2)
    gains = [(1 + sum(KEPT[:more])) / (1 + more * price) for more in range(16)]
    rows = 1 + gains.index(max(gains))
    assert 1 < rows < 16 and drafter._rows(1, fixed=True) == (rows, [[1, 1, *[rows] * 4]] * 2)
    assert drafter._rows(4, fixed=True)[0] < rows, "four sequences have four times the rows"
    assert drafter._rows(1, fixed=False)[0] == 16 and len({*drafter._rows(1, fixed=False)[1][0]}) > 2
    assert drafter._rows(4, fixed=True, predicted=True) == (16, [[1, 1, *[16] * 4]] * 2), "all that there are"
    assert bound(rows=7, max_match=2)._rows(1, fixed=True) == (7, [[1, 7, 7]] * 2)


def test_sampling_makes_no_difference() -> None:
    sequence = [3, 4, 5, 3, 4]
    greedy, sampled = (bound(rows=4).propose(state_of([sequence], sampling)) for sampling in SAMPLINGS.values())
    assert drafted(greedy) == drafted(sampled) == [4, 5, 3, 4]


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
def test_invalid_options_are_refused(options: dict[str, object], named: str) -> None:
    with pytest.raises(InputError, match=named):
        make("prompt_lookup", **options)  # type: ignore[arg-type]

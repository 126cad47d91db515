"""Tree attention: the mask against slow rules, the attention against a loop over heads and rows."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from foreword.model.attention import attend, mask_of


@given(
    base=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    rows=st.integers(1, 4),
    before=st.integers(0, 3),
    groups=st.integers(1, 3),
    shared=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_row_sees_the_prefix_and_what_sees_allows(
    base: list[int], rows: int, before: int, groups: int, shared: bool, seed: int
) -> None:
    """`before` scratch rows of an earlier pass may lie in front of the rows; keys behind the scratch are closed."""
    scratch, keys = before + rows, 16
    draws = torch.rand(1 if shared else len(base), rows, scratch, generator=torch.Generator().manual_seed(seed))
    sees = draws > 0.5
    mask = mask_of(torch.tensor(base), sees, keys, groups, torch.float64)
    assert mask.shape == (len(base), 1, groups * rows, keys)
    for lane, length in enumerate(base):
        for line in range(groups * rows):
            allowed = sees[0 if shared else lane, line % rows]
            for key in range(keys):
                opened = key < length or (key - length < scratch and bool(allowed[key - length]))
                assert float(mask[lane, 0, line, key]) == (0.0 if opened else -math.inf)


def slow_attention(query: Tensor, key: Tensor, value: Tensor, sees: Tensor, scale: float) -> Tensor:
    """Head by head and row by row: [heads, n, width], each query head with the key head it shares."""
    heads, rows, _ = query.shape
    out = torch.zeros(rows, heads, query.shape[-1], dtype=query.dtype)
    for head in range(heads):
        shared = head * key.shape[0] // heads
        for row in range(rows):
            chosen = sees[row].nonzero().flatten()
            weights = (key[shared, chosen] @ query[head, row] * scale).softmax(0)
            out[row, head] = weights @ value[shared, chosen]
    return out


def test_queries_that_share_a_key_head() -> None:
    """6 query heads on 2 key heads, two sequences with other prefixes and other trees."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 6, 3, 5, generator=generator).double()
    key, value = torch.randn(2, 2, 2, 9, 5, generator=generator).double()
    base = torch.tensor([2, 5])
    sees = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]], [[1, 0, 0], [1, 1, 0], [1, 1, 1]]]).bool()
    out = attend(query, key, value, mask_of(base, sees, 9, 3, torch.float64), 0.37)
    assert out.shape == (2, 3, 6, 5)
    for lane in range(2):
        length = int(base[lane])
        allowed = torch.zeros(3, 9, dtype=torch.bool)
        allowed[:, :length] = True
        allowed[:, length : length + 3] = sees[lane]
        expected = slow_attention(query[lane], key[lane], value[lane], allowed, 0.37)
        torch.testing.assert_close(out[lane], expected, atol=1e-12, rtol=0)

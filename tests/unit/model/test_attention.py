"""Tree attention: the mask against slow rules, the attention against a loop over heads and rows."""

import math

import pytest
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
    window=st.integers(0, 9),
    seed=st.integers(0, 99),
)
def test_a_row_attends_to_the_prefix_and_to_what_sees_allows(
    base: list[int], rows: int, before: int, groups: int, shared: bool, window: int, seed: int
) -> None:
    """`before` scratch rows of an earlier pass may precede the rows. Keys after the scratch rows are closed, and so are keys
    that are a window or more back by position."""
    scratch, keys = before + rows, 16
    generator, trees = torch.Generator().manual_seed(seed), 1 if shared else len(base)
    sees = torch.rand(trees, rows, scratch, generator=generator) > 0.5
    depth = torch.randint(0, scratch, (trees, scratch), generator=generator)
    mask = mask_of(torch.tensor(base), sees, keys, groups, torch.float64, window, depth)
    assert mask.shape == (len(base), 1, groups * rows, keys)
    for index, length in enumerate(base):
        for line in range(groups * rows):
            tree = 0 if shared else index
            allowed, deep = sees[tree, line % rows], [*range(-length, 0), *depth[tree].tolist()]
            for key in range(keys):
                opened = key < length or (key - length < scratch and bool(allowed[key - length]))
                opened = opened and (window == 0 or deep[key] > deep[length + before + line % rows] - window)
                assert float(mask[index, 0, line, key]) == (0.0 if opened else -math.inf)


def slow_attention(
    query: Tensor, key: Tensor, value: Tensor, sees: Tensor, scale: float, softcap: float, sinks: Tensor | None = None
) -> Tensor:
    """Return attention computed head by head and row by row: query [heads, n, width] to [n, heads, width]."""
    heads, rows, _ = query.shape
    out = torch.zeros(rows, heads, query.shape[-1], dtype=query.dtype)
    for head in range(heads):
        shared = head * key.shape[0] // heads
        for row in range(rows):
            chosen = sees[row].nonzero().flatten()
            scores = key[shared, chosen] @ query[head, row] * scale
            capped = softcap * (scores / softcap).tanh() if softcap else scores
            if sinks is not None:
                capped = torch.cat([capped, sinks[head : head + 1]])
            out[row, head] = capped.softmax(0)[: len(chosen)] @ value[shared, chosen]
    return out


@pytest.mark.parametrize(("softcap", "has_sinks"), [(0.0, False), (0.5, False), (0.0, True), (0.5, True)])
def test_queries_that_share_a_key_head(softcap: float, has_sinks: bool) -> None:
    """6 query heads on 2 key heads, two sequences with different prefixes and trees."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 6, 3, 5, generator=generator).double()
    key, value = torch.randn(2, 2, 2, 9, 5, generator=generator).double()
    base = torch.tensor([2, 5])
    sees = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]], [[1, 0, 0], [1, 1, 0], [1, 1, 1]]]).bool()
    sinks = torch.randn(6, generator=generator).double() if has_sinks else None
    out = attend(query, key, value, mask_of(base, sees, 9, 3, torch.float64), 0.37, softcap, sinks)
    assert out.shape == (2, 3, 6, 5)
    for index in range(2):
        length = int(base[index])
        allowed = torch.zeros(3, 9, dtype=torch.bool)
        allowed[:, :length] = True
        allowed[:, length : length + 3] = sees[index]
        expected = slow_attention(query[index], key[index], value[index], allowed, 0.37, softcap, sinks)
        torch.testing.assert_close(out[index], expected, atol=1e-12, rtol=0)

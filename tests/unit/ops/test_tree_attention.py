"""Tree attention in Triton's interpreter, against torch's masked attention: trees, batches, windows, soft caps."""

import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from doubles import AttentionCase
from foreword.core.draft import Tree

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

from foreword.ops.layer import tree_attention
from foreword.ops.layer.tree_attention import (
    LEAST_SHARE,
    MANY_UNITS,
    MOST_SHARES,
    PROGRAMS,
    UNSPLIT,
    AttentionTiles,
    attend_tree,
    attention_tiles,
)

SMALL = AttentionTiles(block_q=16, block_k=16, warps=4, stages=2, splits=1)
BY_TWO = replace(SMALL, block_k=32, shares=2)
PRECISE = 2e-6


def by_kernel(
    case: AttentionCase, tiles: AttentionTiles | None, window: int = 0, softcap: float = 0.0, chain: bool = False
) -> Tensor:
    span, scaling = int(case.base.max()), case.query.shape[3] ** -0.5
    depth = case.depth[:, -case.sees.shape[1] :] if window else None
    seen = (case.query, case.keys, case.values, case.slots, case.base, case.sees)
    return attend_tree(*seen, span, scaling, depth, window, softcap, chain, tiles)


def error(
    case: AttentionCase, tiles: AttentionTiles | None, window: int = 0, softcap: float = 0.0, chain: bool = False
) -> float:
    """Return the kernel's distance from the exact result; NaN if it read what no query may see."""
    if window:
        case = case.within(window)
    found = by_kernel(case, tiles, window, softcap, chain)
    assert found.dtype == case.query.dtype
    return float((found.double() - case.exact(window, softcap)).abs().max())


@settings(max_examples=20, phases=[Phase.generate])  # shrinking would take minutes in the interpreter
@given(
    heads=st.sampled_from([(1, 1), (6, 2), (4, 1)]),
    rows=st.integers(1, 6),
    before=st.integers(0, 4),
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=2),
    shared=st.booleans(),
    splits=st.integers(1, 5),
    tiles=st.sampled_from([SMALL, BY_TWO]),
    window=st.sampled_from([0, 0, 1, 3, 20, 100]),
    softcap=st.sampled_from([0.0, 1.5]),
    seed=st.integers(0, 99),
)
def test_any_tree_in_any_batch(
    heads: tuple[int, int],
    rows: int,
    before: int,
    lengths: list[int],
    shared: bool,
    splits: int,
    tiles: AttentionTiles,
    window: int,
    softcap: float,
    seed: int,
) -> None:
    case = AttentionCase.random(heads, 16, rows, lengths, before, shared, seed=seed)
    assert error(case, replace(tiles, splits=splits), window, softcap) < PRECISE


@pytest.mark.parametrize("tiles", [SMALL, BY_TWO], ids=["alone", "shared"])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("length", [0, 1, 15, 16, 33])
def test_lengths_around_the_edges_of_blocks(length: int, splits: int, tiles: AttentionTiles) -> None:
    case = AttentionCase.random((2, 1), 16, 3, [length], before=1)
    assert error(case, replace(tiles, splits=splits)) < PRECISE


@pytest.mark.parametrize("known", [False, True], ids=["tree", "chain"])
@pytest.mark.parametrize(("tiles", "splits"), [(SMALL, 3), (BY_TWO, 1)], ids=["alone, split", "shared"])
@pytest.mark.parametrize("window", [0, 20])
def test_more_rows_than_a_block_of_keys(window: int, splits: int, tiles: AttentionTiles, known: bool) -> None:
    """Like a prompt: the scratch is several blocks, after no prefix or after one that ends within a block. With 48 rows no
    block of queries has rows of two heads. The number of rows is chosen so that any four of the five choices occur in
    every combination."""
    rows = 48 if ((window > 0) + (splits > 1) + (tiles is BY_TWO) + known) % 2 else 40
    case, chain = AttentionCase.random((2, 1), 16, rows, [0, 37]), Tree.chain(rows)
    case = replace(case, sees=chain.ancestors, depth=chain.depth)
    assert error(case, replace(tiles, splits=splits), window, chain=known) < PRECISE


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("rows", [4, 20, 40])
def test_rows_that_see_each_other(rows: int, splits: int) -> None:
    """A block whose rows are not causal, as in masked drafting, with more rows than a block of queries: see `causal`."""
    case = AttentionCase.random((2, 1), 16, rows, [0, 37])
    case = replace(case, sees=torch.ones(1, rows, rows, dtype=torch.bool))
    tiles = replace(SMALL, splits=splits)
    seen = (case.query, case.keys, case.values, case.slots, case.base, case.sees)
    found = attend_tree(*seen, 37, 0.25, tiles=tiles, causal=False)
    assert float((found.double() - case.exact(0, 0.0)).abs().max()) < PRECISE
    with pytest.raises(AssertionError, match="a chain is causal"):
        attend_tree(*seen, 37, 0.25, tiles=tiles, causal=False, chain=True)


@pytest.mark.parametrize("splits", [1, 3])
def test_a_known_chain_is_not_looked_up(splits: int) -> None:
    """`sees` is not read, and the result is the same, also after rows of an earlier pass."""
    case, chain = AttentionCase.random((4, 2), 16, 5, [20, 3], before=2), Tree.chain(7)
    case = replace(case, sees=chain.ancestors[:, 2:], depth=chain.depth)
    expected, tiles = by_kernel(case, replace(SMALL, splits=splits)), replace(SMALL, splits=splits)
    blind = replace(case, sees=torch.zeros_like(case.sees))
    assert torch.equal(by_kernel(blind, tiles, chain=True), expected)


@pytest.mark.parametrize("least", [0, 16, 48, 512])
def test_short_sequences_next_to_a_long_one_leave_shares_empty(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares that were not written are not read: their buffer starts as NaN."""
    case, tiles = AttentionCase.random((2, 1), 16, 3, [300, 0, 15, 17]), replace(SMALL, splits=9, least=least)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: empty(*shape, **options).fill_(torch.nan))
    for window in (0, 50):
        assert error(case, tiles, window) < PRECISE


@pytest.mark.parametrize("splits", [1, 3])
def test_padding_may_lie_beyond_the_cache(splits: int) -> None:
    """Of eight rows the first two have a place in the cache; the memory after it belongs to another tensor."""
    whole = AttentionCase.random((2, 1), 16, 8, [20, 6])
    chain = Tree.chain(8)
    whole = replace(whole, sees=chain.ancestors, depth=chain.depth)
    cache = torch.full((2, *whole.keys.shape[:2], 30, 16), torch.nan)
    cache[..., :22, :] = torch.stack([whole.keys, whole.values])[..., :22, :]
    cut = replace(whole, keys=cache[0, :, :, :22], values=cache[1, :, :, :22])
    found = by_kernel(cut, replace(SMALL, splits=splits))[0, :2]
    assert float((found.double() - whole.exact()[0, :2]).abs().max()) < PRECISE


@pytest.mark.parametrize("window", [1, 15, 16, 47])
def test_windows_around_the_edges_of_blocks(window: int) -> None:
    """A tree deep enough that its last rows see none of the prefix where the window is short."""
    assert error(AttentionCase.random((2, 1), 16, 9, [40, 3]), replace(SMALL, splits=2), window) < PRECISE


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("width", [16, 32, 64, 128])
def test_widths_and_precisions_with_tiles_of_their_own(width: int, dtype: torch.dtype) -> None:
    """25 rows of 3 heads are more than a block of queries."""
    case = AttentionCase.random((3, 1), width, 25, [130], dtype=dtype)
    assert error(case, None) < (PRECISE if dtype == torch.float32 else 4e-3)


def test_visibility_may_have_any_strides() -> None:
    case = AttentionCase.random((2, 1), 16, 5, [20, 7])
    assert error(replace(case, sees=case.sees.mT.contiguous().mT), SMALL) < PRECISE


def test_a_row_that_sees_nothing_gets_nothing() -> None:
    """Not a division by zero, which would spread from padding rows to the cache."""
    case = AttentionCase.random((2, 1), 16, 3, [0])
    blind = replace(case, sees=torch.zeros_like(case.sees))
    for tiles in (SMALL, BY_TWO):
        for splits in (1, 2):
            assert not by_kernel(blind, replace(tiles, splits=splits)).any()


def test_one_share_needs_no_join(monkeypatch: pytest.MonkeyPatch) -> None:
    case = AttentionCase.random((2, 1), 16, 3, [20])
    monkeypatch.setattr(tree_attention, "_join", None)
    assert error(case, SMALL) < PRECISE
    with pytest.raises(TypeError):
        by_kernel(case, replace(SMALL, splits=2))


@given(
    queries=st.integers(1, 3000),
    keys=st.integers(1, 40_000),
    units=st.integers(1, 6000),
    width=st.sampled_from([16, 64, 128, 256]),
)
def test_shares_are_few_and_not_short(queries: int, keys: int, units: int, width: int) -> None:
    tiles = attention_tiles(queries, keys, units, width)
    assert tiles.splits == 1 or 2 < tiles.splits <= MOST_SHARES + 1
    assert tiles.least >= LEAST_SHARE and tiles.least % tiles.block_k == 0
    assert tiles.splits - 2 < keys / LEAST_SHARE
    assert tiles.splits == 1 or units < MANY_UNITS * keys / LEAST_SHARE  # more units fill the GPU by themselves


@given(queries=st.integers(1, 300), keys=st.integers(1, UNSPLIT), units=st.integers(PROGRAMS, 900))
def test_units_that_keep_the_gpu_busy_have_one_share_each(queries: int, keys: int, units: int) -> None:
    tiles = attention_tiles(queries, keys, units, 64)
    assert tiles.splits == 1 and tiles.block_q == (16 if queries <= 16 else 64)
    longer = attention_tiles(queries, UNSPLIT + 1, units, 64)
    # Without a split all would wait for one long sequence. Units past this bound have a least share that holds it whole.
    assert (longer.splits > 1) == (units < MANY_UNITS * (UNSPLIT + 1) / LEAST_SHARE)


@pytest.mark.parametrize("rows", [3, 20])
def test_units_that_keep_the_gpu_busy_see_what_others_see(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_attention, "PROGRAMS", 8)  # a small GPU
    assert error(AttentionCase.random((4, 4), 16, rows, [5, 130]), None) < PRECISE


def test_shares_are_whole_blocks() -> None:
    with pytest.raises(AssertionError, match="whole blocks"):
        replace(SMALL, least=SMALL.block_k + 8)


@given(queries=st.integers(1, 3000), keys=st.integers(1, 40_000), units=st.integers(1, 600))
def test_keys_are_cut_alike_for_any_number_of_queries(queries: int, keys: int, units: int) -> None:
    few, many = attention_tiles(1, keys, units, 64), attention_tiles(queries, keys, units, 64)
    assert (few.splits, few.block_k, few.least) == (many.splits, many.block_k, many.least)


def test_a_row_is_rounded_alike_alone_and_among_others() -> None:
    """In half precision the root's result is the same to the last bit, however many rows are in the pass. The 70 queries
    of a key head are several blocks."""
    for heads, rows, tiles in (((4, 2), 9, replace(SMALL, splits=3)), ((7, 1), 10, None)):
        case = AttentionCase.random(heads, 16, rows, [150], dtype=torch.float16)
        alone = replace(case, query=case.query[:, :, :1], sees=case.sees[:, :1, :1], depth=case.depth[:, :1])
        assert torch.equal(by_kernel(alone, tiles)[:, 0], by_kernel(case, tiles)[:, 0])


@pytest.mark.parametrize("splits", [1, 3])
def test_no_query_reads_a_later_row(splits: int) -> None:
    """Of three blocks of queries only the last reads the last rows, which are NaN."""
    case = AttentionCase.random((2, 1), 16, 48, [20])
    case.keys[:, :, 20 + 32 :], case.values[:, :, 20 + 32 :] = torch.nan, torch.nan
    found = by_kernel(case, replace(SMALL, splits=splits))
    assert found[:, :32].isfinite().all() and not found[:, 40:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize(("tiles", "splits"), [(SMALL, 1), (SMALL, 4), (BY_TWO, 1), (BY_TWO, 3)])
def test_a_sink_counts_once(tiles: AttentionTiles, splits: int, window: int, dtype: torch.dtype) -> None:
    """In one share of several, in a sequence without a prefix, and if it is far above or below all scores."""
    case = AttentionCase.random((6, 2), 16, 5, [90, 0], before=2, dtype=dtype)
    case = case.within(window) if window else case
    sinks = torch.tensor([0.0, 3.0, -2.0, 90.0, -90.0, 8.0], dtype=dtype)
    depth = case.depth[:, -5:] if window else None
    seen = (case.query, case.keys, case.values, case.slots, case.base, case.sees)
    found = attend_tree(*seen, 90, 0.25, depth, window, tiles=replace(tiles, splits=splits), sinks=sinks)
    expected = case.exact(window, sinks=sinks.double())
    assert float((found.double() - expected).abs().max()) < (PRECISE if dtype == torch.float32 else 4e-3)
    assert float((found.double() - case.exact(window)).abs().max()) > 0.1


def test_sequences_may_be_longer_than_the_span() -> None:
    case = AttentionCase.random((2, 1), 16, 3, [300, 40])
    seen = (case.query, case.keys, case.values, case.slots, case.base, case.sees)
    found = attend_tree(*seen, 30, 0.25, tiles=replace(SMALL, splits=3))
    assert float((found.double() - case.exact()).abs().max()) < PRECISE

"""The search over tilings of tree attention, on the CPU through Triton's interpreter: what it tries, times and shows."""

import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console
from torch import Tensor

import attention_tiles
from attention_tiles import AttentionCase, AttentionTrial, grid, sweep, table
from foreword.errors import InputError

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

from foreword.ops.layer.tree_attention import AttentionTiles

CASE = AttentionCase(heads=2, key_heads=1, width=16, rows=3, context=40, texts=2)
GOOD, BAD = (
    AttentionTiles(16, 16, 4, 2, splits=2),
    AttentionTiles(16, 17, 4, 2, splits=1),
)  # blocks of keys are powers of two


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[AttentionTrial]:
    monkeypatch.setattr(attention_tiles, "MOST_CACHES", 2)

    def timer(calls: list[Callable[[], Tensor]]) -> float:
        first, second = (call() for call in calls)
        assert not first.equal(second)  # each call has a cache of its own
        return 5.0

    return sweep(CASE, [GOOD, BAD], timer, "cpu")


def shown(trials: list[AttentionTrial]) -> str:
    console = Console(width=200, record=True)
    console.print(table([trials], best=1))
    return console.export_text()


def test_sequences_may_have_unequal_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(CASE, texts=9, unlike=True)
    assert case.lengths == [40, 2, 4, 13, 6, 3, 20, 5, 40] and CASE.lengths == [40, 40]
    monkeypatch.setattr(attention_tiles, "MOST_CACHES", 1)
    trials = sweep(case, [GOOD], lambda _: 1.0, "cpu")
    assert [one.failure for one in trials] == ["", ""]  # so the outputs equal those of masked attention
    assert "up to 40" in shown(trials)


def test_a_tiling_that_does_not_compile_is_reported_and_the_rest_goes_on(trials: list[AttentionTrial]) -> None:
    masked, good, bad = trials
    assert (masked.tiles, masked.microseconds) == (None, 5.0)
    assert (good.tiles, good.microseconds, good.failure) == (GOOD, 5.0, "")
    assert bad.microseconds is None and bad.failure


def test_a_wrong_output_counts_as_failed(trials: list[AttentionTrial], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_tiles, "attend", lambda query, *_: query.transpose(1, 2) * 0 + 9)
    assert "off by" in sweep(CASE, [GOOD], lambda _: 1.0, "cpu")[1].failure


def test_the_table_shows_the_fastest_and_the_failures(trials: list[AttentionTrial]) -> None:
    text = shown(trials)
    assert "masked" in text and "16x16 4 warps 2 stages 2 shares of 0 or more (default)" in text and "failed: " in text


@pytest.mark.parametrize("texts", [1, 32])
@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.parametrize("shape", attention_tiles.SHAPES.values(), ids=attention_tiles.SHAPES)
def test_the_grid_is_small_and_includes_a_single_share(shape: tuple[int, int, int], rows: int, texts: int) -> None:
    for context in (512, 4096):
        tried = grid(AttentionCase(*shape, rows, context, texts))
        assert 10 <= len(tried) <= 30 and len(set(tried)) == len(tried)
        assert {tiles.splits == 1 for tiles in tried} == {True, False}


def test_the_largest_blocks_of_the_grid_match_masked_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares are whole blocks, one sequence leaves some of them empty, and the tree ends within a block."""
    monkeypatch.setattr(attention_tiles, "MOST_CACHES", 1)
    monkeypatch.setattr("foreword.ops.layer.tree_attention.PROGRAMS", 1)  # so that shares are used
    case = AttentionCase(4, 1, 16, rows=17, context=250, texts=2, unlike=True)
    rig, tried = attention_tiles.Rig(case, "cpu"), [tiles for tiles in grid(case) if tiles.block_k == 128]
    expected = rig.masked()[0]()
    assert len(tried) > 1 and max(tiles.splits for tiles in tried) > 2
    for tiles in tried:
        assert float((rig.by_kernel(tiles)[0]() - expected).abs().max()) < 1e-5, tiles


def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(InputError, match="no CUDA device"):
        attention_tiles.time_attention_tiles()

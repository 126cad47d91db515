"""The tilings that the search inside passes tries; the search itself needs a GPU."""

from pathlib import Path

import pytest

pytest.importorskip("triton")

from foreword.errors import InputError
from foreword.ops.layer.tiles import Kind, tiles_for
from linear_tiles_in_passes import TILINGS, linear_tiles_in_passes, tilings


@pytest.mark.parametrize("rows", list(TILINGS))
@pytest.mark.parametrize(("n", "k", "kind"), [(960, 576, "turned"), (1536, 576, "gated"), (576, 1536, "plain")])
def test_every_tiling_can_be_launched_and_the_present_one_comes_first(rows: int, n: int, k: int, kind: Kind) -> None:
    tried = tilings(rows, (n, k, kind))
    assert tried[0] == tiles_for(rows, n, k, kind) and len(set(tried)) == len(tried) > 5
    for tiles in tried:
        sizes = tiles.block_m, tiles.block_n, tiles.block_k, tiles.warps
        assert all(size > 0 and size & (size - 1) == 0 for size in sizes) and tiles.splits == 1
        assert tiles.block_m > 1 or tiles.block_k >= k


@pytest.mark.parametrize(("k", "preloaded"), [(1536, True), (8192, False)])
def test_weights_are_preloaded_only_if_they_fit(k: int, preloaded: bool) -> None:
    assert any(tiles.stages == 0 for tiles in tilings(16, (2048, k, "plain"))) == preloaded


def test_it_needs_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(InputError, match="CUDA"):
        linear_tiles_in_passes(tmp_path / "inside.json")

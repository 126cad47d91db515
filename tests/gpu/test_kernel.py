"""Tree attention, compiled for the GPU, against torch's masked attention; the unit tests use Triton's interpreter."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from doubles import AttentionCase
from foreword.core.draft import Tree
from tiers import slow

pytestmark = pytest.mark.gpu

CASES = [
    ((9, 3), 64, 1, [512]),
    ((9, 3), 64, 64, [700]),
    ((9, 3), 64, 17, [0, 5, 130, 512]),
    slow((32, 8), 128, 64, [300]),
    slow((32, 8), 128, 1, [4096]),
    slow((8, 2), 256, 20, [100, 900]),
    slow((4, 2), 16, 9, [0]),
    slow((4, 4), 32, 5, [0, 1, 63, 64, 65]),
    slow((72, 24), 64, 1, [900, 60, 90, 300, 150, 80]),  # units that keep the GPU busy
    slow((72, 24), 64, 16, [2100, 60, 0, 300, 150, 80]),
]
CLOSE = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 5e-2}
HALF = [torch.bfloat16, slow(torch.float16)]


def error(
    case: AttentionCase,
    window: int = 0,
    softcap: float = 0.0,
    splits: int | None = None,
    chain: bool = False,
    sinks: Tensor | None = None,
) -> float:
    """Return the kernel's distance from the exact result; NaN if it read what no query may see."""
    from foreword.ops.layer.tree_attention import attend_tree, attention_tiles  # noqa: PLC0415  needs triton

    case = case.to("cuda").within(window) if window else case.to("cuda")
    batch, heads, rows, width = case.query.shape
    span, key_heads, depth = -(-int(case.base.max()) // 256) * 256, case.keys.shape[1], case.depth[:, -rows:]
    tiles = attention_tiles(heads // key_heads * rows, span + rows, batch * key_heads, width, case.query.element_size())
    if splits is not None:
        tiles = replace(tiles, splits=splits)
    seen = (case.query, case.keys, case.values, case.slots, case.base, case.sees)
    found = attend_tree(*seen, span, width**-0.5, depth if window else None, window, softcap, chain, tiles, sinks=sinks)
    return float((found.double() - case.exact(window, softcap, None if sinks is None else sinks.double())).abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize(("heads", "width", "rows", "lengths"), CASES)
def test_the_kernel_is_masked_attention(
    heads: tuple[int, int], width: int, rows: int, lengths: list[int], dtype: torch.dtype
) -> None:
    assert error(AttentionCase.random(heads, width, rows, lengths, dtype=dtype)) < CLOSE[dtype]


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("window", [0, slow(100)])
@pytest.mark.parametrize("rows", [60, 300, slow(1), slow(64)])
@pytest.mark.parametrize(("heads", "width"), [((9, 3), 64), slow((8, 2), 128), slow((4, 2), 256)])
def test_prompts(heads: tuple[int, int], width: int, rows: int, window: int, dtype: torch.dtype) -> None:
    """A chain that is declared as one, after no prefix and after a long one."""
    case, chain = AttentionCase.random(heads, width, rows, [0, 1500, 70], dtype=dtype), Tree.chain(rows)
    case = replace(case, sees=chain.ancestors, depth=chain.depth)
    assert error(case, window, chain=True) < CLOSE[dtype]


@pytest.mark.parametrize("rows", [4, slow(1)])
def test_one_long_sequence_among_many_short_ones(rows: int) -> None:
    case = AttentionCase.random((9, 3), 64, rows, [*range(40, 71), 1600], dtype=torch.bfloat16)
    assert error(case) < CLOSE[torch.bfloat16]


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("splits", [1, 7, slow(2), slow(33)])
def test_any_number_of_shares(splits: int, dtype: torch.dtype) -> None:
    case = AttentionCase.random((9, 3), 64, 17, [0, 5, 130, 512], before=6, dtype=dtype)
    assert error(case, splits=splits) < CLOSE[dtype]


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("window", [9, 200, slow(1), slow(64), slow(4096)])
@pytest.mark.parametrize(("heads", "width"), [((8, 2), 128), slow((9, 3), 64), slow((4, 2), 256)])
def test_windows(heads: tuple[int, int], width: int, window: int, dtype: torch.dtype) -> None:
    """Longer than the sequence, shorter, and so short that deep rows see none of the prefix."""
    case = AttentionCase.random(heads, width, 24, [700, 64, 3], before=5, dtype=dtype)
    assert error(case, window) < CLOSE[dtype]
    assert error(case, window, splits=1) < CLOSE[dtype]


@pytest.mark.parametrize("dtype", [torch.float16, slow(torch.bfloat16)], ids=str)
@pytest.mark.parametrize("window", [150, slow(0)])
@pytest.mark.parametrize("softcap", [50.0, slow(1.5)])
def test_soft_caps(softcap: float, window: int, dtype: torch.dtype) -> None:
    assert error(AttentionCase.random((8, 2), 128, 24, [700, 3], dtype=dtype), window, softcap) < CLOSE[dtype]


@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize("splits", [1, 7])
def test_sinks(splits: int, window: int) -> None:
    sinks = torch.linspace(-6, 6, 64, dtype=torch.bfloat16, device="cuda")
    case = AttentionCase.random((64, 8), 64, 9, [700, 64, 0], dtype=torch.bfloat16)
    assert error(case, window, splits=splits, sinks=sinks) < CLOSE[torch.bfloat16]


def test_the_kernel_is_captured() -> None:
    """Replayed with other lengths, visibility and queries than at capture."""
    from foreword.ops.layer.tree_attention import attend_tree  # noqa: PLC0415  needs triton

    first, second = (
        AttentionCase.random((9, 3), 64, 20, lengths, dtype=torch.bfloat16, seed=seed).to("cuda")
        for seed, lengths in ((0, [300, 7]), (1, [20, 300]))
    )
    seen = [tensor.clone() for tensor in (first.query, first.keys, first.values, first.slots, first.base, first.sees)]
    attend_tree(*seen, 512, 0.125)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attend_tree(*seen, 512, 0.125)
    for case in (first, second):
        new = (case.query, case.keys, case.values, case.slots, case.base, case.sees)
        for buffer, tensor in zip(seen, new, strict=True):
            buffer.copy_(tensor)
        graph.replay()
        assert (found.double() - case.exact()).abs().max() < CLOSE[torch.bfloat16]

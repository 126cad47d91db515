"""Products of few rows and the steps between them on CUDA: real shapes, captured, the same bits every time."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from tiers import slow

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def error(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


SHAPES = [
    (960, 576, "norm"), (576, 576, "residual"), (1536, 576, "gated"), (576, 1536, "residual"), (49152, 576, "norm"),
    (6144, 4096, "norm"), (4096, 4096, "residual"), (14336, 4096, "gated"), (4096, 14336, "residual"), (1152, 896, "bias"),
]  # fmt: skip
CASES = [(*shape, torch.bfloat16) for shape in SHAPES]
CASES += [(*shape, dtype) for shape in SHAPES[:4] for dtype in (torch.float16, torch.float32)]
ROWS = (1, 2, 4, 16, 33, 64, 100)
QUICK = {
    *((rows, *shape, torch.bfloat16) for rows in (1, 16) for shape in SHAPES[:3]),
    (64, *SHAPES[0], torch.bfloat16),
    (33, *SHAPES[-1], torch.bfloat16),
    (16, *SHAPES[-2], torch.bfloat16),  # programs share a sum
    (16, *SHAPES[0], torch.float32),
    (16, *SHAPES[0], torch.float16),
}
PRODUCTS = [
    (pytest.param if (rows, *case) in QUICK else slow)(rows, *case, id=f"{rows}-{'-'.join(map(str, case))}")
    for case in CASES
    for rows in ROWS
]


@pytest.mark.parametrize(("rows", "n", "k", "kind", "dtype"), PRODUCTS)
def test_products_at_real_shapes(rows: int, n: int, k: int, kind: str, dtype: torch.dtype) -> None:
    from foreword.ops.layer.linear import few_rows_linear  # noqa: PLC0415  needs triton

    gated = kind == "gated"
    x, weight = random(rows, k, dtype=dtype), random(2 * n if gated else n, k, dtype=dtype, seed=1) * k**-0.5
    norm = (random(k, dtype=dtype, seed=2), 1e-5) if kind in ("norm", "gated") else None
    residual = random(rows, n, dtype=dtype, seed=3) if kind == "residual" else None
    bias = random(n, dtype=dtype, seed=4) if kind == "bias" else None

    found = [few_rows_linear(x, weight, bias, norm=norm, residual=residual, gated=gated) for _ in range(3)]

    wide = x.double() if norm is None else rms_norm(x.double(), (k,), norm[0].double(), norm[1])
    exact = linear(wide, weight.double(), None if bias is None else bias.double())
    if gated:
        exact = silu(exact.chunk(2, dim=-1)[0]) * exact.chunk(2, dim=-1)[1]
    exact = exact if residual is None else exact + residual.double()
    assert error(found[0], exact) < TOLERANCE[dtype]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize(
    ("m", "n", "warps"), [(1, 8, 4), (16, 16, 8), slow(1, 4, 2), slow(1, 4, 4), slow(16, 8, 4), slow(32, 16, 4)]
)
@pytest.mark.parametrize("kind", ["gated", "residual"])
def test_preloaded_weights(kind: str, m: int, n: int, warps: int) -> None:
    from foreword.ops.layer.linear import few_rows_linear  # noqa: PLC0415  needs triton
    from foreword.ops.layer.tiles import Tiles  # noqa: PLC0415  needs triton

    gated, columns, k = kind == "gated", 100, 576
    x = random(2 if m == 1 else 17, k, dtype=torch.bfloat16)
    weight = random((1 + gated) * columns, k, dtype=torch.bfloat16, seed=1) * k**-0.5
    norm = (random(k, dtype=torch.bfloat16, seed=2), 1e-5) if gated else None
    residual = None if gated else random(len(x), columns, dtype=torch.bfloat16, seed=3)
    given = {"norm": norm, "residual": residual, "gated": gated}
    preloaded, streamed = (few_rows_linear(x, weight, **given, tiles=Tiles(m, n, 1024, warps, stages)) for stages in (0, 1))
    assert error(preloaded, streamed.double()) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("rows", [2, 16, slow(33), slow(64), slow(100)])
@pytest.mark.parametrize(("hidden", "mlp"), [(576, 1536), slow(4096, 14336), slow(896, 1152)])
def test_a_norm_inside_separate_and_prescaled_is_the_same(hidden: int, mlp: int, rows: int) -> None:
    """Except for the order of sums: nearly all numbers are equal to the last bit."""
    from foreword.ops.layer.linear import few_rows_linear, linear_and_prescale  # noqa: PLC0415  needs triton

    x, residual = random(rows, mlp, dtype=torch.bfloat16), random(rows, hidden, dtype=torch.bfloat16, seed=3)
    norm = (random(hidden, dtype=torch.bfloat16, seed=2), 1e-5)
    down = random(hidden, mlp, dtype=torch.bfloat16, seed=1) * mlp**-0.5
    up = random(2 * mlp, hidden, dtype=torch.bfloat16, seed=4) * hidden**-0.5
    (out, prescaled), (same, again) = (linear_and_prescale(x, down, None, residual, norm[0]) for _ in range(2))
    assert torch.equal(out, few_rows_linear(x, down, residual=residual)) and torch.equal(out, same)
    assert (prescaled is None) == (again is None) == (rows <= 4)
    if prescaled is not None and again is not None:
        assert torch.equal(prescaled.rows, (out.float() * norm[0].float()).bfloat16())
        assert torch.equal(prescaled.rows, again.rows) and torch.equal(prescaled.squares, again.squares)
    for gated in (False, True):
        alone = torch.cat([few_rows_linear(row, up, norm=norm, gated=gated) for row in out.split(1)])
        for given in (prescaled, None):
            found = few_rows_linear(out, up, norm=norm, prescaled=given, gated=gated)
            assert (found == alone).float().mean() > 0.95
            assert torch.equal(found, few_rows_linear(out, up, norm=norm, prescaled=given, gated=gated))


@pytest.mark.parametrize("dtype", [torch.bfloat16, slow(torch.float16), slow(torch.float32)], ids=str)
@pytest.mark.parametrize("rows", [(1, 1), (2, 17), slow((1, 4)), slow((1, 16)), slow((1, 64)), slow((3, 1))], ids=str)
@pytest.mark.parametrize(
    ("heads", "key_heads", "width", "k"),
    [(9, 3, 64, 576), (32, 8, 128, 4096), slow(14, 2, 64, 896), slow(4, 2, 16, 64)],
)
def test_the_rotated_product_is_product_and_rotation(
    heads: int, key_heads: int, width: int, k: int, rows: tuple[int, int], dtype: torch.dtype
) -> None:
    """Nearly every number is equal to the last bit, since both round in the same places."""
    from foreword.ops.layer.linear import few_rows_linear  # noqa: PLC0415  needs triton
    from foreword.ops.layer.qkv import linear_rotate_and_store  # noqa: PLC0415
    from foreword.ops.layer.rotary import rotate_and_store  # noqa: PLC0415

    batch, count = rows
    columns = (heads + 2 * key_heads) * width
    x, norm = random(batch, count, k, dtype=dtype), (random(k, dtype=dtype, seed=2), 1e-5)
    weight, bias = random(columns, k, dtype=dtype, seed=1) * k**-0.5, random(columns, dtype=dtype, seed=3)
    angles = [random(batch, count, width, dtype=dtype, seed=seed) for seed in (4, 5)]
    places = torch.randperm(2 * batch * key_heads * count, device="cuda")[: batch * key_heads * count]

    def cache() -> list[Tensor]:
        return [torch.zeros(2 * batch, key_heads, count, width, dtype=dtype, device="cuda") for _ in range(2)]

    product = few_rows_linear(x, weight, bias, norm=norm)
    separate, found, again = cache(), cache(), cache()
    expected = [rotate_and_store(product, *angles, *separate, places), *separate]
    query, same = (linear_rotate_and_store(x, weight, bias, norm, *angles, *part, places) for part in (found, again))
    for one, other, exact in zip((query, *found), (same, *again), expected, strict=True):
        assert torch.equal(one, other) and error(one, exact.double()) < TOLERANCE[dtype]
        assert dtype == torch.float32 or (one == exact).float().mean() > 0.95


@pytest.mark.parametrize("rows", [1, 16, slow(4), slow(64)])
@pytest.mark.parametrize(("hidden", "mlp"), [(576, 1536), slow(4096, 14336)])
def test_a_captured_chain_is_the_plain_one(hidden: int, mlp: int, rows: int) -> None:
    """Every product reads what the previous one wrote: a kernel that starts early and does not wait gives other numbers."""
    from foreword.ops.layer.linear import few_rows_linear, linear_and_prescale  # noqa: PLC0415  needs triton

    weights = [
        (random(2 * mlp, hidden, dtype=torch.bfloat16, seed=i) / hidden**0.5,
         random(hidden, mlp, dtype=torch.bfloat16, seed=i + 9) / mlp**0.5)
        for i in range(6)
    ]  # fmt: skip
    norm = (random(hidden, dtype=torch.bfloat16, seed=5), 1e-5)
    start = random(rows, hidden, dtype=torch.bfloat16)

    def chain(x: Tensor, wait: bool) -> Tensor:
        prescaled = None
        for up, down in weights:
            gated = few_rows_linear(x, up, norm=norm, prescaled=prescaled, gated=True)
            x, prescaled = linear_and_prescale(gated, down, None, x, norm[0])
            if wait:
                torch.cuda.synchronize()
        return x

    expected = chain(start, wait=True)
    graph, given = torch.cuda.CUDAGraph(), start.clone()
    with torch.cuda.graph(graph):
        last = chain(given, wait=False)
    for _ in range(20):
        last.fill_(float("nan"))
        graph.replay()
        assert torch.equal(last, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, slow(torch.float16)], ids=str)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("heads", "key_heads", "width", "batch", "rows"), [(9, 3, 64, 3, 17), slow(9, 3, 64, 1, 1), slow(32, 8, 128, 1, 64)]
)
def test_rotation_and_cache(
    heads: int, key_heads: int, width: int, batch: int, rows: int, normed: bool, dtype: torch.dtype
) -> None:
    from foreword.ops.layer.rotary import rotate_and_store  # noqa: PLC0415  needs triton

    qkv = random(batch, rows, (heads + 2 * key_heads) * width, dtype=dtype)
    cosine, sine = random(batch, rows, width, dtype=dtype, seed=1), random(batch, rows, width, dtype=dtype, seed=2)
    norm = (random(width, dtype=dtype, seed=3), 1e-5) if normed else None
    keys, values = (torch.zeros(batch + 1, key_heads, 128, width, dtype=dtype, device="cuda") for _ in range(2))
    index, head, row = torch.meshgrid(
        *(torch.arange(size, device="cuda") for size in (batch, key_heads, rows)), indexing="ij"
    )
    places = ((index + 1) * key_heads + head) * 128 + row + 40

    query = rotate_and_store(qkv, cosine, sine, keys, values, places.flatten(), norm, norm)

    q, k, v = qkv.double().view(batch, rows, -1, width).transpose(1, 2).split([heads, key_heads, key_heads], dim=1)
    if norm is not None:
        q, k = (rms_norm(part, (width,), norm[0].double(), norm[1]) for part in (q, k))
    q, k = (
        part * cosine.double()[:, None]
        + torch.cat([-part[..., width // 2 :], part[..., : width // 2]], dim=-1) * sine.double()[:, None]
        for part in (q, k)
    )
    for found, exact in ((query, q), (keys[1:, :, 40 : 40 + rows], k), (values[1:, :, 40 : 40 + rows], v)):
        assert error(found, exact) < TOLERANCE[dtype]
    assert not keys[0].any() and not keys[:, :, :40].any() and not values[:, :, 40 + rows :].any()

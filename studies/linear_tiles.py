"""Search tilings for the linear layers of a decoding pass, on CUDA: `python studies/linear_tiles.py --help`.

Times a grid of `Tiles` for every product of three models, by rows, next to torch's own linear. The best run again without
each of their optimisations. A graph loops over copies of the weights that no cache can hold, as a pass does.
Worker processes compile ahead into Triton's cache on disk and compare with float32. The last lines are ready for `TUNED` in
`ops/layer/tiles.py`. `studies/linear_tiles_in_passes.py` serves products of a few microseconds, which depend on their
neighbours. Made results/profile_cuda/linears.json.xz, linears_grown.json.xz and norm_inside.json.xz.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from itertools import product as cartesian
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from foreword.bench.passes import cuda_milliseconds
from foreword.bench.report import facts
from foreword.errors import InputError
from foreword.ops.cuda_graph import record
from foreword.ops.drafting.int8_linear import SecondInput, int8_linear
from foreword.ops.layer import overlap
from foreword.ops.layer.linear import Prescaled, few_rows_linear, linear_and_prescale
from foreword.ops.layer.qkv import linear_rotate_and_store
from foreword.ops.layer.rotary import rotate_and_store
from foreword.ops.layer.tiles import BUCKETS, ONE_BY_ONE, PROGRAMS, Kind, Tiles, tiles_for
from study import command

ROWS = (1, 2, 16, 64)
PRESCALED_BLOCK = 32  # columns of the previous product whose squares it sums
READ_PER_GRAPH = 256 * 2**20  # bytes: several times the L2 cache
LEAST_LAUNCHES = 20
EPSILON = 1e-5  # of norms
WORKERS = 14


@dataclass(frozen=True)
class Product:
    model: str
    name: str
    n: int
    k: int
    normed: bool = False
    added: bool = False
    kind: Kind = "plain"
    heads: tuple[int, int] = (0, 0)  # of queries and of keys, if the product applies rotary embeddings

    @property
    def weights(self) -> int:
        return (2 if self.kind == "gated" else 1) * self.n * self.k

    @property
    def bytes(self) -> int:
        return self.weights * (1 if self.kind == "coarse" else 2)

    @property
    def width(self) -> int:
        """The width of a head."""
        return self.n // (self.heads[0] + 2 * self.heads[1])


@dataclass(frozen=True)
class LinearTrial:
    product: Product
    rows: int
    tiles: Tiles
    overlap: bool = True
    handed: bool = True  # rows come prescaled from the previous product, and leave prescaled for the next norm
    apart: bool = False  # rotary and store run as a separate kernel; the tiles are those of a plain product


PRODUCTS = (
    Product("135M", "qkv", 960, 576, normed=True, kind="turned", heads=(9, 3)),
    Product("135M", "o", 576, 576, added=True),
    Product("135M", "gate_up", 1536, 576, normed=True, kind="gated"),
    Product("135M", "down", 576, 1536, added=True),
    Product("135M", "head", 49152, 576, normed=True),
    Product("7.2B", "qkv", 6144, 4096, normed=True, kind="turned", heads=(32, 8)),
    Product("7.2B", "o", 4096, 4096, added=True),
    Product("7.2B", "gate_up", 14336, 4096, normed=True, kind="gated"),
    Product("7.2B", "down", 4096, 14336, added=True),
    Product("7.2B", "head", 32000, 4096, normed=True),
    Product("widened 7.0B", "qkv", 7680, 4608, normed=True, kind="turned", heads=(72, 24)),
    Product("widened 7.0B", "o", 4608, 4608, added=True),
    Product("widened 7.0B", "gate_up", 12288, 4608, normed=True, kind="gated"),
    Product("widened 7.0B", "down", 4608, 12288, added=True),
    # The int8 draft linears: the head, and those of clover2 for its first level and for every later one.
    Product("135M", "int8 head", 49152, 576, normed=True, kind="coarse"),
    Product("135M", "int8 head of a draft vocabulary", 16768, 576, normed=True, kind="coarse"),
    Product("135M", "int8 query key value", 1728, 576, normed=True, kind="coarse"),
    Product("135M", "int8 first", 576, 576, kind="coarse"),
    Product("135M", "int8 later", 576, 1152, kind="coarse"),
    Product("widened 7.0B", "int8 head", 49152, 4608, normed=True, kind="coarse"),
    Product("widened 7.0B", "int8 head of a draft vocabulary", 16768, 4608, normed=True, kind="coarse"),
    Product("widened 7.0B", "int8 query key value", 13824, 4608, normed=True, kind="coarse"),
    Product("widened 7.0B", "int8 first", 4608, 4608, kind="coarse"),
    Product("widened 7.0B", "int8 later", 4608, 9216, kind="coarse"),
)

# (block_m, block_n, block_k, warps, stages)
_ONE_ROW_LONG = [
    (1, 4, 1024, 4, 1), (1, 8, 512, 4, 1), (1, 8, 1024, 4, 1), (1, 8, 1024, 8, 1), (1, 16, 512, 4, 1), (1, 16, 512, 8, 1),
    (1, 8, 1024, 4, 3), (1, 8, 512, 4, 4), (1, 16, 256, 4, 4), (1, 4, 2048, 8, 2), (16, 16, 256, 4, 5), (16, 32, 128, 4, 6),
]  # fmt: skip
_FEW_ROWS = {
    ("small", 16): [
        (16, 8, 128, 4, 5), (16, 16, 64, 4, 6), (16, 16, 128, 2, 5), (16, 16, 128, 4, 5), (16, 16, 256, 4, 4),
        (16, 32, 128, 4, 5), (16, 32, 64, 2, 6), (16, 32, 256, 4, 3),
    ],
    ("small", 64): [
        (16, 16, 128, 4, 5), (32, 16, 128, 4, 5), (32, 16, 64, 4, 6), (32, 32, 128, 4, 5), (64, 16, 64, 4, 6),
        (64, 16, 128, 4, 4), (64, 32, 64, 4, 6), (64, 32, 128, 4, 4), (16, 32, 256, 4, 3),
    ],
    ("large", 16): [
        (16, 16, 256, 4, 5), (16, 32, 128, 4, 6), (16, 32, 256, 4, 4), (16, 64, 64, 4, 6), (16, 64, 128, 4, 5),
        (16, 64, 128, 8, 5), (16, 128, 64, 4, 5), (16, 128, 128, 8, 4),
    ],
    ("large", 64): [
        (64, 32, 128, 4, 6), (64, 64, 64, 4, 6), (64, 64, 128, 4, 4), (64, 64, 128, 8, 4), (64, 128, 64, 4, 4),
        (64, 128, 64, 8, 5), (64, 128, 128, 8, 3), (64, 256, 64, 8, 4),
    ],
}  # fmt: skip


def grid(product: Product, rows: int) -> list[Tiles]:
    """Return the tilings to try, the default first; for few rows also that of 16 rows. Int8 linears have at most 16 rows."""
    if product.kind == "coarse":
        return list(_int8(product)) if rows == 16 else []
    first, sixteen = (tiles_for(count, product.n, product.k, product.kind) for count in (rows, 16))
    tried = [*_one_by_one(product), sixteen] if rows <= ONE_BY_ONE else _with_matrix_units(product, rows)
    return list(dict.fromkeys([first, *tried]))


def _int8(product: Product) -> Iterator[Tiles]:
    widths = (64, 128) if product.n >= 2**14 else (16, 32, 64)
    ways = ((64, 4, 6), (128, 2, 5), (128, 4, 5), (128, 8, 5), (256, 4, 4))
    shares = (2, 3, 4) if product.n * product.k > 2**22 and product.n < 2**14 else ()
    for width, (depth, warps, stages) in cartesian(widths, ways):
        yield Tiles(16, width, depth, warps, stages)
        if width == max(widths):
            yield from (Tiles(16, width, depth, warps, stages, splits) for splits in shares)
    if product.k <= 1152:
        yield from (Tiles(16, width, 64, warps, stages=0) for width in widths for warps in (4, 8))


def _one_by_one(product: Product) -> Iterator[Tiles]:
    if product.k <= 2048:
        whole = 1 << (product.k - 1).bit_length()
        yield from (Tiles(1, width, whole, warps, stages) for width in (4, 8) for warps in (2, 4) for stages in (1, 0))
        yield from (Tiles(1, 4, 256, 4, 3), Tiles(16, 16, 128, 4, 5))
        return
    for m, n, k, warps, stages in _ONE_ROW_LONG:
        yield Tiles(m, _width(product, n), k, warps, stages)


def _with_matrix_units(product: Product, rows: int) -> Iterator[Tiles]:
    taken = product.n // 2 if product.kind == "turned" else product.n
    for m, n, k, warps, stages in _FEW_ROWS["small" if product.n * product.k <= 2**22 else "large", rows]:
        width = _width(product, n)
        if product.kind == "turned" and width > product.width // 2:
            continue
        yield Tiles(m, width, k, warps, stages)
        splits = min(8, PROGRAMS // math.ceil(taken / width), product.k // 512)
        if splits > 1 and product.kind != "gated":
            yield Tiles(m, width, k, warps, stages, splits=1 << (splits.bit_length() - 1))


def _width(product: Product, n: int) -> int:
    """Halve the columns of a program if they come in pairs."""
    return n // 2 if product.kind != "plain" and n >= 16 else n


class Given:
    """Random inputs of a product on the device, with as many copies of the weights as `memory` holds."""

    def __init__(self, product: Product, rows: int, memory: Tensor) -> None:
        n, k = product.n, product.k
        self.product = product
        self.rows = torch.randn(1, rows, k, device="cuda").bfloat16()
        self.norm = (torch.rand(k, device="cuda").bfloat16() + 0.5, EPSILON) if product.normed else None
        self.residual = torch.randn(1, rows, n, device="cuda").bfloat16() if product.added else None
        self.after = torch.rand(n, device="cuda").bfloat16() + 0.5
        self.prescaled = None if self.norm is None else prescaled_rows(self.rows, self.norm[0])
        copies = max(1, min(2 * memory.numel() // product.bytes, math.ceil(READ_PER_GRAPH / product.bytes)))
        shape = (2 * n if product.kind == "gated" else n, k)
        numbers = memory.view(torch.int8) if product.kind == "coarse" else memory
        self.weights = [numbers[i * product.weights : (i + 1) * product.weights].view(shape) for i in range(copies)]
        self.scales = torch.rand(n, 1, device="cuda") * 1e-2
        self.rotary = RotaryInputs(product, rows) if product.kind == "turned" else None

    def ours(self, trial: LinearTrial) -> Callable[[Tensor], Tensor]:
        tiles, rows = trial.tiles, self.rows
        prescaled = self.prescaled if trial.handed else None
        if self.product.kind == "coarse":
            return self._int8(tiles)
        if self.rotary is not None and not trial.apart:
            where, norm = self.rotary.where, self.norm
            return lambda weight: linear_rotate_and_store(rows, weight, None, norm, *where, prescaled=prescaled, tiles=tiles)
        if self.residual is not None and trial.handed:
            added, after = self.residual, self.after
            return lambda weight: linear_and_prescale(rows, weight, None, added, after, tiles=tiles)[0]
        options: dict[str, Any] = {"norm": self.norm, "prescaled": prescaled, "residual": self.residual, "tiles": tiles}

        def product(weight: Tensor) -> Tensor:
            out = few_rows_linear(rows, weight, gated=self.product.kind == "gated", **options)
            return out if self.rotary is None else rotate_and_store(out, *self.rotary.where)

        return product

    def _int8(self, tiles: Tiles) -> Callable[[Tensor], Tensor]:
        """Return the product as drafters call it: one with twice the hidden size takes two inputs, and a norm only scales by
        the length of the rows."""
        if self.product.name == "int8 later":
            half, other = self.rows.chunk(2, dim=-1)
            return lambda weight: int8_linear(half, weight, self.scales, second=SecondInput(other), tiles=tiles)
        epsilon = EPSILON if self.product.normed else None
        return lambda weight: int8_linear(self.rows, weight, self.scales, epsilon=epsilon, tiles=tiles)

    def exact(self, weight: Tensor) -> Tensor:
        if self.product.kind == "coarse":
            rows = self.rows.float()
            rows = rms_norm(rows, rows.shape[-1:], eps=EPSILON) if self.product.normed else rows
            return linear(rows, weight.float() * self.scales)
        rows = self.rows.float()
        rows = rows if self.norm is None else rms_norm(rows, rows.shape[-1:], self.norm[0].float(), self.norm[1])
        out = linear(rows, weight.float())
        if self.product.kind == "gated":
            gate, up = out.chunk(2, dim=-1)
            out = silu(gate) * up
        out = out if self.residual is None else out + self.residual.float()
        return out if self.rotary is None else self.rotary.exact(out)

    def error(self, trial: LinearTrial) -> float:
        """Return how far one launch is from float32, keys and values in the cache included."""
        found, exact = self.ours(trial)(self.weights[0]), self.exact(self.weights[0])
        found = (found if self.rotary is None else self.rotary.found(found)).float()
        return ((found - exact).norm() / exact.norm()).item()


def prescaled_rows(rows: Tensor, weight: Tensor) -> Prescaled:
    """Prepare rows as a product leaves them for the next norm."""
    flat = rows.float().flatten(0, 1)
    squares = flat.square().unflatten(1, (-1, PRESCALED_BLOCK)).sum(2).t().contiguous()
    return Prescaled(rows, (flat * weight.float()).to(rows.dtype), squares)


class RotaryInputs:
    """Rotary angles of the rows of one sequence, and a cache with room for just these rows."""

    def __init__(self, product: Product, rows: int) -> None:
        (self.heads, key_heads), width = product.heads, product.width
        angle = torch.rand(1, rows, width // 2, device="cuda").repeat(1, 1, 2)
        cache = torch.zeros(2, 1, key_heads, rows, width, device="cuda", dtype=torch.bfloat16)
        self.keys, self.values = cache
        places = torch.arange(key_heads * rows, device="cuda")
        self.where = angle.cos().bfloat16(), angle.sin().bfloat16(), self.keys, self.values, places

    def found(self, query: Tensor) -> Tensor:
        return torch.cat([query, self.keys, self.values], dim=1)

    def exact(self, qkv: Tensor) -> Tensor:
        """Return [1, all heads, rows, width]; the last heads are values, which are not rotated."""
        cosine, sine = (one.float()[:, None] for one in self.where[:2])
        heads = qkv.view(1, qkv.shape[1], -1, self.keys.shape[-1]).transpose(1, 2)
        low, high = heads.chunk(2, dim=-1)
        turned = heads * cosine + torch.cat([-high, low], dim=-1) * sine
        last = self.values.shape[1]
        return torch.cat([turned[:, :-last], heads[:, -last:]], dim=1)


def random_weights(count: int) -> Tensor:
    """Return random weights, small enough that no product overflows."""
    return torch.randn(count, device="cuda", dtype=torch.bfloat16).mul_(0.05)


def compile_ahead(trial: LinearTrial) -> str | None:
    """Run a trial once in a worker, which leaves its kernels in Triton's cache. Return what was wrong, if anything."""
    try:
        torch.backends.cuda.matmul.allow_tf32 = False
        overlap.ENABLED = trial.overlap
        given = Given(trial.product, trial.rows, random_weights(trial.product.weights))
        error = given.error(trial)
        return None if error < 1e-2 else f"off by {error:.1e}"
    except Exception as problem:  # a trial that cannot run is one of the results
        return f"{type(problem).__name__}: {str(problem).splitlines()[0][:150] if str(problem) else ''}"


def workers() -> int:
    """Return how many processes compile ahead: the machine's cores, less two."""
    return min(WORKERS, max(1, (os.cpu_count() or 2) - 2))


def microseconds(product: Callable[[Tensor], Tensor], weights: list[Tensor], same_bits: bool = True) -> float:
    """Time one launch in a graph that loops over all weights. With `same_bits` a replay must equal a plain call."""
    order = list(islice(cycle(weights), max(LEAST_LAUNCHES, len(weights))))
    expected = product(order[-1])
    found: list[Tensor] = []

    def launches() -> None:
        for weight in order:
            found[:] = [product(weight)]

    graph = record(launches)
    times = [cuda_milliseconds(graph.replay, 1) for _ in range(7)][2:]
    if same_bits and not torch.equal(found[0], expected):
        raise ArithmeticError("a replay gave other bits than a plain call")
    return median(times) * 1e3 / len(order)


@dataclass
class LinearTiming:
    trial: LinearTrial
    us: float | None = None
    failed: str | None = None

    @property
    def speed(self) -> float:
        """TB/s of weights."""
        return self.trial.product.bytes / self.us / 1e6 if self.us else 0.0


def timed(trials: list[LinearTrial], problems: list[str | None], memory: Tensor) -> list[LinearTiming]:
    results = []
    for trial, problem in zip(trials, problems, strict=True):
        result = LinearTiming(trial, failed=problem)
        if problem is None:
            overlap.ENABLED = trial.overlap
            given = Given(trial.product, trial.rows, memory)
            try:
                result.us = microseconds(given.ours(trial), given.weights)
            except (RuntimeError, ArithmeticError) as failure:
                result.failed = str(failure).splitlines()[0]
        results.append(result)
    overlap.ENABLED = True
    return results


def best(results: list[LinearTiming]) -> dict[tuple[Product, int], LinearTiming]:
    """Return the fastest trial of every product and row count, in the order of the results."""
    found: dict[tuple[Product, int], LinearTiming] = {}
    for result in (result for result in results if result.us):
        key = result.trial.product, result.trial.rows
        found[key] = min(found.get(key, result), result, key=lambda one: one.us or math.inf)
    return found


def ablations(winners: dict[tuple[Product, int], LinearTiming]) -> list[LinearTrial]:
    """Return the best tilings again: without overlap, without prescaling, without the norm, with a separate rotary."""
    found = [winner.trial for winner in winners.values()]
    trials = [replace(trial, overlap=False) for trial in found]
    trials += [replace(trial, handed=False) for trial in found if trial.tiles.block_m > 1 and trial.product.kind != "coarse"]
    trials += [replace(trial, product=replace(trial.product, normed=False)) for trial in found if trial.product.normed]
    turned = [trial for trial in found if trial.product.kind == "turned"]
    return trials + [
        replace(trial, tiles=tiles_for(trial.rows, trial.product.n, trial.product.k), apart=True) for trial in turned
    ]


def table(
    winners: dict[tuple[Product, int], LinearTiming], stock: dict[tuple[Product, int], float], ablated: list[LinearTiming]
) -> Table:
    others = "no overlap", "not prescaled", "no norm", "separate rotary"
    found = Table("model", "product", "rows", "us", "TB/s", "torch us", *others, "tiles", title="linears")
    for (product, rows), winner in winners.items():
        figures = f"{winner.us:.2f}", f"{winner.speed:.2f}", f"{stock[product, rows]:.2f}"
        ways = [f"{us:.2f}" if us else "-" for us in other_ways(winner, ablated)]
        tiles = ",".join(str(size) for size in asdict(winner.trial.tiles).values())
        found.add_row(product.model, product.name, str(rows), *figures, *ways, tiles)
    return found


def other_ways(winner: LinearTiming, ablated: list[LinearTiming]) -> list[float | None]:
    """Return the times of a winner's ablations: no overlap, no prescaling, no norm, separate rotary."""
    best_trial = winner.trial
    bare = replace(best_trial.product, normed=False)

    def without(**changed: Any) -> float | None:
        sought = replace(best_trial, **changed)
        return next((found.us for found in ablated if replace(found.trial, tiles=sought.tiles) == sought), None)

    return [
        without(overlap=False), without(handed=False),
        without(product=bare) if best_trial.product.normed else None, without(apart=True)
    ]  # fmt: skip


def layers(winners: dict[tuple[Product, int], LinearTiming], stock: dict[tuple[Product, int], float]) -> str:
    """Sum the products of one decoder layer."""
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for (product, rows), winner in winners.items():
        if product.name != "head" and product.kind != "coarse":
            found.setdefault((product.model, rows), []).append((winner.us or 0.0, stock[product, rows]))
    return "\n".join(
        f"{model}, {rows} rows, {len(times)} products of a layer: {sum(ours for ours, _ in times):.1f} us, "
        f"torch {sum(theirs for _, theirs in times):.1f} us"
        for (model, rows), times in sorted(found.items())
    )


def tuned(winners: dict[tuple[Product, int], LinearTiming]) -> str:
    return "\n".join(
        f'    ({next(size for size in BUCKETS if rows <= size)}, {product.n}, {product.k}, "{product.kind}"): '
        f"{winner.trial.tiles},"
        for (product, rows), winner in winners.items()
    )


def linear_tiles(
    out: Annotated[Path, typer.Option(help="Write all timings to this JSON file.")],
    only: Annotated[
        str, typer.Option(help="Only products whose name, such as '7.2B down', contains one of these, separated by commas.")
    ] = "",
    rows: Annotated[str, typer.Option(help="Row counts, separated by commas.")] = ",".join(map(str, ROWS)),
    again: Annotated[bool, typer.Option(help="Time the best again without each of their optimisations.")] = True,
) -> None:
    """Time tilings for products of few rows, next to torch's own linear."""
    if not torch.cuda.is_available():
        raise InputError("the sweep times kernels on a CUDA device, and there is none; run it on a machine that has one")
    products = [one for one in PRODUCTS if any(name in f"{one.model} {one.name}" for name in only.split(","))]
    counts = [int(count) for count in rows.split(",")]
    trials = [
        LinearTrial(product, count, tiles) for product in products for count in counts for tiles in grid(product, count)
    ]
    with ProcessPoolExecutor(workers(), mp_context=multiprocessing.get_context("spawn")) as pool:
        problems = list(pool.map(compile_ahead, trials))
        memory = random_weights(max(READ_PER_GRAPH, *(2 * product.weights for product in products)))
        results = timed(trials, problems, memory)
        winners = best(results)
        write(out, results)
        again_without = ablations(winners) if again else []
        ablated = timed(again_without, list(pool.map(compile_ahead, again_without)), memory)
    stock = {(product, rows): stock_microseconds(product, rows, memory) for product, rows in winners}
    write(out, results + ablated, [{**asdict(p), "rows": r, "us": us} for (p, r), us in stock.items()])
    report(winners, stock, results, ablated)


def report(
    winners: dict[tuple[Product, int], LinearTiming],
    stock: dict[tuple[Product, int], float],
    results: list[LinearTiming],
    ablated: list[LinearTiming],
) -> None:
    """Print the winners, the failures, and last the lines for `TUNED`."""
    console = Console(width=170)
    console.print(table(winners, stock, ablated))
    print(layers(winners, stock))
    failed = [result for result in results + ablated if result.failed]
    for result in failed:
        trial = result.trial
        named = f"{trial.product.model} {trial.product.name} {trial.rows} rows, {trial.tiles}"
        ways = f"overlap {trial.overlap}, handed {trial.handed}, apart {trial.apart}"
        console.print(f"failed: {named}, {ways}: {result.failed}", markup=False)
    console.print(f"{len(results + ablated)} trials, {len(failed)} failed")
    print(tuned(winners))


def stock_microseconds(product: Product, rows: int, memory: Tensor) -> float:
    """Time the product alone, by torch, in half precision."""
    given = Given(replace(product, kind="plain") if product.kind == "coarse" else product, rows, memory)
    return microseconds(lambda weight: linear(given.rows, weight), given.weights, same_bits=False)


def write(out: Path, results: list[LinearTiming], stock: list[dict[str, Any]] | None = None) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    about = facts(torch.device("cuda"), dtype="bfloat16")
    about["command"] = command()
    content = {"about": about, "results": [{**asdict(r), "tb_per_s": r.speed} for r in results], "torch": stock or []}
    out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(linear_tiles)

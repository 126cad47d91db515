"""Time tilings of tree attention on this GPU: `python studies/attention_tiles.py --help`.

Every call of a trial has a cache of its own, as the layers of a model have, so that keys do not all lie in the L2 cache;
the calls run as one captured graph. Torch's masked attention is timed next to the kernel. A tiling that does not compile, or
whose output differs from masked attention, is shown as failed.
Made results/profile_cuda/kernels.json.xz, kernels_grown.json.xz and kernels_unlike.json.xz.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from foreword.bench.passes import cuda_milliseconds
from foreword.bench.report import facts
from foreword.errors import InputError
from foreword.model.attention import attend, mask_of
from foreword.ops.cuda_graph import record
from study import command

if TYPE_CHECKING:
    from foreword.ops.layer.tree_attention import AttentionTiles

CACHED_BYTES = 100e6  # all caches of one trial: more than the L2 cache holds
MOST_CACHES = 64
REPLAYS = 8
DIVISORS = (1, 15, 10, 3, 6, 11, 2, 7)  # unequal sequences: one has the full length, the next a fifteenth of it, ..
SHAPES = {"135M": (9, 3, 64), "7B": (32, 8, 128), "widened": (72, 24, 64)}  # widened: the default model, 8 times

Timer = Callable[[list[Callable[[], Tensor]]], float]


@dataclass(frozen=True)
class AttentionCase:
    """A pass: query heads, key heads, their width, rows per sequence, tokens before them, and sequences in the batch.
    `unlike`: the longest sequence has `context` tokens, and most have few."""

    heads: int
    key_heads: int
    width: int
    rows: int
    context: int
    texts: int = 1  # sequences; the key of published timings
    unlike: bool = False

    @property
    def lengths(self) -> list[int]:
        """Tokens before the pass, by sequence."""
        return [self.context // (DIVISORS[index % len(DIVISORS)] if self.unlike else 1) for index in range(self.texts)]

    @property
    def queries(self) -> int:
        return self.heads // self.key_heads * self.rows


@dataclass(frozen=True)
class AttentionTrial:
    """Microseconds per call, or why there are none. Without tiles: torch's masked attention."""

    case: AttentionCase
    tiles: AttentionTiles | None
    microseconds: float | None
    failure: str = ""


class Rig:
    """The inputs of a case, with one cache for each call of a trial."""

    def __init__(self, case: AttentionCase, device: str) -> None:
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        generator = torch.Generator(device).manual_seed(0)
        shape = (2, case.texts, case.key_heads, case.context + case.rows, case.width)
        read = math.prod(shape) * dtype.itemsize * sum(case.lengths) // (case.texts * case.context)
        count = min(MOST_CACHES, int(CACHED_BYTES / read) + 1)
        self.case, self.scaling = case, case.width**-0.5
        self.caches = torch.randn(count, *shape, generator=generator, device=device).to(dtype)
        queries = (case.texts, case.heads, case.rows, case.width)
        self.query = torch.randn(queries, generator=generator, device=device).to(dtype)
        self.slots = torch.arange(case.texts, device=device)
        self.base = torch.tensor(case.lengths, device=device)
        self.sees = torch.ones(1, case.rows, case.rows, dtype=torch.bool, device=device).tril()

    def masked(self) -> list[Callable[[], Tensor]]:
        groups = self.case.heads // self.case.key_heads
        mask = mask_of(self.base, self.sees, self.caches.shape[4], groups, self.query.dtype)
        return [partial(attend, self.query, keys, values, mask, self.scaling) for keys, values in self.caches]

    def by_kernel(self, tiles: AttentionTiles) -> list[Callable[[], Tensor]]:
        from foreword.ops.layer.tree_attention import attend_tree  # noqa: PLC0415  triton is installed only with CUDA

        seen = (self.slots, self.base, self.sees, self.case.context, self.scaling)
        return [partial(attend_tree, self.query, keys, values, *seen, tiles=tiles) for keys, values in self.caches]


def grid(case: AttentionCase) -> list[AttentionTiles]:
    """Return the default tiling, then others that differ in the block, the warps and loads in flight, or the splits."""
    from foreword.ops.layer.tree_attention import AttentionTiles, attention_tiles  # noqa: PLC0415  triton is installed only with CUDA

    keys = case.context + case.rows
    default = attention_tiles(case.queries, keys, case.texts * case.key_heads, case.width)
    few = default.block_q < 64
    cuts = [(default.block_q, 64, 4, 3)]
    many = [(default.block_q, 64, 4, 2), (32, 64, 4, 3), (64, 128, 8, 2), (64, 32, 4, 3), (128, 64, 8, 2)]
    cuts += [(16, 64, 1, 3), (default.block_q, 32, 4, 3), (64, 64, 4, 3)] if few else many
    ways = [AttentionTiles(*cut, splits=1) for cut in cuts]
    if few:
        ways += [AttentionTiles(16, 64, warps, 2, splits=1, shares=warps) for warps in (4, 2)]
    counts = {1, default.splits, 2 * default.splits, -(-default.splits // 2), 4 * default.splits}
    splits = sorted(count for count in counts if count <= -(-keys // 64))

    def cut(way: AttentionTiles, count: int) -> AttentionTiles:
        """Split the longest sequence into `count` shares. With the default's count they have its length."""
        least = default.least if count in (1, default.splits) else -(-keys // (count - 1))
        return replace(way, splits=count, least=-(-least // way.block_k) * way.block_k)

    return list(dict.fromkeys([default, *(cut(way, count) for way in ways for count in splits)]))


def sweep(case: AttentionCase, tiles: list[AttentionTiles], timer: Timer, device: str) -> list[AttentionTrial]:
    """Time masked attention, then every tiling."""
    rig = Rig(case, device)
    masked = rig.masked()
    expected = masked[0]()
    return [AttentionTrial(case, None, timer(masked)), *(_trial(rig, one, expected, timer) for one in tiles)]


def _trial(rig: Rig, tiles: AttentionTiles, expected: Tensor, timer: Timer) -> AttentionTrial:
    from triton.errors import TritonError  # noqa: PLC0415  triton is installed only with CUDA

    calls = rig.by_kernel(tiles)
    try:
        off = float((calls[0]() - expected).abs().max())
        if not off < 0.02:
            return AttentionTrial(rig.case, tiles, None, f"off by {off:.3g}")
        return AttentionTrial(rig.case, tiles, timer(calls))
    except (TritonError, RuntimeError) as error:
        return AttentionTrial(rig.case, tiles, None, str(error).strip().splitlines()[0])


def by_graph(calls: list[Callable[[], Tensor]]) -> float:
    """Return microseconds per call, all calls in one captured graph: the fastest of several replays."""
    graph = record(lambda: [call() for call in calls])
    graph.replay()
    return cuda_milliseconds(graph.replay, REPLAYS, best=True) * 1e3 / len(calls)


def table(trials: list[list[AttentionTrial]], best: int) -> Table:
    """Show the fastest tilings of each case, the default, masked attention, and the failures."""
    columns = ("heads", "width", "sequences", "rows", "context", "tiles", "us")
    shown = Table(*columns, title="tree attention", title_justify="left")
    for case in trials:
        masked, default = case[:2]
        timed = sorted((one for one in case[1:] if one.microseconds is not None), key=lambda one: one.microseconds or 0.0)
        failed = [one for one in case[1:] if one.failure]
        for one in dict.fromkeys([masked, default, *timed[:best], *failed]):
            at = one.case
            name = "masked" if one is masked else _label(one) + (" (default)" if one is default else "")
            figure = f"{one.microseconds:.1f}" if one.microseconds is not None else f"failed: {one.failure}"
            style = "bold" if timed and one is timed[0] else None
            context = f"up to {at.context}" if at.unlike else str(at.context)
            numbers = (f"{at.heads}/{at.key_heads}", *map(str, (at.width, at.texts, at.rows)), context)
            shown.add_row(*numbers, name, figure, style=style)
        shown.add_section()
    return shown


def _label(trial: AttentionTrial) -> str:
    tiles = trial.tiles
    assert tiles is not None
    warps = f"{tiles.warps} warps" + (f" that share keys by {tiles.shares}" if tiles.shares > 1 else "")
    shares = f"{tiles.splits} shares of {tiles.least} or more" if tiles.splits > 1 else "1 share"
    return f"{tiles.block_q}x{tiles.block_k} {warps} {tiles.stages} stages {shares}"


def time_attention_tiles(
    out: Annotated[Path | None, typer.Option(help="Write all timings to this JSON file.")] = None,
    shapes: Annotated[
        str, typer.Option(help="Model shapes, separated by commas: 135M, 7B, widened (the default model, 8 times).")
    ] = "135M,7B",
    rows: Annotated[str, typer.Option(help="Rows in a pass, separated by commas.")] = "1,16,64",
    contexts: Annotated[str, typer.Option(help="Tokens before the pass, separated by commas.")] = "512,4096",
    texts: Annotated[str, typer.Option(help="Sequences in a batch, separated by commas.")] = "1",
    unlike: Annotated[
        bool, typer.Option("--unlike", help="One sequence of eight has the length of --contexts, the others less.")
    ] = False,
    best: Annotated[int, typer.Option(min=1, help="How many of the fastest to show.")] = 3,
) -> None:
    """Time tilings of tree attention on this machine's GPU."""
    if not torch.cuda.is_available():
        raise InputError("the kernels run on CUDA, and this machine has no CUDA device; run it on a machine that has one")
    combinations = product(shapes.split(","), rows.split(","), contexts.split(","), texts.split(","))
    cases = [
        AttentionCase(*SHAPES[name], int(row), int(context), int(some), unlike) for name, row, context, some in combinations
    ]
    trials = [sweep(case, grid(case), by_graph, "cuda") for case in cases]
    Console(width=None if Console().is_terminal else 160).print(table(trials, best))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        about = facts(gpu=torch.cuda.get_device_name())
        about["command"] = command()
        content = {"about": about, "trials": [asdict(trial) for case in trials for trial in case]}
        out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(time_attention_tiles)

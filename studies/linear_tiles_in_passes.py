"""Search tilings for the linear layers of a small model, timed inside its passes, on CUDA:
`python studies/linear_tiles_in_passes.py --help`.

Run alone (`studies/linear_tiles.py`), a product of two microseconds has the whole GPU to itself. In a pass it shares the GPU
with kernels that end and kernels that wait. So whole captured passes are timed: one product after the other tries every
tiling of a grid, the best is kept, until nothing improves. Workers compile ahead. The last lines are ready for `TUNED` in
`ops/layer/tiles.py`. Made results/profile_cuda/inside.json.xz.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import foreword
from foreword.bench.passes import Probe, milliseconds
from foreword.errors import InputError
from foreword.model.linears import FUSED, joint
from foreword.model.model import Model
from foreword.ops.layer.tiles import TUNED, Kind, Tiles, tiles_for
from linear_tiles import workers
from study import keep

CONTEXT = 512
REPEATS = 30
BETTER_BY = 0.002  # milliseconds; smaller gains are noise
MOST_HELD = 128  # two-byte weights per thread; this leaves half of the registers for the rest

Key = tuple[int, int, Kind]  # output columns, k, kind: with the rows in front, a key of TUNED

# (block_m, block_n, block_k, warps, stages); 0 stages: a program preloads all its weights
TILINGS = {
    1: [(1, 1, 0, 1, 1), (1, 2, 0, 1, 1), (1, 2, 0, 2, 1), (1, 4, 0, 2, 1), (1, 4, 0, 4, 1), (1, 8, 0, 4, 1),
        (1, 1, 0, 1, 0), (1, 2, 0, 1, 0), (1, 2, 0, 2, 0), (1, 4, 0, 2, 0), (1, 4, 0, 4, 0), (1, 8, 0, 4, 0),
        (1, 8, 0, 8, 0)],
    16: [(16, 16, 64, 4, 10), (16, 16, 64, 2, 6), (16, 16, 128, 2, 5), (16, 16, 128, 4, 6), (16, 8, 128, 4, 6),
         (16, 16, 256, 4, 4), (16, 16, 64, 8, 0), (16, 8, 64, 8, 0), (16, 16, 64, 4, 0), (16, 8, 64, 4, 0),
         (16, 16, 64, 2, 0), (16, 32, 64, 4, 0)],
    32: [(32, 16, 128, 4, 4), (32, 16, 64, 4, 6), (32, 16, 128, 4, 6), (32, 32, 64, 4, 8), (32, 32, 128, 4, 6),
         (16, 16, 64, 4, 10), (16, 16, 128, 2, 5), (16, 16, 128, 4, 6), (16, 32, 128, 4, 6), (32, 8, 128, 4, 6),
         (16, 16, 64, 4, 0), (16, 8, 64, 4, 0), (16, 16, 64, 8, 0), (32, 16, 64, 4, 0), (32, 16, 64, 8, 0)],
    64: [(64, 16, 128, 4, 4), (64, 16, 64, 4, 6), (64, 32, 64, 4, 6), (64, 32, 64, 4, 8), (32, 16, 128, 4, 6),
         (32, 32, 128, 4, 6), (16, 16, 128, 4, 6), (16, 32, 128, 4, 6), (64, 8, 128, 4, 6), (32, 16, 64, 4, 0),
         (32, 16, 64, 8, 0), (32, 32, 64, 8, 0), (64, 16, 64, 8, 0), (16, 16, 64, 4, 0), (16, 32, 64, 4, 0)],
}  # fmt: skip


def tilings(rows: int, key: Key) -> list[Tiles]:
    """Return the tilings to try for a product, the present one first. Long sums have too many weights to preload."""
    whole, paired = 1 << (key[1] - 1).bit_length(), key[2] != "plain"
    tried = [Tiles(m, n, k or whole, warps, stages) for m, n, k, warps, stages in TILINGS[rows]]
    fit = [one for one in tried if one.stages or one.block_n * (1 + paired) * whole <= MOST_HELD * 32 * one.warps]
    return list(dict.fromkeys([tiles_for(rows, *key), *fit]))


def products(model: Model) -> list[Key]:
    """Return the keys of a layer's products."""
    layer: Any = model.layer_stack.layers[0]
    qkv: Any = joint(layer.self_attn, FUSED[0])
    gate_up: Any = joint(layer.mlp, FUSED[1])
    tall, wide = gate_up.weight.shape
    plain: list[Key] = [(*layer.mlp.down_proj.weight.shape, "plain"), (*layer.self_attn.o_proj.weight.shape, "plain")]
    return [(tall // 2, wide, "gated"), (*qkv.weight.shape, "turned"), *plain]


@dataclass
class Search:
    """A search for the best tiling of each product at one row count."""

    model: Model
    rows: int
    times: list[dict[str, Any]] = field(default_factory=list)

    def run(self) -> float:
        """Search, and return the milliseconds of a pass with the best tilings."""
        keys = products(self.model)
        best, found = self._pass(), True
        print(f"{self.rows} rows: {best:.4f} ms", flush=True)
        while found:
            found = False
            for key in keys:
                quicker = self._best_tiling(key, best)
                found, best = found or quicker < best, quicker
                print(f"  {key}: {TUNED[self.rows, *key]}, {best:.4f} ms", flush=True)
        return best

    def _best_tiling(self, key: Key, best: float) -> float:
        kept = tiles_for(self.rows, *key)
        for tiles in tilings(self.rows, key):
            TUNED[self.rows, *key] = tiles
            took = self._pass()
            self.times.append({"rows": self.rows, "product": key, "tiles": asdict(tiles), "ms": took})
            if took < best - BETTER_BY:
                kept, best = tiles, took
        TUNED[self.rows, *key] = kept
        return best

    def _pass(self) -> float:
        return milliseconds(Probe(self.model, self.rows, CONTEXT).score, self.model.device, REPEATS)


def compile_ahead(given: tuple[str | None, list[tuple[int, Key, Tiles]]]) -> None:
    """Run passes in a worker, which leaves their kernels in Triton's cache on disk."""
    model, trials = given
    with foreword.load(model, method="plain", slots=1, max_context=2 * CONTEXT, device="cuda") as llm:
        for rows, key, tiles in trials:
            before = TUNED.get((rows, *key))
            TUNED[rows, *key] = tiles
            Probe(llm.model, rows, CONTEXT).score()
            if before is None:
                del TUNED[rows, *key]
            else:
                TUNED[rows, *key] = before


def _jobs(model: str | None, rows: list[int], keys: list[Key]) -> Iterator[tuple[str | None, list[tuple[int, Key, Tiles]]]]:
    trials = [(count, key, tiles) for count in rows for key in keys for tiles in tilings(count, key)]
    count = workers()
    return ((model, trials[first::count]) for first in range(count))


def linear_tiles_in_passes(
    out: Annotated[Path, typer.Option(help="Write all timings to this JSON file.")],
    model: Annotated[
        str | None, typer.Option(help="A model folder, a GGUF file or a hub id. Default: the default model.")
    ] = None,
    rows: Annotated[str, typer.Option(help="Row counts, separated by commas: 1, 16, 32 or 64.")] = "16,32,64,1",
) -> None:
    """Search the best tilings for the linear layers of a model, inside its captured passes."""
    if not torch.cuda.is_available():
        raise InputError("passes are timed on a CUDA device, and there is none; run it on a machine that has one")
    counts = [int(count) for count in rows.split(",")]
    if not set(counts) <= set(TILINGS):
        raise InputError(f"rows is {rows}; choose from {', '.join(map(str, TILINGS))}")
    with foreword.load(model, method="plain", slots=1, max_context=2 * CONTEXT, device="cuda") as llm:
        keys = products(llm.model)
        jobs = list(_jobs(model, counts, keys))
        with ProcessPoolExecutor(len(jobs), mp_context=multiprocessing.get_context("spawn")) as pool:
            list(pool.map(compile_ahead, jobs))
        searches = [Search(llm.model, count) for count in counts]
        ends = {search.rows: search.run() for search in searches}
        keep(out, "inside", llm.model, [time for search in searches for time in search.times], milliseconds=ends)
    for count in counts:
        for n, k, kind in keys:
            print(f'    ({count}, {n}, {k}, "{kind}"): {TUNED[count, n, k, kind]},')


if __name__ == "__main__":
    typer.run(linear_tiles_in_passes)

"""How tree attention is best cut on this GPU: `python -m foreword.bench.kernels --out F` times a grid of `AttentionTiles`.

Every call of a trial has a cache of its own, as the layers of a model have, so that keys are not all found in the GPU's
own cache; the calls run as one captured graph. Beside the kernel stands masked attention of torch. A way of cutting
that does not compile, or answers otherwise than masked attention, is shown as failed.
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

from foreword.bench.passes import between_marks
from foreword.bench.report import facts
from foreword.errors import InputError
from foreword.model.attention import attend, mask_of
from foreword.model.capture import Captured

if TYPE_CHECKING:
    from foreword.kernels.tree_attention import AttentionTiles

CACHED_BYTES = 100e6  # caches of one trial together: more than a GPU keeps close
MOST_CACHES = 64
REPLAYS = 8
PARTS = (1, 15, 10, 3, 6, 11, 2, 7)  # texts of unlike lengths have the whole of the longest, a fifteenth of it, ..
SHAPES = {"135M": (9, 3, 64), "7B": (32, 8, 128), "grown": (72, 24, 64)}  # grown: the default model, 8 times as wide

Timer = Callable[[list[Callable[[], Tensor]]], float]


@dataclass(frozen=True)
class Case:
    """A pass: query heads, key heads, their width, rows of each text, tokens before them, and texts side by side, which may
    be `unlike`: then the longest has so many tokens, and most have few."""

    heads: int
    key_heads: int
    width: int
    rows: int
    context: int
    texts: int = 1
    unlike: bool = False

    @property
    def lengths(self) -> list[int]:
        """Tokens before the pass, of each text."""
        return [self.context // (PARTS[text % len(PARTS)] if self.unlike else 1) for text in range(self.texts)]

    @property
    def queries(self) -> int:
        return self.heads // self.key_heads * self.rows


@dataclass(frozen=True)
class Trial:
    """Microseconds a call, or why there are none. Without tiles: masked attention of torch."""

    case: Case
    tiles: AttentionTiles | None
    microseconds: float | None
    failure: str = ""


class Rig:
    """What a case calls attention with: as many caches as a trial has calls."""

    def __init__(self, case: Case, device: str) -> None:
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        generator = torch.Generator(device).manual_seed(0)
        shape = (2, case.texts, case.key_heads, case.context + case.rows, case.width)
        read = math.prod(shape) * dtype.itemsize * sum(case.lengths) // (case.texts * case.context)
        count = min(MOST_CACHES, int(CACHED_BYTES / read) + 1)
        self.case, self.scaling = case, case.width**-0.5
        self.caches = torch.randn(count, *shape, generator=generator, device=device).to(dtype)
        asked = (case.texts, case.heads, case.rows, case.width)
        self.query = torch.randn(asked, generator=generator, device=device).to(dtype)
        self.slots = torch.arange(case.texts, device=device)
        self.base = torch.tensor(case.lengths, device=device)
        self.sees = torch.ones(1, case.rows, case.rows, dtype=torch.bool, device=device).tril()

    def masked(self) -> list[Callable[[], Tensor]]:
        groups = self.case.heads // self.case.key_heads
        mask = mask_of(self.base, self.sees, self.caches.shape[4], groups, self.query.dtype)
        return [partial(attend, self.query, keys, values, mask, self.scaling) for keys, values in self.caches]

    def by_kernel(self, tiles: AttentionTiles) -> list[Callable[[], Tensor]]:
        from foreword.kernels.tree_attention import attend_tree  # noqa: PLC0415  triton is there only where CUDA is

        seen = (self.slots, self.base, self.sees, self.case.context, self.scaling)
        return [partial(attend_tree, self.query, keys, values, *seen, tiles=tiles) for keys, values in self.caches]


def grid(case: Case) -> list[AttentionTiles]:
    """The default first, then what differs from it in the block, the warps and loads in flight, or the shares."""
    from foreword.kernels.tree_attention import AttentionTiles, attention_tiles  # noqa: PLC0415  triton is there only where CUDA is

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
        """The longest text in so many shares; as many as the default has are as long. To one share `least` says nothing."""
        least = default.least if count in (1, default.splits) else -(-keys // (count - 1))
        return replace(way, splits=count, least=-(-least // way.block_k) * way.block_k)

    return list(dict.fromkeys([default, *(cut(way, count) for way in ways for count in splits)]))


def sweep(case: Case, tiles: list[AttentionTiles], timer: Timer, device: str) -> list[Trial]:
    """Masked attention, then every way of cutting."""
    rig = Rig(case, device)
    masked = rig.masked()
    expected = masked[0]()
    return [Trial(case, None, timer(masked)), *(_trial(rig, one, expected, timer) for one in tiles)]


def _trial(rig: Rig, tiles: AttentionTiles, expected: Tensor, timer: Timer) -> Trial:
    from triton.errors import TritonError  # noqa: PLC0415  triton is there only where CUDA is

    calls = rig.by_kernel(tiles)
    try:
        off = float((calls[0]() - expected).abs().max())
        if not off < 0.02:
            return Trial(rig.case, tiles, None, f"off by {off:.3g}")
        return Trial(rig.case, tiles, timer(calls))
    except (TritonError, RuntimeError) as error:
        return Trial(rig.case, tiles, None, str(error).strip().splitlines()[0])


def by_graph(calls: list[Callable[[], Tensor]]) -> float:
    """Microseconds a call, all of them in one captured graph: the quickest of several replays."""
    graph = Captured(lambda: [call() for call in calls])
    graph.replay()
    return between_marks(graph.replay, REPLAYS, best=True) * 1e3 / len(calls)


def table(trials: list[list[Trial]], best: int) -> Table:
    """The quickest ways of each case, the default, masked attention, and what failed."""
    columns = ("heads", "width", "texts", "rows", "context", "tiles", "us")
    shown = Table(*columns, title="tree attention", title_justify="left")
    for case in trials:
        masked, default = case[:2]
        timed = sorted((one for one in case[1:] if one.microseconds is not None), key=lambda one: one.microseconds or 0.0)
        failed = [one for one in case[1:] if one.failure]
        for one in dict.fromkeys([masked, default, *timed[:best], *failed]):
            at = one.case
            name = "masked" if one is masked else _words(one) + (" (default)" if one is default else "")
            figure = f"{one.microseconds:.1f}" if one.microseconds is not None else f"failed: {one.failure}"
            style = "bold" if timed and one is timed[0] else None
            context = f"up to {at.context}" if at.unlike else str(at.context)
            numbers = (f"{at.heads}/{at.key_heads}", *map(str, (at.width, at.texts, at.rows)), context)
            shown.add_row(*numbers, name, figure, style=style)
        shown.add_section()
    return shown


def _words(trial: Trial) -> str:
    tiles = trial.tiles
    assert tiles is not None
    warps = f"{tiles.warps} warps" + (f" that share keys by {tiles.shares}" if tiles.shares > 1 else "")
    shares = f"{tiles.splits} shares of {tiles.least} or more" if tiles.splits > 1 else "1 share"
    return f"{tiles.block_q}x{tiles.block_k} {warps} {tiles.stages} stages {shares}"


def kernels(
    out: Annotated[Path | None, typer.Option(help="Where the JSON goes.")] = None,
    shapes: Annotated[str, typer.Option(help="Names among 135M, 7B and grown, separated by commas.")] = "135M,7B",
    rows: Annotated[str, typer.Option(help="Rows in a pass, separated by commas.")] = "1,16,64",
    contexts: Annotated[str, typer.Option(help="Tokens before the pass, separated by commas.")] = "512,4096",
    texts: Annotated[str, typer.Option(help="Texts side by side, separated by commas.")] = "1",
    unlike: Annotated[bool, typer.Option("--unlike", help="One text of eight is as long as --contexts says.")] = False,
    best: Annotated[int, typer.Option(min=1, help="How many of the quickest to show.")] = 3,
) -> None:
    """Time ways of cutting tree attention on this machine's GPU."""
    if not torch.cuda.is_available():
        raise InputError("the kernels run on CUDA, and this machine has no CUDA device; run this where there is one")
    wanted = product(shapes.split(","), rows.split(","), contexts.split(","), texts.split(","))
    cases = [Case(*SHAPES[name], int(row), int(context), int(some), unlike) for name, row, context, some in wanted]
    trials = [sweep(case, grid(case), by_graph, "cuda") for case in cases]
    Console(width=None if Console().is_terminal else 160).print(table(trials, best))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        about = facts(gpu=torch.cuda.get_device_name())
        about["command"] = (
            f"python -m foreword.bench.kernels --shapes {shapes} --rows {rows} --contexts {contexts} --texts {texts}"
            + (" --unlike" if unlike else "")
        )
        content = {"about": about, "trials": [asdict(trial) for case in trials for trial in case]}
        out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(kernels)

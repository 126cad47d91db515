"""Time rounds of one rank with and without tensor parallelism: `python studies/tensor_parallel_cost.py --out FILE`.

Three contenders run in turns in one process: the model alone; the same as the only rank, which is what `load(tp=1)` gives;
and as a rank that sums, over itself alone. The last one has the layers and the captured sums of several ranks, so it shows
what these cost besides the time in which ranks exchange data. That time needs several GPUs, and is not measured here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer

from foreword.core.sampling import Sampling
from foreword.drafters.resolve import DrafterRequest
from foreword.engine.engine import Engine
from foreword.engine.request import Request
from foreword.hub.resolve import called, resolve
from foreword.model.loading import choose_device, choose_dtype, load_weights
from foreword.model.model import Model
from foreword.ops.device import synchronize
from foreword.ranks.group import ALONE, free_port, join, launch_variables
from study import keep

PROMPT = 64  # tokens
WARM_UP = 8  # rounds, of which the second is captured


def tensor_parallel_cost(
    out: Annotated[Path, typer.Option(help="Write the figures to this JSON file.")],
    method: Annotated[str, typer.Option(help="A drafting method, timed next to plain.")] = "token_recycling",
    rows: Annotated[int, typer.Option(min=2, help="Rows of its passes.")] = 64,
    turns: Annotated[int, typer.Option(min=1, help="How often each contender is timed.")] = 15,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in a turn.")] = 40,
    model: Annotated[str | None, typer.Option(help="A model folder, file or id.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
) -> None:
    """Time rounds of `plain` and of a drafting method, alone, as one rank, and with sums."""
    if threads:
        torch.set_num_threads(threads)
    place, folder = choose_device(device), resolve(model)
    precision = choose_dtype(dtype, place)
    if place.type == "cuda":
        place = torch.device("cuda", 0)
    os.environ |= launch_variables(0, 1, free_port())
    ranks = join(1, place)
    kinds = {"alone": ALONE, "one rank": ranks, "with sums": replace(ranks, sums=True)}
    loaded = {kind: load_weights(folder, place, precision, ranks=one) for kind, one in kinds.items()}
    found = []
    for name, most in (("plain", None), (method, rows)):
        contenders = {
            kind: rounds_of(Model(hf, called(folder, model)), name, most, turns * rounds) for kind, hf in loaded.items()
        }
        milliseconds = in_turns(contenders, turns, rounds, place)
        for kind, times in milliseconds.items():
            ratios = [own / alone for own, alone in zip(times, milliseconds["alone"], strict=True)]
            found.append({"method": name, "kind": kind, "ms": median(times), "ratio": median(ratios), "turns": times})
            print(f"{name:16} {kind:10} {median(times):8.3f} ms a round   {median(ratios):6.3f} of alone", flush=True)
    described = Model(loaded["alone"], called(folder, model))
    keep(out, "contenders", described, found, rows=rows, turns=turns, rounds=rounds, threads=torch.get_num_threads())


def rounds_of(model: Model, method: str, rows: int | None, count: int) -> Callable[[], object]:
    """Return a function that runs one round of a long sequence, whose graphs are recorded."""
    drafter = DrafterRequest.of(method, rows=rows).resolve(model)[1]
    depth = max(drafter.shape.depth, 15) + 1  # tokens of a round, at most; the shape may be known later
    context = min(model.max_context, PROMPT + (count + 2 * WARM_UP) * depth)
    engine = Engine(model, drafter, slots=1, max_context=context)
    prompt = torch.randint(model.vocab_size, (PROMPT,), generator=torch.Generator().manual_seed(0)).tolist()

    def begin() -> None:
        engine.give_up()
        run = engine.add(Request(tuple(prompt), Sampling(seed=0), engine.max_context, ignore_eos=True, reuse=True))
        while len(run.accepted) < WARM_UP:
            engine.step_for([run])

    def round() -> None:
        if not engine.busy:
            begin()
        engine.step_for([])

    begin()
    return round


def in_turns(
    contenders: dict[str, Callable[[], object]], turns: int, rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """Return the milliseconds of a round, turn by turn."""
    found: dict[str, list[float]] = {kind: [] for kind in contenders}
    for _ in range(turns):
        for kind, one in contenders.items():
            synchronize(device)
            started = time.perf_counter()
            for _ in range(rounds):
                one()
            synchronize(device)
            found[kind].append((time.perf_counter() - started) / rounds * 1e3)
    return found


if __name__ == "__main__":
    typer.run(tensor_parallel_cost)

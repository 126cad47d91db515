"""Time the pseudo rows of `hidden_transfer`: `python studies/pseudo_rows.py --help`.

In: a drafter of hidden_transfer, by default the shipped one, and how many rows a pass may have. Out: for each, how rows are
divided into tree nodes and pseudo rows, and milliseconds of the nodes alone, with their pseudo rows, of as many rows that
are all nodes, and of the walk that `firp` makes instead. Captured passes on CUDA, plain calls on the CPU.
Made results/grafts_cuda.json.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from foreword.api import load
from foreword.bench.passes import Probe, milliseconds
from foreword.core.needs import Needs
from foreword.drafters.saved import restore
from foreword.drafters.shipped import shipped
from foreword.drafting.transfer import steps_after
from foreword.errors import InputError
from foreword.methods.hidden_transfer import HiddenTransfer
from foreword.model.model import Model
from study import keep


@dataclass(frozen=True)
class PseudoRowCost:
    """How the rows of a pass are divided, and milliseconds by what the pass holds."""

    carry: str
    rows: int  # of the pass, at most
    nodes: int
    carried: int
    nodes_alone: float  # milliseconds, like the ones below
    with_carried: float
    all_nodes: float  # a pass in which every row is a node
    own_walk: float  # firp's walk: all steps through the upper layers, after the sequence


def pseudo_rows(
    out: Annotated[Path, typer.Option(help="Write the figures to this JSON file.")],
    drafter: Annotated[
        Path | None, typer.Option(help="A trained drafter of hidden_transfer. Default: the shipped one.")
    ] = None,
    rows: Annotated[str, typer.Option(help="Rows of a pass, nodes and pseudo rows together.")] = "16,32,64",
    context: Annotated[int, typer.Option(min=1, help="Cached tokens before the pass.")] = 256,
    repeats: Annotated[int, typer.Option(min=1, help="Passes timed; the median is reported.")] = 100,
    model: Annotated[str | None, typer.Option(help="A model folder, file or id.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
) -> None:
    """Time passes with and without pseudo rows."""
    folder, target = drafter or shipped()["hidden_transfer"], load(model, method="plain", slots=1, device=device).model
    found = []
    print("carry    rows  nodes  carried   nodes alone   with carried   all nodes   firp's walk, ms")
    for carry in ("likely", "all"):
        for count in map(int, rows.split(",")):
            one = cost(target, folder, carry, count, context, repeats)
            times = f"{one.nodes_alone:14.3f}{one.with_carried:15.3f}{one.all_nodes:12.3f}{one.own_walk:14.3f}"
            print(f"{carry:8}{count:5}{one.nodes:7}{one.carried:9}{times}")
            found.append(asdict(one))
    keep(out, "grafts", target, found, context=context)


def cost(model: Model, folder: Path, carry: str, rows: int, context: int, repeats: int) -> PseudoRowCost:
    drafter = restore(folder, model, rows, carry=carry)
    assert isinstance(drafter, HiddenTransfer)
    nodes, carried = drafter.shape.nodes, drafter.needs.grafted_rows
    if not carried:
        raise InputError(f"{rows} rows leave no room for pseudo rows; give more")
    times = []
    for count, needs in ((nodes, Needs()), (nodes, drafter.needs), (nodes + carried, Needs())):
        probe = Probe(model, count, context, needs)  # one at a time: a probe takes over the model's cache
        times.append(milliseconds(probe.score, model.device, repeats))
    known = torch.randn(1, drafter.options.steps, model.hidden_size, dtype=model.dtype, device=model.device)
    times.append(milliseconds(lambda: _walk(drafter, probe, known), model.device, repeats))
    return PseudoRowCost(carry, rows, nodes, carried, *times)


@torch.inference_mode()
def _walk(drafter: HiddenTransfer, probe: Probe, known: Tensor) -> Tensor:
    """Run what firp runs between two passes, up to the states that draft tokens are read from."""
    first, later = steps_after(drafter.module, drafter.layers, drafter.options.source, known)
    return probe.model.norm(probe.model.onward(probe.batch, first, drafter.layers[0], later))


if __name__ == "__main__":
    typer.run(pseudo_rows)

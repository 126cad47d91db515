"""What pseudo rows cost: passes of hidden_transfer's trees with and without the rows that their nodes carry, and the walk
that firp makes instead: `python -m foreword.bench.grafts --out F`. Captured passes on CUDA, plain calls on the CPU.

In: a drafter of hidden_transfer, by default the shipped one, and how many rows a pass may have. Out: for each, how they are
divided, and milliseconds: of the nodes alone, with what they carry, and of as many rows that are all nodes.
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
from foreword.bench.study import keep
from foreword.core.needs import Needs
from foreword.core.transfer import behind
from foreword.errors import InputError
from foreword.methods.hidden_transfer import HiddenTransfer
from foreword.methods.saved import restore
from foreword.methods.shipped import shipped
from foreword.model.model import Model


@dataclass(frozen=True)
class Cost:
    carry: str
    rows: int  # that the pass may have
    nodes: int
    carried: int
    nodes_alone: float  # milliseconds, as the others
    with_carried: float
    all_nodes: float  # a pass in which every row is a node
    own_walk: float  # of firp: all steps through the upper layers, behind the text


def grafts(
    out: Annotated[Path, typer.Option(help="Where the JSON goes.")],
    drafter: Annotated[Path | None, typer.Option(help="A drafter of hidden_transfer; default: the shipped one.")] = None,
    rows: Annotated[str, typer.Option(help="Rows of a pass, nodes and what they carry.")] = "16,32,64",
    context: Annotated[int, typer.Option(min=1, help="Tokens cached before it.")] = 256,
    repeats: Annotated[int, typer.Option(min=1, help="Passes that a median is taken of.")] = 100,
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


def cost(model: Model, folder: Path, carry: str, rows: int, context: int, repeats: int) -> Cost:
    drafter = restore(folder, model, rows, carry=carry)
    assert isinstance(drafter, HiddenTransfer)
    nodes, carried = drafter.shape.nodes, drafter.needs.grafted_rows
    if not carried:
        raise InputError(f"of {rows} rows none is left for nodes to carry; give more")
    times = []
    for count, needs in ((nodes, Needs()), (nodes, drafter.needs), (nodes + carried, Needs())):
        probe = Probe(model, count, context, needs)  # one after the other: a probe has the model's cache to itself
        times.append(milliseconds(probe.score, model.device, repeats))
    known = torch.randn(1, drafter.options.steps, model.hidden_size, dtype=model.dtype, device=model.device)
    times.append(milliseconds(lambda: _walk(drafter, probe, known), model.device, repeats))
    return Cost(carry, rows, nodes, carried, *times)


@torch.inference_mode()
def _walk(drafter: HiddenTransfer, probe: Probe, known: Tensor) -> Tensor:
    """What firp does between two passes, up to the states that guesses are read off."""
    first, later = behind(drafter.module, drafter.layers, drafter.options.source, known)
    return probe.model.norm(probe.model.onward(probe.lanes, first, drafter.layers[0], later))


if __name__ == "__main__":
    typer.run(grafts)

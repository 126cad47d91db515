"""Count tokens per round by kind of tree and by rows, for trained drafters: `python studies/tree_shapes.py --help`.

Nothing is timed, so many sequences run in one batch and the figures are pooled. Where nodes carry pseudo rows for the next
round, `rows` counts both and the nodes are printed too; `--nodes` compares trees with equal numbers of nodes.
Made results/trees_cpu/ and results/trees_cuda/.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from foreword.api import LLM, load
from foreword.core.sampling import Sampling
from foreword.drafters.saved import read_config, restore
from foreword.engine.engine import Engine
from foreword.engine.request import Request
from foreword.results import Stats
from study import first_turns, keep


def tree_shapes(
    drafters: Annotated[str, typer.Option(help="Folders of trained drafters, or METHOD=FOLDER, separated by commas.")],
    prompts: Annotated[Path, typer.Option(help="A prompt file; the first turn of each is answered.")],
    out: Annotated[Path, typer.Option(help="Write the figures to this JSON file.")],
    per_group: Annotated[int, typer.Option(min=1, help="Prompts of each category, at most.")] = 8,
    kinds: Annotated[str, typer.Option(help="Kinds of tree.")] = "static,best,budget",
    rows: Annotated[str, typer.Option(help="Rows of a pass, root and pseudo rows included.")] = "5,16,32,64",
    nodes: Annotated[str, typer.Option(help="Also trees of this many nodes, each with all its pseudo rows.")] = "",
    levels: Annotated[
        str, typer.Option(help="Also trees of at most this many levels, for methods that draft by levels.")
    ] = "",
    chains: Annotated[str, typer.Option(help="Also with this many lookup rows next to the tree (echo only).")] = "",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer.")] = 128,
    slots: Annotated[int, typer.Option(min=1, help="Sequences in a batch.")] = 16,
    model: Annotated[str | None, typer.Option(help="A model folder, file or id.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
) -> None:
    """Answer prompts greedily with every drafter, tree and number of rows, and print tokens per round."""
    llm = load(model, method="plain", slots=1, device=device)
    asked = first_turns(llm, prompts, per_group)
    given = (rows, nodes, levels, chains)
    by_rows, by_nodes, bounds, lengths = ([int(count) for count in one.split(",") if count] for one in given)
    found = []
    for named, kind in product(drafters.split(","), kinds.split(",")):
        contender = DrafterWithTree.of(named, kind)

        def figure(own: dict[str, Any], most: int | None = None, contender: DrafterWithTree = contender) -> TreeFigure:
            return contender.run(llm, own, asked, max_new_tokens, slots, most)

        figures = {count: figure({"rows": count}) for count in by_rows}
        equal = {count: figure(contender.with_nodes(count)) for count in by_nodes}
        short = {most: {count: figure({"rows": count}, most) for count in by_rows} for most in bounds}
        with_chains = {more: {c: figure({"rows": c + more, "chain": more}) for c in by_rows if c > more} for more in lengths}
        found.append(
            {"method": contender.method, "tree": kind}
            | {"tokens_per_round": _rates(figures)}
            | {"nodes": {count: one.nodes for count, one in figures.items()}}
            | {"by_nodes": {count: asdict(one) for count, one in equal.items()}}
            | {"by_levels": {most: _rates(some) for most, some in short.items()}}
            | {"by_chains": {more: _rates(some) for more, some in with_chains.items()}}
        )
        lines = {f"{contender.method:15} {kind:8}": [*figures.values(), *equal.values()]}
        lines |= {f"{'':15} {most} levels": [*some.values()] for most, some in short.items()}
        lines |= {f"{'':15} and {more} looked up": [*some.values()] for more, some in with_chains.items()}
        for head, line in lines.items():
            print(head + "".join(f"{_shown(one):>30}" for one in line))
    keep(out, "trees", llm.model, found, prompts=len(asked))


@dataclass(frozen=True)
class TreeFigure:
    rows: int  # of a pass, at most; `nodes` of them are nodes of the tree
    nodes: int
    tokens_per_round: float


def _rates(figures: dict[int, TreeFigure]) -> dict[int, float]:
    return {count: one.tokens_per_round for count, one in figures.items()}


def _shown(one: TreeFigure) -> str:
    carried = f" ({one.nodes} nodes)" if one.nodes < one.rows else ""
    return f"{one.rows}{carried}: {one.tokens_per_round:.2f}"


@dataclass(frozen=True)
class DrafterWithTree:
    method: str
    folder: Path
    kind: str

    @staticmethod
    def of(named: str, kind: str) -> DrafterWithTree:
        method, both, folder = named.rpartition("=")
        return DrafterWithTree(method if both else read_config(folder)["method"], Path(folder), kind)

    def with_nodes(self, nodes: int) -> dict[str, Any]:
        """Return the options that make trees of `nodes` nodes."""
        if self.method != "hidden_transfer":
            return {"rows": nodes}
        return {"rows": nodes * (1 + read_config(self.folder)["config"]["steps"]), "carry": "all"}

    def run(
        self,
        llm: LLM,
        own: dict[str, Any],
        asked: list[tuple[int, ...]],
        max_new_tokens: int,
        slots: int,
        levels: int | None = None,
    ) -> TreeFigure:
        if self.method != "gsd":  # its graphs are always unrolled into the likeliest paths
            own = {"tree": self.kind, **own}
        drafter: Any = restore(self.folder, llm.model, method=self.method, **own)
        if levels is not None:
            drafter.plan = replace(drafter.plan, levels=levels)
        engine = Engine(llm.model, drafter, slots=slots, max_context=max(map(len, asked)) + max_new_tokens)
        runs = engine.generate([Request(one, Sampling(seed=0), max_new_tokens) for one in asked])
        nodes = drafter.shape.nodes
        return TreeFigure(nodes + drafter.needs.grafted_rows, nodes, Stats.of(runs).tokens_per_round)


if __name__ == "__main__":
    typer.run(tree_shapes)

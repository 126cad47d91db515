"""Measure what merging nodes saves the draft model of `gsd`: `python studies/merged_graphs.py --help`.

For every threshold the graph is drafted without merging (an ordinary tree) and with each merging rule. Out: tokens per
round, and rows that the draft model read. Nothing is timed, so many sequences run in one batch and the figures are pooled.
Made results/graphs_cuda/graphs.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, cast

import typer

from foreword.api import LLM, load
from foreword.core.sampling import Sampling
from foreword.drafters.resolve import DrafterRequest
from foreword.engine.engine import Engine
from foreword.engine.request import Request
from foreword.methods.gsd import Gsd
from foreword.results import Stats
from study import first_turns, keep

NO_MERGING = -1  # an ordinary tree


@dataclass(frozen=True)
class MergeFigures:
    """The figures of one merging rule at one pair of thresholds."""

    repeat: int
    siblings: float
    sure: float
    tokens_per_round: float
    rows_per_round: float  # read by the draft model
    saved_per_round: float  # rows merged instead of read
    fewer_rows: float = 0.0  # share, against the ordinary tree with the same thresholds
    fewer_tokens: float = 0.0  # share, against that tree

    def relative_to(self, tree: MergeFigures) -> MergeFigures:
        rows, tokens = self.rows_per_round / tree.rows_per_round, self.tokens_per_round / tree.tokens_per_round
        return MergeFigures(**{**asdict(self), "fewer_rows": 1 - rows, "fewer_tokens": 1 - tokens})

    @property
    def line(self) -> str:
        rule = "nothing" if self.repeat == NO_MERGING else f"k = {self.repeat}"
        return (
            f"{rule:8} s {self.siblings:<5g} p {self.sure:<5g} {self.tokens_per_round:6.3f} tokens per round  "
            f"{self.rows_per_round:6.2f} rows  {self.saved_per_round:5.2f} merged  "
            f"{self.fewer_rows:+6.1%} fewer rows  {self.fewer_tokens:+6.1%} fewer tokens"
        )


def merged_graphs(
    prompts: Annotated[Path, typer.Option(help="A prompt file; the first turn of each is answered.")],
    out: Annotated[Path, typer.Option(help="Write the figures to this JSON file.")],
    drafter: Annotated[Path | None, typer.Option(help="A trained drafter of draft_model. Default: the shipped one.")] = None,
    repeat: Annotated[str, typer.Option(help="Merging rules: how many tokens before a node must also be equal.")] = "0,1,2",
    siblings: Annotated[
        str, typer.Option(help="Probability that a node needs, as a share of its best sibling's.")
    ] = "0.1,0.3",
    sure: Annotated[str, typer.Option(help="Path probability below which a node gets no children.")] = "0.02,0.05,0.1",
    depth: Annotated[int, typer.Option(min=1, help="Levels of the graph.")] = 6,
    width: Annotated[int, typer.Option(min=1, help="Nodes that the draft model reads per level, at most.")] = 16,
    branch: Annotated[int, typer.Option(min=1, help="Children of each of them.")] = 4,
    rows: Annotated[int, typer.Option(min=2, help="Rows of a target pass.")] = 64,
    per_group: Annotated[int, typer.Option(min=1, help="Prompts of each category, at most.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer.")] = 128,
    slots: Annotated[int, typer.Option(min=1, help="Sequences in a batch.")] = 16,
    model: Annotated[str | None, typer.Option(help="A model folder, file or id.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
) -> None:
    """Answer prompts greedily with every merging rule and threshold; print tokens per round and rows read."""
    llm = load(model, method="plain", slots=1, device=device)
    asked = first_turns(llm, prompts, per_group)
    requests = [Request(one, Sampling(seed=0), max_new_tokens) for one in asked]
    found: list[MergeFigures] = []
    for share, chance in product(_numbers(siblings), _numbers(sure)):
        tree: MergeFigures | None = None
        for rule in (NO_MERGING, *map(int, repeat.split(","))):
            options = {"repeat": rule, "siblings": share, "sure": chance, "depth": depth, "width": width, "branch": branch}
            request = DrafterRequest.of("gsd", drafter, rows, **options)
            one = measured(llm, cast(Gsd, request.resolve(llm.model)[1]), requests, slots)
            tree = tree or one
            found.append(one.relative_to(tree))
            print(found[-1].line, flush=True)
    kept = [asdict(one) for one in found]
    keep(out, "graphs", llm.model, kept, prompts=len(asked), depth=depth, width=width, branch=branch, rows=rows)


def measured(llm: LLM, drafter: Gsd, requests: Sequence[Request], slots: int) -> MergeFigures:
    """Answer the requests with one way of drafting, and count what its draft model read."""
    context = max(len(one.prompt) + one.max_new_tokens for one in requests)
    answers = Engine(llm.model, drafter, slots=slots, max_context=context).generate(list(requests))
    stats, counts = Stats.of(answers), drafter.counters()
    rule = drafter.rule
    return MergeFigures(
        repeat=rule.repeat,
        siblings=rule.siblings,
        sure=rule.sure,
        tokens_per_round=stats.tokens_per_round,
        rows_per_round=counts["rows_read"] / max(stats.rounds, 1),
        saved_per_round=counts["rows_saved"] / max(stats.rounds, 1),
    )


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


if __name__ == "__main__":
    typer.run(merged_graphs)

"""What merging saves a draft model: `python -m foreword.bench.graphs --prompts FILE --out FILE`, of `gsd`.

For every threshold the graph is drafted without merging, an ordinary tree, and with each rule of merging: tokens a round,
and rows that the small model read. Time plays no part, so many texts are written side by side and the figures are pooled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, cast

import typer

from foreword.api import LLM, load
from foreword.bench.study import first_turns, keep
from foreword.core.sampling import Sampling
from foreword.engine.engine import Engine
from foreword.engine.request import Request
from foreword.methods.gsd import Gsd
from foreword.methods.wanted import Wanted
from foreword.results import Stats

NOTHING = -1  # merged: an ordinary tree


@dataclass(frozen=True)
class Drafted:
    repeat: int
    siblings: float
    sure: float
    tokens_per_round: float
    rows_per_round: float  # that the small model read
    saved_per_round: float  # that were merged instead
    fewer_rows: float = 0.0  # than the ordinary tree with the same thresholds read, as a share
    fewer_tokens: float = 0.0  # than that tree brought, as a share

    def over(self, tree: Drafted) -> Drafted:
        rows, tokens = self.rows_per_round / tree.rows_per_round, self.tokens_per_round / tree.tokens_per_round
        return Drafted(**{**asdict(self), "fewer_rows": 1 - rows, "fewer_tokens": 1 - tokens})

    @property
    def line(self) -> str:
        rule = "nothing" if self.repeat == NOTHING else f"k = {self.repeat}"
        return (
            f"{rule:8} s {self.siblings:<5g} p {self.sure:<5g} {self.tokens_per_round:6.3f} tokens a round  "
            f"{self.rows_per_round:6.2f} rows  {self.saved_per_round:5.2f} merged  "
            f"{self.fewer_rows:+6.1%} fewer rows  {self.fewer_tokens:+6.1%} fewer tokens"
        )


def graphs(
    prompts: Annotated[Path, typer.Option(help="A prompt file; the first turn of each is answered.")],
    out: Annotated[Path, typer.Option(help="Where the JSON goes.")],
    drafter: Annotated[Path | None, typer.Option(help="A drafter of draft_model. Default: the one that ships.")] = None,
    repeat: Annotated[
        str, typer.Option(help="Rules of merging: so many tokens before a guess's own are the same.")
    ] = "0,1,2",
    siblings: Annotated[str, typer.Option(help="Shares of the best sibling's chance that a guess needs.")] = "0.1,0.3",
    sure: Annotated[
        str, typer.Option(help="Chances of a guess below which nothing behind it is drafted.")
    ] = "0.02,0.05,0.1",
    depth: Annotated[int, typer.Option(min=1, help="Levels of the graph.")] = 6,
    width: Annotated[int, typer.Option(min=1, help="Nodes of a level that are read at most.")] = 16,
    branch: Annotated[int, typer.Option(min=1, help="Guesses behind each of them.")] = 4,
    rows: Annotated[int, typer.Option(min=2, help="Rows of a pass of the target.")] = 64,
    per_group: Annotated[int, typer.Option(min=1, help="At most so many prompts of each category.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 128,
    slots: Annotated[int, typer.Option(min=1, help="Texts side by side.")] = 16,
    model: Annotated[str | None, typer.Option(help="A model folder, file or id.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
) -> None:
    """Answer prompts greedily with every rule of merging and every threshold; print tokens a round and rows drafted."""
    llm = load(model, method="plain", slots=1, device=device)
    asked = first_turns(llm, prompts, per_group)
    requests = [Request(one, Sampling(seed=0), max_new_tokens) for one in asked]
    found: list[Drafted] = []
    for share, chance in product(_numbers(siblings), _numbers(sure)):
        tree: Drafted | None = None
        for rule in (NOTHING, *map(int, repeat.split(","))):
            options = {"repeat": rule, "siblings": share, "sure": chance, "depth": depth, "width": width, "branch": branch}
            wanted = Wanted.of("gsd", drafter, rows, **options)
            one = drafted(llm, cast(Gsd, wanted.on(llm.model)[1]), requests, slots)
            tree = tree or one
            found.append(one.over(tree))
            print(found[-1].line, flush=True)
    kept = [asdict(one) for one in found]
    keep(out, "graphs", llm.model, kept, prompts=len(asked), depth=depth, width=width, branch=branch, rows=rows)


def drafted(llm: LLM, drafter: Gsd, requests: Sequence[Request], slots: int) -> Drafted:
    """What one way of drafting brought, and what its small model read for it."""
    context = max(len(one.prompt) + one.max_new_tokens for one in requests)
    answers = Engine(llm.model, drafter, slots=slots, max_context=context).generate(list(requests))
    stats, counts = Stats.of(answers), drafter.counters()
    rule = drafter.rule
    return Drafted(
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
    typer.run(graphs)

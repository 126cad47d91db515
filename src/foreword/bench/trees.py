"""Tokens a round by kind of tree and by rows, of trained drafters: `python -m foreword.bench.trees --drafters DIR,DIR`.

Time plays no part, so many texts are written side by side; the figures are pooled over all of them.
"""

from __future__ import annotations

import json
import shlex
import sys
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from foreword.api import LLM, load
from foreword.bench.report import facts
from foreword.core.sampling import Sampling
from foreword.engine.engine import Engine
from foreword.engine.request import Request
from foreword.methods.saved import read_config, restore
from foreword.results import Stats
from foreword.text.prompts import groups, read_prompts, spread


def trees(
    drafters: Annotated[str, typer.Option(help="Folders of trained drafters, separated by commas.")],
    prompts: Annotated[Path, typer.Option(help="A prompt file; the first turn of each is answered.")],
    out: Annotated[Path, typer.Option(help="Where the JSON goes.")],
    per_group: Annotated[int, typer.Option(min=1, help="At most so many prompts of each category.")] = 8,
    kinds: Annotated[str, typer.Option(help="Kinds of tree.")] = "static,best,budget",
    rows: Annotated[str, typer.Option(help="Rows of a pass, the root included.")] = "5,16,32,64",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 128,
    slots: Annotated[int, typer.Option(min=1, help="Texts side by side.")] = 16,
    model: Annotated[str | None, typer.Option(help="A model folder, file or id.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
) -> None:
    """Answer prompts greedily with every drafter, tree and number of rows, and print tokens a round."""
    llm = load(model, method="plain", slots=1, device=device)
    chosen = spread(read_prompts(prompts), per_group)
    asked = [tuple(llm.tokenizer.encode(one.first())) for some in groups(chosen).values() for one in some]
    counts, found = [int(count) for count in rows.split(",")], []
    for folder, kind in product(map(Path, drafters.split(",")), kinds.split(",")):
        method = read_config(folder)["method"]
        figures = [_tokens_per_round(llm, folder, kind, count, asked, max_new_tokens, slots) for count in counts]
        found.append({"method": method, "tree": kind, "tokens_per_round": dict(zip(counts, figures, strict=True))})
        print(
            f"{method:10} {kind:8}"
            + "".join(f"{f'{count}: {one:.2f}':>12}" for count, one in zip(counts, figures, strict=True))
        )
    about = facts(
        llm.model.device, model=llm.model.name, dtype=str(llm.model.dtype).removeprefix("torch."), prompts=len(asked)
    )
    about["command"] = shlex.join(["python", "-m", "foreword.bench.trees", *sys.argv[1:]])
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"about": about, "trees": found}, indent=1) + "\n", encoding="utf-8")


def _tokens_per_round(
    llm: LLM, folder: Path, kind: str, rows: int, asked: list[tuple[int, ...]], max_new_tokens: int, slots: int
) -> float:
    drafter = restore(folder, llm.model, rows, tree=kind)
    context = max(map(len, asked)) + max_new_tokens
    engine = Engine(llm.model, drafter, slots=slots, max_context=context)
    return Stats.of(engine.generate([Request(one, Sampling(seed=0), max_new_tokens) for one in asked])).tokens_per_round


if __name__ == "__main__":
    typer.run(trees)

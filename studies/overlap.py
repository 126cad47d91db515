"""Measure how well target and draft model of `amusd` work at the same time: `python studies/overlap.py --help`.

In: prompts. Out: the share of the time in which both were busy, tokens per verify pass, the cost of a rollback, the time of
each kind of pass, and the command that asks the simulator (`studies/asynchrony.py`) what to expect. Outputs are compared
with plain decoding's. On CUDA the target's time is the device's own: from the arrival of a draft until its decision leaves.
Made results/asynchrony/cpu.json, cpu_draft.json and streams.json.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from foreword.api import LLM, Prompt, load
from foreword.bench.report import facts
from foreword.bench.suites import BUILTIN_FILE
from foreword.methods.amusd.drafter import Amusd
from foreword.results import Result
from foreword.text.prompts import read_prompts
from study import command


@dataclass(frozen=True)
class Overlap:
    texts: int  # outputs; the key of published figures
    identical: int  # outputs equal to plain's
    overlap: float  # share of the time in which both were busy
    tokens_per_verify: float
    right: float  # how often a draft token was right if those before it were
    dropped_per_refusal: float  # draft tokens that were thrown away
    rollback_ms: float  # from a rejection until the draft model knows of it
    waited: float  # share of the time in which the target waited for draft tokens
    plain_ms: float  # a pass of the target over one row, with no draft model running
    target_ms: float  # a pass of the target over a draft, with the draft model running
    draft_ms: float  # a pass of the draft model
    speedup: float  # over plain

    @property
    def simulated(self) -> str:
        """The command that asks the simulator."""
        times = f"--draft-ms {self.draft_ms:.3f} --target-ms {self.target_ms:.3f} --plain-ms {self.plain_ms:.3f}"
        return f"python studies/asynchrony.py {times} --right {self.right:.3f}"


def measured(llm: LLM, prompts: Sequence[Prompt], max_new_tokens: int, **options: Any) -> Overlap:
    """Answer the prompts one at a time, by plain decoding and by amusd. `options` are those of `LLM.use`."""
    settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "seed": 0}
    _warm(llm.use("plain"), prompts, max_new_tokens)
    plain = [llm.generate(one, **settings) for one in prompts]
    _warm(llm.use("amusd", **options), prompts, max_new_tokens)
    drafter = cast(Amusd, llm.engine.drafter)
    before = drafter.counters()
    drafted = [llm.generate(one, **settings) for one in prompts]
    after = drafter.counters()
    spent = {name: after[name] - before[name] for name in after}
    refusals, rounds = max(spent["refusals"], 1), max(sum(one.stats.rounds for one in drafted), 1)
    return Overlap(
        texts=len(prompts),
        identical=sum(one.tokens == other.tokens for one, other in zip(plain, drafted, strict=True)),
        overlap=spent["both_s"] / max(spent["wall_s"], 1e-9),
        tokens_per_verify=sum(one.stats.new_tokens for one in drafted) / rounds,
        right=_right(drafted),
        dropped_per_refusal=spent["dropped"] / refusals,
        rollback_ms=1000 * spent["rollback_s"] / refusals,
        waited=spent["waited_s"] / max(spent["wall_s"], 1e-9),
        plain_ms=1000 * sum(one.stats.decode_s for one in plain) / max(sum(one.stats.rounds for one in plain), 1),
        target_ms=1000 * spent["target_s"] / max(spent["rounds"], 1),  # the last pass of a sequence may have no time
        draft_ms=1000 * spent["draft_s"] / max(spent["passes"], 1),
        speedup=sum(one.stats.decode_s for one in plain) / max(sum(one.stats.decode_s for one in drafted), 1e-9),
    )


def _warm(llm: LLM, prompts: Sequence[Prompt], max_new_tokens: int) -> None:
    """Start the worker, and on CUDA capture rounds and prompt passes, before the clock runs."""
    lengths = [llm.generate(one, max_new_tokens=2, seed=0).stats.prompt_tokens for one in prompts]
    llm.engine.warm_up(min(lengths), max(lengths) + max_new_tokens)


def _right(results: list[Result]) -> float:
    """Return the share of right draft tokens among those that the target reached."""
    kept = [count for one in results for count in one.stats.spec_decode_num_accepted_tokens_per_pos]
    asked = [
        count
        for one in results
        for count in (one.stats.spec_decode_num_drafts, *one.stats.spec_decode_num_accepted_tokens_per_pos[:-1])
    ]
    return sum(kept) / max(sum(asked), 1)


def overlap(
    prompts: Annotated[Path, typer.Option(help="A prompt file; the first turn of each is answered.")] = BUILTIN_FILE,
    limit: Annotated[int, typer.Option(min=1, help="Answer this many prompts of the file.")] = 4,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens per answer.")] = 128,
    model: Annotated[str | None, typer.Option(help="A model folder, file or id.")] = None,
    drafter: Annotated[Path | None, typer.Option(help="A trained drafter of draft_model, or a model folder.")] = None,
    device: Annotated[str | None, typer.Option(help="Device of the target: cpu or cuda.")] = None,
    draft_device: Annotated[str | None, typer.Option(help="Device of the draft model: cpu, cuda or cuda:1.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of the target.")] = None,
    draft_threads: Annotated[int, typer.Option(min=1, help="CPU threads of the draft model.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Write the figures to this JSON file.")] = None,
) -> None:
    """Answer prompts with plain decoding and with amusd, and print how well its two models overlap."""
    with load(model, method="plain", slots=1, device=device, threads=threads, generation_config=False) as llm:
        asked = [one.first() for one in read_prompts(prompts, limit)]
        found = measured(llm, asked, max_new_tokens, drafter=drafter, draft_device=draft_device, draft_threads=draft_threads)
        about = facts(model=llm.model.name, dtype=str(llm.model.dtype).removeprefix("torch."), prompts=len(asked))
    for name, value in asdict(found).items():
        print(f"{name:20} {value:.3f}" if isinstance(value, float) else f"{name:20} {value}")
    print(f"\n{found.simulated}")
    if out is not None:
        about["command"] = command()
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"about": about, "overlap": asdict(found)}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(overlap)

"""Our drafters inside vLLM, against the same chains in our own engine: `python studies/in_vllm.py --out FILE`.

Greedy, float32, on the CPU, one request at a time. Both engines count alike: accepted draft tokens are the new tokens less
the passes that decided any. So tokens that the limit cuts off do not count, as they do in vLLM's own counters. Every engine
runs in a process of its own. What is done is kept under --work, and a later run at the same commit goes on from there.
`make vllm-test` runs it in an environment with vLLM. Made results/vllm_cpu/drafters.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

import foreword
from foreword.bench.report import facts
from foreword.bench.suites import read_suite
from foreword.drafters.export import export
from foreword.hub.resolve import resolve
from study import write

CONTEXT = 4096
LEAST = 0.95  # of the accepted tokens of our own chain
MUST_REACH = ("lookup", "draft_model")


@dataclass(frozen=True)
class Contender:
    """The same drafter in both engines. `length`: draft tokens of a round."""

    vllm: dict[str, Any]  # its speculative config, without the length; empty: no speculation
    ours: str  # the method's name with its options; empty: none of ours compares
    rows: int | None = None


def contenders(length: int, exported: Path) -> dict[str, Contender]:
    rows = length + 1

    def custom(name: str) -> dict[str, Any]:
        return {"method": "custom_class", "model": f"foreword.vllm.{name}"}

    return {
        "plain": Contender({}, "plain"),
        "lookup": Contender(custom("Lookup"), "prompt_lookup", rows),
        "ngram": Contender({"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 5}, ""),
        "recycling": Contender(custom("Recycling"), "token_recycling:tree=chain:table=shared", rows),
        "heads": Contender(custom("Heads"), "medusa:tree=chain", rows),
        "draft_model": Contender(
            {"method": "draft_model", "model": str(exported)}, f"draft_model:tree=chain:depth={length}:stop=0", rows
        ),
    }


@dataclass(frozen=True)
class Output:
    """An answer, and the number of passes of the target that decided tokens of it."""

    tokens: list[int]
    passes: int


@dataclass(frozen=True)
class Job:
    """What one process runs. `prompts`: token ids."""

    engine: str
    name: str
    model: str
    contender: Contender
    length: int
    prompts: list[list[int]]
    new_tokens: int
    commit: str


# In our engine ------------------------------------------------------------------------------------------------------------


def in_foreword(job: Job) -> dict[str, Any]:
    outputs = []
    with foreword.load(job.model, job.contender.ours, rows=job.contender.rows, slots=1, max_context=CONTEXT) as llm:
        for number, prompt in enumerate(job.prompts, start=1):
            result = llm.generate(prompt, max_new_tokens=job.new_tokens, temperature=0.0)
            outputs.append(asdict(Output(result.tokens, result.stats.rounds)))
            progress(job, number)
    return {"outputs": outputs}


# In vLLM ------------------------------------------------------------------------------------------------------------------


def in_vllm(job: Job) -> dict[str, Any]:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
    from vllm import LLM, SamplingParams, __version__  # noqa: PLC0415  only the process of a vLLM engine needs it

    speculative = job.contender.vllm and job.contender.vllm | {"num_speculative_tokens": job.length}
    llm = LLM(
        job.model,
        dtype="float32",
        max_model_len=CONTEXT,
        max_num_seqs=1,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        generation_config="vllm",  # no settings of the model's generation config
        speculative_config=speculative or None,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=job.new_tokens, detokenize=False)
    outputs = []
    for number, prompt in enumerate(job.prompts, start=1):
        outputs.append(asdict(one_request(llm.llm_engine, str(number), prompt, sampling)))
        progress(job, number)
    counters = {found.name: getattr(found, "value", None) for found in llm.get_metrics() if "spec_decode" in found.name}
    known = {name: value for name, value in counters.items() if value is not None}
    return {"outputs": outputs, "counters": known, "version": __version__}


def one_request(engine: Any, name: str, prompt: list[int], sampling: Any) -> Output:
    """Run one request, a step at a time: a step is one pass of the target."""
    engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
    tokens: list[int] = []
    passes = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            found = list(output.outputs[0].token_ids)
            passes += len(found) > len(tokens)
            tokens = found
    return Output(tokens, passes)


# Processes ----------------------------------------------------------------------------------------------------------------


def progress(job: Job, number: int) -> None:
    print(f"{job.name} in {job.engine}: {number} of {len(job.prompts)} prompts", file=sys.stderr, flush=True)


def kept(job: Job, work: Path) -> dict[str, Any]:
    """Return what a process found: in an earlier run with the same settings at the same commit, or in a new one."""
    file, settings = work / f"{job.name}-{job.engine}.json", asdict(job)
    if file.exists() and not job.commit.endswith("+changes"):
        held = json.loads(file.read_text())
        if held["settings"] == settings:
            return dict(held["found"])
    asked = work / f"{job.name}-{job.engine}.job.json"
    asked.write_text(json.dumps(settings))
    subprocess.run([sys.executable, __file__, "--job", str(asked), "--out", str(file)], check=True)
    return dict(json.loads(file.read_text())["found"])


def run_job(asked: Path, out: Path) -> None:
    settings = json.loads(asked.read_text())
    job = Job(**settings | {"contender": Contender(**settings["contender"])})
    found = {"vllm": in_vllm, "foreword": in_foreword}[job.engine](job)
    out.write_text(json.dumps({"settings": asdict(job), "found": found}))


# Figures ------------------------------------------------------------------------------------------------------------------


def figures(found: dict[str, Any], plain: list[dict[str, Any]]) -> dict[str, Any]:
    """Count over all prompts. `identical`: outputs equal to those of our plain decoding."""
    outputs = [Output(**one) for one in found["outputs"]]
    tokens, passes = sum(len(one.tokens) for one in outputs), sum(one.passes for one in outputs)
    same = sum(one.tokens == other["tokens"] for one, other in zip(outputs, plain, strict=True))
    counts = {"tokens": tokens, "passes": passes, "accepted": tokens - passes, "identical": same}
    counters = {name.removeprefix("vllm:"): value for name, value in found.get("counters", {}).items()}
    return counts | {"tokens_per_pass": tokens / passes} | ({"counters": counters} if counters else {})


def table(rows: list[dict[str, Any]], prompts: int) -> Table:
    shown = Table(
        "drafter", "accepted in vLLM", "in Foreword", "ratio", "per pass in vLLM", "in Foreword", "outputs as plain"
    )
    for row in rows:
        ours, theirs = row.get("foreword"), row["vllm"]
        same = f"{theirs['identical']}" + (f" and {ours['identical']}" if ours else "") + f" of {prompts}"
        cells = ("-", "-") if ours is None else (f"{ours['accepted']}", f"{row['ratio']:.3f}" if row["ratio"] else "-")
        per_pass = "-" if ours is None else f"{ours['tokens_per_pass']:.2f}"
        shown.add_row(row["drafter"], f"{theirs['accepted']}", *cells, f"{theirs['tokens_per_pass']:.2f}", per_pass, same)
    return shown


def chosen_prompts(spec: str, per_group: int, model: str) -> list[list[int]]:
    """Return the first turns of some prompts as token ids, which both engines get."""
    with foreword.load(model, "plain", slots=1) as llm:
        return [llm.tokenizer.encode(prompt.first()) for prompt in read_suite(spec, per_group=per_group).prompts]


def main(
    out: Annotated[Path | None, typer.Option(help="Write the figures to this JSON file.")] = None,
    prompts: Annotated[str, typer.Option(help="FILE, NAME=FILE, or `builtin`.")] = "builtin",
    per_group: Annotated[int, typer.Option(help="Prompts of each group.")] = 2,
    new_tokens: Annotated[int, typer.Option(help="The most tokens of an output.")] = 64,
    length: Annotated[int, typer.Option(help="Draft tokens of a round; the heads that ship draft 4.")] = 5,
    only: Annotated[str, typer.Option(help="Some drafters, with commas between. Default: all.")] = "",
    work: Annotated[Path, typer.Option(help="Keep what is done in this folder.")] = Path("build/in_vllm"),
    job: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Compare accepted draft tokens inside vLLM with those of our own engine."""
    if job is not None:
        assert out is not None
        run_job(job, out)
        return
    work.mkdir(parents=True, exist_ok=True)
    about = facts(torch.device("cpu"))
    model, exported = str(resolve()), work / "exported"
    if not exported.exists():
        export(exported, dtype="float32")
    every = contenders(length, exported.resolve())
    names = [name for name in every if not only or name in {"plain", *only.split(",")}]
    given = chosen_prompts(prompts, per_group, model)
    version = ""
    rows: list[dict[str, Any]] = []
    plain: list[dict[str, Any]] = []
    for name in names:
        one = every[name]
        row: dict[str, Any] = {"drafter": name, "foreword": None, "ratio": None}
        for engine in ("foreword", "vllm") if one.ours else ("vllm",):
            found = kept(Job(engine, name, model, one, length, given, new_tokens, about["commit"]), work)
            plain = plain or found["outputs"]
            row[engine] = figures(found, plain)
            version = found.get("version", version)
        if row["foreword"] and row["foreword"]["accepted"]:
            row["ratio"] = row["vllm"]["accepted"] / row["foreword"]["accepted"]
        rows.append(row)
    Console().print(table(rows, len(given)))
    if out is not None:
        more = {"dtype": "float32", "model": Path(model).name, "prompts": len(given), "max_new_tokens": new_tokens}
        versions = about["versions"] | {"vllm": version}
        more |= {"draft_tokens": length, "commit": about["commit"], "versions": versions}  # the commit at the start
        write(out, "in_vllm", rows, torch.device("cpu"), **more)
    short = [row["drafter"] for row in rows if row["drafter"] in MUST_REACH and (row["ratio"] or 0) < LEAST]
    if short:
        raise SystemExit(f"inside vLLM fewer than {LEAST:.0%} of our own chain's tokens are accepted: {', '.join(short)}")


if __name__ == "__main__":
    typer.run(main)

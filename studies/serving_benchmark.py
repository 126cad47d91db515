"""A benchmark of others against `foreword serve`: `python studies/serving_benchmark.py --out FOLDER` lets guidellm ask.

guidellm gets a virtual environment of its own, which is kept for the next run. Its prompts are passages of docs/, none
twice, and its tokenizer is the model's, so that nothing is fetched while it runs. Its figures are kept as it computed them,
over the requests that it counts as complete. Made results/serving_client_cpu/results.json.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
import venv
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any
from urllib.request import Request, urlopen

import torch
import typer

from foreword.hub.resolve import resolve
from foreword.text import Tokenizer
from serve_speed import served
from study import ROOT, write

CLIENT = "guidellm==0.8.1"
ENVIRONMENT = Path(tempfile.gettempdir()) / "foreword-guidellm"
ASK = "Explain this passage to a beginner:\n\n"
PROMPT_TOKENS = range(100, 251)
TOKENS = 64  # of each answer
CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
SHOWN = {  # of guidellm's report: column, metric and statistic
    "requests/s": ("requests_per_second", "mean"),
    "output tokens/s": ("output_tokens_per_second", "mean"),
    "first token ms": ("time_to_first_token_ms", "median"),
    "first token ms p95": ("time_to_first_token_ms", "p95"),
    "between tokens ms": ("inter_token_latency_ms", "median"),
    "between tokens ms p95": ("inter_token_latency_ms", "p95"),
    "request s": ("request_latency", "median"),
    "request s p95": ("request_latency", "p95"),
}


def passages(tokenizer: Tokenizer) -> Iterator[tuple[str, int]]:
    """Yield prompts made of paragraphs of the pages, with their lengths in tokens."""
    for page in sorted((ROOT / "docs").rglob("*.md")):
        for paragraph in CODE.sub("", page.read_text(encoding="utf-8")).split("\n\n"):
            prompt = ASK + " ".join(paragraph.split())
            if paragraph[:1].isalpha() and (count := len(tokenizer.encode(prompt))) in PROMPT_TOKENS:
                yield prompt, count


def installed(folder: Path) -> Path:
    """Return the client's program, and install it if it is missing."""
    program = folder / "bin" / "guidellm"
    if not program.exists():
        print(f"installing {CLIENT} into {folder}", flush=True)
        venv.create(folder, with_pip=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--constraint", str(ROOT / "constraints.txt"), CLIENT], check=True)
    return program


def asked(
    program: Path, address: str, folder: Path, prompts: list[tuple[str, int]], streams: int, seconds: int
) -> dict[str, Any]:
    """Let the client ask all prompts, some at a time. Return what it measured."""
    rows = [{"prompt": text, "prompt_tokens_count": count, "output_tokens_count": TOKENS} for text, count in prompts]
    with tempfile.TemporaryDirectory() as made:
        data, report = Path(made) / "prompts.jsonl", Path(made) / "report.json"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        options = {
            "backend": f"kind=openai_http,target={address}",
            "profile": f"kind=concurrent,streams={streams}",
            "tokenizer": f"kind=huggingface_auto,model={folder}",
            "data": f"kind=json_file,path={data}",
            "output": f"kind=json,path={report}",
        }
        limits = [f"kind=max_requests,count={len(rows)}", f"kind=max_duration,seconds={seconds}"]
        command = [str(program), "run", "--disable-console", *(f"--{name}={value}" for name, value in options.items())]
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": made}
        subprocess.run([*command, *(f"--constraint={one}" for one in limits)], check=True, env=os.environ | offline)
        (found,) = json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
    return measured(found, streams)


def measured(found: dict[str, Any], streams: int) -> dict[str, Any]:
    """Return the figures of a benchmark that are kept."""
    metrics = found["metrics"]
    figures: dict[str, Any] = {"streams": streams, "seconds": found["duration"], "requests": metrics["request_totals"]}
    for column, (name, statistic) in SHOWN.items():
        complete = metrics[name]["successful"]
        figures[column] = complete["percentiles"][statistic] if statistic.startswith("p") else complete[statistic]
    return figures


def report(about: dict[str, Any], levels: list[dict[str, Any]]) -> str:
    """Return the report as a page."""
    columns = ["streams", *SHOWN]
    rows = [[one[column] for column in columns] for one in levels]
    table = [columns, ["---"] * len(columns), *([f"{value:.4g}" for value in row] for row in rows)]
    lines = "\n".join(f"| {' | '.join(row)} |" for row in table)
    requests = ", ".join(f"{one['requests']['successful']} of {one['requests']['total']}" for one in levels)
    return f"""# `foreword serve`, asked by {about["client"]}

{about["model"]} with `{about["method"]}` on {about["machine"]}, {about["date"]}, commit {about["commit"]}.
Prompts of {PROMPT_TOKENS.start} to {PROMPT_TOKENS.stop - 1} tokens, {TOKENS} tokens each answer, the model's own
sampling settings. Requests complete: {requests}. The server, its engine and the client
share the machine. Without p95, a figure of time is the median.

{lines}

Made by `{about["command"]}`.
"""


def serving_benchmark(
    out: Annotated[Path, typer.Option(help="Write results.json and report.md into this folder.")],
    streams: Annotated[str, typer.Option(help="Streams at a time, one run for each number.")] = "1,4,8",
    requests: Annotated[int, typer.Option(min=1, help="Requests per stream.")] = 8,
    seconds: Annotated[int, typer.Option(min=1, help="The most time of each run; then it stops.")] = 80,
    method: Annotated[str, typer.Option(help="The drafting method.")] = "auto",
    model: Annotated[str | None, typer.Option(help="A model folder, file, name or id.")] = None,
    environment: Annotated[
        Path, typer.Option(help="The client's virtual environment; made if it is missing.")
    ] = ENVIRONMENT,
) -> None:
    """Let guidellm measure a server."""
    program, folder = installed(environment), resolve(model)
    prompts, levels = passages(Tokenizer.load(folder)), []
    arguments = ["--slots", str(max(map(int, streams.split(",")))), "--method", method]
    with served([*arguments, *(["--model", model] if model else [])]) as (host, port):
        address = f"http://{host}:{port}"
        card = first_model(address)
        warm(address, next(prompts)[0])
        for count in map(int, streams.split(",")):
            some = [prompt for prompt, _ in zip(prompts, range(count * requests), strict=False)]
            levels.append(asked(program, address, folder, some, count, seconds))
            print(json.dumps(levels[-1]), flush=True)
    versions = {"client": CLIENT, "uvicorn": version("uvicorn"), "starlette": version("starlette")}
    about = write(
        out / "results.json",
        "levels",
        levels,
        torch.device("cpu"),
        model=card["id"],
        method=card["foreword"]["method"],
        **versions,
    )
    (out / "report.md").write_text(report(about, levels), encoding="utf-8")


def first_model(address: str) -> Any:
    """Return the card of the model that a server has."""
    with urlopen(f"{address}/v1/models", timeout=10) as answer:
        return json.load(answer)["data"][0]


def warm(address: str, prompt: str) -> None:
    """Ask once, so that no run pays for what happens at the first request."""
    body = json.dumps({"messages": [{"role": "user", "content": prompt}], "max_tokens": TOKENS}).encode()
    urlopen(Request(f"{address}/v1/chat/completions", body, {"Content-Type": "application/json"}), timeout=120).close()


if __name__ == "__main__":
    typer.run(serving_benchmark)

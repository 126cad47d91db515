"""What a server costs: `python studies/serve_speed.py --out FILE --prompts FILE` compares it with its engine alone.

Both get the same prompts; tokens per second and the time to first token are measured. The engine writes all prompts by
`generate`, in this process. Then `foreword serve` gets them from as many streams as it has slots; this process is the
client. Each is warmed up by the prompts once. Made results/serve_speed_cuda.json.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

import foreword
from foreword.api import LLM
from study import first_turns, keep

ADDRESS = re.compile(r"http://([\d.]+):(\d+)")


@dataclass(frozen=True)
class Measured:
    """What one way of asking brought."""

    tokens_per_s: float
    first_token_ms: float  # the median, of one stream at a time


def of_engine(llm: LLM, prompts: list[tuple[int, ...]], tokens: int) -> Measured:
    """Time `generate` over all prompts, and the first token of each prompt alone."""
    lists = [list(prompt) for prompt in prompts]
    llm.generate(lists, max_new_tokens=tokens, ignore_eos=True)
    since = time.perf_counter()
    written = sum(len(one.tokens) for one in llm.generate(lists, max_new_tokens=tokens, ignore_eos=True))
    speed = written / (time.perf_counter() - since)
    firsts = []
    for prompt in lists:
        since = time.perf_counter()
        stream = llm.stream(prompt, max_new_tokens=2, ignore_eos=True)
        next(iter(stream))
        firsts.append(time.perf_counter() - since)
        stream.close()
    return Measured(speed, median(firsts) * 1e3)


@contextmanager
def served(arguments: list[str]) -> Iterator[tuple[str, int]]:
    """Run `foreword serve`, and yield its address."""
    command = [sys.executable, "-m", "foreword", "serve", "--port", "0", *arguments]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "200"})
    assert server.stderr is not None
    try:
        for line in server.stderr:
            if found := ADDRESS.search(line):
                yield found[1], int(found[2])
                break
        else:
            raise RuntimeError("the server ended before it was ready")
    finally:
        server.terminate()
        server.wait(60)


async def asked(address: tuple[str, int], prompt: tuple[int, ...], tokens: int) -> tuple[int, float]:
    """Stream one completion. Return how many tokens it has, and the seconds until the first."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    payload = json.dumps({**body, "stream_options": {"include_usage": True}}).encode()
    since, first, count = time.perf_counter(), 0.0, 0
    reader, writer = await asyncio.open_connection(*address)
    # HTTP/1.0: the body ends with the connection, and is not in chunks.
    writer.write(b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\n")
    writer.write(b"Content-Length: %d\r\n\r\n" % len(payload) + payload)
    async for line in reader:
        if not line.startswith(b"data: {"):
            continue
        first = first or time.perf_counter() - since
        if b'"choices":[]' in line:
            count = json.loads(line[6:])["usage"]["completion_tokens"]
    writer.close()
    return count, first


async def of_server(address: tuple[str, int], prompts: list[tuple[int, ...]], tokens: int, streams: int) -> Measured:
    """Time as many streams at a time as there are slots, then the first token of each prompt alone."""

    async def all_prompts() -> int:
        left, written = deque(prompts), 0

        async def worker() -> None:
            nonlocal written
            while left:
                count, _ = await asked(address, left.popleft(), tokens)
                written += count  # not in one line with `await`: that would read `written` before the wait

        await asyncio.gather(*(worker() for _ in range(streams)))
        return written

    await all_prompts()
    since = time.perf_counter()
    speed = await all_prompts() / (time.perf_counter() - since)
    firsts = [(await asked(address, prompt, 2))[1] for prompt in prompts]
    return Measured(speed, median(firsts) * 1e3)


def serve_speed(
    out: Annotated[Path, typer.Option(help="Write the figures to this JSON file.")],
    prompts: Annotated[Path, typer.Option(help="A prompt file.")],
    per_group: Annotated[int, typer.Option(min=1, help="Prompts of each category.")] = 8,
    streams: Annotated[str, typer.Option(help="Streams at a time, one run for each number.")] = "1,8,32",
    tokens: Annotated[int, typer.Option(min=2, help="Tokens per answer.")] = 128,
    method: Annotated[str, typer.Option(help="The drafting method.")] = "auto",
    model: Annotated[str | None, typer.Option(help="A model folder, file, name or id.")] = None,
    max_context: Annotated[int, typer.Option(help="Tokens per sequence.")] = 2048,
) -> None:
    """Compare a server with its engine."""
    found: list[dict[str, Any]] = []
    about: Any = None
    for count in map(int, streams.split(",")):
        with foreword.load(model, method, slots=count, max_context=max_context, warm_up=True, isolated=True) as llm:
            ids = first_turns(llm, prompts, per_group)
            engine, about, chosen = of_engine(llm, ids, tokens), llm.model, llm.method
        arguments = ["--slots", str(count), "--method", chosen, "--max-context", str(max_context)]
        with served([*arguments, *(["--model", model] if model else [])]) as address:
            server = asyncio.run(of_server(address, ids, tokens, count))
        share = server.tokens_per_s / engine.tokens_per_s
        print(f"{count} streams, {chosen}: the server reaches {share:.3f} of the engine", flush=True)
        for name, one in (("engine", engine), ("server", server)):
            print(f"    {name}: {one.tokens_per_s:.1f} tokens/s, first token after {one.first_token_ms:.2f} ms", flush=True)
        found.append(
            {"streams": count, "method": chosen, "share": share, "engine": asdict(engine), "server": asdict(server)}
        )
    keep(out, "streams", about, found, prompts=prompts.name, tokens=tokens)


if __name__ == "__main__":
    typer.run(serve_speed)

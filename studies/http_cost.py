"""What the HTTP process costs: `python studies/http_cost.py --out FILE` gives it rounds from an engine without a model.

Everything but the model is the real thing: application, uvicorn, client of the engine, detokenizer, metrics, messages. The
engine is a process that reports rounds at a fixed pace, together as the real one does; the clients are another process.
Measured is the time that this process computes: per round and output, and per chunk. A share of a core near 1 says that the
HTTP process is the limit; then rounds wait. Made results/http_cost_cpu.json.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
import uvicorn

from foreword.engine.request import Finish
from foreword.hub.resolve import resolve
from foreword.serve.app import app_of
from foreword.serve.async_llm import AsyncLLM
from foreword.serve.client import EngineClient
from foreword.serve.frames import Closed, FrameSocket
from foreword.serve.messages import (
    Abort,
    Begun,
    Ended,
    EngineLoad,
    Progress,
    Ready,
    Start,
    StepReport,
    Submit,
    frame,
    to_engine,
)
from foreword.serve.options import ServeOptions
from foreword.serve.outbox import Outbox
from foreword.serve.server import listen
from study import write

SLOTS = 64
CLIENTS = Path(__file__).with_name("stream_clients.py")


# The engine's process -----------------------------------------------------------------------------------------------------


def report_rounds(descriptor: int, vocabulary: int, round_s: float, tokens: int) -> None:
    """Report rounds of `tokens` tokens to every request, one round each `round_s`, until each has its tokens."""
    channel = FrameSocket(socket.socket(fileno=descriptor))
    left: dict[int, int] = {}
    begun: set[int] = set()
    outbox, numbers, due = Outbox(), count(), 0.0
    while True:
        for body in channel.received(wait=0.0 if left else None):
            message = to_engine(body)
            if isinstance(message, Start):
                channel.send(frame(ready_of(vocabulary)))
            elif isinstance(message, Submit):
                left[message.number] = message.request["max_new_tokens"]
            elif isinstance(message, Abort):
                for number in message.numbers:
                    left.pop(number, None)
        while left and time.monotonic() < due:
            pass
        due = time.monotonic() + round_s
        for number in [*left]:
            new = [next(numbers) % 20_000 + 1_000 for _ in range(min(tokens, left[number]))]
            progress = Progress(number, new, [len(new)], [tokens])
            left[number] -= len(new)
            if number not in begun:
                begun.add(number)
                progress.begun = Begun(0.0, 0, 0.0)
            if not left[number]:
                progress.ended = Ended(Finish("length"))
                del left[number]
            outbox.add(progress)
        if outbox.is_due(len(left)):
            channel.send(frame(StepReport(outbox.taken(), EngineLoad(len(left)), due)))


def ready_of(vocabulary: int) -> Ready:
    sizes: dict[str, Any] = {
        "slots": SLOTS,
        "context": 65536,
        "trained": 65536,
        "vocabulary": vocabulary,
        "cache_rows": 65536,
    }
    return Ready(model="none", method="none", ends=[2], sampling_defaults={}, fingerprint={}, reuses=False, **sizes)


# This process -------------------------------------------------------------------------------------------------------------


async def measured(folder: Path, streams: int, tokens: int, round_ms: float, per_round: int) -> dict[str, Any]:
    """Serve some streams, and return what they cost this process."""
    llm = AsyncLLM(str(folder))
    vocabulary = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    program = [sys.executable, __file__, "engine", str(vocabulary), str(round_ms / 1000), str(per_round)]
    llm._transport = EngineClient({}, restarts=0, program=program)
    async with llm:
        app = app_of(llm, ServeOptions())
        with listen("127.0.0.1", 0) as port:
            server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None))
            running = asyncio.create_task(server.serve([port]))
            number = port.getsockname()[1]
            await clients(number, streams, 64)  # warm
            chunks, seconds, busy = await clients(number, streams, tokens)
            server.should_exit = True
            await running
    rounds = streams * tokens / per_round
    return {
        "streams": streams,
        "tokens_per_s": streams * tokens / seconds,
        "engine_tokens_per_s": streams * per_round / round_ms * 1000,
        "chunks": chunks,
        "rounds_per_chunk": rounds / chunks,
        "us_per_round": busy / rounds * 1e6,
        "us_per_chunk": busy / chunks * 1e6,
        "share_of_a_core": busy / seconds,
    }


async def clients(port: int, streams: int, tokens: int) -> tuple[int, float, float]:
    """Run the clients. Return their chunks, the seconds that they took, and for how many this process computed."""
    before = time.process_time()
    command = [sys.executable, str(CLIENTS), str(port), str(streams), str(tokens)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    printed, _ = await process.communicate()
    chunks, seconds = printed.split()
    return int(chunks), float(seconds), time.process_time() - before


def http_cost(
    out: Annotated[Path, typer.Option(help="Write the figures to this JSON file.")],
    model: Annotated[str | None, typer.Option(help="The model whose tokenizer is used.")] = None,
    streams: Annotated[str, typer.Option(help="Streams at a time, one run for each number.")] = "1,8,32",
    tokens: Annotated[int, typer.Option(help="Tokens per stream.")] = 2000,
    round_ms: Annotated[float, typer.Option(help="The time of a round.")] = 0.36,
    per_round: Annotated[int, typer.Option(help="Tokens that a round decides.")] = 2,
) -> None:
    """Measure what the HTTP process costs."""
    found = []
    for number in map(int, streams.split(",")):
        found.append(asyncio.run(measured(resolve(model), number, tokens, round_ms, per_round)))
        print(json.dumps(found[-1]), flush=True)
    write(out, "http", found, torch.device("cpu"), round_ms=round_ms, tokens_per_round=per_round)


if __name__ == "__main__":
    if sys.argv[1:2] == ["engine"]:
        vocabulary, round_s, tokens, descriptor = sys.argv[2:]
        try:
            report_rounds(int(descriptor), int(vocabulary), float(round_s), int(tokens))
        except Closed:
            sys.exit()
    else:
        typer.run(http_cost)

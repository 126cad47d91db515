"""Kill parts of replicas under load, and see what 200 clients see: `make ray-test`.

    python studies/replicas_under_load.py --out results/replicas_cpu

`foreword serve --ray` runs two replicas of a tiny model with random weights on this machine. The library writes the outputs
of all requests first. Then clients stream them, one engine is killed, and later a whole replica. Every stream must be what
the library writes, or end with an error. It ends by itself within minutes. Made results/replicas_cpu/results.json.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path
from random import Random
from typing import Annotated, Any

import torch
import typer
import uvloop
from rich.table import Table

import foreword
from foreword.bench.report import facts
from foreword.cli.console import complain, note, screen, waiting
from real_server import RealServer, is_gone
from study import command
from under_load.cases import COMPLETION, DTYPE, WORDS, Case, difference
from under_load.client import Answer, ask, got, posted
from under_load.load import percentile
from under_load.processes import held
from under_load.tiny_model import save_tiny_model

SLOTS, CONTEXT, CASES, TURNS = 8, 512, 64, 5
SEEN_S, WHOLE_S, HANGS_S, GONE_S = 10.0, 60.0, 90.0, 30.0  # limits
MOST_S = 180.0  # for all requests
RETRIES = 20
METRICS_PORT = 23170


@dataclass(frozen=True)
class Check:
    name: str
    found: str
    limit: str
    passed: bool


@dataclass
class Findings:
    """What the clients have seen. `cut_s`: from a kill to the end of a stream that it cut, in seconds."""

    kinds: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    most_open: int = 0
    kills: dict[str, float] = field(default_factory=dict)  # when, by what was killed
    whole_s: dict[str, float] = field(default_factory=dict)  # until two replicas were ready again
    cut_s: list[float] = field(default_factory=list)
    moved: int = 0  # sessions
    reused: list[float] = field(default_factory=list)  # cached share of a prompt after the first turn
    fingerprints: set[str] = field(default_factory=set)
    memory_mib: dict[str, float] = field(default_factory=dict)
    own_ports: int = 0  # of replicas, at which they answered /metrics


# The processes ------------------------------------------------------------------------------------------------------------


def below(process: int) -> dict[int, str]:
    """Return the command lines of all processes below one, by their ids."""
    parents, commands = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
                commands[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:  # it has ended
                continue
    found, newest = set[int](), {process}
    while newest:
        newest = {one for one, parent in parents.items() if parent in newest} - found
        found |= newest
    return {one: commands[one] for one in found if one in commands}


def engines(server: RealServer) -> list[int]:
    return sorted(one for one, line in below(server.process.pid).items() if "foreword.serve.engine_process" in line)


def replicas(server: RealServer) -> list[int]:
    return sorted(one for one, line in below(server.process.pid).items() if line.startswith("ray::ServeReplica"))


# The clients --------------------------------------------------------------------------------------------------------------


def cases(folder: Path, seed: int) -> list[Case]:
    """Return requests with what the library writes for them."""
    random = Random(seed)
    found = []
    for _ in range(CASES):
        prompt = " ".join(random.choice(WORDS) for _ in range(random.randint(8, 20)))
        common = {"seed": random.randrange(2**40), "ignore_eos": True, "temperature": random.choice([0.0, 0.8])}
        most = random.randint(32, 128)
        body = {**common, "prompt": prompt, "max_tokens": most, "stream": True, "return_token_ids": True}
        body["stream_options"] = {"include_usage": True}
        found.append(Case(COMPLETION, body, prompt, {**common, "max_new_tokens": most, "chat": False}))
    with foreword.load(folder, "plain", slots=8, dtype=DTYPE, max_context=CONTEXT) as llm:
        results = llm.generate([one.prompt for one in found], settings=[one.settings for one in found])
    for one, result in zip(found, results, strict=True):
        one.expected = [result]
    return found


class Clients:
    """The clients of one server, each with a session of its own."""

    def __init__(self, server: RealServer, known: list[Case], streams: int, seed: int) -> None:
        self.server, self.known, self.streams = server, known, streams
        self.found, self._random = Findings(), Random(seed)
        self._names: set[str] = set()  # of replicas that have answered
        self._done = self._open = 0
        self._has_enough = False

    async def run(self) -> Findings:
        """Keep all clients busy while two processes are killed, one after the other; then look at sessions."""
        load = asyncio.gather(*(self._client(f"client {number}") for number in range(self.streams)))
        await self._kill("engine", engines)
        await self._kill("replica", replicas)
        await self._served(self.streams)
        self._has_enough = True
        await load
        await asyncio.gather(*(self._session(number) for number in range(12)))
        own = [await ask(("127.0.0.1", METRICS_PORT + rank), got("/metrics")) for rank in range(2)]
        self.found.own_ports = sum(b"foreword:requests_running" in one.body for one in own)
        return self.found

    async def _served(self, more: int) -> None:
        """Wait until so many more requests have been answered."""
        until = self._done + more
        while self._done < until:
            await asyncio.sleep(0.02)

    async def _kill(self, what: str, processes: Callable[[RealServer], list[int]]) -> None:
        """Kill a process under load, and wait until a new replica has answered in its place."""
        await self._served(self.streams // 2)
        killed, known = processes(self.server)[0], {*self._names}
        self.found.kills[what] = since = time.monotonic()
        os.kill(killed, signal.SIGKILL)
        while not self._names - known:  # until a new replica has answered a request
            if time.monotonic() - since > WHOLE_S:
                self._note(f"no new replica has answered {WHOLE_S:g} s after the {what} was killed")
                return
            await asyncio.sleep(0.05)
        self.found.whole_s[what] = round(time.monotonic() - since, 2)

    async def _client(self, session: str) -> None:
        number = 0
        while not self._has_enough:
            number += 1
            case = self._random.choice(self.known)
            key = {"prompt_cache_key": session} if number % 2 else {}
            headers = {} if number % 2 else {"X-Session-Id": session}
            await self._request(case, posted(case.path, case.body | key, headers=headers))
            self._done += 1

    async def _request(self, case: Case, request: bytes) -> None:
        """Send a request until it is answered, as clients of OpenAI do: again after 429 and 503, when the answer says so."""
        for _ in range(RETRIES):
            self._open += 1
            self.found.most_open = max(self.found.most_open, self._open)
            try:
                async with asyncio.timeout(HANGS_S):
                    answer = await ask(self.server.address, request)
            except TimeoutError:
                self._note("a stream hung")
                return
            finally:
                self._open -= 1
            if answer.status not in (429, 503):
                self._judge(case, answer)
                return
            self.found.kinds[f"refused with {answer.status}, and sent again"] += 1
            if "retry-after" not in answer.headers:
                self._note(f"status {answer.status} without Retry-After: {bytes(answer.body[:200])!r}")
            await asyncio.sleep(float(answer.headers.get("retry-after", "1")) * self._random.uniform(0.5, 1))
        self._note(f"refused {RETRIES} times")

    def _judge(self, case: Case, answer: Answer) -> None:
        """Note what a stream was."""
        now, text = time.monotonic(), answer.body.decode()
        self.found.fingerprints |= {*re.findall(r'"system_fingerprint":"(\w+)"', text)}
        if not answer.complete or answer.status != 200:
            self._note(f"status {answer.status}, complete: {answer.complete}: {text[-300:]!r}")
        elif failed := re.search(r'data: (\{"error".*)\n\n$', text):
            self.found.kinds[f"ended with the error {json.loads(failed[1])['error']['code']}"] += 1
            self.found.cut_s.append(round(now - max(self.found.kills.values()), 2))
            self._check_beginning(case, text[: failed.start()])
        elif (problem := difference(case, answer.body)) is not None:
            self._note(problem)
        else:
            self._names.add(answer.headers["x-replica"])
            self.found.kinds["equal to the library's text"] += 1

    def _check_beginning(self, case: Case, text: str) -> None:
        """Check that what came before an error is how the library's output begins."""
        chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
        tokens = [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"] or ()]
        if tokens != case.expected[0].tokens[: len(tokens)]:
            self._note(f"a stream that was cut began with {tokens}, and not as {case.expected[0].tokens}")

    async def _session(self, number: int) -> None:
        """Continue a conversation turn by turn. Each must come from one replica, and find its tokens in the cache."""
        prompt, seen = f"{number} " + " ".join(self._random.choice(WORDS) for _ in range(12)), set()
        for turn in range(TURNS):
            body = {"prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
            name = {"prompt_cache_key": f"session {number}"} if turn % 2 else {}
            headers = {} if turn % 2 else {"X-Session-Id": f"session {number}"}
            answer = await ask(self.server.address, posted(COMPLETION, body | name, headers=headers))
            if answer.status != 200:
                self._note(f"a turn of a session got {answer.status}: {bytes(answer.body[:200])!r}")
                return
            usage = json.loads(answer.body)["usage"]
            seen.add(answer.headers["x-replica"])
            if turn:
                self.found.reused.append(usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"])
            prompt += " " + self._random.choice(WORDS)
        self.found.moved += len(seen) > 1

    def _note(self, problem: str) -> None:
        self.found.kinds["wrong"] += 1
        self.found.problems = [*self.found.problems, problem][:20]


# The result ---------------------------------------------------------------------------------------------------------------


def checks(found: Findings, streams: int, gone_s: float) -> list[Check]:
    """Compare what was found with the limits. `gone_s`: how long the server took to end."""
    equal = found.kinds["equal to the library's text"]
    slowest, least = max(found.cut_s, default=0.0), min(found.reused, default=0.0)
    return [
        Check("streams at a time", str(found.most_open), f"{streams}", found.most_open >= streams),
        Check(
            "streams that are wrong, hang or end without a word", str(found.kinds["wrong"]), "0", not found.kinds["wrong"]
        ),
        Check("streams equal to the library's text", str(equal), "more than 0", equal > 0),
        Check("streams that a kill cut", str(len(found.cut_s)), "more than 0", len(found.cut_s) > 0),
        Check("from a kill to the error in a stream that it cut", f"{slowest:.1f} s", f"{SEEN_S:g} s", slowest <= SEEN_S),
        *(
            Check(f"whole again after the {what} was killed", f"{seconds:.1f} s", f"{WHOLE_S:g} s", seconds <= WHOLE_S)
            for what, seconds in found.whole_s.items()
        ),
        Check("kills that the service recovered from", str(len(found.whole_s)), "2", len(found.whole_s) == 2),
        Check("sessions that were answered by two replicas", str(found.moved), "0", found.moved == 0),
        Check("prompt tokens of a session that were cached, least share", f"{least:.0%}", "50%", least >= 0.5),
        Check("replicas that answer /metrics at their own port", str(found.own_ports), "2", found.own_ports == 2),
        Check("fingerprints in all answers", str(len(found.fingerprints)), "1", len(found.fingerprints) == 1),
        Check("until all processes had ended after SIGTERM", f"{gone_s:.1f} s", f"{GONE_S:g} s", gone_s <= GONE_S),
    ]


def figures(found: Findings) -> dict[str, Any]:
    """Return what was found, for the result file."""
    shares = {"p50": 0.5, "worst": 1.0}
    return {
        "requests": dict(sorted(found.kinds.items())),
        "problems": found.problems,
        "whole_again_s": found.whole_s,
        "memory_mib": found.memory_mib,
        "error_after_kill_s": {name: percentile(found.cut_s, share) for name, share in shares.items()},
        "cached_share": {
            name: round(percentile(found.reused, share), 3) for name, share in {"least": 0.0, "p50": 0.5}.items()
        },
    }


def report(about: dict[str, Any], found: Findings, made: list[Check]) -> str:
    lines = ["# Replicas under load", "", f"`{about['command']}`", "", f"{about['machine']}, commit {about['commit']}."]
    lines += ["", "| check | found | limit | |", "|---|---|---|---|"]
    lines += [f"| {one.name} | {one.found} | {one.limit} | {'passed' if one.passed else 'missed'} |" for one in made]
    lines += [
        "",
        "| requests | count |",
        "|---|---|",
        *(f"| {kind} | {count} |" for kind, count in sorted(found.kinds.items())),
    ]
    lines += [
        "",
        "| memory of | MiB |",
        "|---|---|",
        *(f"| {kind} | {value:g} |" for kind, value in found.memory_mib.items()),
    ]
    return "\n".join(lines) + "\n"


async def _within(clients: Clients) -> None:
    try:
        async with asyncio.timeout(MOST_S):
            await clients.run()
    except TimeoutError:
        clients.found.problems.append(f"not done within {MOST_S:g} s")
        clients.found.kinds["wrong"] += 1


def ended_after(server: RealServer) -> float:
    """End the server, and return how long it took until all of its processes had ended well."""
    since, known = time.monotonic(), [server.process.pid, *below(server.process.pid)]
    server.process.terminate()
    while not all(map(is_gone, known)) and time.monotonic() - since < 2 * GONE_S:
        time.sleep(0.1)
    return time.monotonic() - since if server.process.wait(1) == 0 else inf


def memory(server: RealServer) -> dict[str, float]:
    """Return the memory of the processes below a server, in MiB: of replicas, of engines, and of what Ray has besides."""
    found = dict.fromkeys(("replicas", "engines", "ray"), 0.0)
    for process, line in below(server.process.pid).items():
        kind = "engines" if "foreword.serve.engine_process" in line else "replicas" if "ray::ServeReplica" in line else "ray"
        found[kind] += held(process).rss_mib
    return {kind: round(value) for kind, value in found.items()}


def test_replicas(
    out: Annotated[Path | None, typer.Option(help="Write results.json and report.md to this folder. Default: none.")] = None,
    streams: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 200,
    seed: Annotated[int, typer.Option(help="Of all random choices.")] = 0,
) -> None:
    """Kill an engine and a replica while 200 clients stream, and check that each stream is right or says that it failed.

    A client that is refused sends its request again when the answer says so. Sessions are named by a header or in the body.
    The exit status is 1 if a limit is missed. Times mean something on an idle machine only.
    """
    torch.set_num_threads(1)  # for a tiny model
    with tempfile.TemporaryDirectory() as folder:
        model, config = Path(folder, "model"), Path(folder, "ray.toml")
        config.write_text(f"replicas = 2\nmetrics_port = {METRICS_PORT}\n")
        with waiting("the library writes what the streams will be compared with"):
            model.mkdir()
            save_tiny_model(model)
            known = cases(model, seed)
        options = ("--ray", "--ray-config", str(config), "--dtype", DTYPE, "--max-context", str(CONTEXT))
        with RealServer(model, *options, slots=SLOTS) as server:
            clients = Clients(server, known, streams, seed)
            uvloop.run(_within(clients))
            clients.found.memory_mib = memory(server)
            gone_s = ended_after(server)
            note(f"the server wrote: {''.join(server.lines[-12:])}")
    found = clients.found
    made = checks(found, streams, gone_s)
    table = Table("check", "found", "limit", "")
    for one in made:
        table.add_row(one.name, one.found, one.limit, "[green]passed[/]" if one.passed else "[bold red]missed[/]")
    screen().print(table)
    for kind, count in sorted(found.kinds.items()):
        screen().print(f"{count:6} {kind}")
    screen().print("memory in MiB: " + ", ".join(f"{kind} {value:g}" for kind, value in found.memory_mib.items()))
    for problem in found.problems:
        complain(problem)
    if out is not None:
        _keep(out, found, made, streams=streams, slots=SLOTS, replicas=2)
    if not all(one.passed for one in made):
        raise typer.Exit(1)


def _keep(out: Path, found: Findings, made: list[Check], **more: Any) -> None:
    about = facts(torch.device("cpu"), model="a tiny llama of random weights", dtype=DTYPE, **more) | {"command": command()}
    out.mkdir(parents=True, exist_ok=True)
    result = {"about": about, "replicas": figures(found), "checks": [asdict(one) for one in made]}
    out.joinpath("results.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    out.joinpath("report.md").write_text(report(about, found, made), encoding="utf-8")


if __name__ == "__main__":
    typer.run(test_replicas)

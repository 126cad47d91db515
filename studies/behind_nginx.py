"""Two real servers behind a real nginx with examples/deploy/nginx.conf: where sessions go, and what a killed server costs.

    python studies/behind_nginx.py --out results/nginx_cpu.json

Needs nginx. The file is used as it is, but for its address: it listens on the loopback address, without TLS. The servers
have a tiny model with random weights, and are told apart by the names that they give it. Made results/nginx_cpu.json.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer

from foreword.cli.console import screen
from foreword.errors import InputError
from real_server import RealServer, request
from study import write
from under_load.tiny_model import save_tiny_model

CONFIG = Path(__file__).parents[1] / "examples" / "deploy" / "nginx.conf"
SESSIONS, TURNS = 24, 4
PROMPT = "the river before the stone and the window"
REST = """daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{}}
http {{ access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
include {folder}/site.conf; }}
"""


def site(port: int, servers: list[int]) -> str:
    """Return the example, with these servers, at a port of the loopback address."""
    text = CONFIG.read_text(encoding="utf-8")
    lines = "".join(f"    server 127.0.0.1:{server} max_fails=2 fail_timeout=10s;\n" for server in servers)
    text = re.sub(r"(    (# )?server 127\.0\.0\.1:\d+ .*\n)+", lines, text, count=1)
    return text.replace("listen 443 ssl;", f"listen 127.0.0.1:{port};")


@contextmanager
def nginx(servers: list[int]) -> Iterator[RealServer]:
    """Run nginx before some servers. Yield it as one that can be asked."""
    program = shutil.which("nginx")
    if program is None:
        raise InputError("nginx is not installed; on Debian: apt install nginx")
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        Path(folder, "site.conf").write_text(site(port, servers), encoding="utf-8")
        Path(folder, "nginx.conf").write_text(REST.format(folder=folder), encoding="utf-8")
        process = subprocess.Popen([program, "-c", f"{folder}/nginx.conf", "-e", f"{folder}/error.log"])
        try:
            asked = RealServer(Path(folder), port=port)
            asked.until(lambda: asked.status("/ready") == 200, 30, "ready")
            yield asked
        finally:
            process.terminate()
            process.wait()


def turns(front: RealServer, turn: int) -> tuple[dict[int, str], int, list[float]]:
    """Ask once for each session. Return which server answered it, how many requests failed, and the cached shares."""
    names, failed, cached = {}, 0, []
    for session in range(SESSIONS):
        body = {"prompt": f"{session} {PROMPT} {'x' * turn}", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer = front.send(request(body, headers={"X-Session-Id": f"session {session}"}))
        if answer.status != 200:
            failed += 1
            continue
        found = answer.json()
        names[session] = found["model"]
        cached.append(found["usage"]["prompt_tokens_details"]["cached_tokens"] / found["usage"]["prompt_tokens"])
    return names, failed, cached


def behind_nginx(
    out: Annotated[Path | None, typer.Option(help="Write the figures to this file. Default: none.")] = None,
) -> None:
    """Ask two servers through nginx, kill one of them, and ask again."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        save_tiny_model(Path(folder))
        servers = {
            name: stack.enter_context(
                RealServer(Path(folder), "--served-model-name", name, "--dtype", "float64", slots=SESSIONS)
            )
            for name in ("first", "second")
        }
        front = stack.enter_context(nginx([one.address[1] for one in servers.values()]))
        rounds = [turns(front, turn) for turn in range(TURNS)]
        killed = rounds[-1][0][0]
        servers[killed].process.send_signal(signal.SIGKILL)
        after, failed, _ = turns(front, TURNS)
        found = {
            "sessions": SESSIONS,
            "turns": TURNS,
            "on_each_server": sorted(list(rounds[0][0].values()).count(name) for name in servers),
            "moved": sum(len({names.get(session) for names, *_ in rounds}) > 1 for session in range(SESSIONS)),
            "least_cached_share": round(min(share for _, _, shares in rounds[1:] for share in shares), 3),
            "failed_before": sum(failures for _, failures, _ in rounds),
            "failed_after_a_server_was_killed": failed,
            "answered_by_the_other": sum(name != killed for name in after.values()),
        }
    screen().print_json(json.dumps(found))
    version = subprocess.run(["nginx", "-v"], capture_output=True, text=True, check=True).stderr.split("/")[-1].strip()
    if out is not None:
        write(out, "nginx", [found], torch.device("cpu"), model="a tiny llama of random weights", nginx=version)


if __name__ == "__main__":
    typer.run(behind_nginx)

"""Replicas behind Ray Serve, for real: `make ray-test` runs these, and a study that kills some of them under load."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import foreword
from foreword.serve.errors import RETRY_S
from foreword.serve.options import ServeOptions
from foreword.serve.ray.cluster import environment
from real_server import RealServer, is_gone, request
from replicas_under_load import below, replicas

pytestmark = pytest.mark.ray

KEY = {"Authorization": "Bearer secret"}
LONG = {"prompt": "hello", "max_tokens": 400, "temperature": 0.8, "seed": 3, "ignore_eos": True}
OPTIONS = "replicas = 1\nmax_replicas = 2\nongoing = 1\ntarget_load = 1.0\nupscale_delay = 0.5\n"
OWN_CLUSTER = """
import sys, urllib.request
import ray
from ray import serve
from foreword.serve.ray import app

ray.init(address="local", include_dashboard=False, num_cpus=2, _node_ip_address="127.0.0.1", _temp_dir=sys.argv[2])
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[3])})
made = app({"replicas": "1", "engine": {"model": sys.argv[1], "method": "plain", "slots": 2}})
serve.run(made, name="mine", route_prefix="/")
print(urllib.request.urlopen(f"http://127.0.0.1:{sys.argv[3]}/v1/models", timeout=30).read().decode())
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from under_load.tiny_model import save_tiny_model  # noqa: PLC0415  imports transformers

    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder)
    return folder


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose path leaves room for the names of Ray's sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def command(model: Path, folder: Path, *options: str) -> list[str]:
    (folder / "keys").write_text("secret")
    (folder / "ray.toml").write_text(OPTIONS)
    given = ("--ray", "--ray-config", str(folder / "ray.toml"), "--api-key-file", str(folder / "keys"))
    return [*given, "--dtype", "float64", "--method", "plain", "--max-context", "512", *options]


def ask(server: RealServer, body: Any, path: str = "/v1/completions", **headers: str) -> Any:
    return server.send(request(body, path, {**KEY, **headers}))


def test_a_service_of_replicas(model: Path, tmp_path: Path, short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys, limits, the page, back-pressure, a second replica under load, and an end without remains."""
    monkeypatch.setenv("TMPDIR", str(short_path))
    options = command(model, tmp_path, "--max-queued", "2", "--max-body", "10000")
    with RealServer(model, *options, slots=1) as server:
        refused = server.ask({"prompt": "hello"})
        assert (refused.status, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        assert ask(server, {"prompt": "a" * 20_000}).status == 413
        assert server.status("/") == 200 and server.status("/v1/models") == 401
        with foreword.load(model, "plain", dtype="float64", max_context=512) as llm:
            expected = llm.generate("hello", max_new_tokens=400, temperature=0.8, seed=3, ignore_eos=True, chat=False).text
        until, texts, busy, names = time.monotonic() + 120, [], [], set()
        with ThreadPoolExecutor(6) as pool:
            while time.monotonic() < until and (len(names) < 2 or not busy):
                for found in pool.map(lambda _: ask(server, LONG), range(6)):
                    (texts if found.status == 200 else busy).append(found)
                    names |= {*_names(found.head)}
        assert texts and {one.json()["choices"][0]["text"] for one in texts} == {expected}
        assert {(one.status, one.json()["error"]["code"]) for one in busy} == {(429, "queue_full")}
        assert all(f"retry-after: {RETRY_S}".encode() in one.head.lower() for one in busy)
        assert len(names) == 2 and len(replicas(server)) == 2  # it scaled
        known = [server.process.pid, *below(server.process.pid)]
        assert len(known) > 6
        server.process.terminate()
        assert server.process.wait(60) == 0
        server.until(lambda: all(map(is_gone, known)), 20, "gone")
    assert not [*short_path.iterdir()]


def _names(head: bytes) -> list[str]:
    return [line.split(": ")[1] for line in head.decode().split("\r\n") if line.lower().startswith("x-replica")]


def test_ctrl_c_in_a_terminal_lets_streams_finish(model: Path, tmp_path: Path) -> None:
    """It goes to all processes of the terminal at once, and not only to the one that was started."""
    with RealServer(model, *command(model, tmp_path), slots=1, start_new_session=True) as server:
        stream = server.streaming({**LONG, "stream": True}, KEY)
        os.killpg(server.process.pid, signal.SIGINT)
        server.until(lambda: server.status("/ready") != 200, 10, "closed to new requests")
        assert stream.rest().body.endswith(b"data: [DONE]\n\n")
        assert server.process.wait(60) == 0


def test_replicas_that_cannot_start(model: Path, tmp_path: Path) -> None:
    """The reason is the error of the engine, without a traceback."""
    options = command(model, tmp_path)
    options[options.index("plain")] = "medusa"
    done = subprocess.run(
        [sys.executable, "-m", "foreword", "serve", "--model", str(model), "--port", "0", *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 2 and "error: the replicas could not be started: " in done.stderr
    assert "medusa" in done.stderr.splitlines()[-1]


def test_the_application_on_a_cluster_of_ones_own(model: Path, short_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    done = subprocess.run(
        [sys.executable, "-c", OWN_CLUSTER, str(model), str(short_path), str(port)],
        env={**os.environ, **environment(ServeOptions())},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    (card,) = json.loads(done.stdout.splitlines()[-1])["data"]
    assert card["foreword"] == {"method": "plain", "slots": 2}

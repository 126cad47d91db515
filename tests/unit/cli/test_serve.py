"""`foreword serve`: from arguments to a server, and what is refused before a model is loaded."""

import json
import os
import signal
import socket
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from foreword.cli import serve as command
from foreword.cli.serve import ReplicaOptions, ServerOptions
from foreword.serve import ray as replicas
from foreword.serve.options import KEY_VARIABLE, ServeOptions, digest
from foreword.serve.ray.options import RayOptions


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def test_a_server_from_start_to_end(run: Any, tiny_model: str, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one\ntwo\n")
    port = free_port()
    found: list[Any] = []

    def ask() -> None:
        body = json.dumps({"model": "mine", "prompt": "hello", "max_tokens": 3, "ignore_eos": True}).encode()
        address = f"http://127.0.0.1:{port}/v1/completions"
        while not found:
            try:
                request = urllib.request.Request(address, body, {"Authorization": "Bearer two"})
                found.append(json.loads(urllib.request.urlopen(request, timeout=30).read()))
            except OSError:
                time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ask).start()
    options = ("--method", "plain", "--slots", 2, "--served-model-name", "mine", "--api-key-file", tmp_path / "keys")
    shown = run("serve", "--model", tiny_model, "--in-process", "--port", port, *options)
    assert shown.exit_code == 0, shown.output
    assert found[0]["model"] == "mine" and found[0]["usage"]["completion_tokens"] == 3
    assert f"at http://127.0.0.1:{port}" in shown.stderr


def test_the_defaults_are_those_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert ServerOptions().options() == ServeOptions()


def test_keys_come_from_a_file_and_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The variable is taken away, so that no child process has it."""
    (tmp_path / "keys").write_text("one\n\n two \n")
    monkeypatch.setenv(KEY_VARIABLE, "three")
    found = ServerOptions(api_key_file=tmp_path / "keys").options().key_digests
    assert {*found} == {digest("one"), digest("two"), digest("three")}
    assert KEY_VARIABLE not in os.environ


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe"])
def test_a_file_without_keys(run: Any, tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "keys").write_bytes(content)
    shown = run("serve", "--api-key-file", tmp_path / "keys")
    assert shown.exit_code == 2 and "--api-key-file" in shown.stderr


def test_without_the_extra(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "NEEDED", ("msgspec", "no_such_package"))
    shown, advice = run("serve"), "install the extra: pip install 'foreword[serve]'"
    assert (shown.exit_code, shown.stderr) == (2, f"error: a server needs no_such_package; {advice}\n")


def test_a_port_in_use(run: Any) -> None:
    """Known before the model is loaded: this one does not exist."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        shown = run("serve", "--model", "./no-such-model", "--method", "plain", "--port", taken.getsockname()[1])
    assert shown.exit_code == 2 and "the server cannot listen on 127.0.0.1" in shown.stderr


def test_an_open_server_is_warned_of(run: Any) -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        shown = run("serve", "--method", "plain", "--host", "0.0.0.0", "--port", taken.getsockname()[1])
    assert "warning: everyone who can reach 0.0.0.0 can use this server; add --api-key-file" in shown.stderr


@pytest.mark.parametrize(
    ("options", "blamed"),
    [
        (("--replicas", 2), "--replicas"),
        (("--ray-config", "ray.toml"), "--ray-config"),
        (("--ray", "--in-process"), "--in-process"),
        (("--ray", "--switch-methods"), "--switch-methods"),
    ],
)
def test_options_that_have_no_meaning_together(run: Any, options: tuple[Any, ...], blamed: str) -> None:
    shown = run("serve", *options)
    assert shown.exit_code == 2 and blamed in shown.stderr


def test_replicas_without_ray(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "NEEDED", ("no_such_package",))
    shown, advice = run("serve", "--ray"), "install the extra: pip install 'foreword[ray]'"
    assert (shown.exit_code, shown.stderr) == (2, f"error: replicas need no_such_package; {advice}\n")


def test_the_options_of_replicas(tmp_path: Path) -> None:
    (tmp_path / "ray.toml").write_text("replicas = 3\ncpus = 2\n")
    assert ReplicaOptions(ray=True).options() == RayOptions()
    found = ReplicaOptions(ray=True, replicas=4, ray_config=tmp_path / "ray.toml").options()
    assert found == RayOptions(replicas=4, cpus=2)

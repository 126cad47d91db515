"""`run`: from a port to an exit status. Signals drain it, the engine's end ends it, a port in use is an error at once."""

import json
import os
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foreword.api import LLM
from foreword.engine.engine import Engine
from foreword.errors import InputError, ModelNotFound
from foreword.serve.async_llm import AsyncLLM
from foreword.serve.options import ServeOptions
from foreword.serve.server import listen, run

SAY = [{"role": "user", "content": "hello"}]


def ask(address: str, path: str, body: Any = None) -> tuple[int, Any]:
    """Return the status and the parsed answer."""
    content = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(address + path, content), timeout=30) as answer:
            text, status = answer.read(), answer.status
    except urllib.error.HTTPError as error:
        text, status = error.read(), error.code
    return status, json.loads(text) if text.startswith(b"{") else text


def run_with(engine: AsyncLLM, work: Callable[[str], Any], port: int = 0, **options: Any) -> tuple[int, Any]:
    """Run a server in this thread, and `work` in another one, as soon as it is ready. Signals come to this thread."""
    found: list[Any] = []
    threads: list[threading.Thread] = []

    def begin(address: str) -> None:
        threads.append(threading.Thread(target=lambda: found.append(work(address))))
        threads[0].start()

    status = run(engine, ServeOptions(port=port, **options), begin)
    threads[0].join()
    return status, found[0]


def end(sig: signal.Signals = signal.SIGTERM) -> None:
    os.kill(os.getpid(), sig)


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_an_idle_server(llm: LLM, sig: signal.Signals) -> None:
    def work(address: str) -> Any:
        answer = ask(address, "/v1/chat/completions", {"messages": SAY, "max_tokens": 4, "temperature": 0})
        end(sig)
        return answer

    before = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)]
    status, answer = run_with(AsyncLLM.of(llm), work)
    assert status == 0 and answer[0] == 200
    assert answer[1]["choices"][0]["message"]["content"] == llm.generate(SAY, max_new_tokens=4, temperature=0).text
    assert [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)] == before


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    advance = Engine.advance
    monkeypatch.setattr(Engine, "advance", lambda engine, rounds=1: time.sleep(0.02) or advance(engine, rounds))


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("seconds", [30.0, 0.3])
def test_a_signal_drains_a_busy_server(llm: LLM, seconds: float) -> None:
    """The request that runs finishes, if it does in time; a new one is refused meanwhile."""

    def work(address: str) -> Any:
        answers: list[Any] = []
        body = {"messages": SAY, "max_tokens": 40, "ignore_eos": True}
        thread = threading.Thread(target=lambda: answers.append(ask(address, "/v1/chat/completions", body)))
        thread.start()
        while not llm.engine.slots.running:
            time.sleep(0.005)
        end()
        while (ready := ask(address, "/ready"))[0] == 200:
            time.sleep(0.005)
        answers.append(ready)
        answers.append(ask(address, "/v1/chat/completions", body))
        thread.join()
        return answers

    status, (ready, refusal, answer) = run_with(AsyncLLM.of(llm), work, drain_seconds=seconds)
    assert status == 0 and ready == (503, {"status": "draining"})
    assert refusal[0] == 503 and refusal[1]["error"]["code"] == "draining"
    assert answer[0] == (200 if seconds > 1 else 503)
    assert not llm.engine.busy


@pytest.mark.usefixtures("slow")
def test_a_second_signal_ends_what_runs(llm: LLM) -> None:
    def work(address: str) -> Any:
        answers: list[Any] = []
        body = {"messages": SAY, "max_tokens": 400, "ignore_eos": True}
        thread = threading.Thread(target=lambda: answers.append(ask(address, "/v1/chat/completions", body)))
        thread.start()
        while not llm.engine.slots.running:
            time.sleep(0.005)
        end()
        time.sleep(0.2)
        assert llm.engine.busy
        end()
        thread.join()
        return answers[0]

    since = time.monotonic()
    status, answer = run_with(AsyncLLM.of(llm), work)
    assert status == 0 and time.monotonic() - since < 4
    assert answer[0] == 503 and answer[1]["error"]["code"] == "draining"
    assert not llm.engine.busy


def test_a_port_in_use_is_an_error(llm: LLM) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=rf"cannot listen on 127.0.0.1:{port} .*give another --host or --port"):
            run(AsyncLLM.of(llm), ServeOptions(port=port))


@pytest.mark.parametrize("host", ["no.such.host.invalid", "1.2.3.4", "x" * 300])
def test_an_address_that_is_not_here(host: str) -> None:
    with pytest.raises(InputError, match="the server cannot listen on"):
        listen(host, 0)


def test_a_model_that_cannot_be_loaded_ends_the_server(own_home: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        run(AsyncLLM(tmp_path / "nothing", "plain"), ServeOptions(port=0))


def test_an_engine_in_another_process(folders: dict[str, Path], own_home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """While it loads the server says so. When it dies for good, the server ends."""
    port = free_port()
    before: list[Any] = []

    def look() -> None:
        while len(before) < 3:
            try:
                before.extend(ask(f"http://127.0.0.1:{port}", path) for path in ("/health", "/ready", "/v1/models"))
            except urllib.error.URLError:
                time.sleep(0.01)

    def work(address: str) -> Any:
        answer = ask(address, "/v1/chat/completions", {"messages": SAY, "max_tokens": 4, "stream": True})
        os.kill(engine._transport._process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        return answer

    threading.Thread(target=look).start()
    engine = AsyncLLM(folders["llama"], "plain", slots=1, restarts=0)
    status, answer = run_with(engine, work, port)
    assert status == 1 and "the engine has ended" in capfd.readouterr().err
    assert [one[0] for one in before] == [200, 503, 503] and before[0][1] == {"status": "starting"}
    assert before[2][1]["error"]["code"] == "starting"
    assert answer[0] == 200 and b"[DONE]" in answer[1]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])

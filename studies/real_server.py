"""A real server of a tiny model, for studies and tests of it: `foreword serve` in a process of its own, and a client on raw
sockets, which can do what a proper client never does.

In: a model folder, and options of the command. Out: answers as they came over the wire, and what the machine says of the
server's processes.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

ADDRESS = re.compile(r"http://([\d.]+):(\d+)")
START_S, ANSWER_S = 180.0, 90.0
COMPLETIONS = "/v1/completions"
SHORT: dict[str, Any] = {"prompt": "hello", "max_tokens": 2, "temperature": 0, "ignore_eos": True}
LONG: dict[str, Any] = {**SHORT, "max_tokens": 100_000, "stream": True}


@dataclass
class Answer:
    """The answer to a request. `status`: 0 if the connection was closed without one."""

    status: int
    head: bytes = b""
    body: bytes = b""

    @staticmethod
    def of(received: bytes) -> Answer:
        head, _, body = received.partition(b"\r\n\r\n")
        found = re.match(rb"HTTP/1\.1 (\d{3}) ", head)
        if re.search(rb"transfer-encoding: chunked", head, re.IGNORECASE):
            body = re.sub(rb"[0-9a-f]+\r\n(.*?)\r\n", rb"\1", body, flags=re.DOTALL)  # our events hold no \r
        return Answer(int(found[1]) if found else 0, head, body)

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """The code of an error, also of one in a stream; empty if there is none."""
        found = re.search(rb'"code": ?"(\w+)"', self.body)
        return found[1].decode() if found else ""

    def __str__(self) -> str:
        return f"{self.status or 'closed'} {self.code}".strip()


def request(body: Any = None, path: str = COMPLETIONS, headers: Mapping[str, str] | None = None, method: str = "") -> bytes:
    """Return a request as bytes. `body`: bytes, or what becomes JSON. The server closes the connection after its answer,
    unless the headers say otherwise."""
    content = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {"Host": "test", "Content-Length": str(len(content)), "Connection": "close", **(headers or {})}
    lines = [f"{method or ('GET' if body is None else 'POST')} {path} HTTP/1.1", *map(": ".join, given.items())]
    return "\r\n".join([*lines, "", ""]).encode() + content


class RealServer:
    """Runs `foreword serve` in a `with` block. What it writes to stderr is kept."""

    def __init__(
        self, model: Path, *options: str, slots: int = 2, stderr: Any = subprocess.PIPE, port: int = 0, **more: Any
    ):
        given = ["--model", str(model), "--slots", str(slots), "--port", str(port), *options]
        method = [] if "--method" in options else ["--method", "prompt_lookup"]
        self.command = [sys.executable, "-m", "foreword", "serve", *given, *method]
        self.lines: list[str] = []
        self.address = "127.0.0.1", port
        self._stderr, self._more = stderr, more

    def __enter__(self) -> Self:
        environment = {**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(self.command, stderr=self._stderr, text=True, env=environment, **self._more)
        if self.process.stderr is not None:
            self._has_address = threading.Event()
            threading.Thread(target=self._read_stderr, daemon=True).start()
            self._has_address.wait(START_S)
        try:
            self.until(lambda: self.process.poll() is not None or self.status("/ready") == 200, START_S, "ready")
        except AssertionError:
            self.__exit__()
            raise
        return self

    def _read_stderr(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if found := ADDRESS.search(line):
                self.address = found[1], int(found[2])
                self._has_address.set()
        self._has_address.set()

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    # Asking -------------------------------------------------------------------------------------------------------------

    def connect(self, **options: int) -> socket.socket:
        """Open a connection. `options`: of the socket, such as SO_RCVBUF."""
        made = socket.socket()
        for name, value in options.items():
            made.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
        made.settimeout(ANSWER_S)
        made.connect(self.address)
        return made

    def send(self, sent: bytes) -> Answer:
        """Send bytes, and return the answer when the server closes the connection."""
        with self.connect() as connection:
            return answer(connection, sent)

    def ask(self, body: Any = None, path: str = COMPLETIONS, **headers: str) -> Answer:
        return self.send(request(body, path, headers))

    def status(self, path: str) -> int:
        """Return the status of a path; 0 if nobody answers."""
        with suppress(OSError):
            return self.ask(path=path).status
        return 0

    def metric(self, name: str) -> float:
        """Return the sum of the samples of a metric."""
        page = self.ask(path="/metrics").body.decode()
        return sum(map(float, re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", page, re.MULTILINE)))

    def running(self) -> float:
        """Return how many outputs hold a slot or wait for one."""
        return self.metric("foreword:requests_running") + self.metric("foreword:requests_waiting")

    def streaming(self, body: Any = None, headers: Mapping[str, str] | None = None) -> Stream:
        """Begin a stream, and return when its first tokens have come."""
        stream = Stream(self.connect())
        stream.connection.sendall(request(body or LONG, headers=headers))
        stream.until(b'"text"')
        return stream

    # Looking ------------------------------------------------------------------------------------------------------------

    @staticmethod
    def until(is_true: Callable[[], Any], seconds: float = 10.0, what: str = "true") -> float:
        """Wait until something is true, and return how long it took."""
        since = time.monotonic()
        while not is_true():
            if time.monotonic() - since > seconds:
                raise AssertionError(f"not {what} within {seconds:g} s")
            time.sleep(0.01)
        return time.monotonic() - since

    @property
    def engine(self) -> int:
        """The process id of the engine."""
        for process in Path("/proc").iterdir():
            with suppress(OSError, IndexError):
                is_engine = process.name.isdigit() and b"engine_process" in (process / "cmdline").read_bytes()
                if is_engine and int((process / "stat").read_text().rsplit(")", 1)[1].split()[1]) == self.process.pid:
                    return int(process.name)
        raise AssertionError("the server has no engine process")

    def memory(self) -> float:
        """Return the memory of the HTTP process, in MB."""
        found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{self.process.pid}/status").read_text())
        assert found is not None
        return int(found[1]) / 1000

    def kill_engine(self, how: signal.Signals = signal.SIGKILL) -> int:
        pid = self.engine
        os.kill(pid, how)
        return pid

    def wrote(self, text: str) -> bool:
        return text in "".join(self.lines)


@dataclass
class Stream:
    """A stream that is being read."""

    connection: socket.socket
    received: bytearray = field(default_factory=bytearray)

    def until(self, what: bytes) -> None:
        """Read until some bytes have come."""
        while what not in self.received:
            found = self.connection.recv(1 << 16)
            if not found:
                raise AssertionError(f"the stream ended without {what!r}: {bytes(self.received[-300:])!r}")
            self.received += found

    def rest(self) -> Answer:
        """Read until the server closes the connection, and return the whole answer."""
        self.received += all_of(self.connection)
        self.connection.close()
        return Answer.of(bytes(self.received))


def answer(connection: socket.socket, sent: bytes) -> Answer:
    """Send bytes over a connection, and return the answer when the server closes it."""
    with suppress(ConnectionError):  # refused before everything was sent
        connection.sendall(sent)
    return Answer.of(all_of(connection))


def all_of(connection: socket.socket) -> bytes:
    """Read until the server closes a connection."""
    found = bytearray()
    with suppress(ConnectionError):
        while part := connection.recv(1 << 16):
            found += part
    return bytes(found)


def is_gone(pid: int) -> bool:
    """Return whether a process has ended, also if nobody has waited for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True

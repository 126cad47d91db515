"""Faults of a server: each is provoked against `foreword serve` in processes of its own, and what is seen is compared with
what is expected.

    python studies/serve_faults.py --out results/serve_faults

The model is tiny and random. Faults of a request take less than a second and share a server; tests/unit/serve/test_faults.py
runs them too. The others have servers of their own, some at a time. Made results/serve_faults/faults.json.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import typer  # noqa: E402  the path to the doubles comes first

from doubles import byte_tokenizer, talking_model  # noqa: E402
from foreword.bench.report import facts  # noqa: E402
from real_server import LONG, SHORT, START_S, Answer, RealServer, Stream, all_of, is_gone, request  # noqa: E402
from study import command  # noqa: E402

CHAT = "/v1/chat/completions"
CONTEXT = 2048  # of the tiny model; an output that fills it takes seconds
AT_ONCE_S = 2.0  # a round takes milliseconds; the machine may be busy
MOST_GROWTH = 100.0  # MB; a large body and what is parsed of it
FAULTS: list[Fault] = []


@dataclass(frozen=True)
class Fault:
    """`probe`: provokes the fault, and returns what was seen; raises AssertionError if that is not what is expected.
    `is_quick`: it gets a server that others use too; else a model folder."""

    name: str
    expected: str
    probe: Callable[[Any], str]
    is_quick: bool

    @property
    def slug(self) -> str:
        return self.name.replace(" ", "-")


@dataclass(frozen=True)
class Seen:
    fault: str
    expected: str
    seen: str
    as_expected: bool
    seconds: float


def quick(name: str, expected: str) -> Callable[[Callable[[RealServer], str]], Any]:
    return lambda probe: FAULTS.append(Fault(name, expected, probe, True))


def slow(name: str, expected: str) -> Callable[[Callable[[Path], str]], Any]:
    return lambda probe: FAULTS.append(Fault(name, expected, probe, False))


def model_folder(folder: Path) -> Path:
    """Make the tiny model."""
    talking_model(max_position_embeddings=CONTEXT).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


# Faults of a request ------------------------------------------------------------------------------------------------------


def completion(**fields: Any) -> bytes:
    return request({**SHORT, **fields})


def raw(body: bytes) -> bytes:
    return request(b'{"prompt": "a", "max_tokens": 1, ' + body + b"}")


def headed(*lines: str, body: bytes = b"") -> bytes:
    """Return a request with these lines as its head."""
    return "\r\n".join([f"POST {CHAT} HTTP/1.1", "Host: test", "Connection: close", *lines, "", ""]).encode() + body


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


CHUNKED = "Transfer-Encoding: chunked"
NO_JSON = (400,)
REQUESTS: dict[str, tuple[bytes, tuple[int, ...]]] = {
    "JSON of depth 100,000": (raw(b'"x": ' + b"[" * 100_000), NO_JSON),
    "JSON of depth 100,000 that is closed": (raw(b'"x": ' + b"[" * 100_000 + b"]" * 100_000), NO_JSON),
    "an integer of 5,000 digits": (raw(b'"seed": ' + b"9" * 5000), NO_JSON),
    "a number that is too large": (raw(b'"temperature": 1e999'), NO_JSON),
    "NaN": (raw(b'"temperature": NaN'), NO_JSON),
    "minus infinity": (raw(b'"temperature": -Infinity'), NO_JSON),
    "half of a surrogate pair": (raw(rb'"stop": "\ud800"'), NO_JSON),
    "a body that is not UTF-8": (raw(b'"stop": "\xff\xfe"'), NO_JSON),
    "a body in UTF-16": (request(json.dumps(SHORT).encode("utf-16")), NO_JSON),
    "an empty body": (request(b""), NO_JSON),
    "a list as body": (request([SHORT]), NO_JSON),
    "a field that comes twice": (raw(b'"seed": 1, "seed": 2'), (200,)),
    "NUL characters in a prompt": (completion(prompt="a\0b\0"), (200,)),
    "a prompt of 10 MB": (completion(prompt="a" * 10_000_000), (413, 0)),
    "a prompt of 8 MB": (completion(prompt="a" * 8_000_000), (400,)),
    "a prompt of 2 million token ids": (completion(prompt=[7] * 2_000_000), (400,)),
    "token ids out of range": (completion(prompt=[1, 10**6]), (400,)),
    "token ids that are negative": (completion(prompt=[-1]), (400,)),
    "token ids of 100 digits": (completion(prompt=[10**100]), (400,)),
    "token ids with fractions": (completion(prompt=[1.5]), (400,)),
    "10,000 stop strings": (completion(stop=[str(i) for i in range(10_000)]), (400,)),
    "a stop string of 1 MB": (completion(stop="a" * 1_000_000), (400,)),
    "100,000 biases": (completion(logit_bias={str(i): 1 for i in range(100_000)}), (400,)),
    "100,000 stop tokens": (completion(stop_token_ids=[5] * 100_000), (400,)),
    "100,000 bad words": (completion(bad_words=["a"] * 100_000), (400,)),
    "1,024 outputs": (completion(n=1024), (400,)),
    "10^12 outputs": (completion(n=10**12), (400,)),
    "10,000 prompts": (completion(prompt=["a"] * 10_000), (400,)),
    "10^12 tokens": (completion(max_tokens=10**12, ignore_eos=False, stop_token_ids=[*range(200)]), (200,)),
    "a prediction of 7 MB": (completion(prediction={"type": "content", "content": "a" * 7_000_000}), (400,)),
    "another model": (completion(model="another"), (404,)),
    "a regular expression as response_format": (completion(response_format={"type": "regex", "regex": "(a*)*"}), (400,)),
    "a schema of 200 levels": (
        completion(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": nested(200)}}),
        (400,),
    ),
    "a schema that refers to itself alone": (
        completion(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#"}}}),
        (400,),
    ),
    "headers of 10 MB": (headed(*(f"X-Filler-{i}: {'a' * 1000}" for i in range(10_000))), (431, 0)),
    "a header of 10 MB": (headed(f"X-Filler: {'a' * 10_000_000}"), (431, 0)),
    "a first line of 10 MB": (b"GET /" + b"a" * 10_000_000 + b" HTTP/1.1\r\n\r\n", (431, 0)),
    "a chunk whose size is no number": (headed(CHUNKED, body=b"zz\r\n{}\r\n0\r\n\r\n"), (400,)),
    "a chunk that is longer than it says": (headed(CHUNKED, body=b"1\r\n{}}}}}\r\n0\r\n\r\n"), (400,)),
    "a length and chunks": (headed("Content-Length: 5", CHUNKED, body=b"0\r\n\r\n"), (400,)),
    "two lengths": (headed("Content-Length: 2", "Content-Length: 3", body=b"{}}"), (400,)),
    "a length that is shorter than the body": (headed("Content-Length: 1", body=b"{}" * 100), (400,)),
    "a body that is no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", (400,)),
    "a path that is not ASCII": (b"GET /\xff\xfe HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n", (400, 404)),
    "an upgrade to a web socket": (
        request(path="/health", headers={"Connection": "Upgrade, close", "Upgrade": "websocket"}),
        (200,),
    ),
}


def _asks(sent: bytes, statuses: tuple[int, ...]) -> Callable[[RealServer], str]:
    def probe(server: RealServer) -> str:
        found = server.send(sent)
        assert found.status in statuses, f"{found}: {found.body[:300]!r}"
        assert len(found.body) < 5000, f"an answer of {len(found.body)} bytes"
        return str(found)

    return probe


for _name, (_sent, _statuses) in REQUESTS.items():
    _expected = " or ".join(str(status or "closed") for status in _statuses)
    FAULTS.append(Fault(_name, _expected, _asks(_sent, _statuses), True))


# Faults of a client -------------------------------------------------------------------------------------------------------


def frees_its_slot(server: RealServer) -> str:
    took = server.until(lambda: server.running() == 0, AT_ONCE_S, "free")
    return f"free after {took:.2f} s"


@quick("a client that leaves between its body and the first token", "its slot is free at once")
def _(server: RealServer) -> str:
    server.connect().sendall(request(LONG))  # closed as soon as nothing refers to it
    return frees_its_slot(server)


@quick("a client that leaves while its prompt is read", "its slot is free at once")
def _(server: RealServer) -> str:
    with server.connect() as connection:
        connection.sendall(request({**LONG, "prompt": "a" * (CONTEXT - 200), "prompt_logprobs": None, "logprobs": 5}))
        server.until(server.running, what="let in")
    return frees_its_slot(server)


@quick("a client that leaves during its stream", "its slot is free at once")
def _(server: RealServer) -> str:
    server.streaming().connection.close()
    return frees_its_slot(server)


@quick("a client that leaves while it waits for an answer in one piece", "its slot is free at once")
def _(server: RealServer) -> str:
    with server.connect() as connection:
        connection.sendall(request({**LONG, "stream": False}))
        server.until(server.running, what="let in")
    return frees_its_slot(server)


@quick("a client that shuts down its sending side", "the stream ends as if it had left")
def _(server: RealServer) -> str:
    stream = server.streaming()
    stream.connection.shutdown(socket.SHUT_WR)
    return frees_its_slot(server)


@quick("clients that leave while they wait for a slot", "the others finish")
def _(server: RealServer) -> str:
    streams = [server.streaming({**LONG, "max_tokens": 200}) for _ in range(2)]
    waiting = [server.connect() for _ in range(20)]
    for connection in waiting:
        connection.sendall(request(LONG))
        connection.close()
    ends = [stream.rest() for stream in streams]
    assert all(b"[DONE]" in end.body for end in ends), [end.body[-200:] for end in ends]
    return f"2 streams finished; {frees_its_slot(server)}"


@quick("requests that are pipelined", "answered in order")
def _(server: RealServer) -> str:
    kept = {"Connection": "keep-alive"}
    first, last = request(SHORT, headers=kept), request({**SHORT, "model": "another"})
    with server.connect() as connection:
        connection.sendall(first + first + last)
        found = all_of(connection)
    statuses = [part[:3].decode() for part in found.split(b"HTTP/1.1 ")[1:]]
    assert statuses == ["200", "200", "404"], statuses
    return ", ".join(statuses)


@quick("garbage after a request whose stream runs", "nothing else is written into the stream")
def _(server: RealServer) -> str:
    stream = server.streaming(headers={"Connection": "keep-alive"})
    stream.connection.sendall(b"\0\0\0\0")
    end = stream.rest()
    assert b"HTTP/1.1" not in end.body and b"[DONE]" not in end.body
    return f"the connection is closed; {frees_its_slot(server)}"


@quick("1,000 open connections that say nothing", "others are served")
def _(server: RealServer) -> str:
    with ExitStack() as opened, many_files():
        for _ in range(1000):
            opened.enter_context(server.connect())
        since = time.monotonic()
        found = server.ask(SHORT)
        assert found.status == 200, str(found)
        return f"200 after {time.monotonic() - since:.2f} s"


@contextmanager
def many_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


TALKATIVE = {**LONG, "logprobs": 20, "trace_rounds": True}  # kilobytes per round


@quick("a client that never reads its stream", "the memory stays, the next stream runs, the slot becomes free")
def _(server: RealServer) -> str:
    before = server.memory()
    with server.connect(SO_RCVBUF=4096) as connection:
        connection.sendall(request({**TALKATIVE, "max_tokens": 300}))
        server.until(server.running, what="let in")
        other = server.ask({**LONG, "max_tokens": 20})
        assert b"[DONE]" in other.body
        server.until(lambda: server.running() == 0, 10, "free")
        growth = server.memory() - before
    assert growth < MOST_GROWTH, f"the memory grew by {growth:.0f} MB"
    return f"memory +{growth:.0f} MB, the other stream finished"


def still_serves(server: RealServer, engine: int) -> None:
    """Fail if a server is not as it was: the same engine, no slot in use, the same output."""
    assert server.process.poll() is None, "the server has ended"
    server.until(lambda: server.running() == 0, what="idle")
    found = server.ask(SHORT)
    assert found.status == 200 and server.engine == engine, f"afterwards a request gets {found}"


# Faults of processes and of the machine -----------------------------------------------------------------------------------


# Those that wait for a limit come first: they need no time of the processor.


@slow("the engine hung during a stream", "killed after 120 s of silence; an error event; restarted")
def _(model: Path) -> str:
    with RealServer(model) as server:
        stream = server.streaming()
        server.kill_engine(signal.SIGSTOP)
        since = time.monotonic()
        stream.connection.settimeout(150)
        end = stream.rest()
        took = time.monotonic() - since
        assert end.code == "engine_error" and server.wrote("was silent for 120 s"), str(end)
        assert b": keep-alive" in end.body
        server.until(lambda: server.status("/health") == 200, START_S, "started again")
        assert server.ask(SHORT).status == 200
        return f"an error event after {took:.0f} s, restarted"


@slow("a client that never reads, without a limit of time", "disconnected after 60 s")
def _(model: Path) -> str:
    with RealServer(model) as server, server.connect(SO_RCVBUF=4096) as connection:
        connection.sendall(request(TALKATIVE))
        server.until(server.running, what="let in")
        took = server.until(lambda: _connections(server) == 0, 100, "disconnected")
        return f"after {took:.0f} s"


@slow("half a head, half a body, no byte at all", "disconnected after 60 s, the body with 408; others are served")
def _(model: Path) -> str:
    with RealServer(model) as server:
        whole = request(SHORT)
        parts = (whole[:30], whole[:-5], b"")
        connections = [server.connect() for _ in parts]
        for connection, part in zip(connections, parts, strict=True):
            connection.settimeout(90)
            connection.sendall(part)
        assert server.ask(SHORT).status == 200
        since, found = time.monotonic(), []
        for connection in connections:
            found.append(f"{Answer.of(all_of(connection))} after {time.monotonic() - since:.0f} s")
            connection.close()
        assert [one.split(" ")[0] for one in found] == ["closed", "408", "closed"], found
        return ", ".join(found)


@slow("the engine killed during streams, then while idle", "error events; restarted once; then status 1 and a message")
def _(model: Path) -> str:
    with RealServer(model) as server:
        streams = [server.streaming() for _ in range(2)] + [_waiting(server)]
        server.kill_engine()
        ends = [stream.rest() for stream in streams]
        assert [end.code for end in ends] == ["engine_error"] * 3, [str(end) for end in ends]
        assert not any(b"[DONE]" in end.body for end in ends)
        down = [server.status("/health"), server.ask(SHORT).status]
        assert down == [503, 503], down
        took = server.until(lambda: server.status("/health") == 200, START_S, "started again")
        assert server.ask(SHORT).status == 200
        server.kill_engine()
        return f"3 error events, 503, ready again after {took:.1f} s, {_ends_with(server, 1, 'the engine has ended')}"


@slow("the engine killed while idle, then during streams", "503; restarted once; error events; then status 1 and a message")
def _(model: Path) -> str:
    with RealServer(model) as server:
        server.kill_engine()
        server.until(lambda: server.status("/health") == 503, AT_ONCE_S, "503")
        took = server.until(lambda: server.status("/health") == 200, START_S, "started again")
        assert server.ask(SHORT).status == 200
        stream = server.streaming()
        server.kill_engine()
        end = stream.rest()
        assert end.code == "engine_error" and b"[DONE]" not in end.body, str(end)
        return f"503, ready again after {took:.1f} s, an error event, {_ends_with(server, 1, 'the engine has ended')}"


def _waiting(server: RealServer) -> Stream:
    """Return a stream that waits for a slot."""
    stream = Stream(server.connect())
    stream.connection.sendall(request(LONG))
    server.until(lambda: server.running() == 3, what="waiting")
    return stream


def _ends_with(server: RealServer, status: int, message: str = "") -> str:
    took = server.until(lambda: server.process.poll() is not None, 60, "ended")
    assert server.process.returncode == status, f"status {server.process.returncode}"
    server.until(lambda: server.wrote(message), AT_ONCE_S, f"{message!r} on stderr: {server.lines[-3:]}")
    return f"ended with status {status} after {took:.1f} s"


@slow("the engine stopped for 3 s during a stream", "the stream goes on")
def _(model: Path) -> str:
    with RealServer(model) as server:
        stream = server.streaming()
        engine = server.kill_engine(signal.SIGSTOP)
        time.sleep(3)
        os.kill(engine, signal.SIGCONT)
        end = stream.rest()
        assert b"[DONE]" in end.body, end.body[-200:]
        still_serves(server, engine)
        return "the stream finished"


def formed(schema: dict[str, Any]) -> bytes:
    return completion(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}})


BOMBS = (
    {"type": "string", "pattern": "^(((a{1,500}){1,500}){1,500})$"},
    {"type": "array", "items": {"type": "integer"}, "minItems": 10**9},
    {"$defs": {str(i): {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(40)}, "$ref": "#/$defs/0"},
    {"type": "object", "properties": {f"p{i}": {"enum": [f"{i} {j}" for j in range(200)]} for i in range(20)}},
)


@slow("schemas that take all time and memory to compile", "400 or 200 for each in time; a request meanwhile is served")
def _(model: Path) -> str:
    with RealServer(model) as server, ThreadPoolExecutor(len(BOMBS)) as senders:
        asked = [senders.submit(server.send, formed(bomb)) for bomb in BOMBS]
        since = time.monotonic()
        meanwhile = server.ask(SHORT)
        took = time.monotonic() - since
        found = [one.result() for one in asked]
        assert meanwhile.status == 200 and {one.status for one in found} <= {200, 400}, [str(one) for one in found]
        return f"{', '.join(str(one.status) for one in found)}; the request after {took:.1f} s"


@slow("the HTTP process killed", "its engine ends within seconds")
def _(model: Path) -> str:
    found = []
    for busy in (False, True):
        with RealServer(model) as server:
            engine = server.engine
            if busy:
                server.streaming()
            server.process.kill()
            found.append(server.until(partial(is_gone, engine), 10, "gone"))
    return "gone after {:.1f} s when idle, {:.1f} s during a stream".format(*found)


@slow("SIGTERM during a stream", "503 for new requests, the stream finishes, status 0")
def _(model: Path) -> str:
    with RealServer(model) as server:
        engine, stream = server.engine, server.streaming()
        server.process.terminate()
        server.until(lambda: server.status("/ready") == 503, AT_ONCE_S, "draining")
        refused = server.ask(SHORT)
        end = stream.rest()
        assert b"[DONE]" in end.body and refused.code == "draining", f"{refused}, {end.body[-200:]!r}"
        ended = _ends_with(server, 0)
        assert is_gone(engine), "the engine is left"
        return f"{refused}, the stream finished, {ended}"


@slow("SIGTERM twice during a stream", "an error event, status 0")
def _(model: Path) -> str:
    with RealServer(model) as server:
        stream = server.streaming(TALKATIVE)
        for _ in range(2):
            server.process.terminate()
            time.sleep(0.1)
        end = stream.rest()
        assert end.code == "draining" and b"[DONE]" not in end.body, f"{end}: {end.body[-200:]!r}"
        return f"{end}, {_ends_with(server, 0)}"


@slow("SIGTERM while the model is loaded", "the server and its engine end with status 0")
def _(model: Path) -> str:
    server = RealServer(model, port=_free_port())
    server.process = subprocess.Popen(server.command, stderr=subprocess.DEVNULL)
    try:
        server.until(lambda: server.status("/health") == 200, START_S, "listening")
        engine = server.engine
        server.process.terminate()
        ended = _ends_with(server, 0)
    finally:
        server.process.kill()
    assert is_gone(engine), "the engine is left"
    return ended


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@slow("a client that never reads, and the limit of time", "its slot is free after the limit")
def _(model: Path) -> str:
    with RealServer(model, "--request-timeout", "1") as server, server.connect(SO_RCVBUF=4096) as connection:
        connection.sendall(request({**TALKATIVE, "n": 2}))
        server.until(server.running, what="let in")
        took = server.until(lambda: server.running() == 0, 6, "free")
        assert server.metric("foreword:aborts_total") == 2, "nothing was aborted"
        return f"free after {took:.1f} s"


@slow("a client that never reads, and SIGTERM", "the server ends soon after --drain-seconds")
def _(model: Path) -> str:
    with RealServer(model, "--drain-seconds", "1") as server, server.connect(SO_RCVBUF=4096) as connection:
        connection.sendall(request(TALKATIVE))
        server.until(server.running, what="let in")
        time.sleep(0.5)  # until its buffers are full
        server.process.terminate()
        return _ends_with(server, 0)


def _connections(server: RealServer) -> int:
    """Return how many connections a server has, as its process sees them."""
    port = f":{server.address[1]:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[1].endswith(port) and row[3] in ("01", "04", "05", "08") for row in rows)


@slow("40 bodies of 8 MB that are never finished", "503 for some, and the memory stays bounded")
def _(model: Path) -> str:
    body = completion(prompt="a" * 8_000_000)[:-1]
    with RealServer(model) as server, ExitStack() as opened:
        before = server.memory()
        connections = [opened.enter_context(server.connect()) for _ in range(40)]
        with ThreadPoolExecutor(40) as senders:
            list(senders.map(lambda one: _send_all(one, body), connections))
        found = server.ask(SHORT)
        growth = server.memory() - before
        refused = 40 - _connections(server)
        for connection in connections:
            connection.close()
        server.until(lambda: server.ask(SHORT).status == 200, what="serving again")
    assert growth < 400, f"the memory grew by {growth:.0f} MB"
    return f"{refused} refused, memory +{growth:.0f} MB; a short request meanwhile: {found}"


def _send_all(connection: socket.socket, sent: bytes) -> None:
    with suppress(OSError):
        connection.settimeout(5)
        connection.sendall(sent)


@slow("more connections than the process may open", "those that are open are served; later ones when others close")
def _(model: Path) -> str:
    limited = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (96, 96))
    with RealServer(model, preexec_fn=limited) as server, ExitStack() as opened:
        first = opened.enter_context(server.connect())
        for _ in range(200):
            opened.enter_context(server.connect())
        first.sendall(request(SHORT))
        found = Answer.of(all_of(first))
        assert found.status == 200, str(found)
        opened.close()
        took = server.until(lambda: server.status("/health") == 200, 30, "serving")
        return f"{found}; others after {took:.1f} s"


@slow("a full disk behind stderr", "starts, serves, restarts its engine")
def _(model: Path) -> str:
    with open("/dev/full", "w") as full:
        with RealServer(model, "--log-requests", "--host", "0.0.0.0", stderr=full, port=_free_port()) as server:
            assert server.ask(SHORT).status == 200 and server.send(b"\0\0\0\0").status == 400
            server.kill_engine()
            server.until(lambda: server.status("/health") == 503, AT_ONCE_S, "503")
            server.until(lambda: server.status("/health") == 200, START_S, "started again")
            assert server.ask(SHORT).status == 200
            return "served, restarted"


@slow("no file can be written", "starts and serves")
def _(model: Path) -> str:
    limited = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (0, 0))
    with RealServer(model, preexec_fn=limited) as server:
        assert server.ask(SHORT).status == 200
        return "served"


@slow("a port that is taken", "status 2 and a message, before the model is loaded")
def _(model: Path) -> str:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return _refuses_to_start(model, "--port", str(taken.getsockname()[1]))


@slow("a host that is not here", "status 2 and a message")
def _(model: Path) -> str:
    return _refuses_to_start(model, "--host", "192.0.2.1")


def _refuses_to_start(model: Path, *options: str) -> str:
    done = subprocess.run([*RealServer(model).command, *options], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "cannot listen on" in done.stderr, f"{done.returncode}: {done.stderr}"
    return "status 2, `cannot listen on ...`"


# The study ----------------------------------------------------------------------------------------------------------------


def tried(fault: Fault, given: Any) -> Seen:
    since = time.monotonic()
    try:
        seen, as_expected = fault.probe(given), True
    except (AssertionError, OSError) as error:
        seen, as_expected = f"{type(error).__name__}: {error}"[:500], False
    found = Seen(fault.name, fault.expected, seen, as_expected, round(time.monotonic() - since, 2))
    print(f"{'' if as_expected else 'NOT AS EXPECTED: '}{found.fault}: {found.seen} ({found.seconds} s)", flush=True)
    return found


def tried_on(server: RealServer, fault: Fault) -> Seen:
    """Provoke a fault, and look whether the server is as before."""
    engine = server.engine

    def probe(given: RealServer) -> str:
        seen = fault.probe(given)
        still_serves(given, engine)
        return seen

    return tried(Fault(fault.name, fault.expected, probe, True), server)


def report(about: dict[str, Any], found: list[Seen]) -> str:
    rows = [f"| {one.fault} | {one.expected} | {one.seen} | {'yes' if one.as_expected else '**no**'} |" for one in found]
    head = "| fault | expected | seen | as expected |\n|---|---|---|---|\n"
    where = f"{about['machine']}; commit {about['commit']}; {about['date']}; `{about['command']}`"
    return f"# Faults of a server\n\n{where}\n\n{head}" + "\n".join(rows) + "\n"


def serve_faults(
    out: Annotated[Path, typer.Option(help="Write faults.json and report.md to this folder.")],
    only: Annotated[str, typer.Option(help="Provoke only the faults with this in their name.")] = "",
    only_quick: Annotated[
        bool, typer.Option("--only-quick", help="Leave out those that need a server of their own.")
    ] = False,
    at_a_time: Annotated[int, typer.Option(min=1, help="How many servers run at a time.")] = 6,
) -> None:
    """Provoke every fault, and write what was seen. The exit status is 1 if something is not as expected."""
    chosen = [fault for fault in FAULTS if only in fault.name and (fault.is_quick or not only_quick)]
    with tempfile.TemporaryDirectory() as folder:
        model = model_folder(Path(folder))
        found: list[Seen] = []
        if any(fault.is_quick for fault in chosen):
            with RealServer(model) as server:
                found += [tried_on(server, fault) for fault in chosen if fault.is_quick]
        with ThreadPoolExecutor(at_a_time) as running:
            found += running.map(lambda fault: tried(fault, model), [fault for fault in chosen if not fault.is_quick])
    about = facts(None, model="a tiny random Llama") | {"command": command()}
    out.mkdir(parents=True, exist_ok=True)
    written = {"about": about, "faults": [asdict(one) for one in found]}
    (out / "faults.json").write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    (out / "report.md").write_text(report(about, found), encoding="utf-8")
    raise typer.Exit(not all(one.as_expected for one in found))


if __name__ == "__main__":
    typer.run(serve_faults)

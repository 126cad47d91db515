"""`run`: an engine and options -> a server that listens until a signal ends it.

The port is taken before the model is loaded, so that a busy one is known at once. While the model loads, /health answers,
and everything else is refused. After SIGTERM or Ctrl-C the server drains: running requests may finish, new ones are refused.
A second signal ends them. If the engine dies for good, the server ends with status 1.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from foreword.errors import InputError
from foreword.serve.app import app_of
from foreword.serve.async_llm import AsyncLLM
from foreword.serve.connection import Connection
from foreword.serve.errors import Refusal
from foreword.serve.generation import json_response
from foreword.serve.options import ServeOptions

CHECK_S = 0.5  # how often the server looks whether its engine is alive
LAST_ANSWERS_S = 5  # for what is still being written after the drain
YOUNG_OBJECTS = 20_000  # that the garbage collector waits for; its default is 700
ACCEPTED_AT_ONCE = 32  # clients, in one pass of the event loop
SWITCH_S = 0.0005  # how long a thread may keep the event loop waiting: a tenth of Python's default
UNREAD_S = 60.0  # a client that takes no byte of its answer for so long is disconnected

log = logging.getLogger("foreword.serve")


class Gate:
    """The application until the model is loaded, and then the one that was made for it."""

    def __init__(self) -> None:
        self.app: ASGIApp = self._closed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)

    async def _closed(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] in ("/health", "/ready"):
            answer = json_response({"status": "starting"}, 200 if scope["path"] == "/health" else 503)
        else:
            message = "the model is being loaded; try again in a moment"
            answer = Refusal(503, message, code="starting", headers={"Retry-After": "5"}).response()
        await answer(scope, receive, send)


class DrainingServer(uvicorn.Server):
    """A uvicorn server that signals drain. `drain`: lets running requests finish within some seconds; None before anything
    runs."""

    drain: Callable[[float], None] | None = None
    drain_seconds = 0.0
    signals = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.signals += 1
        if self.drain is None or self.signals > 2:
            self.should_exit = self.force_exit = True
        else:
            self.drain(self.drain_seconds if self.signals == 1 else 0.0)


def run(llm: AsyncLLM, options: ServeOptions, ready: Callable[[str], None] = lambda address: None) -> int:
    """Serve until a signal comes, and return the exit status. `llm`: not started yet. `ready`: called with the address when
    requests are served."""
    listening = listen(options.host, options.port)
    log_to_stderr(options.log_requests)
    sys.setswitchinterval(SWITCH_S)
    gate = Gate()
    _allow_connections()
    config = uvicorn.Config(
        gate,
        http=Connection,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=LAST_ANSWERS_S,
    )
    with listening, asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        return runner.run(_serve(llm, options, gate, DrainingServer(config), listening, ready))


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that has the address, or say why it cannot be had."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError, UnicodeError) as error:
        raise InputError(f"the server cannot listen on {host}:{port} ({error}); give another --host or --port") from error
    listening.setblocking(False)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # connections inherit it
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNREAD_S * 1000))
    return listening


def address_of(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _allow_connections() -> None:
    """Allow this process as many open files as the system lets it: each connection is one. The usual limit is 1,024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # some systems refuse what they offer
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _serve(
    llm: AsyncLLM,
    options: ServeOptions,
    gate: Gate,
    server: DrainingServer,
    listening: socket.socket,
    ready: Callable[[str], None],
) -> int:
    # uvloop accepts one client of a socket per pass, so that a check of health would wait behind all who came before it.
    sockets = [listening, *(listening.dup() for _ in range(ACCEPTED_AT_ONCE - 1))]
    http = asyncio.create_task(server.serve(sockets))
    try:
        starting = asyncio.create_task(llm.start())
        await asyncio.wait({http, starting}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():  # a signal came first
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return 0
        starting.result()
        _open(llm, options, gate, server)
        host, port = listening.getsockname()[:2]
        with suppress(OSError):  # the disk of stderr is full
            ready(address_of(host, port))
        return await _until_ended(llm, http)
    finally:
        server.should_exit = True
        await asyncio.gather(http, return_exceptions=True)
        await llm.close()


def _open(llm: AsyncLLM, options: ServeOptions, gate: Gate, server: DrainingServer) -> None:
    """Serve requests from now on, and drain at a signal."""
    app = app_of(llm, options)
    loop = asyncio.get_running_loop()
    tasks: list[asyncio.Task[None]] = []

    async def drain(seconds: float) -> None:
        await app.state.service.admission.drain(seconds)
        server.should_exit = True

    def begin(seconds: float) -> None:
        log.warning("stopping: running requests have %g s to finish", seconds)
        tasks.append(loop.create_task(drain(seconds)))

    def wake(seconds: float) -> None:  # in a signal handler
        loop.call_soon_threadsafe(begin, seconds)

    server.drain, server.drain_seconds = wake, options.drain_seconds
    _collect_seldom()
    gate.app = app


def _collect_seldom() -> None:
    """Let the garbage collector leave all libraries out, and search less often: with a thousand clients, a search stops all
    of their streams for a tenth of a second, and requests leave next to nothing to find."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)


async def _until_ended(llm: AsyncLLM, http: asyncio.Task[None]) -> int:
    """Wait until the server ends, or its engine."""
    while not http.done():
        await asyncio.wait({http}, timeout=CHECK_S)
        if llm.health.state == "dead":
            log.error("the engine has ended; the server ends too")
            return 1
    return 0


def log_to_stderr(requests: bool) -> None:
    """Write what the server has to say to stderr. `requests`: a line for each answer, too."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for name, level in (("foreword.serve", logging.INFO if requests else logging.WARNING), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)

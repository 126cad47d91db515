"""Replica: the application of `foreword serve` in an actor of Ray, with its engine in a child process.

Ray makes replicas, asks them whether they are healthy, and replaces them. A replica whose engine has ended leaves at once:
it would look idle, and Ray would send it every request until it believes its health checks.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from contextlib import suppress

import uvicorn
from ray import serve
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foreword.errors import EngineError, InputError
from foreword.serve.app import OPEN, app_of
from foreword.serve.async_llm import AsyncLLM
from foreword.serve.errors import Refusal
from foreword.serve.ray.options import Deployment
from foreword.serve.server import CHECK_S, listen, log_to_stderr

LAST_EVENTS_S = 0.5  # for the errors of the streams that an engine leaves behind

log = logging.getLogger("foreword.serve")


class Replica:
    """One server behind Ray's proxy."""

    async def __init__(self, deployment: Deployment) -> None:  # type: ignore[misc]  # Ray awaits it
        log_to_stderr(deployment.server.log_requests)
        context, options = serve.get_replica_context(), deployment.replicas
        self.tasks: list[asyncio.Task[None]] = []
        self.llm = AsyncLLM(**deployment.engine, restarts=0)
        await self.llm.start()
        self.served = named(app_of(self.llm, deployment.server), context.replica_tag)
        self.tasks.append(asyncio.create_task(self._leave_without_engine()))
        if options.metrics_port:
            address = options.metrics_host, options.metrics_port + int(context.rank.rank)
            self.tasks.append(asyncio.create_task(answer_alone(self.served, *address)))

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self.served

    async def check_health(self) -> None:
        """Raise an error if the engine has ended."""
        if self.llm.health.state != "ready":
            raise EngineError("the engine has ended")

    async def _leave_without_engine(self) -> None:
        while self.llm.health.state == "ready":
            await asyncio.sleep(CHECK_S)
        log.error("the engine has ended; its replica is replaced")
        await asyncio.sleep(LAST_EVENTS_S)
        os._exit(1)

    async def __del__(self) -> None:
        """Ray calls this when the requests of a replica that is no longer needed have finished."""
        for task in self.tasks:
            task.cancel()
        await self.llm.close()


def named(app: ASGIApp, name: str) -> ASGIApp:
    """Return an application whose answers name the replica that they come from."""

    async def answering(scope: Scope, receive: Receive, send: Send) -> None:
        async def signed(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Replica"] = name
            await send(message)

        await app(scope, receive, signed)

    return answering


async def answer_alone(app: ASGIApp, host: str, port: int) -> None:
    """Answer what needs no key at an address of this replica's own, as soon as it is free: the replica that had the same
    rank before may still be ending."""

    async def only_open(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] in OPEN:
            return await app(scope, receive, send)
        await Refusal(404, f"this address has {', '.join(sorted(OPEN))}").response()(scope, receive, send)

    config = uvicorn.Config(only_open, ws="none", log_config=None, access_log=False, server_header=False, lifespan="off")
    listening = await _free(host, port)
    with listening:
        await uvicorn.Server(config).serve([listening])


async def _free(host: str, port: int) -> socket.socket:
    while True:
        with suppress(InputError):
            return listen(host, port)
        await asyncio.sleep(CHECK_S)

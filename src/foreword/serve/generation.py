"""The path of a request that generates: body -> fields -> exchange -> runs -> answer.

A request enters before it costs anything. Prompts are encoded in threads, and new grammars tried in another. Whatever
happens, leaving the flow aborts the runs that have not ended: within a round when the client leaves, after the limit of
time, or when the server has drained.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from foreword.engine.request import LONGEST_SESSION, Running
from foreword.errors import ForewordError
from foreword.serve import sse
from foreword.serve.errors import ClientGone, Refusal, refused
from foreword.serve.exchange import Exchange
from foreword.serve.fields import Fields, GenerationFields, checked, names_of, read_object
from foreword.serve.flow import Flow
from foreword.serve.metrics import Counting
from foreword.serve.service import Service

LARGE_BODY = 1 << 16  # bytes; to parse a larger one here would hold up other requests
BODY_S = 60.0  # a client that needs longer to send a body only keeps a connection busy

log = logging.getLogger("foreword.serve")


@dataclass(frozen=True)
class Generation:
    """An endpoint that generates, as an ASGI application. `kind`: of its body. `exchange`: makes the exchange of one."""

    service: Service
    kind: type[GenerationFields]
    exchange: Callable[[Service, Any, str | None], Exchange]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        since, request = perf_counter(), Request(scope, receive)
        fields = await read(request, self.kind, self.service)
        self.service.check_model(fields.model)
        try:
            exchange = self.exchange(self.service, fields, _session(request))
            async with Flow(receive, self.service.options.request_seconds) as flow:
                with self.service.admission.enter(flow, len(exchange.prompts) * exchange.samples):
                    runs = await flow.first(self._runs(exchange))
                    exchange.begin(runs)
                    counting = self.service.metrics.follow(runs, since)
                    if exchange.streams:
                        await self._stream(exchange, flow, counting, send)
                    else:
                        await (await self._whole(exchange, flow, counting))(scope, receive, send)
        except ForewordError as error:
            raise refused(error, names_of(fields)) from error

    async def _runs(self, exchange: Exchange) -> list[Running]:
        """Return the checked requests of an exchange, those of a prompt next to each other."""
        settings = await asyncio.to_thread(exchange.settings)
        await self.service.trials.passed(settings)
        return await asyncio.to_thread(self.service.llm.checked, exchange.prompts, settings, exchange.samples)

    async def _stream(self, exchange: Exchange, flow: Flow, counting: Counting, send: Send) -> None:
        stream = sse.EventStream(lambda message: flow.written(send(message)))
        await stream.begin()
        try:
            with counting:
                await stream.write(exchange.opening())
                async for news in flow.rounds(self.service.llm, counting.runs, self.service.options.keep_alive_seconds):
                    if news is None:
                        await stream.write(sse.KEEP_ALIVE)
                    else:
                        counting.take(news)
                        await stream.write(exchange.chunk(news))
                await stream.write(exchange.closing())
        except ClientGone:
            raise
        except Exception as error:  # the status is out already: the client hears of it in the stream
            refusal = refused(error)
            if refusal.code == "internal_error":
                log.error("a stream failed", exc_info=error)
            await stream.write(exchange.failure(refusal))
        await stream.end()

    async def _whole(self, exchange: Exchange, flow: Flow, counting: Counting) -> Response:
        with counting:
            async for news in flow.rounds(self.service.llm, counting.runs, self.service.options.keep_alive_seconds):
                if news is not None:
                    counting.take(news)
            return json_response(exchange.whole())


def json_response(content: Any, status: int = 200) -> Response:
    body = json.dumps(content, allow_nan=False)
    return Response(body, status, {"Cache-Control": "no-store"}, media_type="application/json")


async def read(request: Request, kind: type[Fields], service: Service) -> Fields:
    """Read and check the body of a request."""
    try:
        async with asyncio.timeout(BODY_S):
            body = await request.body()
    except TimeoutError as error:
        raise Refusal(408, f"the body took longer than {BODY_S:g} s", headers={"Connection": "close"}) from error
    except ClientDisconnect as error:
        raise ClientGone from error

    def parse() -> tuple[Fields, int]:
        return checked(read_object(body), kind)

    fields, unknown = await asyncio.to_thread(parse) if len(body) > LARGE_BODY else parse()
    service.metrics.unknown_fields.inc(unknown)
    return fields


def _session(request: Request) -> str | None:
    """Return the session that a header names."""
    session = request.headers.get("x-session-id")
    if session is not None and len(session) > LONGEST_SESSION:
        raise Refusal(400, f"the header X-Session-Id is longer than {LONGEST_SESSION} characters; shorten it")
    return session

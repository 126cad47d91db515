"""The application: endpoints, and what every request passes on its way to them (guard.py).

In: an engine that has been started, and options. Out: an ASGI application. Errors have the same body everywhere. A failure
of ours is logged, and its client is told nothing but the id of the request.
"""

from __future__ import annotations

from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from foreword.serve.admission import Admission
from foreword.serve.async_llm import AsyncLLM
from foreword.serve.chat import ChatExchange
from foreword.serve.completions import CompletionExchange
from foreword.serve.errors import Refusal
from foreword.serve.fields import ChatFields, CompletionFields
from foreword.serve.generation import Generation
from foreword.serve.guard import BodyLimit, Keys, Origins, Refusals, RequestIds
from foreword.serve.metrics import Metrics
from foreword.serve.options import ServeOptions
from foreword.serve.plain_endpoints import PlainEndpoints
from foreword.serve.service import Service

PAGE = Path(__file__).parent / "page"


def app_of(llm: AsyncLLM, options: ServeOptions) -> Starlette:
    """Return the application that serves an engine. Its `state.service` has the parts."""
    service = Service(llm, options, Admission(llm, options.max_queued), Metrics(llm))
    routes = [*_api(service), *(_page() if options.page and PAGE.is_dir() else [])]
    known = frozenset(route.path for route in routes if isinstance(route, Route))
    cors = Middleware(CORSMiddleware, allow_origins=options.allow_origins, allow_methods=["*"], allow_headers=["*"])
    guards = [
        Middleware(RequestIds, service=service, known=known),
        *([cors] if options.allow_origins else []),
        Middleware(Refusals),
        Middleware(Origins, allowed=options.allow_origins),
        Middleware(Keys, digests=options.key_digests),
        Middleware(BodyLimit, most=options.max_body),
    ]
    app = Starlette(routes=routes, middleware=guards, exception_handlers={HTTPException: _refused_by_router})
    app.state.service = service
    return app


def _api(service: Service) -> list[BaseRoute]:
    plain = PlainEndpoints(service)
    chat = Generation(service, ChatFields, ChatExchange)
    completions = Generation(service, CompletionFields, CompletionExchange)
    return [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/models", plain.models),
        Route("/v1/models/{model:path}", plain.model),
        Route("/tokenize", plain.tokenize, methods=["POST"]),
        Route("/detokenize", plain.detokenize, methods=["POST"]),
        Route("/health", plain.health),
        Route("/ready", plain.ready),
        Route("/version", plain.version),
        Route("/metrics", plain.metrics),
    ]


def _page() -> list[BaseRoute]:
    """Return the routes of the web page: its index, and the files next to it."""

    async def index(request: Request) -> Response:
        return FileResponse(PAGE / "index.html")

    return [Route("/", index), Mount("/page", StaticFiles(directory=PAGE))]


async def _refused_by_router(request: Request, error: Exception) -> Response:
    """Answer with our body where no endpoint, or another method, was meant."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}; GET /openapi.json lists what there is"
    return Refusal(error.status_code, message, code="not_found", headers=error.headers).response()

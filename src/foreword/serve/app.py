"""The application: endpoints, and what every request passes on its way to them (guard.py).

`app_of` makes it for an engine. Errors have the same body everywhere. A failure of ours is logged, and its client is told
nothing but the id of the request.
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
from foreword.serve.errors import Refusal, refused
from foreword.serve.fields import ChatFields, CompletionFields
from foreword.serve.generation import Generation, json_response
from foreword.serve.guard import BodyLimit, Keys, Origins, RequestIds
from foreword.serve.metrics import Metrics
from foreword.serve.options import ServeOptions
from foreword.serve.plain_endpoints import PlainEndpoints
from foreword.serve.service import Service

PAGE = Path(__file__).parent / "page"


def app_of(llm: AsyncLLM, options: ServeOptions) -> Starlette:
    """Return the application that serves an engine. Its `state.service` has the parts."""
    admission = Admission(llm, options.max_queued)
    service = Service(llm, options, admission, Metrics(llm))
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
    handlers = {Refusal: _refuse, HTTPException: _refuse_http, Exception: _fail}
    app = Starlette(routes=routes, middleware=guards, exception_handlers=handlers)
    app.state.service = service
    return app

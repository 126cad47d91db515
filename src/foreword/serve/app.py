"""The application: endpoints, and what every request passes on its way to them (guard.py).

In: an engine that has been started, and options. Out: an ASGI application. Errors have the same body everywhere. A failure
of ours is logged, and its client is told nothing but the id of the request.
"""

from __future__ import annotations

from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from foreword.serve import answers, static
from foreword.serve.admission import Admission
from foreword.serve.async_llm import AsyncLLM
from foreword.serve.chat import ChatExchange
from foreword.serve.completions import CompletionExchange
from foreword.serve.errors import Refusal
from foreword.serve.fields import (
    ChatFields,
    CompletionFields,
    DetokenizeFields,
    MethodFields,
    ResponseFields,
    TokenizeFields,
)
from foreword.serve.generation import Generation, json_response
from foreword.serve.guard import BodyLimit, Keys, Origins, Refusals, RequestIds, Turns
from foreword.serve.metrics import Metrics
from foreword.serve.openapi import WITH_ENGINE, Endpoint, document
from foreword.serve.options import ServeOptions
from foreword.serve.plain_endpoints import PlainEndpoints
from foreword.serve.responses import ResponseExchange
from foreword.serve.service import Service
from foreword.serve.trials import GrammarTrials

OPEN = frozenset({"/health", "/ready", "/metrics"})  # without a key


def app_of(llm: AsyncLLM, options: ServeOptions) -> Starlette:
    """Return the application that serves an engine. Its `state.service` has the parts."""
    service = Service(llm, options, Admission(llm, options.max_queued), Metrics(llm), GrammarTrials(llm))
    endpoints = _endpoints(service)
    pages = static.routes() if options.page else []
    cors = Middleware(CORSMiddleware, allow_origins=options.allow_origins, allow_methods=["*"], allow_headers=["*"])
    guards = [
        Middleware(Turns, at_once=OPEN),
        Middleware(RequestIds, metrics=service.metrics, known=frozenset(one.path for one in endpoints)),
        *([cors] if options.allow_origins else []),
        Middleware(Refusals),
        Middleware(Origins, allowed=options.allow_origins),
        Middleware(Keys, digests=options.key_digests, open_paths=OPEN | {page.path for page in pages}),
        Middleware(BodyLimit, most=options.max_body),
    ]
    routes = [*(endpoint.route() for endpoint in endpoints), *pages]
    app = Starlette(routes=routes, middleware=guards, exception_handlers={HTTPException: _refused_by_router})
    app.state.service = service
    return app


def _endpoints(service: Service) -> list[Endpoint]:
    plain = PlainEndpoints(service)
    chat = Generation(service, ChatFields, ChatExchange)
    completions = Generation(service, CompletionFields, CompletionExchange)
    responses = Generation(service, ResponseFields, ResponseExchange)

    async def describe(request: Request) -> Response:
        return json_response(document(found, OPEN))

    generates = partial(Endpoint, "POST", also=WITH_ENGINE)
    found = [
        generates(
            "/v1/chat/completions", chat, "Continue a conversation.", answers.ChatAnswer, ChatFields, answers.ChatChunk
        ),
        generates(
            "/v1/completions",
            completions,
            "Continue texts.",
            answers.CompletionAnswer,
            CompletionFields,
            answers.CompletionChunk,
        ),
        generates(
            "/v1/responses",
            responses,
            "Continue a conversation of items.",
            answers.ResponseAnswer,
            ResponseFields,
            answers.ResponseEvent,
        ),
        Endpoint("GET", "/v1/models", plain.models, "The model, under all its names.", answers.ModelCards),
        Endpoint("GET", "/v1/models/{model:path}", plain.model, "The model.", answers.ModelCard, also=(404,)),
        Endpoint(
            "POST", "/tokenize", plain.tokenize, "The tokens of a text or of messages.", answers.Tokens, TokenizeFields
        ),
        Endpoint("POST", "/detokenize", plain.detokenize, "The text of tokens.", answers.Text, DetokenizeFields),
        Endpoint("GET", "/foreword/methods", plain.methods, "The drafting method, and which there are.", answers.Methods),
        Endpoint(
            "POST",
            "/foreword/method",
            plain.use_method,
            "Switch to another method.",
            answers.Methods,
            MethodFields,
            also=(409,),
        ),
        Endpoint("GET", "/health", plain.health, "Whether the engine lives.", answers.Status),
        Endpoint("GET", "/ready", plain.ready, "Whether requests are let in.", answers.Status),
        Endpoint("GET", "/version", plain.version, "The version, and what the fingerprint is made of.", answers.Version),
        Endpoint("GET", "/metrics", plain.metrics, "Metrics for Prometheus.", None, kind="text/plain"),
        Endpoint("GET", "/openapi.json", describe, "This document.", None),
    ]
    return found


async def _refused_by_router(request: Request, error: Exception) -> Response:
    """Answer with our body where no endpoint, or another method, was meant."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}; GET /openapi.json lists what there is"
    return Refusal(error.status_code, message, code="not_found", headers=error.headers).response()

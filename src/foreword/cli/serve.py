"""`foreword serve`: a server with OpenAI's endpoints. It needs the extra: pip install 'foreword[serve]'."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foreword.cli.console import complain, note, notes
from foreword.cli.options import MethodOptions, ModelOptions, Slots, Tp
from foreword.errors import ForewordError
from foreword.serve.options import ServeOptions, digest

if TYPE_CHECKING:
    from foreword.serve.async_llm import AsyncLLM

SERVE_EXAMPLES = """\
[bold]Examples[/]

  foreword serve

  foreword serve --model ./my-model --method prompt_lookup --slots 16 --port 9000

  curl localhost:8000/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Why is the sky blue?"}]}'

  openssl rand -hex 16 > keys.txt; foreword serve --host 0.0.0.0 --api-key-file keys.txt
"""

SERVER, LIMITS, SAFETY = "Server", "Limits", "Safety"  # panels of --help
_of_server = partial(typer.Option, rich_help_panel=SERVER)
_of_limits = partial(typer.Option, rich_help_panel=LIMITS)
_of_safety = partial(typer.Option, rich_help_panel=SAFETY)

NEEDED = ("httptools", "msgspec", "prometheus_client", "starlette", "uvicorn")
KEY_VARIABLE = "FOREWORD_API_KEY"
LOCAL = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class ServerOptions:
    """Where the server listens, what it serves, and its limits."""

    host: Annotated[
        str, _of_server(metavar="NAME", help="The address to listen on. 0.0.0.0 is all addresses of this machine.")
    ] = "127.0.0.1"
    port: Annotated[int, _of_server(min=0, max=65535, metavar="N", help="The port; 0 is any free one.")] = 8000
    served_model_name: Annotated[
        list[str],
        _of_server(metavar="NAME", help="What clients call the model; may be repeated. Default: what --model says."),
    ] = field(default_factory=list)
    no_page: Annotated[bool, _of_server("--no-page", metavar="", help="Leave out the web page at /.")] = False
    switch_methods: Annotated[
        bool, _of_server("--switch-methods", metavar="", help="Let clients change the method while nothing runs.")
    ] = False
    in_process: Annotated[
        bool,
        _of_server(
            "--in-process",
            metavar="",
            help="Run the engine in the server's own process, to debug it: no warm-up, slower under load.",
        ),
    ] = False
    log_requests: Annotated[
        bool, _of_server("--log-requests", metavar="", help="Log a line for each answer, without its content.")
    ] = False
    max_queued: Annotated[
        int, _of_limits(min=0, metavar="N", help="Outputs that may wait for a slot; further requests get status 429.")
    ] = ServeOptions.max_queued
    max_body: Annotated[int, _of_limits(min=1, metavar="BYTES", help="The largest body of a request.")] = (
        ServeOptions.max_body
    )
    request_timeout: Annotated[
        float, _of_limits(min=0.001, metavar="SECONDS", help="The most time for a request, its wait included.")
    ] = ServeOptions.request_seconds
    restarts: Annotated[
        int, _of_limits(min=0, metavar="N", help="Start the engine again so often if it dies; then the server ends.")
    ] = 1
    drain_seconds: Annotated[
        float, _of_limits(min=0, metavar="SECONDS", help="How long running requests may go on after Ctrl-C or SIGTERM.")
    ] = ServeOptions.drain_seconds
    api_key_file: Annotated[
        Path | None,
        _of_safety(
            metavar="FILE", help=f"A file of API keys, one per line. Keys in {KEY_VARIABLE} count too. Default: no key."
        ),
    ] = None
    allow_origin: Annotated[
        list[str],
        _of_safety(
            metavar="ORIGIN",
            help="Accept requests of web pages of this origin, such as https://example.org, or of all: *; may be repeated. "
            "Default: none.",
        ),
    ] = field(default_factory=list)

    def options(self) -> ServeOptions:
        return ServeOptions(
            host=self.host,
            port=self.port,
            key_digests=_digests(self.api_key_file),
            allow_origins=tuple(self.allow_origin),
            served_names=tuple(self.served_model_name),
            max_queued=self.max_queued,
            max_body=self.max_body,
            request_seconds=self.request_timeout,
            drain_seconds=self.drain_seconds,
            page=not self.no_page,
            switch_methods=self.switch_methods,
            log_requests=self.log_requests,
        )


def serve(model: ModelOptions, method: MethodOptions, server: ServerOptions, slots: Slots = 8, tp: Tp = None) -> None:
    """Serve a model to programs that speak OpenAI's API.

    Endpoints: /v1/chat/completions, /v1/completions and /v1/responses, streaming or not, /v1/models, /tokenize, /detokenize,
    /health, /ready, /metrics for Prometheus, and /openapi.json, which lists all fields. Requests that come at the same time
    share the batch. The output is that of plain decoding; in half precision up to near-ties. Ctrl-C lets running requests
    finish; a second one ends them.
    """
    _check_installed()
    from foreword.serve.server import run  # noqa: PLC0415  needs the extra

    options = server.options()
    if options.host not in LOCAL and not options.key_digests:
        complain(f"everyone who can reach {options.host} can use this server; add --api-key-file", "warning", "yellow")
    status = run(_engine(model, method, slots, server, tp), options, partial(_greet, model.name))
    if status:
        raise typer.Exit(status)


def _greet(model: str, address: str) -> None:
    notes().print(f"serving {model} at {address}", soft_wrap=True)
    note("Ctrl-C stops the server; requests that run may finish")


def _check_installed() -> None:
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ForewordError(f"a server needs {', '.join(missing)}; install the extra: pip install 'foreword[serve]'")


def _digests(file: Path | None) -> tuple[bytes, ...]:
    """Return the digests of the API keys in a file and in the environment, which is cleared for child processes."""
    keys = os.environ.pop(KEY_VARIABLE, "").split()
    if file is not None:
        try:
            keys += file.read_text(encoding="utf-8").split()
        except (OSError, ValueError) as error:
            raise typer.BadParameter(f"cannot read {file}: {error}", param_hint="--api-key-file") from error
        if not keys:
            raise typer.BadParameter(f"{file} has no key; write one per line", param_hint="--api-key-file")
    return tuple(map(digest, keys))


def _engine(
    model: ModelOptions, method: MethodOptions, slots: int, server: ServerOptions, tp: int | None = None
) -> AsyncLLM:
    from foreword.api import load  # noqa: PLC0415  imports torch
    from foreword.serve.async_llm import AsyncLLM  # noqa: PLC0415  as above

    own = method.own() | {"drafter": method.drafter, "rows": method.rows, "slots": slots, "isolated": True}
    if tp is not None:
        own["tp"] = tp
    if server.in_process:
        if tp is not None:
            raise typer.BadParameter(
                "several ranks need an engine in a process of its own; leave it out", param_hint="--in-process"
            )
        return AsyncLLM.of(load(model.model, method.method, **model.where(), **own))
    return AsyncLLM(model.model, method.method, restarts=server.restarts, **model.where(), **own)

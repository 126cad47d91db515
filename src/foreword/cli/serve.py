"""`foreword serve`: a server with OpenAI's endpoints. It needs the extra: pip install 'foreword[serve]'."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foreword.cli.console import complain, note, notes
from foreword.cli.options import MethodOptions, ModelOptions, Slots, Tp
from foreword.errors import ForewordError, InputError
from foreword.serve.options import KEY_VARIABLE, ServeOptions, digests

if TYPE_CHECKING:
    from foreword.serve.async_llm import AsyncLLM
    from foreword.serve.ray.options import RayOptions

SERVE_EXAMPLES = """\
[bold]Examples[/]

  foreword serve

  foreword serve --model ./my-model --method prompt_lookup --slots 16 --port 9000

  curl localhost:8000/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Why is the sky blue?"}]}'

  openssl rand -hex 16 > keys.txt; foreword serve --host 0.0.0.0 --api-key-file keys.txt

  foreword serve --ray --replicas 2 --model ./my-model
"""

SERVER, LIMITS, SAFETY, REPLICAS = "Server", "Limits", "Safety", "Replicas"  # panels of --help
_of_server = partial(typer.Option, rich_help_panel=SERVER)
_of_limits = partial(typer.Option, rich_help_panel=LIMITS)
_of_safety = partial(typer.Option, rich_help_panel=SAFETY)
_of_replicas = partial(typer.Option, rich_help_panel=REPLICAS)

NEEDED = ("httptools", "msgspec", "prometheus_client", "starlette", "uvicorn")
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


@dataclass(frozen=True)
class ReplicaOptions:
    """Several servers of one model behind one address."""

    ray: Annotated[
        bool,
        _of_replicas(
            "--ray",
            metavar="",
            help="Run replicas of the server on this machine behind Ray Serve, each with its own engine and, if there are "
            "GPUs, its own GPU. A session stays on its replica. If an engine dies, its replica is replaced; --restarts has "
            "no meaning. Needs: pip install 'foreword\\[ray]'.",
        ),
    ] = False
    replicas: Annotated[int | None, _of_replicas(min=1, metavar="N", help="With --ray: how many. Default: 2.")] = None
    ray_config: Annotated[
        Path | None,
        _of_replicas(
            metavar="FILE",
            help="With --ray: a TOML file of everything else about replicas, such as scaling with the load, GPUs and health "
            "checks. examples/ray.toml has every key. Default: none.",
        ),
    ] = None

    def check(self, server: ServerOptions) -> None:
        """Refuse options that have no meaning together."""
        for name, given in (("--replicas", self.replicas), ("--ray-config", self.ray_config)):
            if given is not None and not self.ray:
                raise typer.BadParameter("it is about replicas; add --ray", param_hint=name)
        for name, flag in (("--in-process", server.in_process), ("--switch-methods", server.switch_methods)):
            if flag and self.ray:
                raise typer.BadParameter("it is for one server, not for replicas; leave out --ray or this", param_hint=name)

    def options(self) -> RayOptions:
        """Read the file. --replicas wins over it."""
        import msgspec  # noqa: PLC0415  needs the extra

        from foreword.serve.ray.options import RayOptions, read_options  # noqa: PLC0415  as above

        found = RayOptions() if self.ray_config is None else read_options(self.ray_config)
        return found if self.replicas is None else msgspec.structs.replace(found, replicas=self.replicas)


def serve(
    model: ModelOptions,
    method: MethodOptions,
    server: ServerOptions,
    replicas: ReplicaOptions,
    slots: Slots = 8,
    tp: Tp = None,
) -> None:
    """Serve a model to programs that speak OpenAI's API.

    Endpoints: /v1/chat/completions, /v1/completions and /v1/responses, streaming or not, /v1/models, /tokenize, /detokenize,
    /health, /ready, /metrics for Prometheus, and /openapi.json, which lists all fields. Requests that come at the same time
    share the batch. The output is that of plain decoding; in half precision up to near-ties. Ctrl-C lets running requests
    finish; a second one ends them.
    """
    _check_installed()
    replicas.check(server)
    options = server.options()
    if options.host not in LOCAL and not options.key_digests:
        complain(f"everyone who can reach {options.host} can use this server; add --api-key-file", "warning", "yellow")
    ready, loading = partial(_greet, model.name), _loading(model, method, slots, tp)
    if replicas.ray:
        _run_replicas(loading, options, replicas, ready)
        return
    from foreword.serve.server import run  # noqa: PLC0415  needs the extra

    status = run(_engine(loading, server), options, ready)
    if status:
        raise typer.Exit(status)


def _run_replicas(
    engine: dict[str, Any], options: ServeOptions, replicas: ReplicaOptions, ready: Callable[[str], None]
) -> None:
    from foreword.serve.ray import check_installed  # noqa: PLC0415  needs the extra

    check_installed()
    from foreword.serve.ray.cluster import run  # noqa: PLC0415  as above
    from foreword.serve.ray.options import Deployment  # noqa: PLC0415  as above

    note("starting Ray and the replicas; this takes a quarter of a minute, and longer for large models")
    run(Deployment(engine, options, replicas.options()), ready)


def _greet(model: str, address: str) -> None:
    notes().print(f"serving {model} at {address}", soft_wrap=True)
    note("Ctrl-C stops the server; requests that run may finish")


def _check_installed() -> None:
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ForewordError(f"a server needs {', '.join(missing)}; install the extra: pip install 'foreword[serve]'")


def _digests(file: Path | None) -> tuple[bytes, ...]:
    try:
        return digests(file)
    except InputError as error:
        raise typer.BadParameter(str(error), param_hint="--api-key-file") from error


def _loading(model: ModelOptions, method: MethodOptions, slots: int, tp: int | None) -> dict[str, Any]:
    """Return the parameters of `AsyncLLM`."""
    own = method.own() | {"drafter": method.drafter, "rows": method.rows, "slots": slots, "isolated": True}
    ranks = {} if tp is None else {"tp": tp}
    return {"model": model.model, "method": method.method, **model.where(), **own, **ranks}


def _engine(loading: dict[str, Any], server: ServerOptions) -> AsyncLLM:
    from foreword.api import load  # noqa: PLC0415  imports torch
    from foreword.serve.async_llm import AsyncLLM  # noqa: PLC0415  as above

    if not server.in_process:
        return AsyncLLM(restarts=server.restarts, **loading)
    if "tp" in loading:
        raise typer.BadParameter(
            "several ranks need an engine in a process of its own; leave it out", param_hint="--in-process"
        )
    return AsyncLLM.of(load(**loading))

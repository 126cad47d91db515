"""`run`: replicas on this machine, in a cluster of Ray of their own, until a signal ends them.

Ray is set up to be private: its processes need a token that only they have, write to a temporary folder, and send no usage
statistics. After SIGTERM or Ctrl-C new requests are refused, and running ones may finish. A second signal ends them. Ray
reads its environment when it is imported, so functions import it here, after that is set.
"""

from __future__ import annotations

import logging
import math
import os
import re
import secrets
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

from foreword.errors import EngineError, InputError
from foreword.serve.async_llm import AsyncLLM
from foreword.serve.options import ServeOptions
from foreword.serve.ray.ingress import CALLBACK, MAX_BODY_VARIABLE
from foreword.serve.ray.options import Deployment
from foreword.serve.server import address_of, listen

LOOPBACK, SIGNALS = "127.0.0.1", (signal.SIGTERM, signal.SIGINT)
LONGEST_FOLDER = 24  # characters: the path of a socket has at most 107, and Ray's own names take the others

log = logging.getLogger("foreword.serve")


def run(deployment: Deployment, ready: Callable[[str], None]) -> int:
    """Serve until a signal comes, and return the exit status. `ready`: called with the address when requests are served."""
    server = deployment.server
    with listen(server.host, server.port) as listening:  # a busy port is known before anything starts
        port = listening.getsockname()[1]
    AsyncLLM(**deployment.engine).fetched()  # once, and not by every replica
    os.environ |= environment(server)
    with signals_kept(), suppress(KeyboardInterrupt), private_cluster(deployment):
        _start(deployment, port)
        ready(address_of(server.host, port))
        try:
            while True:
                signal.pause()
        except KeyboardInterrupt:
            log.warning("stopping: running requests have %g s to finish", server.drain_seconds)
            _drain()
    return 0


def environment(server: ServeOptions) -> dict[str, str]:
    """Return what Ray's processes are told."""
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": CALLBACK,
        MAX_BODY_VARIABLE: str(server.max_body),
    }


@contextmanager
def signals_kept() -> Iterator[None]:
    """Restore the handlers of this process after this block."""
    before = {sig: signal.getsignal(sig) for sig in SIGNALS}
    try:
        yield
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)


def stop_at_signals() -> None:
    """Raise KeyboardInterrupt when SIGTERM or SIGINT comes."""

    def stop(sig: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    for sig in SIGNALS:
        signal.signal(sig, stop)


@contextmanager
def private_cluster(deployment: Deployment) -> Iterator[None]:
    """Start Ray on this machine for the time of this block."""
    import ray  # noqa: PLC0415  reads the environment

    options = deployment.replicas
    needed = math.ceil(max(options.replicas, options.max_replicas) * options.cpus)  # replicas may share cores, but not wait
    folder = tempfile.mkdtemp(prefix="foreword-", dir=None if len(tempfile.gettempdir()) <= LONGEST_FOLDER else "/tmp")
    stop_at_signals()
    try:
        ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, needed),
            include_dashboard=False,
            logging_level=logging.ERROR,
            _node_ip_address=LOOPBACK,
            _temp_dir=folder,
        )
        stop_at_signals()  # again: Ray aborts the process at SIGTERM
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _start(deployment: Deployment, port: int) -> None:
    """Start proxy and replicas, and return when all are ready."""
    import ray  # noqa: PLC0415  reads the environment
    from ray import serve  # noqa: PLC0415  as above
    from ray.serve.config import HTTPOptions, ProxyLocation  # noqa: PLC0415  as above

    from foreword.serve.ray.deployment import NAME, QUIET, application, gpus_of  # noqa: PLC0415  as above

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    count = deployment.replicas.replicas
    gpus, there = gpus_of(deployment) * count, int(ray.cluster_resources().get("GPU", 0))
    if gpus > there:
        raise InputError(f"{count} replicas need {gpus} GPUs, and this machine has {there}; set replicas or gpus")
    serve.start(
        proxy_location=ProxyLocation.HeadOnly,
        http_options=HTTPOptions(host=deployment.server.host, port=port),
        logging_config=QUIET,
    )
    try:
        serve.run(application(deployment), name=NAME, route_prefix="/")
    except RuntimeError as error:
        said = serve.status().applications[NAME].deployments[NAME].message
        raise EngineError(f"the replicas could not be started: {_reason(said) or error}") from error


def _reason(said: str) -> str:
    """Return the error at the end of the last traceback in what Ray says of a deployment."""
    found = re.findall(r"^(?:foreword\.errors\.)?(\w+): (.+)$", said, re.MULTILINE)
    return f"{found[-1][0]}: {found[-1][1]}" if found else said


def _drain() -> None:
    """Refuse new requests, and return when the running ones have finished or their time is over."""
    from ray import serve  # noqa: PLC0415  reads the environment

    from foreword.serve.ray.deployment import NAME  # noqa: PLC0415  as above

    serve.delete(NAME)

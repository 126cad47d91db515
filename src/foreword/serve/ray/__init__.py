"""Several replicas of a server behind Ray Serve. It needs the extra: pip install 'foreword[ray]'.

`foreword serve --ray` runs them on this machine (`cluster.py`). On a cluster of your own, `foreword.serve.ray:app` is what
`serve run` and `serve deploy` import. A replica is the HTTP process of `foreword serve` with its engine in a child process
(`replica.py`). Ray's proxy chooses the replica (`routing.py`), and passes each request through `ingress.py` before.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from foreword.errors import ForewordError

if TYPE_CHECKING:
    from ray.serve import Application

NEEDED = ("ray", "mmh3", "starlette", "uvicorn", "msgspec", "prometheus_client", "httptools")


def app(args: dict[str, Any]) -> Application:
    """Return the application for `serve run foreword.serve.ray:app` and for the `args` of a Serve config file. `args`: as in
    examples/ray_serve.yaml."""
    check_installed()
    from foreword.serve.ray.deployment import application  # noqa: PLC0415  needs the extra
    from foreword.serve.ray.options import deployment_of  # noqa: PLC0415  as above

    return application(deployment_of(args))


def check_installed() -> None:
    """Raise an error that says what to install, if anything is missing."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ForewordError(f"replicas need {', '.join(missing)}; install the extra: pip install 'foreword[ray]'")

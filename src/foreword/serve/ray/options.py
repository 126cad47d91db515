"""The options of replicas: a TOML file, or the arguments of a Serve application -> `RayOptions`, or a whole `Deployment`.

A key that nobody knows is refused by name, and so is a value of another type or out of its range. Needs msgspec, not Ray.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from foreword.errors import InputError
from foreword.serve.options import ServeOptions, digests

DEFAULT_SLOTS = 8  # of `foreword serve`
MORE_THAN_SLOTS = 4  # requests of a replica in addition to those in its slots: they are being encoded, or generate nothing
NOT_OF_A_REPLICA = {"host", "port", "key_digests", "switch_methods"}  # options of a server that others decide, or nobody

Natural = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Kind = TypeVar("Kind")


class RayOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many replicas there are, what each of them gets, and when one is replaced. Times are in seconds."""

    replicas: Count = 2
    """Replicas at the start, and the fewest."""

    max_replicas: Natural = 0
    """The most replicas. If it is larger than `replicas`, their number follows the load. 0: as many as `replicas`."""

    target_load: Annotated[float, Meta(ge=0)] = 0.0
    """Requests per replica, running and waiting, that the number of replicas aims at. 0: the number of slots."""

    upscale_delay: Seconds = 5.0
    """How long the load must be higher before replicas are added."""

    downscale_delay: Seconds = 300.0
    """How long the load must be lower before replicas are removed."""

    ongoing: Natural = 0
    """Requests that a replica has at a time; others wait in the proxy. 0: four more than there are slots."""

    session_fallbacks: Natural = 0
    """How many other replicas may take a request of a session whose replica is full. 0: the request waits."""

    gpus: Annotated[int, Meta(ge=-1)] = -1
    """GPUs of a replica, all on one machine. -1: one for each rank (`tp`) if the cluster has GPUs, else none."""

    cpus: Annotated[float, Meta(gt=0)] = 1.0
    """CPUs of a replica, as Ray counts them. Without a GPU, its engine computes with that many threads."""

    health_period: Annotated[float, Meta(gt=0)] = 1.0
    """Time between two checks of a replica. After three failed checks in a row it is replaced; if its process or its engine
    has ended, at once."""

    health_timeout: Annotated[float, Meta(gt=0)] = 10.0
    """A check that takes longer has failed."""

    start_attempts: Count = 1
    """How often the first replicas may fail to start before the deployment fails. Later ones are started again and again."""

    metrics_port: Port = 0
    """A replica answers /metrics, /health and /ready itself at this port plus its rank: 0, 1, 2, ... 0: it does not."""

    metrics_host: str = "127.0.0.1"
    """The address for `metrics_port`."""

    def __post_init__(self) -> None:
        if 0 < self.max_replicas < self.replicas:
            raise ValueError(f"max_replicas is {self.max_replicas}, below the {self.replicas} of replicas")

    @property
    def scales(self) -> bool:
        return self.max_replicas > self.replicas

    def ongoing_of(self, slots: int) -> int:
        """Return how many requests a replica has at a time."""
        return self.ongoing or slots + MORE_THAN_SLOTS


class Arguments(RayOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The arguments of a Serve application. `engine`: the parameters of `foreword.load`. `server`: fields of `ServeOptions`,
    and `api_key_file`."""

    engine: dict[str, Any] = {}
    server: dict[str, Any] = {}


@dataclass(frozen=True)
class Deployment:
    """What each replica loads and serves, and how replicas are managed. `engine`: the parameters of `AsyncLLM`."""

    engine: dict[str, Any]
    server: ServeOptions
    replicas: RayOptions

    def __post_init__(self) -> None:
        if 0 < self.replicas.gpus < self.ranks:
            raise InputError(f"gpus is {self.replicas.gpus}, but an engine with tp = {self.ranks} needs as many")

    @property
    def slots(self) -> int:
        return int(self.engine["slots"])

    @property
    def ranks(self) -> int:
        """How many processes divide the model of one replica."""
        return int(self.engine.get("tp") or 1)


def read_options(file: Path) -> RayOptions:
    """Read a TOML file with fields of `RayOptions`."""
    try:
        given = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {file}: {error}") from error
    return _converted(given, RayOptions, str(file))


def deployment_of(args: Mapping[str, Any]) -> Deployment:
    """Return what the arguments of a Serve application say."""
    found = _converted(dict(args), Arguments, "the arguments of foreword.serve.ray:app")
    engine = {"slots": DEFAULT_SLOTS, "isolated": True, **found.engine}
    return Deployment(engine, _server_options(found.server), found)


def _server_options(given: Mapping[str, Any]) -> ServeOptions:
    known = {one.name for one in fields(ServeOptions)} - NOT_OF_A_REPLICA | {"api_key_file"}
    if unknown := sorted(given.keys() - known):
        raise InputError(f"server has an unknown field `{unknown[0]}`; it may have {', '.join(sorted(known))}")
    values = dict(given)
    keys = values.pop("api_key_file", None)
    options = _converted(values, ServeOptions, "server")
    return replace(options, key_digests=digests(None if keys is None else Path(keys)))


def _converted(given: Mapping[str, Any], kind: type[Kind], where: str) -> Kind:
    """Return a mapping as options. `serve run` gives all values as text, so text is read as numbers."""
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        names = ", ".join(sorted(one.name for one in msgspec.structs.fields(RayOptions)))
        known = f"; there are {names}" if "unknown field" in str(error) else ""
        raise InputError(f"{where} cannot be used: {error}{known}") from error

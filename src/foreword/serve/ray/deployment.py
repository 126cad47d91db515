"""A `Deployment` -> an application of Ray Serve: how many replicas, on which devices, and when one is replaced."""

from __future__ import annotations

from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, BackpressureConfig, RequestRouterConfig
from ray.serve.schema import LoggingConfig

from foreword.serve.errors import RETRY_S
from foreword.serve.ray.options import Deployment, RayOptions
from foreword.serve.ray.replica import Replica
from foreword.serve.ray.routing import SessionRouter

NAME = "foreword"
QUIET = LoggingConfig(log_level="CRITICAL", enable_access_log=False)  # our own processes log for themselves
LOOK_BACK_S = 15.0  # the load is a mean over this time; Ray reports it every 10 s


def application(deployment: Deployment) -> Application:
    """Return what `serve.run` runs."""
    options = deployment.replicas
    replica = serve.deployment(
        serve.ingress()(Replica),
        name=NAME,
        max_ongoing_requests=options.ongoing_of(deployment.slots),
        max_queued_requests=deployment.server.max_queued,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=RETRY_S),
        request_router_config=RequestRouterConfig(
            request_router_class=SessionRouter,
            request_router_kwargs={"num_fallback_replicas": options.session_fallbacks},
        ),
        health_check_period_s=options.health_period,
        health_check_timeout_s=options.health_timeout,
        graceful_shutdown_timeout_s=deployment.server.drain_seconds,
        graceful_shutdown_wait_loop_s=0.5,
        max_constructor_retry_count=options.start_attempts,
        logging_config=QUIET,
        **_replicas(options, deployment.slots),
        **_resources(deployment),
    )
    return replica.bind(deployment)


def _replicas(options: RayOptions, slots: int) -> dict[str, Any]:
    if not options.scales:
        return {"num_replicas": options.replicas}
    scaling = AutoscalingConfig(
        min_replicas=options.replicas,
        max_replicas=options.max_replicas,
        target_ongoing_requests=options.target_load or slots,
        upscale_delay_s=options.upscale_delay,
        downscale_delay_s=options.downscale_delay,
        look_back_period_s=LOOK_BACK_S,
    )
    return {"autoscaling_config": scaling}


def _resources(deployment: Deployment) -> dict[str, Any]:
    """Return what Ray reserves for a replica. The ranks of an engine are children of its replica, so all of their GPUs are
    in one bundle, which lies on one machine: Ray shows them to one process."""
    gpus, cpus = gpus_of(deployment), deployment.replicas.cpus
    actor = {"num_cpus": cpus, "num_gpus": gpus}
    if deployment.ranks == 1:
        return {"ray_actor_options": actor}
    bundle = {"CPU": cpus, **({"GPU": float(gpus)} if gpus else {})}
    return {"ray_actor_options": actor, "placement_group_bundles": [bundle], "placement_group_strategy": "STRICT_PACK"}


def gpus_of(deployment: Deployment) -> int:
    """Return how many GPUs a replica gets."""
    if deployment.replicas.gpus >= 0:
        return deployment.replicas.gpus
    if deployment.engine.get("device") == "cpu" or not ray.cluster_resources().get("GPU", 0):
        return 0
    return deployment.ranks

"""SessionRouter: which replica gets a request. Ray's proxies import it."""

from __future__ import annotations

from typing import Any

from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter


class SessionRouter(ConsistentHashRouter):
    """Sends the requests of a session to one replica, by consistent hashing: when replicas come or go, few sessions move.
    Requests without a session go to the replica that has the fewest."""

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """Return groups of replicas: the first group with a replica that is not full gets the request."""
        if pending_request is None or pending_request.metadata.session_id:
            return await super().choose_replicas(candidate_replicas, pending_request)
        pending_request.routing_context.should_backoff = True
        return [list(candidate_replicas)]

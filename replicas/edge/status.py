"""GET /health, /ready, /cluster, /metrics, /version, /v1/models: what the edge knows of itself and its replicas."""

from __future__ import annotations

import time
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from manta import __version__
from manta.engine.errors import Unavailable

from .client import EdgeContext, ReplicaStatus
from .endpoints import check_model
from .errors import reply_for
from .sse import encode_json

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class StatusEndpoints:
    """Endpoints that start no work."""

    def __init__(self, context: EdgeContext) -> None:
        self._context = context
        self._created = int(time.time())

    async def health(self, request: Request) -> Response:
        """200 for as long as the process answers, also while it loads or drains."""
        return _json({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """200 when work is taken; 503 while loading or draining. The body lists every replica either way, and says in
        `missing` what replicas wait for that have no room in the cluster."""
        context = self._context
        replicas = context.client.replicas()
        if context.is_draining:
            status = "draining"
        else:
            status = "ready" if any(replica.ready for replica in replicas) else "loading"
        answer: dict[str, Any] = {
            "status": status,
            "model": context.model_name,
            "replicas": [_describe(replica) for replica in replicas],
        }
        if context.missing is not None:
            answer["missing"] = context.missing
        if status == "ready":
            return _json(answer)
        reason = "This server is stopping." if status == "draining" else _why_none_is_ready(context)
        reply = reply_for(Unavailable(reason, retry_after_s=context.drain_retry_after_s))
        return _json({**answer, **reply.envelope}, status=reply.status, headers=reply.headers)

    async def cluster(self, request: Request) -> Response:
        """Nodes, gangs and ranks with their phases of start-up; 404 where there is no cluster."""
        if self._context.cluster_status is None:
            raise HTTPException(404)
        return _json(await self._context.cluster_status())

    async def metrics(self, request: Request) -> Response:
        """Everything that is measured, as Prometheus text."""
        return Response(await self._context.client.render_metrics(), media_type=METRICS_TYPE)

    async def version(self, request: Request) -> Response:
        """The version of this software."""
        return _json({"version": __version__})

    async def models(self, request: Request) -> Response:
        """The one model that is served, as a list."""
        return _json({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """The model of that name; 404 for any other."""
        check_model(self._context, request.path_params["model"])
        return _json(self._model())

    def _model(self) -> dict[str, Any]:
        info, name = self._context.client.info, self._context.model_name
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "manta",
            "root": name,
            "max_model_len": None if info is None else info.max_model_len,
        }


def _why_none_is_ready(context: EdgeContext) -> str:
    if context.missing is None:
        return "No replica is ready."
    return f"No replica is ready: one that is to start {context.missing}."


def _describe(replica: ReplicaStatus) -> dict[str, Any]:
    described: dict[str, Any] = {
        "replica_id": replica.replica_id,
        "ready": replica.ready,
        "draining": replica.draining,
        "last_frame_age_s": replica.last_frame_age_s,
    }
    if (snapshot := replica.snapshot) is not None:
        described |= {
            "num_running": snapshot.num_running,
            "num_waiting": snapshot.num_waiting,
            "kv_cache_usage": snapshot.kv_cache_usage,
            "num_used_blocks": snapshot.num_used_blocks,
            "num_steps": snapshot.num_steps,
        }
    return described


def _json(tree: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode_json(tree), status_code=status, headers=headers, media_type="application/json")

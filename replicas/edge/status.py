"""GET /health, /ready, /cluster, /metrics, /version, /v1/models: what the edge knows of itself and its replicas."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from manta import __version__
from manta.cluster.routing.roles import Role
from manta.engine.errors import InvalidRequest, Unavailable

from .body import parse_object
from .client import EdgeContext, ReplicaStatus
from .endpoints import check_model
from .errors import NotAllowed, UnknownRequest, reply_for
from .middleware import TENANT
from .roles import unserved
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
        """200 when there is a ready replica for every role, or requests wait here for the first one, which starts when
        they come; 503 while loading or draining. The body lists every replica either way, those that start with the
        phases that are over, and says in `missing` what replicas wait for that have no room in the cluster."""
        context = self._context
        replicas = context.client.replicas()
        if context.is_draining:
            status = "draining"
        else:
            status = "loading" if unserved(context.roles, replicas) else "ready"
            if status == "loading" and _holds_requests(context):
                status = "waking" if context.starting() else "asleep"
        answer: dict[str, Any] = {
            "status": status,
            "model": context.model_name,
            "roles": _count_roles(context.roles, replicas),
            "replicas": [_describe(replica) for replica in replicas],
        }
        if starting := context.starting():
            answer["starting"] = starting
        if context.missing is not None:
            answer["missing"] = context.missing
        if status in ("ready", "asleep", "waking"):
            return _json(answer)
        reason = "This server is stopping." if status == "draining" else _why_none_is_ready(context)
        reply = reply_for(Unavailable(reason, retry_after_s=context.drain_retry_after_s))
        return _json({**answer, **reply.envelope}, status=reply.status, headers=reply.headers)

    async def cluster(self, request: Request) -> Response:
        """Nodes, gangs and ranks with their phases of start-up; 404 where there is no cluster."""
        if self._context.cluster_status is None:
            raise HTTPException(404)
        return _json(await self._context.cluster_status())

    async def autoscaling(self, request: Request) -> Response:
        """What is wanted of each pool, what there is, and the last decisions with their reasons. 404 where the number
        of replicas is fixed, 503 while nothing is known yet."""
        if self._context.scaling is None:
            raise HTTPException(404)
        status = self._context.scaling()
        if status is None:
            raise Unavailable("The autoscaler has not answered yet.", retry_after_s=1.0)
        return _json(msgspec.to_builtins(status))

    async def explain(self, request: Request) -> Response:
        """How a request was routed: every decision with its candidates. 404 for one that no edge remembers."""
        request_id, explain = request.path_params["request_id"], self._context.explain
        found = None if explain is None else await explain(request_id)
        if found is None:
            raise UnknownRequest(
                f"No edge remembers a request {request_id[:200]!r}: decisions about the latest requests are kept, by "
                "the id of their responses."
            )
        return _json(found)

    async def set_role(self, request: Request) -> Response:
        """Have a replica drain and take another role; 202 as soon as it was asked, /ready shows when it has it. The
        body is {"replica": id, "role": role}. Not for tenants; 404 where roles are fixed."""
        if self._context.set_role is None:
            raise HTTPException(404)
        if TENANT in request.scope:
            raise NotAllowed("A tenant's key cannot change roles: use one of serving.api_keys.")
        replica_id, role = _read_role(await request.body())
        self._context.set_role(replica_id, role)
        return _json({"replica": replica_id, "role": role}, status=202)

    async def metrics(self, request: Request) -> Response:
        """Everything that is measured, over all edges, as Prometheus text."""
        page = self._context.metrics or self._context.client.render_metrics
        return Response(await page(), media_type=METRICS_TYPE)

    async def metrics_targets(self, request: Request) -> Response:
        """Where the metrics of each edge are, as Prometheus's HTTP discovery wants it; 404 where edges have no pages of
        their own."""
        if self._context.metrics_targets is None:
            raise HTTPException(404)
        return _json(await self._context.metrics_targets())

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


def _holds_requests(context: EdgeContext) -> bool:
    """Whether requests may come though no replica is there: one of a pool that may have none starts for them."""
    status = None if context.scaling is None else context.scaling()
    return status is not None and all(pool.min_replicas == 0 or pool.num_ready for pool in status.pools)


def _why_none_is_ready(context: EdgeContext) -> str:
    roles = unserved(context.roles, context.client.replicas())
    what = "No replica is ready"
    if len(context.roles) > 1:
        what += f" for {' and '.join(roles)}"
    return f"{what}." if context.missing is None else f"{what}: one that is to start {context.missing}."


def _count_roles(wanted: Iterable[Role], replicas: Sequence[ReplicaStatus]) -> dict[str, int]:
    """Ready replicas by role, those included of which none is."""
    counts = Counter(replica.role for replica in replicas if replica.ready and replica.role is not None)
    return {role: counts[role] for role in dict.fromkeys((*wanted, *counts))}


def _read_role(body: bytes) -> tuple[str, Role]:
    tree = parse_object(body)
    replica_id, role = tree.get("replica"), tree.get("role")
    if not isinstance(replica_id, str):
        raise InvalidRequest("`replica` must be a replica's id, as /ready shows them.", param="replica")
    if role not in list(Role):
        raise InvalidRequest(f"`role` must be one of {', '.join(Role)}, not {str(role)[:50]!r}.", param="role")
    return replica_id, Role(role)


def _describe(replica: ReplicaStatus) -> dict[str, Any]:
    described: dict[str, Any] = {
        "replica_id": replica.replica_id,
        "role": replica.role,
        "ready": replica.ready,
        "draining": replica.draining,
        "last_frame_age_s": replica.last_frame_age_s,
    }
    if replica.startup_s is not None:
        described["startup_s"] = dict(replica.startup_s)
    if (snapshot := replica.snapshot) is not None:
        described |= {
            "num_running": snapshot.num_running,
            "num_waiting": snapshot.num_waiting,
            "kv_cache_usage": snapshot.kv_cache_usage,
            "num_used_blocks": snapshot.num_used_blocks,
            "num_steps": snapshot.num_steps,
            "num_kv_leases": snapshot.num_kv_leases,
        }
    return described


def _json(tree: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode_json(tree), status_code=status, headers=headers, media_type="application/json")

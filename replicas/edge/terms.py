"""What a request asks of the edge beside its tokens, from headers and fields; and the headers that tell where it went.

Knows no engine and no endpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping
from typing import Any

from manta.cluster.routing.admission import Tenant
from manta.engine.errors import InvalidRequest

from .client import EdgeContext, RequestTerms
from .job import Job
from .middleware import TENANT
from .schema import GenerationFields

DEADLINE_HEADER = "X-Manta-Deadline"
"""Seconds in which the first token must come; as the field `deadline_s`, over which it wins."""
SESSION_HEADER = "X-Manta-Session"
"""As the field `prompt_cache_key`, over which it wins."""
TRACE_HEADER = "traceparent"
"""W3C Trace Context: the caller's trace."""
EXPLAIN_HEADER = "X-Manta-Explain"
"""Whether the reply is to have the headers of `route_headers`."""

_OFF = frozenset({"", "0", "false", "no", "off"})


def header(scope: MutableMapping[str, Any], name: str) -> str | None:
    """A request header's value; None when it is not there."""
    given = dict(scope["headers"]).get(name.lower().encode())
    return None if given is None else given.decode("latin-1").strip()


def wants_route(scope: MutableMapping[str, Any]) -> bool:
    """Whether the reply is to say where the request went."""
    return (header(scope, EXPLAIN_HEADER) or "").lower() not in _OFF


def set_terms(
    context: EdgeContext, scope: MutableMapping[str, Any], fields: GenerationFields, job: Job, arrival_s: float
) -> None:
    """Give the job's sequences their terms. Raises InvalidRequest."""
    tenant: Tenant = scope.get(TENANT, context.default_tenant)
    wait_s = _deadline_header(scope)
    for given in (fields.deadline_s, tenant.deadline_s, context.deadline_s):
        if wait_s is None:
            wait_s = given
    terms = RequestTerms(
        tenant=tenant.name,
        deadline_s=None if wait_s is None else arrival_s + wait_s,
        session=header(scope, SESSION_HEADER) or fields.prompt_cache_key,
    )
    job.traceparent = header(scope, TRACE_HEADER)
    has_tenants = bool(context.tenant_keys)
    for choice in job.choices:
        choice.terms = terms
        if has_tenants:  # nobody gets ahead of those whose tenant is more urgent
            choice.request.priority = tenant.priority + max(choice.request.priority, 0)


def route_headers(job: Job) -> Mapping[str, str]:
    """Where the sequences went, as far as that is known now; several values are joined by commas."""
    notes = [choice.note for choice in job.choices if choice.note.replica_id is not None]
    values = {
        "X-Manta-Request-Id": [job.response_id],
        "X-Manta-Replica": [note.replica_id for note in notes],
        "X-Manta-Prefill-Replica": [note.prefill_replica_id for note in notes],
        "X-Manta-Cached-Tokens": [job.num_cached_tokens] if notes else [],
        "X-Manta-Estimated-Seconds": [_seconds(note.estimated_s) for note in notes],
        "X-Manta-Actual-Seconds": [_seconds(note.actual_s) for note in notes],
    }
    known = {name: [str(value) for value in given if value is not None] for name, given in values.items()}
    return {name: ", ".join(given) for name, given in known.items() if given}


def _seconds(value: float | None) -> str | None:
    return None if value is None else f"{value:.4f}"


def _deadline_header(scope: MutableMapping[str, Any]) -> float | None:
    text = header(scope, DEADLINE_HEADER)
    if text is None:
        return None
    try:
        wait_s = float(text)
    except ValueError:
        wait_s = math.nan
    if not (math.isfinite(wait_s) and wait_s >= 0):
        raise InvalidRequest(
            f"{DEADLINE_HEADER} must be a number of seconds, not {text[:40]!r}.", param=DEADLINE_HEADER
        )
    return wait_s

"""The messages between edges and engine cores, and nothing about how they travel (see channel.py).

Up (edge to engine): Hello, Submit, Cancel, Drain, Resync, Expect, Release, SetRole.
Down (engine to edge): Welcome, Rejected, Frame.
"""

from __future__ import annotations

import msgspec

from manta.cluster.routing.roles import Role
from manta.engine.prefix_cache import CacheEvents
from manta.engine.request import EngineRequest, Refusal, RequestDelta
from manta.engine.stats import EngineInfo, Snapshot
from manta.engine.step_costs import StepCosts

from .engine_times import EngineTimes
from .step_histogram import StepHistogram

PROTOCOL_VERSION = 5


class Hello(msgspec.Struct, tag=True, kw_only=True):
    """First message of an edge; answered by a Welcome at once, or by Rejected."""

    edge_id: str
    version: int = PROTOCOL_VERSION
    is_watcher: bool = False
    """A watcher submits nothing; its frames name the edges that have work here."""
    wants_cache_events: bool = False
    """Whether it routes by what is cached here: it is then told all of it, in parts, and every change after that."""


class Submit(msgspec.Struct, tag=True, kw_only=True):
    request: EngineRequest


class Cancel(msgspec.Struct, tag=True, kw_only=True):
    """No further delta of this request will be sent; unknown ids are ignored."""

    request_id: str


class Drain(msgspec.Struct, tag=True, kw_only=True):
    """The edge has learned that the replica is leaving: new requests are refused, running ones finish."""

    is_over: bool = False
    """The replica is among the members again (a controller that starts anew tells of them one by one)."""


class Resync(msgspec.Struct, tag=True, kw_only=True):
    """The edge missed a change of the prefix cache: it is told everything again, beginning with a complete list."""


class Expect(msgspec.Struct, tag=True, kw_only=True, omit_defaults=True):
    """Another replica computes this prompt: its KV will come under the ticket, and then a Submit that takes it."""

    ticket: str
    prompt_token_ids: list[int]
    cache_salt: str | None = None


class Release(msgspec.Struct, tag=True, kw_only=True):
    """Nobody will take what comes under this ticket; unknown ones are ignored."""

    ticket: str


class SetRole(msgspec.Struct, tag=True, kw_only=True):
    """Drain, then take this role and work again; nothing is loaded anew. The last one that is asked for counts."""

    role: Role


class Demand(msgspec.Struct, tag=True, kw_only=True):
    """What this edge's tenants ask of it. The engine tells the other edges, so that they divide limits by need."""

    tokens_per_s: dict[str, float]
    """By tenant, those of refused requests included."""


Up = Hello | Submit | Cancel | Drain | Resync | Demand | Expect | Release | SetRole


class Welcome(msgspec.Struct, tag=True, kw_only=True):
    replica_id: str
    info: EngineInfo
    snapshot: Snapshot
    beat_url: str
    """Where its heartbeat is to be had, under the key of the engine's address (see heartbeat.py)."""
    role: Role = Role.MIXED


class Rejected(msgspec.Struct, tag=True, kw_only=True):
    """The engine does not talk to this edge."""

    message: str
    version: int = PROTOCOL_VERSION


class Frame(msgspec.Struct, tag=True, kw_only=True, omit_defaults=True):
    """At most one a step and edge; without deltas it is the heartbeat."""

    sequence: int
    deltas: list[RequestDelta] = []
    refusals: list[Refusal] = []
    snapshot: Snapshot | None = None
    step_times: StepHistogram | None = None
    """Now and then: with the first frame after each interval between heartbeats."""
    times: EngineTimes | None = None
    """As often."""
    step_costs: StepCosts | None = None
    """As often, where the engine learns them from its steps."""
    cache_events: CacheEvents | None = None
    """Numbered for this edge alone (see channel_events.py)."""
    draining: bool = False
    role: Role = Role.MIXED
    """What the replica is for now; while it drains for another role, the one from before."""
    demands: dict[str, dict[str, float]] | None = None
    """Now and then, for an edge that tells its own demand: that of the others by id, tokens a second by tenant."""
    num_edges: int = 1
    """That sent requests lately, this one included."""
    turn: int = 0
    """How many of these come before it here when slots become free: an order that lasts, another at each replica."""
    busy_edges: list[str] = []
    """For watchers: ids of the edges that had a request here at any time since the watcher's last frame."""


Down = Welcome | Rejected | Frame

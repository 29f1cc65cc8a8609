"""The messages between edges and engine cores, and nothing about how they travel (see channel.py).

Up (edge to engine): Hello, Submit, Cancel, Drain. Down (engine to edge): Welcome, Rejected, Frame.
"""

from __future__ import annotations

import msgspec

from manta.engine.prefix_cache import CacheEvents
from manta.engine.request import EngineRequest, Refusal, RequestDelta
from manta.engine.stats import EngineInfo, Snapshot

from .step_histogram import StepHistogram

PROTOCOL_VERSION = 3


class Hello(msgspec.Struct, tag=True, kw_only=True):
    """First message of an edge; answered by a Welcome at once, or by Rejected."""

    edge_id: str
    version: int = PROTOCOL_VERSION
    is_watcher: bool = False
    """A watcher submits nothing; its frames name the edges that have work here."""


class Submit(msgspec.Struct, tag=True, kw_only=True):
    request: EngineRequest


class Cancel(msgspec.Struct, tag=True, kw_only=True):
    """No further delta of this request will be sent; unknown ids are ignored."""

    request_id: str


class Drain(msgspec.Struct, tag=True, kw_only=True):
    """The edge has learned that the replica is leaving: new requests are refused, running ones finish."""

    is_over: bool = False
    """The replica is among the members again (a controller that starts anew tells of them one by one)."""


Up = Hello | Submit | Cancel | Drain


class Welcome(msgspec.Struct, tag=True, kw_only=True):
    replica_id: str
    info: EngineInfo
    snapshot: Snapshot
    beat_url: str
    """Where its heartbeat is to be had, under the key of the engine's address (see heartbeat.py)."""


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
    cache_events: CacheEvents | None = None
    draining: bool = False
    busy_edges: list[str] = []
    """For watchers: ids of the edges that had a request here at any time since the watcher's last frame."""


Down = Welcome | Rejected | Frame

"""One edge as the engine's end of the channel has it: what is to go into its next frame, and when. Knows no socket."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from manta.engine.request import Refusal, RequestDelta

from .channel import FRAME_INTERVAL_S
from .channel_events import CacheFeed
from .protocol import Frame

CACHE_EVENTS_INTERVAL_S = 0.05
"""An edge without other news is told of cached blocks at most so often; what it sent itself it expects anyway."""


@dataclass(eq=False)
class ConnectedEdge:
    """One connection that said Hello, and what is to go into its next frame."""

    identity: bytes
    edge_id: str
    is_watcher: bool
    sent_at_s: float
    feed: CacheFeed | None = None
    """For an edge that wants cache events."""
    demand: dict[str, float] | None = None
    """What its tenants ask of it, when it tells that."""
    order: int = 0
    """Its place among edges, another one at each replica."""
    submitted_at_s: float = -math.inf
    """When its last request came."""
    step_times_at_s: float = 0.0
    """When step times were last sent."""
    num_frames: int = 0
    stalled_since_s: float | None = None
    request_ids: set[str] = field(default_factory=set)
    tickets: set[str] = field(default_factory=set)
    """Expected, and neither taken nor released yet."""
    deltas: list[RequestDelta] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    busy_edges: set[str] = field(default_factory=set)
    """For a watcher: edges that had a request since its last frame. No news by themselves: heartbeats carry them."""

    @property
    def has_news(self) -> bool:
        return bool(self.deltas or self.refusals)

    @property
    def due_at_s(self) -> float:
        """When its next frame is due though it has no news."""
        if self.stalled_since_s is None and self.feed is not None and self.feed.has_news:
            return self.sent_at_s + CACHE_EVENTS_INTERVAL_S
        return self.sent_at_s + FRAME_INTERVAL_S

    def wants_step_times(self, now_s: float) -> bool:
        """Whether the next frame is to have what comes now and then only."""
        return now_s - self.step_times_at_s >= FRAME_INTERVAL_S

    def took(self, frame: Frame, now_s: float) -> None:
        """The frame is on its way."""
        if frame.cache_events is not None and self.feed is not None:
            self.feed.sent()
        if self.wants_step_times(now_s):
            self.step_times_at_s = now_s
        self.num_frames += 1
        self.sent_at_s = now_s
        self.stalled_since_s = None
        self.deltas, self.refusals = [], []

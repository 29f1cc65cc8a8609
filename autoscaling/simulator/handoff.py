"""Requests whose prompt one replica computes and another decodes, on the virtual clock: blocks, bytes and times.

As in the engine: when the first tokens of a prompt are planned, blocks are reserved where the request will decode; KV
moves while more of it is computed; a request for which there was no room is computed again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from manta.engine.set_aside import Reserved

from .events import EventQueue
from .replica import Replica
from .workload import SimRequest


@dataclass(frozen=True)
class KvLink:
    """How KV moves. Every replica has one way out and one way in, each used by one request after the other."""

    bytes_per_token: float = 0.0
    bytes_per_s: float = 50e9
    latency_s: float = 3e-3
    """From the last byte to the request's being ready, whatever its size."""
    tail: float = 0.1
    """Part of the last chunk's KV that is still to move when it has been computed: layers go as they are done."""


@dataclass
class _Handoff:
    request: SimRequest
    prefills: Replica
    decodes: Replica
    reserved: Reserved | None = None
    begun_s: float = 0.0


@dataclass
class Handoffs:
    """Those of one fleet."""

    events: EventQueue
    link: KvLink
    num_sent: int = 0
    """Requests whose KV was used where it went."""
    num_recomputed: int = 0
    """Requests for which there was no room when they began."""
    num_bytes: float = 0.0
    _under_way: dict[str, _Handoff] = field(default_factory=dict)
    _free_s: dict[tuple[str, str], float] = field(default_factory=dict)
    """When a replica's way (out, in) is free again."""

    def submit(self, request: SimRequest, prefills: Replica, decodes: Replica) -> None:
        """Let one replica compute the prompt and the first token, for another that goes on."""
        if request.num_output_tokens > 1:
            self._under_way[request.request_id] = _Handoff(request, prefills, decodes)
        prefills.submit(request.engine_request(max_tokens=1))

    def forget(self, request_id: str) -> None:
        """The prompt's replica does not take the request."""
        self._under_way.pop(request_id, None)

    def begin(self, request_id: str) -> None:
        """A replica has planned a request's first tokens: reserve where it will decode, if it is one of these."""
        handoff = self._under_way.get(request_id)
        if handoff is not None and handoff.reserved is None:
            handoff.begun_s = self.events.now_s
            handoff.reserved = handoff.decodes.reserve(handoff.request)

    def go_on(self, request: SimRequest, *, after_s: float) -> None:
        """The first token is there: the other replica gets the request after `after_s`, and starts when its KV came."""
        handoff = self._under_way.pop(request.request_id)
        reserved, decodes, now_s = handoff.reserved, handoff.decodes, self.events.now_s
        ready_s = now_s + after_s
        if reserved is None:
            self.num_recomputed += 1
        else:
            ready_s = max(ready_s, self._moved_s(handoff, request.num_prompt_tokens - reserved.num_cached_tokens))

        def submit() -> None:
            refusal = decodes.expect(request.engine_request(num_known_tokens=1))
            assert refusal is None, refusal

        def start() -> None:
            self.num_sent += decodes.start(request.request_id, reserved)

        self.events.at(now_s + after_s, submit)
        self.events.at(ready_s, start)

    def _moved_s(self, handoff: _Handoff, num_tokens: int) -> float:
        """When the KV is there: behind what uses the same ways, and the last layers' after they were computed."""
        link, now_s = self.link, self.events.now_s
        ways = ("out", handoff.prefills.replica_id), ("in", handoff.decodes.replica_id)
        move_s = num_tokens * link.bytes_per_token / link.bytes_per_s
        last_tokens = min(num_tokens, handoff.prefills.spec.max_num_batched_tokens)
        last_s = link.tail * last_tokens * link.bytes_per_token / link.bytes_per_s
        free_s = max(handoff.begun_s, *(self._free_s.get(way, 0.0) for way in ways))
        moved_s = max(now_s + last_s, free_s + move_s)
        for way in ways:
            self._free_s[way] = free_s + move_s
        self.num_bytes += num_tokens * link.bytes_per_token
        return moved_s + link.latency_s

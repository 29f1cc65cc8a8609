"""The engine's end of the channel: one ROUTER, owned by the thread of the step loop. Knows no engine and no Ray.

The loop calls `receive` and `publish` in turn. Nothing here blocks on an edge: what a slow one cannot take is kept for
its next frame, and an edge that is gone, or takes nothing for STALL_S, turns into cancellations of its requests.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from zlib import crc32

import msgspec
import zmq
import zmq.auth.thread

from manta.cluster.routing.roles import Role
from manta.engine.kv_transfer.messages import TakeKv
from manta.engine.prefix_cache import CacheEvents
from manta.engine.request import Refusal, RequestDelta
from manta.engine.stats import EngineInfo, Snapshot
from manta.engine.step_costs import StepCosts

from .channel import (
    FRAME_INTERVAL_S,
    MAX_UNSENT_BEATS,
    MAX_UNSENT_FRAMES,
    STALL_S,
    Address,
    KeyPair,
    decode_up,
    encode,
    set_common_options,
)
from .channel_events import CacheFeed
from .connected_edge import ConnectedEdge
from .engine_times import EngineTimes
from .heartbeat import Heartbeat
from .protocol import (
    PROTOCOL_VERSION,
    Cancel,
    Demand,
    Drain,
    Expect,
    Frame,
    Hello,
    Rejected,
    Release,
    Resync,
    SetRole,
    Submit,
    Welcome,
)
from .step_histogram import StepHistogram

logger = logging.getLogger(__name__)

TURN_BOUND_S = 10.0
"""A turn of the loop that takes longer is a hang, where no better bound is known; on an accelerator."""
CPU_TURN_BOUND_S = 60.0
"""The same on a CPU, where one step may take many seconds."""

LATELY_S = 2.0
"""An edge that sent no request for longer takes no turn when slots become free."""

Command = Submit | Cancel | Drain | Expect | Release | SetRole


class ChannelServer:
    """Commands of all edges in, frames out."""

    def __init__(
        self,
        replica_id: str,
        info: EngineInfo,
        *,
        client_key: bytes,
        host: str = "127.0.0.1",
        stall_s: float = STALL_S,
        max_unsent_frames: int = MAX_UNSENT_FRAMES,
        turn_bound_s: float | None = None,
        step: Callable[[float], tuple[float, float] | None] | None = None,
    ) -> None:
        """Listen on two free ports of `host`. Only clients with the public key `client_key` are let in.

        `step` (see heartbeat.py) is asked by another thread. `turn_bound_s`: how long the loop's turn may take where
        `step` says nothing; by default what fits the kind of device.
        """
        self._replica_id = replica_id
        self._info = info
        self._stall_s = stall_s
        self._edges: dict[bytes, ConnectedEdge] = {}
        self._owner: dict[str, ConnectedEdge] = {}
        self._orphans: list[Command] = []
        """What edges that are gone would have to ask for."""
        self._snapshot = Snapshot()
        self._step_times: StepHistogram | None = None
        self._times: EngineTimes | None = None
        self._step_costs: StepCosts | None = None
        self._is_draining = False
        self._role = Role.MIXED
        self._context = zmq.Context()
        self._authenticator = zmq.auth.thread.ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(credentials_provider=_OneKey(client_key))
        keys = KeyPair.new()
        self._socket, url = self._bind(zmq.ROUTER, host, keys, max_unsent=max_unsent_frames)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an edge that is gone shows as an error
        self.address = Address(url, keys.public)
        beats, self._beat_url = self._bind(zmq.PUB, host, keys, max_unsent=MAX_UNSENT_BEATS)
        bound_s = turn_bound_s or (CPU_TURN_BOUND_S if info.device == "cpu" else TURN_BOUND_S)
        self._heartbeat = Heartbeat(beats, turn_bound_s=bound_s, step=step)

    @property
    def num_edges(self) -> int:
        return len(self._edges)

    @property
    def num_requests(self) -> int:
        """Requests that an edge waits for."""
        return len(self._owner)

    @property
    def needs_cached(self) -> bool:
        """Whether an edge waits for a complete list of cached blocks."""
        return any(edge.feed is not None and edge.feed.needs_list for edge in self._edges.values())

    def receive(self, timeout_s: float, *, wake: Sequence[zmq.Socket[bytes] | int] = ()) -> list[Command]:
        """What edges ask for, waiting up to `timeout_s` (or until the next heartbeat is due) when there is nothing.

        `wake`: sockets and file descriptors that end the wait, too, when they are readable.
        """
        wait_s = 0.0 if self._orphans else min(timeout_s, self._seconds_to_heartbeat())
        if wait_s > 0:
            self._heartbeat.end_turn()
            poller = zmq.Poller()
            for source in (self._socket, *wake):
                poller.register(source, zmq.POLLIN)
            has_something = poller.poll(int(wait_s * 1000) + 1)
            self._heartbeat.begin_turn()
            if not has_something:
                return []
        else:
            self._heartbeat.begin_turn()
        commands, self._orphans = self._orphans, []
        while True:
            try:
                identity, *payload = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return commands
            command = self._read(identity, payload)
            if command is not None:
                commands.append(command)

    def publish(
        self,
        deltas: Sequence[RequestDelta] = (),
        refusals: Sequence[Refusal] = (),
        *,
        snapshot: Snapshot,
        step_times: StepHistogram | None = None,
        times: EngineTimes | None = None,
        step_costs: StepCosts | None = None,
        cache_events: CacheEvents | None = None,
        cached: CacheEvents | None = None,
        to_all: bool = False,
    ) -> None:
        """One frame to each edge that has news or is due for a heartbeat or cache events; to every one with `to_all`.

        `cache_events` are changes; `cached`, when it is needed, is everything after those changes.
        """
        self._snapshot, self._step_times, self._times, self._step_costs = snapshot, step_times, times, step_costs
        for delta in deltas:
            edge = self._owner.get(delta.request_id)
            if edge is not None:
                edge.deltas.append(delta)
                if delta.finish_reason is not None:
                    self._end(delta.request_id)
        for refusal in refusals:
            edge = self._owner.get(refusal.request_id)
            if edge is not None:
                edge.refusals.append(refusal)
                self._end(refusal.request_id)
        if cache_events is not None or cached is not None:
            self._feed_edges(cache_events, cached)
        now_s = time.monotonic()
        for edge in list(self._edges.values()):
            if to_all or edge.has_news or now_s >= edge.due_at_s:
                self._send_frame(edge, now_s)

    def set_draining(self, is_draining: bool) -> None:
        """Say in every frame whether no new request is taken."""
        self._is_draining = is_draining

    def set_role(self, role: Role) -> None:
        """Say in every frame what the replica is for."""
        self._role = role

    def close(self) -> None:
        """Close the ports; edges notice at once."""
        self._heartbeat.close()
        self._socket.close()
        self._authenticator.stop()
        self._context.term()

    def _bind(self, kind: int, host: str, keys: KeyPair, *, max_unsent: int) -> tuple[zmq.Socket[bytes], str]:
        """A socket of our own on a free port, and its URL."""
        socket = self._context.socket(kind)
        set_common_options(socket)
        socket.setsockopt(zmq.SNDHWM, max_unsent)
        socket.setsockopt(zmq.IPV6, int(":" in host))
        socket.curve_server = True
        socket.curve_publickey = keys.public
        socket.curve_secretkey = keys.secret
        url_host = f"[{host}]" if ":" in host else host
        return socket, f"tcp://{url_host}:{socket.bind_to_random_port(f'tcp://{url_host}')}"

    def _read(self, identity: bytes, payload: list[bytes]) -> Command | None:
        try:
            message = decode_up(b"".join(payload))
        except msgspec.DecodeError as error:
            logger.warning("an edge sent what is not a message: %s", error)
            return None
        if isinstance(message, Hello):
            self._welcome(identity, message)
            return None
        edge = self._edges.get(identity)
        if edge is None:  # was given up, or never said Hello; it will notice that no frame comes
            return None
        if isinstance(message, Submit):
            request_id = message.request.request_id
            if request_id in self._owner:
                logger.error("request %s was submitted twice; the second is ignored", request_id)
                return None
            self._owner[request_id] = edge
            edge.request_ids.add(request_id)
            edge.submitted_at_s = time.monotonic()
            if isinstance(message.request.handoff, TakeKv):
                edge.tickets.discard(message.request.handoff.ticket)
            for other in self._edges.values():
                if other.is_watcher:
                    other.busy_edges.add(edge.edge_id)
        elif isinstance(message, Cancel):
            if self._owner.get(message.request_id) is not edge:
                return None
            self._end(message.request_id)
        elif isinstance(message, Expect):
            edge.tickets.add(message.ticket)
        elif isinstance(message, Release):
            edge.tickets.discard(message.ticket)
        elif isinstance(message, Resync):
            if edge.feed is not None:
                logger.info("edge %s asks for all cached blocks again", edge.edge_id)
                edge.feed.restart()
            return None
        elif isinstance(message, Demand):
            edge.demand = message.tokens_per_s
            return None
        return message

    def _feed_edges(self, changes: CacheEvents | None, cached: CacheEvents | None) -> None:
        for edge in self._edges.values():
            if edge.feed is None:
                continue
            if changes is not None:
                edge.feed.add(changes)
            if cached is not None and edge.feed.needs_list:
                edge.feed.begin(cached.stored)

    def _welcome(self, identity: bytes, hello: Hello) -> None:
        if hello.version != PROTOCOL_VERSION:
            message = (
                f"The engine of replica {self._replica_id} speaks protocol version {PROTOCOL_VERSION}, "
                f"edge {hello.edge_id} speaks {hello.version}: run the same version of Manta everywhere."
            )
            logger.error(message)
            self._send(identity, Rejected(message=message))
            return
        answer = Welcome(
            replica_id=self._replica_id,
            info=self._info,
            snapshot=self._snapshot,
            beat_url=self._beat_url,
            role=self._role,
        )
        # Counted before it can know that it is welcome.
        feed = CacheFeed() if hello.wants_cache_events else None
        order = crc32(f"{hello.edge_id} {self._replica_id}".encode())
        edge = ConnectedEdge(identity, hello.edge_id, hello.is_watcher, time.monotonic(), feed, order=order)
        self._edges[identity] = edge
        if self._send(identity, answer) is not None:
            del self._edges[identity]

    def _send_frame(self, edge: ConnectedEdge, now_s: float) -> None:
        with_step_times = edge.wants_step_times(now_s)
        since_s = now_s - LATELY_S
        others = [one for one in self._edges.values() if one.submitted_at_s > since_s and one is not edge]
        frame = Frame(
            sequence=edge.num_frames,
            deltas=edge.deltas,
            refusals=edge.refusals,
            snapshot=self._snapshot,
            step_times=self._step_times if with_step_times else None,
            times=self._times if with_step_times else None,
            step_costs=self._step_costs if with_step_times else None,
            cache_events=None if edge.feed is None else edge.feed.report(),
            draining=self._is_draining,
            role=self._role,
            demands=self._demands_of_others(edge) if with_step_times else None,
            num_edges=1 + len(others),
            turn=sum(other.order < edge.order for other in others),
            busy_edges=list(edge.busy_edges),
        )
        problem = self._send(edge.identity, frame)
        if problem is None:
            edge.took(frame, now_s)
            if edge.is_watcher:
                edge.busy_edges = {other.edge_id for other in self._edges.values() if other.request_ids}
        elif problem != zmq.EAGAIN:
            self._drop(edge, "is gone")
        elif edge.stalled_since_s is None:
            edge.stalled_since_s = now_s
        elif now_s - edge.stalled_since_s > self._stall_s:
            self._drop(edge, f"took no frame for {self._stall_s:g} s")

    def _demands_of_others(self, edge: ConnectedEdge) -> dict[str, dict[str, float]] | None:
        if edge.demand is None:
            return None
        return {
            other.edge_id: other.demand
            for other in self._edges.values()
            if other is not edge and other.demand is not None
        }

    def _send(self, identity: bytes, message: Welcome | Rejected | Frame) -> int | None:
        """None when it is on its way, else the error number: EAGAIN for a full queue, others for a peer that left."""
        try:
            self._socket.send_multipart((identity, encode(message)), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            return error.errno
        return None

    def _drop(self, edge: ConnectedEdge, why: str) -> None:
        logger.info("edge %s %s; %d requests are cancelled", edge.edge_id, why, len(edge.request_ids))
        del self._edges[edge.identity]
        for request_id in list(edge.request_ids):
            self._orphans.append(Cancel(request_id=request_id))
            self._end(request_id)
        self._orphans += [Release(ticket=ticket) for ticket in edge.tickets]

    def _end(self, request_id: str) -> None:
        self._owner.pop(request_id).request_ids.discard(request_id)

    def _seconds_to_heartbeat(self) -> float:
        if not self._edges:
            return FRAME_INTERVAL_S
        return max(0.0, min(edge.due_at_s for edge in self._edges.values()) - time.monotonic())


class _OneKey:
    """Lets in whoever holds the secret of one public key."""

    def __init__(self, client_key: bytes) -> None:
        self._client_key = client_key

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._client_key

"""The edge's end of the channel: one DEALER on an asyncio loop. Knows no choice of replica and no HTTP.

A frame is handed to all its streams in one go, without a task a token: what a stream does with a delta runs inside the
frame's callback. A client that lost its engine stays lost: make a new one. All methods belong to the loop's thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import cast

import zmq
from zmq.utils.monitor import recv_monitor_message

from manta.cluster.routing.roles import Role
from manta.engine.request import EngineRequest, Refusal, RequestDelta
from manta.engine.stats import EngineInfo, Snapshot

from .channel import Address, ChannelLost, KeyPair, ReplicaLeaves, decode_down, encode, set_common_options
from .engine_times import EngineTimes
from .heartbeat import SILENCE_S, decode_beat
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
    Up,
    Welcome,
)
from .step_histogram import StepHistogram

MAX_UNSENT_MESSAGES = 65536

Take = Callable[[RequestDelta], bool]
"""Is given each delta of one request, in order; False when no more is wanted. What it raises ends the stream."""

_ENDS = {
    zmq.EVENT_DISCONNECTED: "the engine's process ended or froze",
    zmq.EVENT_CLOSED: "the engine's port is closed",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the engine does not accept this edge's key",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "the handshake with the engine failed",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "what listens at the engine's address is no engine",
}


class ReplyStream:
    """What an engine says about one request. Deltas go to `take` as they come; `wait` tells how it ended."""

    __slots__ = ("_end", "_take", "is_engine_done")

    def __init__(self, take: Take) -> None:
        self._take = take
        self._end: asyncio.Future[Refusal | Exception | None] = asyncio.get_running_loop().create_future()
        self.is_engine_done = False
        """Whether the engine holds nothing of the request any more."""

    async def wait(self) -> Refusal | None:
        """Until the last delta was taken or no more is wanted (None), or the engine refused.

        Raises ChannelLost when no more can come, ReplicaLeaves after `leave`, and what `take` raised.
        """
        end = await self._end
        if isinstance(end, Exception):
            raise end
        return end

    def put(self, delta: RequestDelta) -> None:
        if self._end.done():  # what the engine computed before it heard that no more is wanted
            return
        self.is_engine_done = delta.finish_reason is not None
        try:
            is_wanted = self._take(delta)
        except Exception as error:  # belongs to the task that waits, not to the frame and its other streams
            self._end.set_result(error)
            return
        if self.is_engine_done or not is_wanted:
            self._end.set_result(None)

    def end(self, how: Refusal | ChannelLost) -> None:
        self.is_engine_done = True
        if not self._end.done():
            self._end.set_result(how)

    def leave(self) -> bool:
        """Take no more here, because the replica is about to stop. False when it has ended already."""
        if self._end.done():
            return False
        self._end.set_result(ReplicaLeaves())
        return True


class ChannelClient:
    """One engine core as an edge sees it. `connect` once; `close` at the end."""

    def __init__(
        self,
        address: Address,
        *,
        edge_id: str,
        keys: KeyPair,
        is_watcher: bool = False,
        wants_cache_events: bool = False,
        version: int = PROTOCOL_VERSION,
        silence_s: float = SILENCE_S,
        on_frame: Callable[[Frame], None] = lambda frame: None,
    ) -> None:
        """`keys` are the cluster's client keys. `silence_s`: the process is lost when nothing came for so long."""
        self._hello = Hello(
            edge_id=edge_id, version=version, is_watcher=is_watcher, wants_cache_events=wants_cache_events
        )
        self._silence_s = silence_s
        self._server_key, self._keys = address.server_key, keys
        self._on_frame = on_frame
        self._streams: dict[str, ReplyStream] = {}
        self._info: EngineInfo | None = None
        self.snapshot = Snapshot()
        self.role = Role.MIXED
        """What the replica said last that it is for."""
        self.step_times = StepHistogram()
        self.times = EngineTimes()
        self.is_draining = self._has_left = False
        self.num_frames = 0
        self.last_frame_at_s = self._heard_at_s = time.monotonic()
        self.lost: ChannelLost | None = None
        self._loop = asyncio.get_running_loop()
        self._welcomed: asyncio.Future[None] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None
        self._socket = self._new_socket(zmq.DEALER, address.url)
        self._socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self._socket.setsockopt(zmq.SNDHWM, MAX_UNSENT_MESSAGES)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._beats: zmq.Socket[bytes] | None = None
        events = 0
        for event in _ENDS:
            events |= event
        self._monitor = self._socket.get_monitor_socket(events)
        self._fds = [cast(int, self._socket.FD), cast(int, self._monitor.FD)]
        self._loop.add_reader(self._fds[0], self._read)
        self._loop.add_reader(self._fds[1], self._read_monitor)
        self._socket.connect(address.url)
        self._send(self._hello)
        self._loop.call_soon(self._read_monitor)

    @property
    def info(self) -> EngineInfo:
        """Known once connected."""
        assert self._info is not None
        return self._info

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    @property
    def last_frame_age_s(self) -> float:
        return time.monotonic() - self.last_frame_at_s

    async def connect(self, timeout_s: float) -> None:
        """Wait for the engine's Welcome. Raises ChannelLost; the client is closed then."""
        await asyncio.wait((self._welcomed, self._ended), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if self.lost is None and not self._welcomed.done():
            self._lose(f"the engine did not answer within {timeout_s:g} s")
        if self.lost is not None:
            raise self.lost

    async def wait_lost(self) -> None:
        """Until the engine is lost or this client is closed."""
        await asyncio.shield(self._ended)

    def submit(self, request: EngineRequest, take: Take) -> ReplyStream:
        """Send a request. Its stream must be given back by `finish`, after which nothing is taken any more."""
        stream = self._streams[request.request_id] = ReplyStream(take)
        if self.lost is not None:
            stream.end(self.lost)
        else:
            self._send(Submit(request=request))
        return stream

    def finish(self, request_id: str) -> None:
        """Forget a request's stream; what the engine still does for it is cancelled."""
        stream = self._streams.pop(request_id, None)
        if stream is not None and not stream.is_engine_done and self.lost is None:
            self._send(Cancel(request_id=request_id))

    def drain(self) -> None:
        """Tell the engine that its replica is leaving."""
        self.is_draining = self._has_left = True
        if self.lost is None:
            self._send(Drain())

    def end_drain(self) -> None:
        """Tell the engine that its replica stays after all; its next frame says when it takes work again."""
        self._has_left = False
        if self.lost is None:
            self._send(Drain(is_over=True))

    def expect(self, ticket: str, prompt_token_ids: list[int], cache_salt: str | None) -> None:
        """Tell the engine that the KV of this prompt will come under the ticket, which must be taken or released."""
        if self.lost is None:
            self._send(Expect(ticket=ticket, prompt_token_ids=prompt_token_ids, cache_salt=cache_salt))

    def release(self, ticket: str) -> None:
        """Tell the engine that nobody will take what comes under the ticket."""
        if self.lost is None:
            self._send(Release(ticket=ticket))

    def set_role(self, role: Role) -> None:
        """Ask the engine to drain and then to be for something else; its frames say when it is."""
        if self.lost is None:
            self._send(SetRole(role=role))

    def resync(self) -> None:
        """Ask for all that the engine's cache holds; its next report of cache events begins a complete list."""
        if self.lost is None:
            self._send(Resync())

    def tell_demand(self, tokens_per_s: dict[str, float]) -> None:
        """Have the other edges told what this one's tenants ask of it; theirs comes back in frames."""
        if self.lost is None:
            self._send(Demand(tokens_per_s=tokens_per_s))

    def move_streams(self, num_streams: int) -> int:
        """End so many streams' stay here (ReplicaLeaves), the oldest first. Returns how many there were."""
        num_left = 0
        for stream in self._streams.values():
            if num_left == num_streams:
                break
            num_left += stream.leave()
        return num_left

    def close(self) -> None:
        """Leave; the engine cancels what still runs for this edge."""
        self._lose("the channel was closed")

    def _send(self, message: Up) -> None:
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            self._loop.call_soon(self._lose, "the engine takes no messages")
            return
        # Sending may have swallowed the edge-triggered signal of a frame that arrived meanwhile.
        if cast(int, self._socket.EVENTS) & zmq.POLLIN:
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        while self.lost is None:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(data)

    def _take(self, data: bytes) -> None:
        message = decode_down(data)
        self.last_frame_at_s = self._heard_at_s = time.monotonic()
        if isinstance(message, Frame):
            self._take_frame(message)
        elif isinstance(message, Welcome):
            self._info, self.snapshot, self.role = message.info, message.snapshot, message.role
            self._listen_to_beats(message.beat_url)
            self._check_age()
            if not self._welcomed.done():
                self._welcomed.set_result(None)
        else:
            assert isinstance(message, Rejected)
            self._lose(message.message)

    def _take_frame(self, frame: Frame) -> None:
        self.num_frames += 1
        self.is_draining = self._has_left or frame.draining
        self.role = frame.role
        if frame.snapshot is not None:
            self.snapshot = frame.snapshot
        if frame.step_times is not None:
            self.step_times = frame.step_times
        if frame.times is not None:
            self.times = frame.times
        streams = self._streams
        # Refusals first: a request with several sequences shows nothing when one of them is refused at the start.
        for refusal in frame.refusals:
            if (stream := streams.get(refusal.request_id)) is not None:
                stream.end(refusal)
        for delta in frame.deltas:
            if (stream := streams.get(delta.request_id)) is not None:
                stream.put(delta)
        self._on_frame(frame)

    def _read_monitor(self) -> None:
        while self.lost is None:
            try:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            except zmq.Again:
                return
            self._read()  # what arrived before the end still counts
            self._lose(_ENDS[zmq.Event(event["event"])])

    def _new_socket(self, kind: int, url: str) -> zmq.Socket[bytes]:
        socket = zmq.Context.instance().socket(kind)
        set_common_options(socket)
        socket.setsockopt(zmq.IPV6, int("[" in url))
        socket.curve_serverkey = self._server_key
        socket.curve_publickey = self._keys.public
        socket.curve_secretkey = self._keys.secret
        return socket

    def _listen_to_beats(self, url: str) -> None:
        if self._beats is not None:
            return
        beats = self._beats = self._new_socket(zmq.SUB, url)
        beats.setsockopt(zmq.SUBSCRIBE, b"")
        beats.connect(url)
        self._fds.append(cast(int, beats.FD))
        self._loop.add_reader(self._fds[-1], self._read_beats)
        self._loop.call_soon(self._read_beats)

    def _read_beats(self) -> None:
        while self.lost is None and self._beats is not None:
            try:
                beat = decode_beat(self._beats.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            self._heard_at_s = time.monotonic()
            if beat.is_hang:
                self._read()  # what arrived before the hang still counts
                self._lose(f"the engine hangs: {beat.age_s:.1f} s in one step, {beat.bound_s:.1f} s at most")

    def _check_age(self) -> None:
        self._read()  # what waits here because this loop was busy is no silence
        self._read_beats()
        if self.lost is not None:
            return
        silence_s = time.monotonic() - self._heard_at_s
        if silence_s > self._silence_s:
            return self._lose(f"the engine's process says nothing: no frame and no beat for {silence_s:.1f} s")
        self._timer = self._loop.call_later(min(0.5, self._silence_s / 4), self._check_age)

    def _lose(self, why: str) -> None:
        if self.lost is not None:
            return
        self.lost = ChannelLost(why)
        if self._timer is not None:
            self._timer.cancel()
        for fd in self._fds:
            self._loop.remove_reader(fd)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        if self._beats is not None:
            self._beats.close(linger=0)
        for stream in self._streams.values():
            stream.end(self.lost)
        if not self._ended.done():
            self._ended.set_result(None)

"""All engine replicas of one model, for the edge: picks one a request, and moves the request when its replica dies.

Implements EngineClient over channels. Who the replicas are (`set_members`), where they listen and what Serve is told
about a request comes from a Directory; knows no Ray and no HTTP. Everything belongs to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from manta.cluster.routing.policy import Candidate, choose
from manta.engine.errors import EngineFailed, Overloaded, Unavailable
from manta.engine.llm import refusal_error
from manta.engine.request import EngineRequest, Refusal, RefusalReason, RequestDelta, ResumeState
from manta.engine.stats import EngineInfo
from manta.replicas.channel import Address, ChannelLost, KeyPair, ReplicaLeaves
from manta.replicas.channel_client import ChannelClient
from manta.replicas.metrics import EdgeMetrics
from manta.replicas.protocol import Frame

from .client import ReplicaStatus, Take

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0
MAX_FAILURES_WITHOUT_PROGRESS = 2
"""A request that lost so many replicas in a row without a new token is not given a third."""
FULL_POLL_S = 0.1
"""How often a stream that must move looks for room while all replicas are full."""
MAX_REMEMBERED = 256
"""Replicas that left, of which the edge still knows that it told them to drain."""
DRAIN_GRACE_S = 5.0
"""How long the streams of a replica that leaves may take to end there before they move."""


class Directory(Protocol):
    """What the router must know about replicas by id."""

    async def locate(self, replica_id: str) -> Address:
        """Where the replica's engine listens. Raises ChannelLost when it cannot be asked."""
        ...

    def hold(self, replica_id: str) -> Callable[[], None]:
        """Account for a request that runs on the replica; the result ends that. Must not raise."""
        ...


@dataclass(frozen=True)
class RouterLimits:
    """Bounds of one edge."""

    max_queued_requests: int = 256
    """Requests that may wait: in a replica beyond those that run, and in the edge while no replica is ready."""
    max_wait_s: float = 60.0
    """How long a request waits for a replica to become ready, and a stream that must move for room."""
    drain_grace_s: float = DRAIN_GRACE_S


class _Link:
    """One replica and the channel to it, which comes and goes."""

    def __init__(self, replica_id: str) -> None:
        self.replica_id = replica_id
        self.is_member = True
        self.channel: ChannelClient | None = None
        self.task: asyncio.Task[None] | None = None
        self.mover: asyncio.Task[None] | None = None
        """Moves the streams away; from when the replica is known to leave."""
        self.num_since_frame = 0
        """Requests sent since the last frame came: its snapshot does not count them yet."""

    @property
    def is_leaving(self) -> bool:
        return not self.is_member or (self.channel is not None and self.channel.is_draining)

    @property
    def is_ready(self) -> bool:
        channel = self.channel
        return self.is_member and channel is not None and channel.lost is None and not channel.is_draining

    def candidate(self, limits: RouterLimits) -> Candidate:
        assert self.channel is not None
        info, snapshot = self.channel.info, self.channel.snapshot
        reported = snapshot.num_running + snapshot.num_waiting
        return Candidate(
            self.replica_id,
            num_requests=max(self.channel.num_streams, reported + self.num_since_frame),
            max_requests=info.max_num_seqs + min(info.max_num_waiting, limits.max_queued_requests),
        )


class ChannelRouter:
    """Made on a running loop. `set_members` tells it the replicas; `close` ends all channels."""

    def __init__(
        self, directory: Directory, *, edge_id: str, keys: KeyPair, limits: RouterLimits, metrics: EdgeMetrics
    ) -> None:
        """`keys` are the cluster's client keys."""
        self._directory = directory
        self._edge_id = edge_id
        self._keys = keys
        self._limits = limits
        self._metrics = metrics
        self._links: dict[str, _Link] = {}
        self._info: EngineInfo | None = None
        self._left: dict[str, None] = {}
        """Replicas that were told to drain and may come back."""
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def info(self) -> EngineInfo | None:
        return self._info

    def replicas(self) -> list[ReplicaStatus]:
        return [
            ReplicaStatus(
                link.replica_id,
                ready=link.is_ready,
                draining=link.is_leaving,
                snapshot=None if link.channel is None else link.channel.snapshot,
                step_times=None if link.channel is None else link.channel.step_times,
                last_frame_age_s=None if link.channel is None else link.channel.last_frame_age_s,
            )
            for link in self._links.values()
        ]

    async def render_metrics(self) -> bytes:
        return self._metrics.render(self.replicas(), num_waiting=len(self._waiters))

    def set_members(self, replica_ids: Iterable[str]) -> None:
        """The replicas that exist now. One that is missing drains: it gets no new work and ends what it can within the
        grace; the rest moves as soon as another has room."""
        members = set(replica_ids)
        for replica_id in members - self._links.keys():
            link = self._links[replica_id] = _Link(replica_id)
            link.task = asyncio.get_running_loop().create_task(self._keep_connected(link))
        for link in list(self._links.values()):
            if link.is_member and link.replica_id not in members:
                link.is_member = False
                self._left[link.replica_id] = None
                if link.channel is not None:
                    link.channel.drain()
                self._start_moving(link)
                self._forget_if_idle(link)
            elif not link.is_member and link.replica_id in members:
                link.is_member = True
                self._welcome_back(link)
        while len(self._left) > MAX_REMEMBERED:
            del self._left[next(iter(self._left))]

    async def close(self) -> None:
        """Close all channels; their requests fail."""
        links, self._links = list(self._links.values()), {}
        for link in links:
            link.is_member = False
            if link.channel is not None:
                link.channel.close()
        tasks = [task for link in links for task in (link.task, link.mover) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def run(self, request: EngineRequest, take: Take) -> None:
        state = ResumeState(request=msgspec.structs.replace(request, output_token_ids=list(request.output_token_ids)))
        num_refusals = 0
        must_go_on = False  # once an engine has had it, an engine that is full is no answer any more

        def relay(delta: RequestDelta) -> bool:
            state.add(delta)
            return take(delta)

        while True:
            link = await self._acquire(must_move=state.num_submissions > 0)
            submission = state.submission()
            channel = link.channel
            assert channel is not None
            stream = channel.submit(submission, relay)
            link.num_since_frame += 1
            release = self._directory.hold(link.replica_id)
            try:
                refusal = await stream.wait()
                if refusal is None:
                    return
                num_refusals += 1
                self._refused(link, refusal, must_go_on=must_go_on, num_refusals=num_refusals)
            except ReplicaLeaves:
                must_go_on = True
                self._moves(state, link, "it leaves")
            except ChannelLost as lost:
                must_go_on = True
                self._count_failure(state, link, lost)
                self._moves(state, link, str(lost))
            finally:
                channel.finish(submission.request_id)
                release()
                self._forget_if_idle(link)
            if num_refusals and must_go_on:
                await asyncio.sleep(FULL_POLL_S)

    def _refused(self, link: _Link, refusal: Refusal, *, must_go_on: bool, num_refusals: int) -> None:
        """Returns when the request should try again, elsewhere or later: one that was taken before waits for room."""
        if refusal.reason is RefusalReason.DRAINING:
            if link.channel is not None:
                link.channel.is_draining = True
            self._start_moving(link)
            return
        error = refusal_error(refusal)
        if not must_go_on:
            raise error
        if isinstance(error, Overloaded) and num_refusals * FULL_POLL_S < self._limits.max_wait_s:
            return
        raise EngineFailed(f"The request could not go on elsewhere: {refusal.message}") from error

    def _count_failure(self, state: ResumeState, link: _Link, lost: ChannelLost) -> None:
        if link.is_leaving:
            return  # it was about to end: no sign that the request ends replicas
        state.num_failures_without_progress += 1
        if state.num_failures_without_progress >= MAX_FAILURES_WITHOUT_PROGRESS:
            raise EngineFailed(
                "The engine failed while it worked on this request, on two replicas in a row; it is not tried again."
            ) from lost

    def _moves(self, state: ResumeState, link: _Link, why: str) -> None:
        self._metrics.request_moved()
        logger.warning(
            "request %s leaves replica %s after %d tokens: %s",
            state.request.request_id,
            link.replica_id,
            len(state.request.output_token_ids),
            why,
        )

    def _welcome_back(self, link: _Link) -> None:
        """Undo the drain of a replica that left and is a member again."""
        if not link.is_member or link.channel is None or link.channel.lost is not None:
            return  # later, when it is connected
        if link.replica_id not in self._left:
            return
        del self._left[link.replica_id]
        link.channel.end_drain()
        if link.mover is not None:
            link.mover.cancel()
            link.mover = None

    def _start_moving(self, link: _Link) -> None:
        if link.mover is None and link.channel is not None and link.channel.num_streams:
            link.mover = asyncio.get_running_loop().create_task(self._move_streams(link.channel))

    async def _move_streams(self, channel: ChannelClient) -> None:
        """After the grace, away with the streams as others have room; they run on where they are meanwhile."""
        await asyncio.sleep(self._limits.drain_grace_s)
        while channel.lost is None and channel.num_streams:
            ready = [link.candidate(self._limits) for link in self._links.values() if link.is_ready]
            room = sum(max(one.max_requests - one.num_requests, 0) for one in ready)
            channel.move_streams(room)
            await asyncio.sleep(FULL_POLL_S)

    async def _acquire(self, *, must_move: bool) -> _Link:
        """A replica with room. One that is to move waits for room; a new one is refused at once when all are full."""
        until_s = time.monotonic() + self._limits.max_wait_s
        while True:
            ready = [link for link in self._links.values() if link.is_ready]
            choice = choose([link.candidate(self._limits) for link in ready])
            if choice is not None:
                logger.debug("replica %s: %s", choice.replica_id, choice.reason)
                return self._links[choice.replica_id]
            if ready and not must_move:
                raise Overloaded("All replicas are full; try again later.", retry_after_s=1.0)
            if not must_move and len(self._waiters) >= self._limits.max_queued_requests:
                raise Overloaded(
                    "No replica is ready and the queue for one is full; try again later.", retry_after_s=1.0
                )
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise Unavailable(f"No replica became ready within {self._limits.max_wait_s:g} s.", retry_after_s=5.0)
            await self._wait_for_replica(min(left_s, FULL_POLL_S) if ready else left_s)

    async def _wait_for_replica(self, timeout_s: float) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await asyncio.wait((waiter,), timeout=timeout_s)
        finally:
            self._waiters.remove(waiter)

    async def _keep_connected(self, link: _Link) -> None:
        delay_s = 0.1
        while link.is_member:
            try:
                channel = await self._connect(link)
            except (ChannelLost, TimeoutError) as error:
                logger.info("replica %s cannot be reached: %s", link.replica_id, error)
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, 2.0)
                continue
            delay_s = 0.1
            self._connected(link, channel)
            await channel.wait_lost()
            link.channel = None
            if link.mover is not None:
                link.mover.cancel()
                link.mover = None
            self._metrics.replica_left(link.replica_id, channel.snapshot)
            if link.is_member:
                logger.warning("replica %s: %s", link.replica_id, channel.lost)
                self._metrics.replica_lost()
                await asyncio.sleep(delay_s)
        self._links.pop(link.replica_id, None)

    async def _connect(self, link: _Link) -> ChannelClient:
        address = await asyncio.wait_for(self._directory.locate(link.replica_id), CONNECT_TIMEOUT_S)

        def learn(frame: Frame) -> None:
            link.num_since_frame = 0
            if frame.draining:
                self._start_moving(link)

        channel = ChannelClient(address, edge_id=self._edge_id, keys=self._keys, on_frame=learn)
        try:
            await channel.connect(CONNECT_TIMEOUT_S)
        except asyncio.CancelledError:
            channel.close()
            raise
        return channel

    def _connected(self, link: _Link, channel: ChannelClient) -> None:
        link.channel, link.num_since_frame = channel, 0
        self._info = channel.info
        self._metrics.replica_joined(link.replica_id, channel.snapshot)
        if not link.is_member:
            channel.drain()
            self._forget_if_idle(link)
        self._welcome_back(link)
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _forget_if_idle(self, link: _Link) -> None:
        """End the channel to a replica that left and has none of our requests any more."""
        if link.is_member:
            return
        if link.channel is None:
            if link.task is not None:
                link.task.cancel()
            self._links.pop(link.replica_id, None)
        elif not link.channel.num_streams:
            link.channel.close()

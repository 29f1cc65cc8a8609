"""The edge's channels to all engine replicas: made, kept and ended as the membership says. Knows no request, no choice.

A replica that leaves drains: it gets no new work and ends what it can within the grace; the rest moves as soon as
others have room. Everything belongs to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from manta.replicas.channel import Address, ChannelLost, KeyPair
from manta.replicas.channel_client import ChannelClient
from manta.replicas.protocol import Frame

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0
FULL_POLL_S = 0.1
"""How often a stream that must move looks for room while all replicas are full."""
DRAIN_GRACE_S = 5.0
"""How long the streams of a replica that leaves may take to end there before they move."""
MAX_REMEMBERED = 256
"""Replicas that left, of which the edge still knows that it told them to drain."""


class Directory(Protocol):
    """What the edge must know about replicas by id."""

    async def locate(self, replica_id: str) -> Address:
        """Where the replica's engine listens. Raises ChannelLost when it cannot be asked."""
        ...

    def hold(self, replica_id: str) -> Callable[[], None]:
        """Account for a request that runs on the replica; the result ends that. Must not raise."""
        ...


class LinkListener(Protocol):
    """Who wants to know what happens to the links. Must not block or raise."""

    def joined(self, link: Link) -> None:
        """Its engine was reached; the link is ready unless it drains already."""
        ...

    def heard(self, link: Link, frame: Frame) -> None:
        """A frame came; its deltas are with their streams already."""
        ...

    def lost(self, link: Link, channel: ChannelClient) -> None:
        """Its channel is over, for whatever reason; nothing more comes from it."""
        ...

    def room(self) -> int:
        """How many streams the ready replicas would take."""
        ...


class Link:
    """One replica and the channel to it, which comes and goes."""

    def __init__(self, replica_id: str) -> None:
        self.replica_id = replica_id
        self.is_member = True
        self.channel: ChannelClient | None = None
        self.task: asyncio.Task[None] | None = None
        self.mover: asyncio.Task[None] | None = None
        """Moves the streams away; from when the replica is known to leave."""

    @property
    def is_leaving(self) -> bool:
        return not self.is_member or (self.channel is not None and self.channel.is_draining)

    @property
    def is_ready(self) -> bool:
        channel = self.channel
        return self.is_member and channel is not None and channel.lost is None and not channel.is_draining


class Links:
    """All of them. Made on a running loop; `set_members` tells the replicas, `close` ends all channels."""

    def __init__(
        self,
        directory: Directory,
        listener: LinkListener,
        *,
        edge_id: str,
        keys: KeyPair,
        wants_cache_events: bool,
        drain_grace_s: float,
    ) -> None:
        """`keys` are the cluster's client keys."""
        self._directory = directory
        self._listener = listener
        self._edge_id = edge_id
        self._keys = keys
        self._wants_cache_events = wants_cache_events
        self._drain_grace_s = drain_grace_s
        self._links: dict[str, Link] = {}
        self._left: dict[str, None] = {}
        """Replicas that were told to drain and may come back."""

    def __iter__(self) -> Iterator[Link]:
        return iter(self._links.values())

    def __getitem__(self, replica_id: str) -> Link:
        return self._links[replica_id]

    def get(self, replica_id: str) -> Link | None:
        return self._links.get(replica_id)

    def set_members(self, replica_ids: Iterable[str]) -> None:
        """The replicas that exist now. One that is missing drains."""
        members = set(replica_ids)
        for replica_id in members - self._links.keys():
            link = self._links[replica_id] = Link(replica_id)
            link.task = asyncio.get_running_loop().create_task(self._keep_connected(link))
        for link in list(self._links.values()):
            if link.is_member and link.replica_id not in members:
                link.is_member = False
                self._left[link.replica_id] = None
                if link.channel is not None:
                    link.channel.drain()
                self.start_moving(link)
                self.forget_if_idle(link)
            elif not link.is_member and link.replica_id in members:
                link.is_member = True
                self._welcome_back(link)
        while len(self._left) > MAX_REMEMBERED:
            del self._left[next(iter(self._left))]

    def start_moving(self, link: Link) -> None:
        """Begin to move its streams away, once."""
        if link.mover is None and link.channel is not None and link.channel.num_streams:
            link.mover = asyncio.get_running_loop().create_task(self._move_streams(link.channel))

    def forget_if_idle(self, link: Link) -> None:
        """End the channel to a replica that left and has none of our requests any more."""
        if link.is_member:
            return
        if link.channel is None:
            if link.task is not None:
                link.task.cancel()
            self._links.pop(link.replica_id, None)
        elif not link.channel.num_streams:
            link.channel.close()

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

    def _welcome_back(self, link: Link) -> None:
        """Undo the drain of a replica that left and is a member again."""
        if not link.is_member or link.channel is None or link.channel.lost is not None:
            return  # later, when it is connected
        if link.replica_id not in self._left:
            return
        del self._left[link.replica_id]
        link.channel.end_drain()
        self._stop_moving(link)

    def _stop_moving(self, link: Link) -> None:
        if link.mover is not None:
            link.mover.cancel()
            link.mover = None

    async def _move_streams(self, channel: ChannelClient) -> None:
        """After the grace, away with the streams as others have room; they run on where they are meanwhile."""
        await asyncio.sleep(self._drain_grace_s)
        while channel.lost is None and channel.num_streams:
            channel.move_streams(self._listener.room())
            await asyncio.sleep(FULL_POLL_S)

    async def _keep_connected(self, link: Link) -> None:
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
            await channel.wait_lost()
            link.channel = None
            self._stop_moving(link)
            self._listener.lost(link, channel)
            if link.is_member:
                logger.warning("replica %s: %s", link.replica_id, channel.lost)
                await asyncio.sleep(delay_s)
        self._links.pop(link.replica_id, None)

    async def _connect(self, link: Link) -> ChannelClient:
        address = await asyncio.wait_for(self._directory.locate(link.replica_id), CONNECT_TIMEOUT_S)

        def learn(frame: Frame) -> None:
            self._connected(link, channel)  # a frame may come before this task goes on
            if frame.draining:
                self.start_moving(link)
            elif link.is_member:  # it drained for another role, and has it
                self._stop_moving(link)
            self._listener.heard(link, frame)

        channel = ChannelClient(
            address,
            edge_id=self._edge_id,
            keys=self._keys,
            wants_cache_events=self._wants_cache_events,
            on_frame=learn,
        )
        try:
            await channel.connect(CONNECT_TIMEOUT_S)
        except ChannelLost:
            if link.channel is not channel:
                raise
        except asyncio.CancelledError:
            channel.close()
            raise
        self._connected(link, channel)
        return channel

    def _connected(self, link: Link, channel: ChannelClient) -> None:
        if link.channel is channel:
            return
        link.channel = channel
        if not link.is_member:
            channel.drain()
            self.forget_if_idle(link)
        self._welcome_back(link)
        self._listener.joined(link)

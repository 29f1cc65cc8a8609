"""The endpoints of an engine's ranks as its core sees them, and how followers' events get to it. Loads no torch.

Rank 0's endpoint leaves its events in the core's inbox; each follower sends its own over a connection whose keys follow
from the gang's secret. Where the endpoints listen is told through the gang's store.
"""

from __future__ import annotations

import msgspec
import zmq

from manta.engine.model_shape import ModelShape
from manta.engine.parallel.layout import ShardLayout
from manta.engine.parallel.member import GangMember
from manta.engine.parallel.place import RankPlace
from manta.engine.parallel.watch import Store

from .control import EventInbox, connected_socket, listening_socket, url_of
from .messages import KvEvent, KvShard

KV_KEY = "kv transfer"
"""Purpose of the gang's key that is KvPeer.key."""
_EVENTS_URL = "kv/events-url"
_PURPOSE = "kv events"


class _RankEvent(msgspec.Struct, array_like=True):
    rank: int
    event: KvEvent


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_RankEvent).decode


def shards_of(shape: ModelShape, *, tp_size: int, pp_size: int) -> list[KvShard]:
    """What each rank of an engine holds of every block."""
    layouts = [ShardLayout.of(shape, RankPlace(rank, tp_size, pp_size)) for rank in range(tp_size * pp_size)]
    return [KvShard((one.layers.start, one.layers.stop), (one.kv_heads.start, one.kv_heads.stop)) for one in layouts]


class LocalRanks:
    """Rank 0 alone. Implements handovers.KvRanks."""

    def __init__(self) -> None:
        self.inbox = EventInbox()

    @property
    def pollables(self) -> list[zmq.Socket[bytes] | int]:
        return [self.inbox.fd]

    def events(self) -> list[tuple[int, KvEvent]]:
        return self.inbox.take()

    def close(self) -> None:
        self.inbox.close()


class GangRanks(LocalRanks):
    """Rank 0 and the followers of its gang."""

    def __init__(self, member: GangMember, store: Store) -> None:
        """Says through `store` where followers' events are taken."""
        super().__init__()
        self._store = store
        self._world_size = member.place.world_size
        self._context = zmq.Context()
        self._socket = listening_socket(self._context, zmq.PULL, member.key(_PURPOSE), _PURPOSE, member.host)
        store.set(_EVENTS_URL, url_of(self._socket))

    def follower_urls(self) -> list[str]:
        """Where the followers' endpoints listen, by rank. Waits until all have said so."""
        return [self._store.get(_url_key(rank)).decode() for rank in range(1, self._world_size)]

    @property
    def pollables(self) -> list[zmq.Socket[bytes] | int]:
        return [self.inbox.fd, self._socket]

    def events(self) -> list[tuple[int, KvEvent]]:
        found = self.inbox.take()
        while self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:  # type: ignore[operator]
            told = _decode(self._socket.recv(zmq.NOBLOCK))
            found.append((told.rank, told.event))
        return found

    def close(self) -> None:
        super().close()
        self._socket.close()
        self._context.term()


class FollowerEvents:
    """A follower's end: its endpoint's events go to rank 0."""

    def __init__(self, member: GangMember, store: Store) -> None:
        """Waits until rank 0 says where they are taken."""
        self._rank = member.place.rank
        self._store = store
        self._context = zmq.Context()
        url = store.get(_EVENTS_URL).decode()
        self._socket = connected_socket(self._context, zmq.PUSH, member.key(_PURPOSE), _PURPOSE, url)

    def put(self, event: KvEvent) -> None:
        """From one thread, the endpoint's."""
        self._socket.send(_encode(_RankEvent(self._rank, event)))

    def say_url(self, url: str) -> None:
        """Where this rank's endpoint listens."""
        self._store.set(_url_key(self._rank), url)

    def close(self) -> None:
        """Once no event comes any more."""
        self._socket.close()
        self._context.term()


def _url_key(rank: int) -> str:
    return f"kv/url/{rank}"

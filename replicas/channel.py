"""What both ends of the channel share: keys, address, codec, socket options. Knows no request and no engine.

One authenticated ZeroMQ connection joins each pair of edge and engine core: a DEALER in the edge (channel_client.py), a
ROUTER in the engine's process (channel_server.py). It is encrypted with CURVE; the server takes only the one client key
of its cluster. Three things tell of the engine's process: the connection's end or ZMTP heartbeats (dead, cut off or
frozen: within 2 s), the age of the last frame or beat, and a beat that says that the loop's turn takes too long.
"""

from __future__ import annotations

import hashlib

import msgspec
import zmq

from .protocol import Down, Up

FRAME_INTERVAL_S = 0.5
"""An engine sends every edge a frame at least so often."""
STALL_S = 5.0
"""An edge that takes no frame for so long is given up and its requests are cancelled."""
MAX_UNSENT_FRAMES = 512
"""Frames that may wait in the sockets for one edge."""
MAX_UNSENT_BEATS = 8

_PING_INTERVAL_MS = 500
_PING_TIMEOUT_MS = 1500


class ChannelLost(Exception):
    """The other end is dead, hung, unreachable or refuses to talk. The message says which."""


class ReplicaLeaves(Exception):
    """The replica is about to stop: the request is to go on elsewhere while it still runs there."""


class KeyPair(msgspec.Struct, frozen=True):
    """A CURVE key pair, Z85-encoded."""

    public: bytes
    secret: bytes

    @classmethod
    def new(cls) -> KeyPair:
        """A random pair."""
        return cls(*zmq.curve_keypair())

    @property
    def for_engines(self) -> EngineKeys:
        """What engines get of the cluster's client keys. The hash key says nothing about the secret."""
        digest = hashlib.blake2b(self.secret, digest_size=32, person=b"manta-blocks").digest()
        return EngineKeys(client=self.public, block_hashes=digest)

    def __repr__(self) -> str:
        return f"KeyPair({self.public.decode()})"


class EngineKeys(msgspec.Struct, frozen=True):
    """The cluster's keys as engines need them."""

    client: bytes
    """Public key of the only clients that are let in."""
    block_hashes: bytes
    """Key of the hashes of token blocks; edges hash with the same."""

    def __repr__(self) -> str:
        return f"EngineKeys({self.client.decode()})"


class Address(msgspec.Struct, frozen=True):
    """Where an engine core listens, and the public key by which it is known."""

    url: str
    server_key: bytes


encode = msgspec.msgpack.Encoder().encode
decode_up = msgspec.msgpack.Decoder(Up).decode
decode_down = msgspec.msgpack.Decoder(Down).decode


def set_common_options(socket: zmq.Socket[bytes]) -> None:
    """Heartbeats, no lingering at close; for either end."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _PING_INTERVAL_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _PING_TIMEOUT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, _PING_TIMEOUT_MS)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)

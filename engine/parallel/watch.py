"""Notices the end, the silence and the failure of other ranks: a thread and a connection that carry nothing else.

Every follower holds one TCP connection to rank 0. Both ends prove that they know the gang's secret, then say each
second that they live. A connection that ends without a farewell, a silence, a failure that a rank reports and a step
that hangs break the gang: `on_broken` is called once, from the watch's thread. Loads no torch.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from manta.engine.errors import CheckpointError, ConfigError, EngineFailed, MantaError

from .member import GangMember
from .vitals import BEAT_S, SILENCE_S, Silence, StepClock

logger = logging.getLogger(__name__)

_TURN_S = 0.1
"""How often the thread looks around when nothing arrives."""
_HANDSHAKE_S = 5.0
_CONNECT_S = 60.0
_SEND_S = 1.0
_ADDRESS_KEY = "watch/address"

_NONCE_BYTES = 32
_HELLO = struct.Struct(f"<I{_NONCE_BYTES}s32s")  # rank, nonce, proof
_FRAME = struct.Struct("<cI")  # kind, bytes that follow
_BEAT, _READY, _FAILED, _BYE = b"h", b"r", b"f", b"b"
_MOST_BYTES = 1 << 16

_ERRORS: dict[str, type[MantaError]] = {"ConfigError": ConfigError, "CheckpointError": CheckpointError}


class Store(Protocol):
    """What the ranks need of torch.distributed's store. `get` waits until somebody sets the key."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...


class _Failure(msgspec.Struct, array_like=True):
    kind: str
    message: str
    field: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> _Failure:
        if isinstance(error, MantaError):
            return cls(type(error).__name__, str(error)[: _MOST_BYTES // 8], getattr(error, "field", None))
        return cls("", f"{type(error).__name__}: {error}"[: _MOST_BYTES // 8])

    def error(self, rank: int) -> MantaError:
        if self.kind == "ConfigError":
            return ConfigError(self.message, field=self.field)
        return (
            _ERRORS[self.kind](self.message) if self.kind in _ERRORS else EngineFailed(f"Rank {rank}: {self.message}")
        )


class _Peer:
    """One authenticated connection."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        connection.settimeout(_SEND_S)
        self.rank = rank
        self.connection = connection
        self.has_left = False
        self._received = b""

    def send(self, kind: bytes, payload: bytes = b"") -> None:
        """Raises OSError when the connection is broken or takes nothing."""
        self.connection.sendall(_FRAME.pack(kind, len(payload)) + payload)

    def receive(self) -> list[tuple[bytes, bytes]] | None:
        """Frames that have arrived, for a connection that is readable; None at its end."""
        try:
            data = self.connection.recv(_MOST_BYTES)
        except TimeoutError:
            return []
        except OSError:
            return None
        if not data:
            return None
        self._received += data
        frames = []
        while len(self._received) >= _FRAME.size:
            kind, size = _FRAME.unpack_from(self._received)
            if size > _MOST_BYTES:
                return None
            end = _FRAME.size + size
            if len(self._received) < end:
                break
            frames.append((kind, self._received[_FRAME.size : end]))
            self._received = self._received[end:]
        return frames


class Watch:
    """One rank's watch: rank 0 over all others, the others over rank 0. Its methods may be called by any thread."""

    def __init__(
        self, member: GangMember, store: Store, on_broken: Callable[[str], None], *, minds_silence: bool = True
    ) -> None:
        """Rank 0 listens and says where through `store`, the others connect (and wait for rank 0's address).

        `on_broken(reason)` is called at most once, from the watch's thread. `minds_silence`: False where the end of the
        other's process is noticed all the same and its being suspended is no fault. Raises EngineFailed when rank 0
        cannot be reached or does not know the gang's secret.
        """
        self.steps: StepClock | None = None
        """Set, on rank 0, once steps are to be judged."""
        self._member = member
        self._key = member.key("watch")
        self._on_broken = on_broken
        self._minds_silence = minds_silence
        self._judged_at_s = time.monotonic()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._peers: dict[int, _Peer] = {}
        self._ready: set[int] = set()
        self._error: MantaError | None = None
        self._is_closing = False
        self._silence = Silence(time.monotonic())
        self._listener: socket.socket | None = None
        if member.place.is_driver:
            self._listener = _listen(member.hosts[0])
            host, port = self._listener.getsockname()[:2]
            store.set(_ADDRESS_KEY, f"{host} {port}")
            self._start(self._accept, "manta-watch-accept")
        else:
            host, port = store.get(_ADDRESS_KEY).decode().split()
            self._add(_Peer(0, _connect(host, int(port), member.place.rank, self._key)))
        self._thread = self._start(self._run, "manta-watch")

    @property
    def error(self) -> MantaError | None:
        """What broke the gang, once it is broken."""
        return self._error

    @property
    def is_left_alone(self) -> bool:
        """Whether every peer said farewell."""
        with self._lock:
            return bool(self._peers) and all(peer.has_left for peer in self._peers.values())

    def check(self) -> None:
        """Raises what broke the gang."""
        if self._error is not None:
            raise self._error

    def cause_of(self, error: Exception) -> Exception:
        """What broke the gang, if that is known or becomes known within a few seconds; else `error` itself."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._is_closing, SILENCE_S + 2 * BEAT_S)
        return error if self._error is None else self._error

    def say_ready(self) -> None:
        """This rank's start is over: from now on a silence of seconds means that it is dead or frozen."""
        self._say(_READY)

    def wait_until_ready(self, timeout_s: float) -> None:
        """Until all other ranks are ready. Raises what broke the gang, or EngineFailed with the ranks that are late."""
        with self._changed:
            others = set(range(self._member.place.world_size)) - {self._member.place.rank}
            self._changed.wait_for(lambda: others <= self._ready or self._error is not None, timeout_s)
            self.check()
            if late := sorted(others - self._ready):
                raise EngineFailed(f"Ranks {late} did not start within {timeout_s:.0f} s; their logs say why.")

    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank cannot go on; `on_broken` is not called here."""
        self._say(_FAILED, msgspec.msgpack.encode(_Failure.of(error)))
        self.close()

    def close(self) -> None:
        """Say farewell and stop watching."""
        with self._changed:
            if self._is_closing:
                return
            self._is_closing = True
            self._changed.notify_all()
        self._say(_BYE)
        if self._listener is not None:
            self._listener.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * BEAT_S)
        for peer in self._peers.values():
            peer.connection.close()

    def _say(self, kind: bytes, payload: bytes = b"") -> None:
        with self._lock:
            for peer in self._peers.values():
                if not peer.has_left:
                    with contextlib.suppress(OSError):  # the thread notices the end of a connection
                        peer.send(kind, payload)

    def _run(self) -> None:
        beat_at_s = 0.0
        while not self._is_closing:
            with self._lock:
                peers = {peer.connection: peer for peer in self._peers.values() if not peer.has_left}
            readable = _readable(list(peers), _TURN_S)
            if self._is_closing:
                return
            for connection in readable:
                self._take(peers[connection])
            now_s = time.monotonic()
            if now_s >= beat_at_s:
                beat_at_s = now_s + BEAT_S
                self._say(_BEAT)
            self._judge(now_s)

    def _take(self, peer: _Peer) -> None:
        frames = peer.receive()
        if frames is None:
            if not peer.has_left:
                self._break(EngineFailed(f"Rank {peer.rank} is gone: its connection ended."))
            return
        with self._changed:
            self._silence.heard(peer.rank)
            for kind, _ in frames:
                if kind == _READY:
                    self._ready.add(peer.rank)
                    self._silence.is_up(peer.rank)
                elif kind == _BYE:
                    peer.has_left = True
                    self._silence.forget(peer.rank)
            self._changed.notify_all()
        for kind, payload in frames:
            if kind == _FAILED:
                self._break(msgspec.msgpack.decode(payload, type=_Failure).error(peer.rank))

    def _judge(self, now_s: float) -> None:
        with self._lock:
            silent = self._silence.look(now_s)
        if silent is not None and self._minds_silence:
            self._break(
                EngineFailed(f"Rank {silent[0]} is not heard of for {silent[1]:.1f} s: dead, frozen or cut off.")
            )
        steps, before_s, self._judged_at_s = self.steps, self._judged_at_s, now_s
        if steps is not None and now_s - before_s > 2 * BEAT_S:
            steps.was_frozen(now_s)
        overdue = None if steps is None else steps.overdue(now_s)
        if overdue is not None:
            self._break(EngineFailed(overdue))

    def _break(self, error: MantaError) -> None:
        with self._changed:
            if self._error is not None or self._is_closing:
                return
            self._error = error
            self._changed.notify_all()
        self._on_broken(str(error))

    def _accept(self) -> None:
        assert self._listener is not None
        missing = set(range(1, self._member.place.world_size))
        while missing:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            rank = _admit(connection, self._key, missing)
            if rank is None:
                connection.close()
                continue
            missing.discard(rank)
            self._add(_Peer(rank, connection))
        self._listener.close()

    def _add(self, peer: _Peer) -> None:
        with self._lock:
            self._peers[peer.rank] = peer
            self._silence.heard(peer.rank)

    def _start(self, run: Callable[[], None], name: str) -> threading.Thread:
        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread


def end_process(reason: str) -> None:
    """What a rank does when its gang is broken: it ends at once, whatever its threads wait for."""
    logger.critical("%s The process ends.", reason)
    os._exit(1)


def _listen(host: str) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen(128)
    return listener


def _readable(connections: list[socket.socket], timeout_s: float) -> list[socket.socket]:
    if not connections:
        time.sleep(timeout_s)  # nobody has connected yet
        return []
    poller = select.poll()
    by_number = {connection.fileno(): connection for connection in connections}
    for number in by_number:
        if number >= 0:
            poller.register(number, select.POLLIN)
    return [by_number[number] for number, _ in poller.poll(timeout_s * 1e3)]


def _proof(key: bytes, role: bytes, rank: int, own: bytes, other: bytes) -> bytes:
    return hmac.digest(key, role + struct.pack("<I", rank) + own + other, "sha256")


def _admit(connection: socket.socket, key: bytes, missing: set[int]) -> int | None:
    """Rank 0's side of the handshake. The rank that has proved to be one of `missing`, else None."""
    try:
        connection.settimeout(_HANDSHAKE_S)
        own = secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(own)
        rank, nonce, proof = _HELLO.unpack(_receive_exactly(connection, _HELLO.size))
        if rank not in missing or not hmac.compare_digest(proof, _proof(key, b"follower", rank, nonce, own)):
            logger.warning("A connection to the gang's watch that does not know its secret was refused.")
            return None
        connection.sendall(_proof(key, b"driver", rank, own, nonce))
    except OSError:
        return None
    return rank


def _connect(host: str, port: int, rank: int, key: bytes) -> socket.socket:
    """A follower's side of the handshake."""
    with contextlib.ExitStack() as until_known:
        try:
            connection = until_known.enter_context(socket.create_connection((host, port), timeout=_CONNECT_S))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(_HANDSHAKE_S)
            other = _receive_exactly(connection, _NONCE_BYTES)
            own = secrets.token_bytes(_NONCE_BYTES)
            connection.sendall(_HELLO.pack(rank, own, _proof(key, b"follower", rank, own, other)))
            answer = _receive_exactly(connection, 32)
        except OSError as error:
            raise EngineFailed(
                f"Rank {rank} cannot reach rank 0 at {host}:{port}, or is not known there: {error}."
            ) from None
        if not hmac.compare_digest(answer, _proof(key, b"driver", rank, other, own)):
            raise EngineFailed(f"What listens at {host}:{port} is not this gang's rank 0.")
        until_known.pop_all()
    return connection


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionError("the connection ended")
        data += more
    return data

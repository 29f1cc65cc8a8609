"""Gangs of endpoints with random caches in this process, raw peers that say what they like, a proxy that can be cut."""

from __future__ import annotations

import queue
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import torch
import zmq

from manta.engine.kv_transfer.control import connected_socket, listening_socket, url_of
from manta.engine.kv_transfer.endpoint import KvEndpoint
from manta.engine.kv_transfer.frames import (
    PURPOSE,
    Frame,
    Geometry,
    Hello,
    ToSender,
    ToTarget,
    TransportLimits,
    decode_to_sender,
    decode_to_target,
    encode,
)
from manta.engine.kv_transfer.messages import (
    Accepted,
    KvAccept,
    KvEvent,
    KvOpen,
    KvPeer,
    KvRange,
    KvShard,
    Received,
    Sent,
)
from manta.engine.layers.attention import LayerCache
from manta.engine.model_shape import ModelShape
from manta.engine.parallel.layout import ShardLayout
from manta.engine.parallel.place import RankPlace

WAIT_S = 30.0
LIMITS = TransportLimits()
QUICK = TransportLimits(frame_bytes=4096, num_slots=3, beat_s=0.1, silence_s=1.0, stall_s=1.0)
"""Small frames, and little patience."""


def model_shape(*, num_layers: int, num_heads: int, num_kv_heads: int, head_dim: int = 5) -> ModelShape:
    return ModelShape(
        architecture="LlamaForCausalLM",
        num_layers=num_layers,
        hidden_size=64,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=96,
        vocab_size=640,
        max_position_embeddings=512,
    )


def shards_of(shape: ModelShape, *, tp_size: int = 1, pp_size: int = 1) -> list[KvShard]:
    """What each rank holds when the engine splits the model so."""
    found = []
    for rank in range(tp_size * pp_size):
        layout = ShardLayout.of(shape, RankPlace(rank, tp_size, pp_size))
        layers, heads = layout.layers, layout.kv_heads
        found.append(KvShard((layers.start, layers.stop), (heads.start, heads.stop)))
    return found


class KvGang:
    """One engine's endpoints. `blocks` holds the whole model's KV: [layers, 2, num_blocks, block_size, heads, dim]."""

    def __init__(
        self,
        shards: Sequence[KvShard],
        blocks: torch.Tensor,
        *,
        limits: TransportLimits | None = LIMITS,
        device: str = "cpu",
        **options: Any,
    ) -> None:
        self.shards = list(shards)
        self.key = secrets.token_bytes(32)
        self.caches: list[list[LayerCache]] = [_part(blocks, shard, device) for shard in shards]
        self._events: list[queue.Queue[KvEvent]] = [queue.Queue() for _ in shards]
        block_size, head_dim = blocks.shape[3], blocks.shape[5]
        self.endpoints = [
            KvEndpoint(
                caches,
                self.shards,
                rank,
                block_size=block_size,
                key=self.key,
                on_event=self._events[rank].put,
                limits=limits,
                **options,
            )
            for rank, caches in enumerate(self.caches)
        ]
        self.peer = KvPeer(
            control_url="",
            rank_urls=[endpoint.url for endpoint in self.endpoints],
            shards=self.shards,
            model="a model",
            block_size=block_size,
            head_dim=head_dim,
            dtype=str(blocks.dtype),
            key=self.key,
        )

    def __enter__(self) -> KvGang:
        return self

    def __exit__(self, *_: object) -> None:
        for endpoint in self.endpoints:
            endpoint.close()

    def obey(self, order: Any) -> None:
        for endpoint in self.endpoints:
            endpoint.obey(order)

    def event(self, rank: int = 0) -> KvEvent:
        """The rank's next."""
        return self._events[rank].get(timeout=WAIT_S)

    def events(self) -> list[KvEvent]:
        """The next of each rank."""
        return [self.event(rank) for rank in range(len(self.endpoints))]

    def endless_event(self) -> KvEvent:
        """Rank 0's next, however long it takes."""
        return self._events[0].get()

    def has_news(self, rank: int = 0) -> bool:
        return not self._events[rank].empty()

    def whole(self, like: torch.Tensor) -> torch.Tensor:
        """All ranks' caches put together. What ranks hold twice must be equal."""
        found = torch.full_like(like, float("nan")) if like.is_floating_point() else torch.zeros_like(like)
        seen = torch.zeros(like.shape[0], like.shape[4], dtype=torch.bool)
        for shard, caches in zip(self.shards, self.caches, strict=True):
            heads = slice(*shard.kv_heads)
            for layer, sides in zip(range(*shard.layers), caches, strict=True):
                for side, on_device in enumerate(sides.tensors):
                    cache = on_device.cpu()
                    if bool(seen[layer, heads].all()) and side == 0:
                        torch.testing.assert_close(found[layer, 0, :, :, heads], cache, equal_nan=True, rtol=0, atol=0)
                    found[layer, side, :, :, heads] = cache
                seen[layer, heads] = True
        return found


def hand_over(
    source: KvGang,
    target: KvGang,
    generation: int,
    source_ids: list[int],
    target_ids: list[int],
    *,
    num_tokens: int,
    first_token: int = 0,
    range_ends: Sequence[int] = (),
) -> int:
    """One whole transfer. Bytes that the target's ranks received."""
    target.obey(KvAccept(generation, target_ids, first_token, num_tokens))
    assert target.events() == [Accepted(generation)] * len(target.endpoints)
    source.obey(KvOpen(generation, target.peer, source_ids, target_ids))
    begin = first_token
    for end in (*range_ends, num_tokens):
        source.obey(KvRange(generation, begin, end, is_last=end == num_tokens))
        begin = end
    assert source.events() == [Sent(generation)] * len(source.endpoints)
    num_bytes = 0
    for event in target.events():
        assert isinstance(event, Received), event
        assert event.generation == generation
        num_bytes += event.num_bytes
    return num_bytes


class RawSender:
    """A peer of an endpoint that says what it is told to say."""

    def __init__(self, url: str, key: bytes, *, link_id: str = "raw") -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = connected_socket(self._context, zmq.DEALER, key, PURPOSE, url)
        self.link_id = link_id

    def __enter__(self) -> RawSender:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def hello(self, geometry: Geometry) -> None:
        self.say(Hello(self.link_id, 0, geometry, None))

    def say(self, message: ToTarget | bytes, *payload: bytes) -> None:
        data = message if isinstance(message, bytes) else encode(message)
        self._socket.send_multipart([data, *payload])

    def answer(self) -> ToSender:
        assert self._socket.poll(int(WAIT_S * 1e3)), "no answer"
        return decode_to_sender(self._socket.recv())


class RawTarget:
    """Looks like an endpoint, and acknowledges nothing by itself."""

    def __init__(self) -> None:
        self.key = secrets.token_bytes(32)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = listening_socket(self._context, zmq.ROUTER, self.key, PURPOSE, "127.0.0.1")
        self.url = url_of(self._socket)
        self.identity = b""

    def __enter__(self) -> RawTarget:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def message(self, timeout_s: float = WAIT_S) -> ToTarget | None:
        if not self._socket.poll(int(timeout_s * 1e3)):
            return None
        self.identity, data, *_ = self._socket.recv_multipart()
        return decode_to_target(data)

    def frame(self, timeout_s: float = WAIT_S) -> Frame | None:
        """The next frame; None when none comes for so long."""
        end_s = time.monotonic() + timeout_s
        while (left_s := end_s - time.monotonic()) > 0:  # beats come all the time
            message = self.message(left_s)
            if isinstance(message, Frame):
                return message
        return None

    def say(self, message: ToSender) -> None:
        self._socket.send_multipart([self.identity, encode(message)])

    def peer(self, like: KvPeer) -> KvPeer:
        """As an engine of one rank like another."""
        return msgspec.structs.replace(like, rank_urls=[self.url], key=self.key)


class Proxy:
    """Passes bytes on to a URL, remembers them, and stops when told to."""

    def __init__(self, url: str, *, chunk_bytes: int = 1 << 16) -> None:
        host, port = url.removeprefix("tcp://").rsplit(":", 1)
        self._target = host, int(port)
        self._chunk_bytes = chunk_bytes
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.seen = bytearray()
        """All that went to the target."""
        self.goes_on = threading.Event()
        """Cleared: bytes stay here, connections stay open."""
        self.goes_on.set()
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.goes_on.set()
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """End all connections."""
        for one in self._sockets:
            one.close()

    def peer(self, like: KvPeer) -> KvPeer:
        """The engine of one rank behind this."""
        return msgspec.structs.replace(like, rank_urls=[self.url])

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._target)
            except OSError:  # nobody listens there any more
                near.close()
                continue
            self._sockets += [near, far]
            for source, target, keeps in ((near, far, True), (far, near, False)):
                threading.Thread(target=self._pass_on, args=(source, target, keeps), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, keeps: bool) -> None:
        try:
            while data := source.recv(self._chunk_bytes):
                self.goes_on.wait()
                if keeps:
                    self.seen += data
                target.sendall(data)
        except OSError:
            pass
        finally:
            for one in (source, target):
                one.close()


def random_blocks(
    shape: ModelShape, *, num_blocks: int, block_size: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> torch.Tensor:
    """[layers, 2, num_blocks, block_size, heads, dim]."""
    sizes = (shape.num_layers, 2, num_blocks, block_size, shape.num_kv_heads, shape.head_dim)
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).to(dtype)


def nan_blocks(like: torch.Tensor) -> torch.Tensor:
    """As many, never written."""
    return torch.full(like.shape, float("nan"), dtype=torch.float32).to(like.dtype)


def expected(blocks: torch.Tensor, before: torch.Tensor, source_ids: list[int], target_ids: list[int]) -> torch.Tensor:
    """The target's blocks after these were copied."""
    after = before.clone()
    after[:, :, target_ids] = blocks[:, :, source_ids]
    return after


def longer(limits: TransportLimits, **changes: Any) -> TransportLimits:
    return replace(limits, **changes)


def _part(blocks: torch.Tensor, shard: KvShard, device: str) -> list[LayerCache]:
    heads = slice(*shard.kv_heads)
    return [
        LayerCache(_copied(blocks[layer, 0][:, :, heads], device), _copied(blocks[layer, 1][:, :, heads], device))
        for layer in range(*shard.layers)
    ]


def _copied(part: torch.Tensor, device: str) -> torch.Tensor:
    return part.contiguous().clone().to(device)

"""What two endpoints say to each other, how blocks are cut into frames, checksums. Torch-free; knows no socket.

A frame is a rectangle: layers x a run of blocks x KV heads of one generation. Its payload is laid out
[layers, keys and values, blocks, block_size, heads, head_dim], scales behind it (block_store), and fits a staging
buffer of fixed size. Over TCP it follows its header; inside a node it lies in a staging buffer of the target's GPU
already when the header is sent.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from .layout import Span

MIB = 1 << 20
PURPOSE = "kv endpoint"
"""Of the CURVE keys that follow from an engine's secret."""


@dataclass(frozen=True)
class TransportLimits:
    """How much is on its way at most, and how long silence is borne. What an endpoint holds for each peer is bounded by
    num_slots * frame_bytes, or on GPUs of one node by num_staging * staging_bytes at either end."""

    frame_bytes: int = MIB
    """Of payload. A frame holds at least one block of one layer, whatever that takes."""
    num_slots: int = 8
    """Frames that the target has not acknowledged yet."""
    num_lanes: int = 1
    """Connections to a target, each encrypted by a thread of its own."""
    staging_bytes: int = 16 * MIB
    num_staging: int = 4
    beat_s: float = 0.5
    silence_s: float = 5.0
    """A sender that says nothing for so long is dead."""
    stall_s: float = 5.0
    """A target that leaves a frame unacknowledged for so long, or does not answer at all, is dead."""

    @classmethod
    def of(cls, device_type: str) -> TransportLimits:
        """For caches on `cpu` or `cuda`. A lane encrypts half a gigabyte a second, which hosts of GPUs have more of."""
        if device_type == "cpu":
            return cls()
        return cls(frame_bytes=4 * MIB, num_slots=16, num_lanes=8)


class Geometry(msgspec.Struct, frozen=True, array_like=True):
    """What both ends must agree on for bytes to mean the same."""

    block_size: int
    head_dim: int
    dtype: str
    """Of the entries; int8 and float8_e4m3fn come with scales."""


class Staging(msgspec.Struct, frozen=True):
    """The target's staging buffers on its GPU, one behind the other, for a process of the same node."""

    handle: bytes
    """Of CUDA IPC."""
    pid: int
    address: int
    """Where they lie in the target's own process."""
    slot_bytes: int
    num_slots: int


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first message of each lane of a link."""

    link_id: str
    """Random, the same on all lanes: a link that broke comes back under another."""
    lane: int
    geometry: Geometry
    node: str | None
    """Names the node (and the process's view of it) where the sender could write to another process's GPU memory."""


class Announce(msgspec.Struct, frozen=True, tag=True):
    """Frames of the generation will come over this link."""

    generation: int


class Frame(msgspec.Struct, frozen=True, tag=True):
    """A header. Ranges are half-open; layers and heads count over the whole model."""

    sequence: int
    """Of the link; acknowledged by it."""
    generation: int
    layers: Span
    kv_heads: Span
    blocks: Span
    """Positions in the prompt, in blocks: where these lie the target alone knows."""
    num_bytes: int
    checksums: list[int] | None = None
    """CRC-32 of each block's bytes in the frame."""
    slot: int | None = None
    """Which staging buffer holds the payload; None: it follows."""


class Beat(msgspec.Struct, frozen=True, tag=True):
    """The sender lives."""


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """Answers the Hello of lane 0."""

    frame_bytes: int
    staging: Staging | None


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Nothing of this link is taken: it is of another model, or was given up as silent."""

    reason: str


class Ack(msgspec.Struct, frozen=True, tag=True):
    """The frame's bytes are in the blocks, or were thrown away: its buffer is free."""

    sequence: int


class Drop(msgspec.Struct, frozen=True, tag=True):
    """The target takes no more frames of the generation."""

    generation: int
    reason: str


ToTarget = Hello | Announce | Frame | Beat
ToSender = Welcome | Refused | Ack | Drop

encode = msgspec.msgpack.Encoder().encode
decode_to_target = msgspec.msgpack.Decoder(ToTarget).decode
decode_to_sender = msgspec.msgpack.Decoder(ToSender).decode


def cut(layers: Span, blocks: Span, *, block_bytes: int, frame_bytes: int) -> Iterator[tuple[Span, Span]]:
    """Layers and blocks of the frames that cover the rectangle, layer after layer.

    `block_bytes`: one block of one layer. A frame has several layers only where each of them has all blocks.
    """
    num_blocks = blocks[1] - blocks[0]
    fitting = max(1, frame_bytes // block_bytes)
    layers_a_frame = max(1, fitting // num_blocks)
    blocks_a_frame = min(num_blocks, fitting)
    for layer in range(layers[0], layers[1], layers_a_frame):
        for block in range(blocks[0], blocks[1], blocks_a_frame):
            yield (
                (layer, min(layer + layers_a_frame, layers[1])),
                (block, min(block + blocks_a_frame, blocks[1])),
            )


def checksums(payload: memoryview, *, num_layers: int, num_blocks: int) -> list[int]:
    """Of each block, over its keys and values of all the frame's layers."""
    size = len(payload) // (2 * num_layers * num_blocks)
    found = [0] * num_blocks
    for part in range(2 * num_layers):
        for block in range(num_blocks):
            start = (part * num_blocks + block) * size
            found[block] = zlib.crc32(payload[start : start + size], found[block])
    return found

"""What rank 0 tells the other ranks and what the sampling rank answers, as bytes. Knows no transport.

A plan is a diff by nature (what entered, what was freed, which blocks were appended), so its structs are written as
they are: MessagePack arrays without names, about 11 bytes a decoding row. Leaving out the rows that go on as they
were would make a message five times smaller, but takes longer on both sides than it saves on a wire.
"""

from __future__ import annotations

import enum

import msgspec

from manta.engine.kv_transfer.messages import KvOrder
from manta.engine.plan import StepPlan, StepResult


class Order(enum.Enum):
    """What rank 0 wants of the others beside steps."""

    PREPARE_MORE = b"m"
    """Do one piece of the work that makes later steps faster."""
    END = b"e"
    """Finish what is in flight and end."""


class StepReport(msgspec.Struct, array_like=True):
    """A step's result on its way to rank 0. Raised errors take another way (watch.py)."""

    step_id: int
    result: StepResult


_PLAN = b"p"
_KV = b"k"

_encode = msgspec.msgpack.Encoder().encode
_decode_plan = msgspec.msgpack.Decoder(StepPlan).decode
_decode_kv = msgspec.msgpack.Decoder(KvOrder).decode
_decode_report = msgspec.msgpack.Decoder(StepReport).decode


def encode(message: StepPlan | KvOrder | Order) -> bytes:
    """A plan or an order as a message to the followers."""
    if isinstance(message, Order):
        return message.value
    return (_PLAN if isinstance(message, StepPlan) else _KV) + _encode(message)


def decode(data: bytes) -> StepPlan | KvOrder | Order:
    """Inverse of `encode`. Raises ValueError for anything else."""
    if data[:1] == _PLAN:
        return _decode_plan(memoryview(data)[1:])
    if data[:1] == _KV:
        return _decode_kv(memoryview(data)[1:])
    return Order(data)


def encode_report(report: StepReport) -> bytes:
    """A step's result as a message to rank 0."""
    return _encode(report)


def decode_report(data: bytes) -> StepReport:
    """Inverse of `encode_report`. Raises msgspec.DecodeError (a ValueError) for anything else."""
    return _decode_report(data)

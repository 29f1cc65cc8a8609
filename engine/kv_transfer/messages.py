"""What cores, and the ranks of a gang, tell each other about a request's KV on its way. Torch-free; knows no transport.

Four languages, of who speaks to whom:
- edge to core: SendKv and TakeKv, in a request, and a ticket that is the same in both;
- core to core (P, which computed the prompt, and D, which decodes): Begin, Sending, GivenUp up; Granted, NotGranted,
  Withdrawn down;
- core to its own ranks, in the order of the step plans: KvOrder;
- a rank's endpoint to its core: KvEvent.

A generation is the number of one grant of D's. It is unique over all engines, so that frames and events need no more.
"""

from __future__ import annotations

import msgspec


class KvShard(msgspec.Struct, frozen=True, array_like=True):
    """The part of every block that one rank holds, as half-open ranges over the whole model."""

    layers: tuple[int, int]
    kv_heads: tuple[int, int]


class KvPeer(msgspec.Struct, frozen=True, kw_only=True):
    """All that one engine must know of another to send KV to it, its own ranks included. Part of EngineInfo."""

    control_url: str
    """Where the core takes Begin."""
    rank_urls: list[str]
    """Where each rank's endpoint takes frames, by rank."""
    shards: list[KvShard]
    """What each rank holds, by rank."""
    model: str
    block_size: int
    """Tokens."""
    head_dim: int
    dtype: str
    key: bytes
    """32 secret bytes from which the CURVE keys of all of the engine's KV sockets follow: who has them may write into
    blocks that were granted. They travel over the authenticated channel only."""

    def __repr__(self) -> str:
        return f"KvPeer({self.control_url})"

    @property
    def num_layers(self) -> int:
        return max(shard.layers[1] for shard in self.shards)

    @property
    def num_kv_heads(self) -> int:
        return max(shard.kv_heads[1] for shard in self.shards)

    def mismatch(self, other: KvPeer) -> str | None:
        """Why KV cannot go from one to the other, naming what differs; None when it can."""
        for name in ("model", "block_size", "dtype", "head_dim", "num_layers", "num_kv_heads"):
            own, others = getattr(self, name), getattr(other, name)
            if own != others:
                return f"{name} is {own} on one side and {others} on the other"
        return None


class SendKv(msgspec.Struct, frozen=True, tag=True):
    """Of a request that another engine will decode: its tokens' KV goes there while it is computed here."""

    ticket: str
    to: KvPeer


class TakeKv(msgspec.Struct, frozen=True, tag=True):
    """Of a request that another engine has prefilled: use the KV that came under this ticket, if it came."""

    ticket: str


class Begin(msgspec.Struct, frozen=True, tag=True):
    """P computes the first of the tokens that D expects under the ticket. Answered by Granted or NotGranted."""

    ticket: str
    num_tokens: int


class Sending(msgspec.Struct, frozen=True, tag=True):
    """P goes on with a grant's tokens: the lease counts from now."""

    generation: int


class GivenUp(msgspec.Struct, frozen=True, tag=True):
    """P will not complete what it began."""

    ticket: str
    reason: str


class Granted(msgspec.Struct, frozen=True, tag=True):
    """D's blocks for the ticket's tokens, and how many of the first of them it has already."""

    ticket: str
    generation: int
    block_ids: list[int]
    """For all tokens, in their order; the last may be partly filled. More than the tokens need are D's own business."""
    num_cached_tokens: int


class NotGranted(msgspec.Struct, frozen=True, tag=True):
    """D will compute the tokens itself."""

    ticket: str
    reason: str


class Withdrawn(msgspec.Struct, frozen=True, tag=True):
    """D wants no more of a grant: P may stop."""

    generation: int
    reason: str


ToDecode = Begin | Sending | GivenUp
ToPrefill = Granted | NotGranted | Withdrawn


class KvOpen(msgspec.Struct, frozen=True, tag=True):
    """P's ranks: what the ranges of a generation mean. Before its first KvRange."""

    generation: int
    to: KvPeer
    source_block_ids: list[int]
    target_block_ids: list[int]
    """As many, in the order of the tokens."""


class KvRange(msgspec.Struct, frozen=True, tag=True):
    """P's ranks: send tokens [first_token, end_token), whose KV is in the cache once the steps launched so far are done
    (in a step plan: once that step is). Ranges of a generation follow one another without gaps."""

    generation: int
    first_token: int
    end_token: int
    is_last: bool


class KvStop(msgspec.Struct, frozen=True, tag=True):
    """P's ranks: send nothing more of a generation. Answered by Stopped when the last read is over, also when all was
    sent already or nothing was ever asked for."""

    generation: int


class KvAccept(msgspec.Struct, frozen=True, tag=True):
    """D's ranks: take tokens [first_token, num_tokens) into these blocks. Answered by Accepted, then by Received."""

    generation: int
    block_ids: list[int]
    first_token: int
    num_tokens: int


class KvRevoke(msgspec.Struct, frozen=True, tag=True):
    """D's ranks: read what still comes of a generation and throw it away. Answered by Revoked once no write into its
    blocks will happen any more, also for a generation that is complete, or unknown."""

    generation: int


KvOrder = KvOpen | KvRange | KvStop | KvAccept | KvRevoke


class Accepted(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """D: the rank takes frames of the generation."""

    generation: int


class Received(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """D: all bytes of the generation are in the rank's blocks."""

    generation: int
    num_bytes: int = 0


class Revoked(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """D: the rank's blocks of the generation are not written any more."""

    generation: int


class Sent(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """P: the rank has read all that the generation's ranges asked for, the last included; its blocks may be reused."""

    generation: int


class Stopped(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """P: the rank reads the generation's blocks no more."""

    generation: int


class Failed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Either side: the rank's transfer cannot be completed. Blocks may still be read or written until Stopped or
    Revoked answers the order that follows."""

    generation: int
    reason: str


KvEvent = Accepted | Received | Revoked | Sent | Stopped | Failed

"""How a process learns which rank of which gang it is. Torch-free; knows no model and not who starts the processes.

Whoever starts the ranks (LLM, Ray actors, a test) hands each its GangMember. Everything else the ranks tell each other
through one store of torch.distributed, which rank 0's process hosts.
"""

from __future__ import annotations

import hashlib
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass

from .place import RankPlace


@dataclass(frozen=True)
class GangMember:
    """One rank of a gang. All members of a gang are equal but for `place`."""

    place: RankPlace
    store_host: str
    store_port: int
    hosts: tuple[str, ...]
    """Address of each rank's node, by rank: the same string means the same node (shared memory is used there)."""
    gang_id: str
    """Random and secret (`new_gang_id`): who knows it may talk to the ranks. It never travels between them."""
    backend: str | None = None
    """Of torch.distributed for the tensors; None: NCCL where every rank has a GPU of its own, else gloo."""

    def __post_init__(self) -> None:
        world_size = self.place.world_size
        assert len(self.hosts) == world_size, f"{len(self.hosts)} hosts for {world_size} ranks"

    @property
    def host(self) -> str:
        """Address of this rank's node."""
        return self.hosts[self.place.rank]

    @property
    def ranks_on_node(self) -> tuple[int, ...]:
        """The ranks of this rank's node, itself among them."""
        return tuple(rank for rank, host in enumerate(self.hosts) if host == self.host)

    @property
    def is_beside_driver(self) -> bool:
        """Whether this rank shares a node, and so memory, with rank 0."""
        return self.host == self.hosts[0]

    def key(self, purpose: str) -> bytes:
        """32 secret bytes that all members derive alike for one purpose."""
        return hashlib.blake2b(purpose.encode(), key=self.gang_id.encode()[:64], digest_size=32).digest()


@dataclass(frozen=True)
class GangSeat:
    """Rank 0's place in a gang, and what it agrees on with whoever starts the other ranks."""

    member: GangMember
    store_socket: socket.socket | None
    """Where the ranks meet; used up. None: the member's port is listened at."""
    on_broken: Callable[[str], None]
    """Called by another thread, with the reason, when a rank dies, freezes or hangs after the start."""
    on_closed: Callable[[], None] = lambda: None
    """Called when the engine has been closed and the other ranks were told to end."""
    check: Callable[[], None] = lambda: None
    """Called again and again during the start; may raise what is wrong with the other ranks' processes."""


def new_gang_id() -> str:
    """A fresh secret for one start of a gang."""
    return secrets.token_hex(32)


def listen_for_store(host: str) -> socket.socket:
    """A listening socket for rank 0's store on a free port of `host`, so that the port is known, and taken, before the
    store runs. Pass it to `start_engine`, which uses it up."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen(128)
    return listener

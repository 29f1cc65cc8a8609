"""How the ranks of a gang exchange tensors: sums in a stage, residuals between stages, numbers among all.

Made directly from a store, without torch.distributed's global state: many ranks can live in one process as threads.
Knows places and tensors, no model and no plans; who started the ranks, and on which nodes, is not known here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import distributed
from torch._C._distributed_c10d import PrefixStore, Store

from manta.engine.errors import ConfigError

from . import nccl, shared_sum
from .exchange import Backend, Exchange
from .one_shot import OneShotSum, open_one_shot
from .place import RankPlace

_TIMEOUT = timedelta(minutes=10)
"""Of one exchange. A rank that died is noticed by others (engine/parallel/watch.py), long before."""


class AllReduce(Protocol):
    """Sums over the ranks of a stage. One interface, so that a kernel of our own can stand beside a library."""

    def __call__(self, x: torch.Tensor) -> None:
        """Replace `x` by the sum of all ranks' `x`, bit for bit the same on each. Called by all, in the same order."""
        ...


class TensorGroup:
    """The ranks that hold the same layers. Every method is called by all of them, in the same order."""

    def __init__(
        self,
        place: RankPlace,
        exchange: Exchange,
        all_reduce: AllReduce | None = None,
        one_shot: OneShotSum | None = None,
    ) -> None:
        """`all_reduce`: in place of the exchange's own; `one_shot`: in place of either, for what it takes."""
        self.rank = place.tp_rank
        self.size = place.tp_size
        self._exchange = exchange
        self._all_reduce: AllReduce = exchange.all_reduce_ if all_reduce is None else all_reduce
        self._one_shot = one_shot
        self._is_silent = False

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Inside, nothing is exchanged and results mean nothing, for work that only compiles."""
        self._is_silent = True
        try:
            yield
        finally:
            self._is_silent = False

    def all_reduce_(self, x: torch.Tensor) -> None:
        """Replace `x` by the sum of all ranks' `x`, bit for bit the same on each."""
        if self._is_silent:
            return
        if self._one_shot is not None and self._one_shot.takes(x):
            self._one_shot(x)
        else:
            self._all_reduce(x)

    def add_sum_(self, residual: torch.Tensor, part: torch.Tensor) -> None:
        """residual += the sum of all ranks' `part`, of the same shape, which is used up. `residual` is the same on all
        ranks, and is so afterwards."""
        if not self._is_silent and self._one_shot is not None and self._one_shot.takes(part):
            self._one_shot(part, residual)
            return
        self.all_reduce_(part)
        residual.add_(part)

    def maximum_(self, x: torch.Tensor) -> None:
        """Replace `x` by the largest of all ranks' `x`, element by element."""
        if not self._is_silent:
            self._exchange.maximum_(x)

    def broadcast_(self, x: torch.Tensor, *, source: int = 0) -> None:
        """Replace `x` by that of the rank `source` of this group."""
        if not self._is_silent:
            self._exchange.broadcast_(x, source)

    def gather_vocab(self, logits: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """From [rows, sizes[rank]] on each rank to [rows, sum(sizes)] on rank 0; on the others `logits` as they are."""
        if self._is_silent:
            return logits.new_zeros(logits.shape[0], sum(sizes)) if self.rank == 0 else logits
        widest = max(sizes)
        if logits.shape[1] < widest:
            padded = logits.new_zeros(logits.shape[0], widest)
            padded[:, : logits.shape[1]] = logits
        else:
            padded = logits.contiguous()
        gathered = self._exchange.gather(padded)
        if gathered is None:
            return logits
        return torch.cat([part[:, :size] for part, size in zip(gathered, sizes, strict=True)], dim=1)


class StageLinks:
    """The residual stream's way from one stage to the next, between ranks of the same part."""

    def __init__(self, place: RankPlace, exchange: Exchange) -> None:
        self._previous, self._next = place.pp_rank - 1, place.pp_rank + 1
        self._num_unfinished = place.pp_size + 1
        self._exchange = exchange
        self._sending: deque[Callable[[], None]] = deque()

    def send(self, residual: torch.Tensor) -> None:
        """To the next stage; `residual` must not be changed afterwards. Returns before it has arrived."""
        self._sending.append(self._exchange.start_send(residual, self._next))
        while len(self._sending) > self._num_unfinished:
            self._sending.popleft()()

    def receive(self, num_tokens: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """[num_tokens, hidden_size] from the previous stage, in the order in which it sends."""
        residual = torch.empty((num_tokens, hidden_size), dtype=dtype, device=device)
        self._exchange.receive_(residual, self._previous)
        return residual


class HostGroup:
    """All ranks of the gang, for tensors and numbers on the host."""

    def __init__(self, place: RankPlace, exchange: Exchange) -> None:
        self._place = place
        self._exchange = exchange

    def smallest(self, values: Sequence[int]) -> list[int]:
        """The minimum over all ranks of each of `values`; called by all."""
        found = torch.tensor(values, dtype=torch.int64)
        self._exchange.minimum_(found)
        return found.tolist()

    def barrier(self) -> None:
        """Return when all ranks have come here."""
        self.smallest([0])

    def broadcast_(self, x: torch.Tensor, *, source: int) -> None:
        """Replace `x` by that of rank `source`; called by all, in the same order."""
        self._exchange.broadcast_(x, source)

    def start_send(self, x: torch.Tensor, rank: int, *, tag: int = 0) -> Callable[[], None]:
        """Start to send to another rank. Returns what waits for the end; until then `x` must not be changed."""
        return self._exchange.start_send(x, rank, tag=tag)

    def receive_(self, x: torch.Tensor, rank: int, *, tag: int = 0) -> None:
        """Fill `x` with what `rank` sends under the same tag."""
        self._exchange.receive_(x, rank, tag=tag)


@dataclass(frozen=True)
class Groups:
    """The groups of one rank; None where there is nobody to talk to."""

    place: RankPlace
    backend: Backend
    """What tensors of the device travel through."""
    tensor: TensorGroup | None
    stages: StageLinks | None
    everyone: HostGroup | None
    num_on_device: int = 1
    """Ranks on this rank's GPU, itself among them."""
    nccl_groups: list[Any] = field(default_factory=list)
    one_shot: OneShotSum | None = None

    @property
    def can_capture(self) -> bool:
        """Whether a step's exchanges may be part of a CUDA graph: all are kernels, and no stage waits for another."""
        return self.backend == "nccl" and self.stages is None

    def smallest(self, values: Sequence[int]) -> list[int]:
        """The minimum over all ranks of each of `values`."""
        return list(values) if self.everyone is None else self.everyone.smallest(values)

    def abort(self) -> None:
        """Let go whatever waits on the GPU for other ranks, which may be dead: the results mean nothing then, and the
        groups are of no more use. May be called by any thread, and again. Exchanges of the host end by themselves when
        a rank's process does."""
        if self.one_shot is not None:
            self.one_shot.abort()
        self._give_up()

    def close(self) -> None:
        """Give up what is left, once nothing is under way on the GPU and no graph holds an exchange."""
        self._give_up()
        if self.one_shot is not None:
            self.one_shot.close()

    def _give_up(self) -> None:
        groups, self.nccl_groups[:] = [*self.nccl_groups], []
        nccl.give_up(groups)


def join_groups(
    place: RankPlace,
    store: Store,
    *,
    device: torch.device,
    backend: Backend | None = None,
    address: str | None = None,
) -> Groups:
    """Meet all other ranks over `store`, and return when all are connected; called once by every rank.

    `backend`: None takes NCCL on CUDA when every rank has a GPU of its own, else gloo (through the host). `address` is
    this rank's own, at which the others reach it; None: the one that the host's name resolves to. Ranks of a stage with
    the same address on the CPU share memory for their sums. Raises ConfigError when the backend cannot work on the
    device.
    """
    if place.world_size == 1:
        return Groups(place, backend or "gloo", None, None, None)
    store = PrefixStore("manta/groups", store)
    devices = _devices(place, store, device)
    chosen = _choose_backend(devices, device, backend)

    nccl_groups: list[Any] = []

    def joined(name: str, ranks: Sequence[int], kind: Backend, on: torch.device) -> Exchange:
        part = PrefixStore(f"{name}/{ranks[0]}", store)
        rank, size = ranks.index(place.rank), len(ranks)
        if kind == "gloo":
            return Exchange(_gloo_group(part, rank, size, address), on, kind)
        nccl_groups.append(nccl.nccl_group(part, rank, size, on, timeout=_TIMEOUT))
        return Exchange(nccl_groups[-1], on, kind)

    host = torch.device("cpu")
    everyone = HostGroup(place, joined("everyone", range(place.world_size), "gloo", host))
    tensor = stages = one_shot = None
    if place.tp_size > 1:
        all_reduce = None
        part = PrefixStore(f"sum/{place.stage_ranks[0]}", store)
        is_one_node = _is_one_node(place, store, address)
        if shared_sum.can_share(device) and is_one_node:
            all_reduce = shared_sum.SharedSum(place.tp_rank, place.tp_size, part)
        exchange = joined("tensor", place.stage_ranks, chosen, device)
        if chosen == "nccl" and is_one_node:
            one_shot = open_one_shot(place.tp_rank, place.tp_size, part, device)
        tensor = TensorGroup(place, exchange, all_reduce, one_shot)
    if place.pp_size > 1:
        column = range(place.tp_rank, place.world_size, place.tp_size)
        stages = StageLinks(place, joined("stages", column, chosen, device))
    everyone.barrier()  # a rank that let go of its groups at once would break off what others still connect
    return Groups(
        place,
        chosen,
        tensor,
        stages,
        everyone,
        num_on_device=devices.count(devices[place.rank]),
        nccl_groups=nccl_groups,
        one_shot=one_shot,
    )


def _is_one_node(place: RankPlace, store: Store, address: str | None) -> bool:
    """Whether all ranks of the stage have the same address."""
    store.set(f"address/{place.rank}", address or "")
    addresses = {store.get(f"address/{rank}").decode() for rank in place.stage_ranks}
    return len(addresses) == 1 and "" not in addresses


def _devices(place: RankPlace, store: Store, device: torch.device) -> list[str]:
    """What tells the ranks' devices apart, by rank."""
    own = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else f"host of {place.rank}"
    store.set(f"device/{place.rank}", own)
    return [store.get(f"device/{rank}").decode() for rank in range(place.world_size)]


def _choose_backend(devices: Sequence[str], device: torch.device, asked: Backend | None) -> Backend:
    """NCCL where every rank has a GPU of its own. All ranks come to the same answer."""
    can_nccl = device.type == "cuda" and len(set(devices)) == len(devices)
    if asked == "nccl" and not can_nccl:
        raise ConfigError(
            f"backend = 'nccl': needs a CUDA GPU of its own for each of {len(devices)} ranks, which have "
            f"{', '.join(sorted(set(devices)))}; use gloo",
            field="parallel.backend",
        )
    return asked or ("nccl" if can_nccl else "gloo")


def _gloo_group(store: Store, rank: int, size: int, address: str | None) -> Any:
    gloo: Any = distributed.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = _TIMEOUT
    options._threads = 2
    options._devices = [gloo.create_device(hostname=address) if address else gloo.create_default_device()]
    return gloo(store, rank, size, options)

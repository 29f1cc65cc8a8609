"""Members of a gang, a store without torch, and waiting for what another thread or process does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from manta.engine.parallel.member import GangMember
from manta.engine.parallel.place import RankPlace


class LocalStore:
    """torch.distributed's store for the threads of one process. `get` waits."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value.encode()
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._values, 10), f"nobody sets {key}"
            return self._values[key]


def members(tp: int = 1, pp: int = 1, *, nodes: tuple[str, ...] = (), gang_id: str = "secret") -> list[GangMember]:
    """All members of a gang, on one node unless `nodes` says otherwise."""
    hosts = nodes or ("127.0.0.1",) * (tp * pp)
    return [GangMember(RankPlace(rank, tp, pp), "127.0.0.1", 0, hosts, gang_id) for rank in range(tp * pp)]


def wait_for(condition: Callable[[], object], timeout_s: float = 10.0) -> float:
    """Until `condition` holds. Returns the seconds that passed."""
    start_s = time.monotonic()
    while not condition():
        assert time.monotonic() - start_s < timeout_s, "it did not happen in time"
        time.sleep(0.01)
    return time.monotonic() - start_s

"""How ranks settle whether the one-shot kernel sums for them, and how NCCL groups are given up; without a GPU."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from manta.engine.kv_transfer.cuda_ipc import IpcUnavailable
from manta.engine.parallel import nccl, one_shot
from manta.engine.parallel.one_shot import OneShotSum, open_one_shot
from tests.engine.parallel.gangs import LocalStore

CPU = torch.device("cpu")


def opened(*max_bytes: int | None) -> list[OneShotSum | None]:
    """What each of as many ranks gets."""
    store, size = LocalStore(), len(max_bytes)

    def work(rank: int) -> OneShotSum | None:
        return open_one_shot(rank, size, store, CPU, max_bytes=max_bytes[rank])

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, range(size)))


def test_without_an_entry_in_the_table_no_rank_asks_for_memory():
    assert opened(None, None) == [None, None]


def test_ranks_whose_tables_differ_leave_sums_to_the_library(caplog: pytest.LogCaptureFixture):
    assert opened(0, 1 << 19, 1 << 19) == [None] * 3
    assert "their tables differ" in caplog.text


def test_where_one_rank_cannot_share_its_memory_all_learn_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    class Buffer:
        handle, address, is_closed = b"handle", 0, False

        def __init__(self, num_bytes: int, device: torch.device) -> None:
            buffers.append(self)
            if len(buffers) == 2:
                raise IpcUnavailable("the second has no room")
            self._bytes = torch.ones(num_bytes, dtype=torch.uint8)

        def tensor(self) -> torch.Tensor:
            return self._bytes

        def close(self) -> None:
            self.is_closed = True

    buffers: list[Buffer] = []
    monkeypatch.setattr(one_shot, "SharedBuffer", Buffer)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert opened(1 << 16, 1 << 16) == [None, None]
    assert "NCCL alone" in caplog.text
    assert buffers[0].is_closed
    assert not buffers[0].tensor().any(), "an arena begins as zeros"


def test_a_group_that_cannot_be_given_up_stops_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    class Group:
        is_aborted = False

        def abort(self) -> None:
            self.is_aborted = True

    class Broken(Group):
        def abort(self) -> None:
            raise RuntimeError("no communicator")

    class Stuck(Group):
        def __init__(self) -> None:
            self.goes_on = threading.Event()

        def abort(self) -> None:
            self.goes_on.wait()

    monkeypatch.setattr(nccl, "_ABORT_S", 0.05)
    last, stuck = Group(), Stuck()
    nccl.give_up([Broken(), last])
    assert last.is_aborted
    assert "no communicator" in caplog.text
    nccl.give_up([stuck])
    assert "takes longer" in caplog.text
    stuck.goes_on.set()

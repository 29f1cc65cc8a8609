"""The link brings every message to every rank, in order, by shared memory and by network."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest

from manta.engine.errors import EngineFailed
from manta.engine.parallel.link import DriverLink, FollowerLink
from manta.engine.parallel.member import GangMember
from manta.engine.parallel.ring import RingReader, RingWriter
from tests.engine.parallel.gangs import LocalStore, members

NEAR = ("127.0.0.1",) * 3
FAR = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
MIXED = ("127.0.0.1", "127.0.0.1", "127.0.0.2")


def no_check() -> None:
    pass


def join(stack: ExitStack, gang: list[GangMember]) -> tuple[DriverLink, list[FollowerLink]]:
    store = LocalStore()
    driver = stack.enter_context(closing(DriverLink(gang[0], store)))
    followers = [stack.enter_context(closing(FollowerLink(member, store))) for member in gang[1:]]
    driver.wait_for_followers(10, no_check)
    return driver, followers


@pytest.mark.parametrize("nodes", [NEAR, FAR, MIXED], ids=["one node", "three nodes", "two nodes"])
def test_every_rank_gets_every_message_in_order_also_long_ones(nodes: tuple[str, ...]):
    rng = random.Random(1)
    sizes = [0, 1, 32768, 32769, 5_000_000, *(rng.randrange(40_000) for _ in range(300))]
    messages = [rng.randbytes(size) for size in sizes]
    with ExitStack() as stack:
        driver, followers = join(stack, members(pp=3, nodes=nodes))
        pool = stack.enter_context(ThreadPoolExecutor(2))
        received = [pool.submit(lambda f=f: [f.receive(10) for _ in messages]) for f in followers]
        for message in messages:
            driver.send(message, no_check)
        assert [r.result() == messages for r in received] == [True, True]


@pytest.mark.parametrize("nodes", [NEAR, FAR, MIXED], ids=["one node", "three nodes", "two nodes"])
def test_the_sampling_rank_reports_to_rank_0(nodes: tuple[str, ...]):
    with ExitStack() as stack:
        driver, followers = join(stack, members(pp=3, nodes=nodes))
        for number in range(50):
            followers[-1].report(str(number).encode(), no_check)
        assert [int(driver.receive(no_check)) for _ in range(50)] == list(range(50))


def test_a_reader_that_looks_before_it_sleeps_gets_the_same_messages():
    writer = RingWriter(1)
    with closing(writer), ThreadPoolExecutor(1) as pool:
        reader = RingReader(writer.address, 0)
        reader.look_s = 60.0  # longer than the test: it never sleeps
        received = pool.submit(lambda: [reader.receive(30) for _ in range(200)])
        for number in range(200):
            writer.send(b"x" * number, no_check)
        assert received.result() == [b"x" * number for number in range(200)]
        assert reader.receive(0.01) is None


def test_ranks_look_before_they_sleep_only_with_two_cores_each(monkeypatch: pytest.MonkeyPatch):
    with ExitStack() as stack:
        gang = members(pp=3, nodes=MIXED)
        _, (near, far) = join(stack, gang)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(3)))
        assert not near.look_for_plans(gang[1])
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
        assert near.look_for_plans(gang[1])
        assert not far.look_for_plans(gang[2])  # it waits for a network


def test_receiving_returns_when_nothing_comes():
    with ExitStack() as stack:
        _, followers = join(stack, members(pp=3, nodes=MIXED))
        assert [follower.receive(0.01) for follower in followers] == [None, None]


def test_the_driver_is_not_stuck_when_a_follower_reads_no_more():
    def gone() -> None:
        raise EngineFailed("rank 1 is gone")

    with ExitStack() as stack:
        driver, _ = join(stack, members(tp=2))
        for _ in range(64):
            driver.send(b"plan", gone)
        with pytest.raises(EngineFailed, match="rank 1 is gone"):
            driver.send(b"plan", gone)


def test_the_driver_is_not_stuck_when_no_report_comes():
    def gone() -> None:
        raise EngineFailed("rank 1 is gone")

    with ExitStack() as stack:
        driver, _ = join(stack, members(pp=2))
        with pytest.raises(EngineFailed, match="rank 1 is gone"):
            driver.receive(gone)


def test_who_does_not_know_the_secret_neither_joins_nor_reads():
    store = LocalStore()
    with ExitStack() as stack:
        driver = stack.enter_context(closing(DriverLink(members(pp=2, nodes=FAR[:2])[0], store)))
        stranger = members(pp=2, nodes=FAR[:2], gang_id="another secret")[1]
        link = stack.enter_context(closing(FollowerLink(stranger, store)))
        with pytest.raises(TimeoutError, match="ranks 1 did not open"):
            driver.wait_for_followers(0.5, no_check)
        assert link.receive(0.1) is None


def test_a_ring_reaches_other_processes_and_leaves_nothing_behind():
    writer = RingWriter(1)
    code = (
        "import sys; from manta.engine.parallel.ring import *\n"
        "reader = RingReader(RingAddress(*map(int, sys.argv[1:])), 0)\n"
        "print(reader.receive(10).decode())"
    )
    a = writer.address
    numbers = [a.pid, a.descriptor, a.num_slots, a.slot_bytes, a.num_readers]
    with subprocess.Popen([sys.executable, "-c", code, *map(str, numbers)], stdout=subprocess.PIPE, text=True) as child:
        writer.send(b"hello", no_check)
        assert child.communicate(timeout=20)[0] == "hello\n"
    writer.close()
    with pytest.raises(OSError):
        RingReader(a, 0)


def test_waiting_for_a_message_takes_no_cpu_time():
    writer = RingWriter(1)
    with closing(writer):
        reader = RingReader(writer.address, 0)
        before = os.times()
        assert reader.receive(0.5) is None
        after = os.times()
        assert after.user + after.system - before.user - before.system < 0.1

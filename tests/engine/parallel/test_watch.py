"""The watch of real connections: ends, silences, failures and farewells are noticed, strangers are not let in."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest

from manta.engine.errors import CheckpointError, ConfigError, EngineFailed
from manta.engine.parallel.vitals import StepClock
from manta.engine.parallel.watch import Watch
from tests.engine.parallel.gangs import LocalStore, members, wait_for


class Gang:
    """Watches of all ranks in one process, and what each said is broken."""

    def __init__(self, stack: ExitStack, *, tp: int = 3) -> None:
        self.store = LocalStore()
        self.broken: list[list[str]] = [[] for _ in range(tp)]
        self.ranks: list[Watch] = []
        for member, broken in zip(members(tp=tp), self.broken, strict=True):
            self.ranks.append(stack.enter_context(closing(Watch(member, self.store, broken.append))))

    def start(self) -> None:
        for watch in self.ranks:
            watch.say_ready()
        self.ranks[0].wait_until_ready(5)


@pytest.fixture
def gang() -> Iterator[Gang]:
    with ExitStack() as stack:
        yield Gang(stack)


def test_ranks_that_live_and_say_farewell_break_nothing(gang: Gang):
    gang.start()
    gang.ranks[1].close()
    wait_for(lambda: gang.ranks[0]._peers[1].has_left)
    gang.ranks[0].close()
    wait_for(lambda: gang.ranks[2].is_left_alone)
    assert gang.broken == [[], [], []]


def test_a_connection_that_ends_breaks_the_gang_once(gang: Gang):
    gang.start()
    gang.ranks[2]._peers[0].connection.shutdown(socket.SHUT_RDWR)
    wait_for(lambda: gang.broken[0])
    assert gang.broken[0] == ["Rank 2 is gone: its connection ended."]
    with pytest.raises(EngineFailed, match="Rank 2 is gone"):
        gang.ranks[0].check()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConfigError("cache.num_blocks = 2: too few", field="cache.num_blocks"), ConfigError),
        (CheckpointError("model.safetensors is short"), CheckpointError),
        (RuntimeError("out of luck"), EngineFailed),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_error_of_a_rank_that_cannot_start_is_raised_in_rank_0(gang: Gang, error: Exception, expected: type):
    gang.ranks[1].fail(error)
    with pytest.raises(expected, match=str(error)) as raised:
        gang.ranks[0].wait_until_ready(5)
    assert getattr(raised.value, "field", None) == getattr(error, "field", None)
    assert len(gang.broken[0]) == 1


def test_rank_0_s_failure_reaches_every_other_rank(gang: Gang):
    gang.start()
    gang.ranks[0].fail(RuntimeError("no memory"))
    wait_for(lambda: gang.broken[1] and gang.broken[2])
    assert gang.broken[1] == ["Rank 0: RuntimeError: no memory"]


def test_ranks_that_are_late_are_named(gang: Gang):
    gang.ranks[1].say_ready()
    with pytest.raises(EngineFailed, match=r"Ranks \[2\] did not start"):
        gang.ranks[0].wait_until_ready(0.3)


def test_a_step_that_hangs_breaks_the_gang(gang: Gang):
    gang.start()
    gang.ranks[0].steps = clock = StepClock(predict=lambda num_tokens: 0.01)
    for step_id in range(10):
        clock.begin(step_id, 1, 0.0)
        clock.end(0.01)
    clock.begin(10, 1, time.monotonic() - 60)
    wait_for(lambda: gang.broken[0])
    assert "Step 10 of 1 tokens hangs" in gang.broken[0][0]


def test_a_stranger_is_not_let_in_and_does_not_take_a_rank_s_place():
    store = LocalStore()
    with ExitStack() as stack:
        own = members(tp=2)
        driver = stack.enter_context(closing(Watch(own[0], store, print)))
        stranger = members(tp=2, gang_id="another secret")[1]
        with pytest.raises(EngineFailed, match="cannot reach rank 0"):
            Watch(stranger, store, print)
        follower = stack.enter_context(closing(Watch(own[1], store, print)))
        follower.say_ready()
        driver.wait_until_ready(5)


@contextmanager
def follower_process(store: LocalStore) -> Iterator[subprocess.Popen[str]]:
    """Rank 1 of two in a process of its own, ready; its output tells what broke."""
    code = (
        "import sys, time\n"
        "from manta.engine.parallel.member import GangMember\n"
        "from manta.engine.parallel.place import RankPlace\n"
        "from manta.engine.parallel.watch import Watch\n"
        "class Store:\n"
        "    def get(self, key): return sys.argv[1].encode()\n"
        "member = GangMember(RankPlace(1, 2), '127.0.0.1', 0, ('127.0.0.1',) * 2, 'secret')\n"
        "watch = Watch(member, Store(), lambda reason: print(reason, flush=True))\n"
        "watch.say_ready()\n"
        "sys.stdin.read()\n"
    )
    address = store.get("watch/address").decode()
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code, address], stdin=pipe, stdout=pipe, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


@pytest.mark.parametrize(
    ("number", "limit_s", "reason"),
    [(signal.SIGKILL, 1.0, "its connection ended"), (signal.SIGSTOP, 5.0, "not heard of")],
    ids=["killed", "stopped"],
)
def test_a_process_that_is_killed_or_stopped_is_noticed_in_less_than_5_seconds(
    number: signal.Signals, limit_s: float, reason: str
):
    store, broken = LocalStore(), []
    with closing(Watch(members(tp=2)[0], store, broken.append)) as watch, follower_process(store) as child:
        watch.say_ready()
        watch.wait_until_ready(20)
        os.kill(child.pid, number)
        assert wait_for(lambda: broken) < limit_s
        assert reason in broken[0]

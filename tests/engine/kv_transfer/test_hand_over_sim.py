"""Hand-overs between simulated engines: no bytes, but the time that they take, and the tokens of one engine."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from manta.engine.config import EngineConfig
from manta.engine.core import EngineCore
from manta.engine.kv_transfer.messages import (
    Accepted,
    KvAccept,
    KvEvent,
    KvOpen,
    KvPeer,
    KvRange,
    KvRevoke,
    KvShard,
    KvStop,
    Received,
    Revoked,
    Sent,
    Stopped,
)
from manta.engine.kv_transfer.sim_endpoint import SimEndpoint
from manta.engine.request import SamplingParams
from manta.engine.startup import start_engine
from tests.engine.kv_transfer.pairs import Pair, alone, tokens_of
from tests.engine.parallel.gangs import wait_for

KEY = b"k" * 32


def start() -> EngineCore:
    sizes = {"num_blocks": 64, "block_size": 16, "max_num_batched_tokens": 32, "max_num_seqs": 8}
    return start_engine(EngineConfig.build("smollm2-135m", device="sim:1ms", kv_transfer=True, **sizes))


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with Pair(start(), start()) as pair:
        yield pair


def test_tokens_are_those_of_one_engine(pair: Pair):
    params = SamplingParams(temperature=0, max_tokens=6, seed=0)
    prompts = [[100 + length] * length for length in (1, 15, 16, 17, 64, 100)]
    expected = [tokens_of(deltas) for deltas in alone(pair.d, prompts, params)]
    pair.forget_cached()
    for prompt in prompts:
        pair.begin(f"n{len(prompt)}", prompt, params)
    pair.run(*(f"n{len(prompt)}" for prompt in prompts))
    assert [pair.tokens[f"n{len(prompt)}"] for prompt in prompts] == expected
    snapshot = pair.d.snapshot()
    assert (snapshot.num_kv_received, snapshot.num_kv_recomputed) == (6, 0)
    assert snapshot.num_kv_bytes == sum(map(len, prompts)) * 2 * 30 * 3 * 64 * 2
    assert pair.p.snapshot().num_kv_sent == 6


def test_what_is_abandoned_leaves_nothing(pair: Pair):
    for num_turns in range(12):
        name = f"quit{num_turns}"
        pair.begin(name, [200 + num_turns] * 90, SamplingParams(temperature=0, max_tokens=6, seed=0))
        for _ in range(num_turns):
            pair.turn()
        pair.p.cancel(name)
        pair.d.cancel(name)
        pair.d.release(f"t-{name}")
    pair.run_until(lambda: pair.is_idle)


class Ends:
    """Two endpoints whose link takes 1 ms a token."""

    def __init__(self) -> None:
        self.events: list[list[KvEvent]] = [[], []]
        self.ends = [
            SimEndpoint(key=KEY, on_event=self.events[index].append, bytes_per_token=100, bandwidth=100e3)
            for index in range(2)
        ]
        self.peer = KvPeer(
            control_url="",
            rank_urls=[self.ends[1].url],
            shards=[KvShard((0, 1), (0, 1))],
            model="m",
            block_size=16,
            head_dim=8,
            dtype="float32",
            key=KEY,
        )

    def __enter__(self) -> Ends:
        return self

    def __exit__(self, *exception: object) -> None:
        for end in self.ends:
            end.close()


def test_a_transfer_takes_its_time_and_tells_both_sides():
    with Ends() as ends:
        sender, target = ends.ends
        target.obey(KvAccept(1, [0, 1], 0, 30))
        wait_for(lambda: ends.events[1] == [Accepted(1)])
        begun_s = time.monotonic()
        sender.obey(KvOpen(1, ends.peer, [4, 5], [0, 1]))
        sender.obey(KvRange(1, 0, 20, False))
        sender.obey(KvRange(1, 20, 30, True), not_before_s=begun_s + 0.01)
        wait_for(lambda: ends.events[1] == [Accepted(1), Received(1, 3000)])
        assert time.monotonic() - begun_s >= 0.03
        wait_for(lambda: ends.events[0] == [Sent(1)])


def test_what_is_stopped_or_revoked_does_not_arrive():
    with Ends() as ends:
        sender, target = ends.ends
        for generation in (1, 2, 3):
            target.obey(KvAccept(generation, [0], 0, 10))
            sender.obey(KvOpen(generation, ends.peer, [4], [0]))
            sender.obey(KvRange(generation, 0, 10, True))
        sender.obey(KvStop(1))
        target.obey(KvRevoke(2))
        wait_for(lambda: Received(3, 1000) in ends.events[1])
        assert set(ends.events[0]) == {Stopped(1), Sent(2), Sent(3)}
        assert Revoked(2) in ends.events[1]
        assert not any(isinstance(event, Received) and event.generation != 3 for event in ends.events[1])


def test_a_loop_that_sleeps_is_woken_by_what_comes(pair: Pair):
    import zmq

    poller = zmq.Poller()
    for source in pair.d.pollables:
        poller.register(source, zmq.POLLIN)
    pair.turn()
    assert not poller.poll(0)
    threading.Timer(0.01, lambda: pair.d._handovers._ranks.inbox.put(0, Revoked(7))).start()  # type: ignore[union-attr]
    assert poller.poll(10_000)
    pair.turn()
    assert not poller.poll(0)


def test_a_simulated_engine_that_exchanges_kv_needs_no_torch():
    code = (
        "import sys\n"
        "from manta.engine.config import EngineConfig\n"
        "from manta.engine.startup import start_engine\n"
        "core = start_engine(EngineConfig.build('smollm2-135m', device='sim:1ms', kv_transfer=True))\n"
        "assert core.info.kv is not None\n"
        "core.close()\n"
        "print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (run.stdout, run.stderr, run.returncode) == ("False\n", "", 0)

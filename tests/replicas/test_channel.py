"""The channel between edges and engine cores: order, keys, versions, heartbeats, every way to lose the other end."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from manta.engine.request import EngineRequest, FinishReason, Refusal, RefusalReason, RequestDelta, SamplingParams
from manta.replicas.channel import FRAME_INTERVAL_S, Address, ChannelLost, KeyPair, encode
from manta.replicas.channel_client import ChannelClient
from manta.replicas.heartbeat import BEAT_INTERVAL_S
from manta.replicas.protocol import Frame, Hello, Submit
from tests.replicas.edge.local_server import write_byte_model
from tests.replicas.engines import INFO, Engine, FakeCore, engine, token_at

ROOT = Path(__file__).parents[2]
KEYS = KeyPair.new()


def request(request_id: str, *, prompt: list[int] | None = None, max_tokens: int = 5) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, seed=1)
    return EngineRequest(request_id=request_id, prompt_token_ids=prompt or [1, 2, 3], params=params)


@asynccontextmanager
async def edge(address: Address, edge_id: str = "edge", **options: Any) -> AsyncIterator[ChannelClient]:
    client = ChannelClient(address, **{"edge_id": edge_id, "keys": KEYS, **options})
    try:
        await client.connect(5.0)
        yield client
    finally:
        client.close()


class Reply:
    """One submitted request; everything that its engine says about it, in order."""

    def __init__(self, client: ChannelClient, one: EngineRequest) -> None:
        self._deltas: asyncio.Queue[RequestDelta] = asyncio.Queue()
        self._stream = client.submit(one, lambda delta: self._deltas.put_nowait(delta) is None)

    async def next(self) -> RequestDelta:
        return await asyncio.wait_for(self._deltas.get(), 5)

    async def end(self) -> Refusal | None:
        """Raises ChannelLost."""
        return await self._stream.wait()

    async def tokens(self) -> list[int]:
        """Those that have not been looked at, up to the regular end."""
        assert await self.end() is None
        deltas = [self._deltas.get_nowait() for _ in range(self._deltas.qsize())]
        assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + [FinishReason.LENGTH]
        return [token_id for delta in deltas for token_id in delta.token_ids]


async def become_true(condition: Callable[[], bool], *, within_s: float) -> float:
    """Seconds until it was true."""
    start_s = time.monotonic()
    while not condition():
        assert time.monotonic() - start_s < within_s, "it did not become true in time"
        await asyncio.sleep(0.005)
    return time.monotonic() - start_s


@pytest.fixture
def running() -> Iterator[Engine]:
    with engine(FakeCore(), KEYS.public) as one:
        yield one


async def test_every_token_arrives_once_and_in_order_at_the_edge_that_asked(running: Engine) -> None:
    async with edge(running.server.address, "a") as first, edge(running.server.address, "b") as second:
        assert first.info == INFO
        prompts = {f"{name}{i}": [ord(name), i + 1] for name in "ab" for i in range(20)}
        streams = {
            name: Reply(first if name[0] == "a" else second, request(name, prompt=prompt, max_tokens=40))
            for name, prompt in prompts.items()
        }
        outputs = await asyncio.gather(*(stream.tokens() for stream in streams.values()))
        for prompt, tokens in zip(prompts.values(), outputs, strict=True):
            assert tokens == [token_at(prompt, i) for i in range(40)]
        await become_true(lambda: running.server.num_requests == 0, within_s=1)


async def test_one_frame_a_step_and_edge(running: Engine) -> None:
    frames: list[Frame] = []
    async with edge(running.server.address, on_frame=frames.append) as client:
        streams = [Reply(client, request(f"r{i}", max_tokens=30)) for i in range(8)]
        await asyncio.gather(*(stream.tokens() for stream in streams))
        assert [frame.sequence for frame in frames] == list(range(len(frames)))
        with_tokens = [frame for frame in frames if frame.deltas]
        assert 30 <= len(with_tokens) <= 30 + 8  # the requests may have begun in different steps
        assert all(len({d.request_id for d in frame.deltas}) == len(frame.deltas) for frame in frames)


async def test_an_idle_engine_sends_heartbeats_with_its_load(running: Engine) -> None:
    frames: list[Frame] = []
    async with edge(running.server.address, on_frame=frames.append):
        assert await become_true(lambda: len(frames) == 3, within_s=10 * FRAME_INTERVAL_S) > 2.5 * FRAME_INTERVAL_S
    assert all(frame.snapshot is not None and not frame.deltas for frame in frames)


async def test_a_wrong_key_is_refused(running: Engine) -> None:
    client = ChannelClient(running.server.address, edge_id="stranger", keys=KeyPair.new())
    with pytest.raises(ChannelLost, match="does not accept this edge's key"):
        await client.connect(5.0)
    assert running.server.num_edges == 0


async def test_a_client_without_a_key_gets_nothing(running: Engine) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(running.server.address.url)
    socket.send(encode(Hello(edge_id="plain")))
    assert socket.poll(500) == 0
    socket.close(linger=0)
    context.term()
    assert running.server.num_edges == 0


async def test_another_protocol_version_is_refused_by_name(running: Engine) -> None:
    client = ChannelClient(running.server.address, edge_id="old", keys=KEYS, version=999)
    with pytest.raises(ChannelLost, match=r"replica r0 speaks protocol version 5, edge old speaks 999"):
        await client.connect(5.0)
    assert running.server.num_edges == 0


async def test_nothing_listens_at_the_address() -> None:
    with engine(FakeCore(), KEYS.public) as one:
        address = one.server.address
    client = ChannelClient(address, edge_id="late", keys=KEYS)
    start_s = time.monotonic()
    with pytest.raises(ChannelLost, match="closed"):
        await client.connect(5.0)
    assert time.monotonic() - start_s < 1.0


async def test_cancelled_work_is_freed_and_the_load_is_told_at_once() -> None:
    core = FakeCore(step_s=0.01)
    with engine(core, KEYS.public) as one:
        async with edge(one.server.address) as client:
            streams = [Reply(client, request(f"r{i}", max_tokens=4000)) for i in range(8)]
            for stream in streams:
                await stream.next()
            assert client.snapshot.num_running == 8
            for i in range(8):
                client.finish(f"r{i}")
            assert await become_true(lambda: client.snapshot.num_running == 0, within_s=1) < FRAME_INTERVAL_S
            assert sorted(core.cancelled) == sorted(f"r{i}" for i in range(8))
            assert client.num_streams == one.server.num_requests == 0


async def test_the_work_of_an_edge_that_leaves_is_cancelled() -> None:
    core = FakeCore(step_s=0.01)
    with engine(core, KEYS.public) as one:
        async with edge(one.server.address, "stays") as stays:
            async with edge(one.server.address, "leaves") as leaves:
                stream, gone = Reply(stays, request("s", max_tokens=50)), Reply(leaves, request("l", max_tokens=4000))
                await gone.next()
            await become_true(lambda: core.cancelled == ["l"], within_s=2)
            assert len(await stream.tokens()) == 50
            assert one.server.num_edges == 1


async def test_an_edge_that_leaves_an_idle_engine_is_forgotten(running: Engine) -> None:
    async with edge(running.server.address):
        assert running.server.num_edges == 1
    await become_true(lambda: running.server.num_edges == 0, within_s=3)


async def test_an_edge_that_reads_nothing_hurts_nobody_else() -> None:
    core = FakeCore(step_s=0.001, tokens_a_step=20_000)
    with engine(core, KEYS.public, stall_s=0.3, max_unsent_frames=2) as one:
        context = zmq.Context()
        slow = context.socket(zmq.DEALER)
        slow.setsockopt(zmq.RCVHWM, 1)
        slow.curve_serverkey, slow.curve_publickey, slow.curve_secretkey = (
            one.server.address.server_key, KEYS.public, KEYS.secret,
        )  # fmt: skip
        slow.connect(one.server.address.url)
        slow.send(encode(Hello(edge_id="slow")))
        slow.send(encode(Submit(request=request("slow", max_tokens=10**9))))
        async with edge(one.server.address, "quick") as quick:
            await become_true(lambda: "slow" in core.added, within_s=2)
            while "slow" not in core.cancelled:
                start_s = time.monotonic()
                assert len(await Reply(quick, request("quick", max_tokens=1)).tokens()) == 1
                quick.finish("quick")
                assert time.monotonic() - start_s < 1.0
            assert one.server.num_edges == 1
        slow.close(linger=0)
        context.term()


async def test_a_dead_engine_is_noticed_at_once() -> None:
    with engine(FakeCore(step_s=0.01), KEYS.public) as one:
        async with edge(one.server.address) as client:
            stream = Reply(client, request("r", max_tokens=4000))
            await stream.next()
            one.close()
            start_s = time.monotonic()
            with pytest.raises(ChannelLost, match="ended"):
                await stream.tokens()
            assert time.monotonic() - start_s < 0.5
            with pytest.raises(ChannelLost):
                await Reply(client, request("later")).end()


@contextmanager
def stuck(core: FakeCore) -> Iterator[None]:
    """The core's next step takes until the end of the block."""
    core.may_step.clear()
    try:
        yield
    finally:
        core.may_step.set()


async def test_a_stuck_step_loop_is_noticed_although_its_process_lives() -> None:
    core = FakeCore()
    with engine(core, KEYS.public, turn_bound_s=1.5) as one:
        async with edge(one.server.address) as client:
            await Reply(client, request("first")).tokens()
            start_s = time.monotonic()
            with stuck(core):
                with pytest.raises(ChannelLost, match=r"hangs: .* s in one step, 1\.5 s at most"):
                    await Reply(client, request("second")).end()
                assert 1.5 < time.monotonic() - start_s < 1.5 + 2 * BEAT_INTERVAL_S


async def test_a_long_step_within_its_bound_is_no_hang_however_long_no_frame_comes() -> None:
    core = FakeCore()
    with engine(core, KEYS.public, turn_bound_s=60.0) as one:
        async with edge(one.server.address, silence_s=1.5) as client:
            stream = Reply(client, request("long prefill"))
            with stuck(core):
                await become_true(lambda: client.last_frame_age_s > 3.0, within_s=10)
            assert len(await stream.tokens()) == 5
            assert client.lost is None


async def test_a_process_that_says_nothing_is_noticed(running: Engine) -> None:
    """Its connection stands and answers pings, but neither loop nor heartbeat sends anything."""
    async with edge(running.server.address, silence_s=1.5) as client:
        running.loop.stop()
        running.thread.join()
        running.server._heartbeat._is_over.set()
        start_s = time.monotonic()
        await asyncio.wait_for(client.wait_lost(), 5)
        assert client.lost is not None
        assert "says nothing" in str(client.lost)
        assert 0.5 < time.monotonic() - start_s < 2.5


async def test_beats_are_for_those_with_the_cluster_s_key_only(running: Engine) -> None:
    context = zmq.Context()

    def listen(keys: KeyPair | None) -> int:
        socket = context.socket(zmq.SUB)
        if keys is not None:
            socket.curve_serverkey = running.server.address.server_key
            socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(running.server._beat_url)
        got = socket.poll(1500)
        socket.close(linger=0)
        return got

    assert await asyncio.to_thread(listen, KEYS)
    assert not await asyncio.to_thread(listen, KeyPair.new())
    assert not await asyncio.to_thread(listen, None)
    context.term()


async def test_a_busy_edge_does_not_take_its_own_pause_for_a_silence(running: Engine) -> None:
    async with edge(running.server.address, silence_s=1.0) as client:
        time.sleep(1.5)  # the edge's loop stands still for longer than silence_s
        await asyncio.sleep(0.6)
        assert client.lost is None


async def test_a_draining_engine_refuses_new_work_and_finishes_what_it_has() -> None:
    with engine(FakeCore(step_s=0.01), KEYS.public) as one:
        async with edge(one.server.address, "a") as first, edge(one.server.address, "b") as second:
            old = Reply(first, request("old", max_tokens=30))
            await old.next()
            first.drain()
            await become_true(lambda: second.is_draining, within_s=1)
            refusal = await Reply(second, request("new")).end()
            assert isinstance(refusal, Refusal)
            assert refusal.reason is RefusalReason.DRAINING
            assert len(await old.tokens()) == 29


async def test_a_refusal_reaches_its_sender() -> None:
    core = FakeCore()
    core.refuses = RefusalReason.TOO_LONG
    with engine(core, KEYS.public) as one:
        async with edge(one.server.address) as client:
            refusal = await Reply(client, request("r")).end()
            assert isinstance(refusal, Refusal)
            assert refusal.reason is RefusalReason.TOO_LONG
        assert one.server.num_requests == 0


async def test_a_watcher_learns_which_edges_have_work() -> None:
    frames: list[Frame] = []
    with engine(FakeCore(step_s=0.005), KEYS.public) as one:
        async with edge(one.server.address, "watcher", is_watcher=True, on_frame=frames.append):
            async with edge(one.server.address, "quick") as quick, edge(one.server.address, "leaves") as leaves:
                await Reply(quick, request("done")).tokens()
                await Reply(leaves, request("orphan", max_tokens=4000)).next()
                seen = len(frames)
                await become_true(lambda: len(frames) >= seen + 3, within_s=5)
                # A request that came and went between two frames is told once, one that runs again and again.
                assert any("quick" in frame.busy_edges for frame in frames[: seen + 1])
                assert all(frame.busy_edges == ["leaves"] for frame in frames[seen + 1 :])
            seen = len(frames)
            await become_true(lambda: len(frames) >= seen + 3, within_s=5)
            assert frames[-1].busy_edges == []


async def test_edges_that_send_requests_take_turns_and_those_that_send_none_do_not() -> None:
    turns: dict[str, Frame] = {}

    def keep(name: str) -> Callable[[Frame], None]:
        return lambda frame: turns.__setitem__(name, frame)

    with engine(FakeCore(step_s=0.005), KEYS.public) as one:
        address = one.server.address
        async with (
            edge(address, "idle"),
            edge(address, "a", on_frame=keep("a")) as first,
            edge(address, "b", on_frame=keep("b")) as second,
        ):
            await Reply(first, request("r")).tokens()
            assert (turns["a"].num_edges, turns["a"].turn) == (1, 0)
            replies = Reply(first, request("s", max_tokens=4000)), Reply(second, request("t", max_tokens=4000))
            await asyncio.gather(*(reply.next() for reply in replies))
            assert {frame.num_edges for frame in turns.values()} == {2}
            assert {frame.turn for frame in turns.values()} == {0, 1}


async def test_what_is_not_a_message_is_ignored(running: Engine) -> None:
    async with edge(running.server.address) as client:
        client._socket.send(b"\xc1 nonsense")
        assert len(await Reply(client, request("r")).tokens()) == 5


class Process:
    """A simulated engine in a process of its own."""

    def __init__(self, model: Path) -> None:
        command = [sys.executable, "-m", "tests.replicas.sim_engine", str(model), KEYS.public.decode()]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        url, key, rss_mb, heavy = self.process.stdout.readline().split()
        self.address, self.rss_mb, self.heavy = Address(url, key.encode()), float(rss_mb), heavy

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    one = Process(write_byte_model(tmp_path / "bytes"))
    yield one
    one.close()


async def test_a_simulated_replica_is_small_and_free_of_torch(process: Process) -> None:
    assert process.heavy == "-"
    assert process.rss_mb < 200


@pytest.mark.parametrize(("how", "within_s"), [(signal.SIGKILL, 0.5), pytest.param(signal.SIGSTOP, 3.0, id="SIGSTOP")])
async def test_a_killed_or_frozen_process_is_noticed(process: Process, how: signal.Signals, within_s: float) -> None:
    async with edge(process.address) as client:
        stream = Reply(client, request("r", max_tokens=900))
        await stream.next()
        start_s = time.monotonic()
        process.process.send_signal(how)
        with pytest.raises(ChannelLost, match="ended or froze"):
            await stream.tokens()
        assert time.monotonic() - start_s < within_s

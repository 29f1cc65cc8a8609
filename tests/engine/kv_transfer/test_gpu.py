"""Transfers from and to a GPU: between processes by CUDA IPC, through host memory, in order with the engine's stream.

`pytest -m gpu`. One GPU is enough: both ends use it.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from manta.engine.cuda_graphs import GraphCapture
from manta.engine.kv_transfer.block_store import DeviceStore, HostStore
from manta.engine.kv_transfer.frames import Ack, Announce, Drop, Frame, Geometry, TransportLimits, Welcome
from manta.engine.kv_transfer.messages import (
    Accepted,
    Failed,
    KvAccept,
    KvOpen,
    KvRange,
    KvRevoke,
    KvShard,
    KvStop,
    Received,
    Revoked,
    Sent,
    Stopped,
)
from manta.engine.layers.attention import LayerCache
from manta.engine.request import SamplingParams
from manta.kernels.quantized.kv_cache import CacheScales
from tests.engine.kv_transfer.kv_gangs import (
    QUICK,
    KvGang,
    RawSender,
    expected,
    hand_over,
    longer,
    model_shape,
    nan_blocks,
    random_blocks,
    shards_of,
)
from tests.engine.kv_transfer.kv_process import BLOCK_SIZE, NUM_BLOCKS, SHAPE, KvProcess
from tests.engine.kv_transfer.pairs import Pair, start
from tests.gpus import needs_two_gpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

CUDA = "cuda:0"
ODD = model_shape(num_layers=5, num_heads=9, num_kv_heads=3)
"""A head has 5 elements: 20 bytes, or 10."""
EVEN = model_shape(num_layers=3, num_heads=8, num_kv_heads=4, head_dim=64)
SOURCE_IDS = [6, 2, 9, 3]
TARGET_IDS = [1, 8, 4, 7]
SMALL_SLOTS = TransportLimits(frame_bytes=4096, num_slots=3, num_lanes=2, staging_bytes=4096, num_staging=3)
SLEEP_CYCLES = 400_000_000
"""Some tenths of a second of a GPU."""
GOLDEN = json.loads((Path(__file__).parents[2] / "data/golden/smollm2_135m_q4_1.json").read_text())["prompts"]


@pytest.fixture(autouse=True)
def released_memory() -> Iterator[None]:
    yield
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def equal(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("has_scales", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [ODD, EVEN], ids=["odd", "even"])
def test_the_device_lays_a_buffer_out_as_the_host_does(shape: Any, dtype: torch.dtype, has_scales: bool):
    blocks = random_blocks(shape, num_blocks=10, block_size=7, dtype=dtype)
    host, device = [], []
    for layer in range(shape.num_layers):
        keys, values = blocks[layer, 0].clone(), blocks[layer, 1].clone()
        scales = CacheScales(*torch.rand(2, 10, shape.num_kv_heads, 7)) if has_scales else None
        host.append(LayerCache(keys, values, scales))
        on_gpu = None if scales is None else CacheScales(*(side.to(CUDA) for side in scales))
        device.append(LayerCache(keys.to(CUDA), values.to(CUDA), on_gpu))
    shard = KvShard((0, shape.num_layers), (0, shape.num_kv_heads))
    on_host, on_device = HostStore(host, shard), DeviceStore(device, shard)
    buffer = torch.zeros(1 << 20, dtype=torch.uint8, device=CUDA)
    with torch.inference_mode():
        size = on_device.read(buffer, (1, 3), (1, 3), on_device.ids(SOURCE_IDS))
        flat = torch.zeros(1 << 20, dtype=torch.uint8)
        assert on_host.read(flat.numpy(), (1, 3), (1, 3), SOURCE_IDS) == size
        assert torch.equal(buffer[:size].cpu(), flat[:size])
        on_device.write(buffer, (1, 3), (1, 3), on_device.ids(TARGET_IDS))
    on_host.write(flat.numpy(), (1, 3), (1, 3), TARGET_IDS)
    for layer, device_layer in zip(host, device, strict=True):
        for side, device_side in zip(layer.tensors, device_layer.tensors, strict=True):
            assert torch.equal(side.view(torch.uint8), device_side.cpu().view(torch.uint8))


@pytest.mark.parametrize("shares", [True, False], ids=["gpu to gpu", "through the host"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tp_sizes", [(1, 1), (1, 3), (3, 1), (2, 4), (4, 2)])
@pytest.mark.parametrize("shape", [ODD, EVEN], ids=["odd", "even"])
def test_blocks_arrive_whole_and_others_stay_untouched(
    shape: Any, tp_sizes: tuple[int, int], dtype: torch.dtype, shares: bool
):
    blocks = random_blocks(shape, num_blocks=10, block_size=7, dtype=dtype)
    empty = nan_blocks(blocks)
    options: dict[str, Any] = {"device": CUDA, "limits": SMALL_SLOTS, "shares_gpu_memory": shares}
    with (
        KvGang(shards_of(shape, tp_size=tp_sizes[0]), blocks, **options) as source,
        KvGang(shards_of(shape, tp_size=tp_sizes[1]), empty, **options) as target,
    ):
        num_bytes = 0
        for generation in range(3):
            num_bytes += hand_over(
                source, target, generation, SOURCE_IDS, TARGET_IDS, num_tokens=27, range_ends=(5, 20)
            )
        equal(target.whole(empty), expected(blocks, empty, SOURCE_IDS, TARGET_IDS))
        shared = sum(endpoint.num_shared_bytes for endpoint in target.endpoints)
        assert shared == (num_bytes if shares else 0)


@pytest.mark.parametrize("devices", [(CUDA, "cpu"), ("cpu", CUDA)])
def test_a_gpu_and_a_cpu_exchange_blocks(devices: tuple[str, str]):
    blocks = random_blocks(ODD, num_blocks=10, block_size=7)
    empty = nan_blocks(blocks)
    with (
        KvGang(shards_of(ODD, tp_size=2), blocks, device=devices[0]) as source,
        KvGang(shards_of(ODD, tp_size=3), empty, device=devices[1]) as target,
    ):
        hand_over(source, target, 1, SOURCE_IDS, TARGET_IDS, num_tokens=27)
        equal(target.whole(empty), expected(blocks, empty, SOURCE_IDS, TARGET_IDS))


def test_checksums_are_of_what_lies_on_the_gpu():
    blocks = random_blocks(EVEN, num_blocks=10, block_size=7)
    empty = nan_blocks(blocks)
    with (
        KvGang(shards_of(EVEN), blocks, device=CUDA, checksums=True) as source,
        KvGang(shards_of(EVEN), empty, device=CUDA) as target,
    ):
        hand_over(source, target, 1, SOURCE_IDS, TARGET_IDS, num_tokens=27)
        equal(target.whole(empty), expected(blocks, empty, SOURCE_IDS, TARGET_IDS))
        assert target.endpoints[0].num_shared_bytes > 0


def test_a_range_is_read_after_what_the_stream_held_when_it_was_ordered():
    blocks = random_blocks(EVEN, num_blocks=10, block_size=7)
    empty = nan_blocks(blocks)
    with (
        KvGang(shards_of(EVEN), empty, device=CUDA) as source,
        KvGang(shards_of(EVEN), empty, device=CUDA) as target,
    ):
        target.obey(KvAccept(1, TARGET_IDS, 0, 28))
        assert target.event() == Accepted(1)
        source.obey(KvOpen(1, target.peer, SOURCE_IDS, TARGET_IDS))
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP_CYCLES)  # a step that takes its time
            for layer, sides in enumerate(source.caches[0]):
                for side, cache in enumerate(sides.tensors):
                    cache.copy_(blocks[layer, side].pin_memory(), non_blocking=True)
            source.obey(KvRange(1, 0, 28, True))
            assert not stream.query()
        assert source.event() == Sent(1)
        assert isinstance(target.event(), Received)
        equal(target.whole(empty), expected(blocks, empty, SOURCE_IDS, TARGET_IDS))


def test_each_layer_is_read_after_its_own_event():
    blocks = random_blocks(EVEN, num_blocks=10, block_size=7)
    empty = nan_blocks(blocks)
    with (
        KvGang(shards_of(EVEN), empty, device=CUDA) as source,
        KvGang(shards_of(EVEN), empty, device=CUDA) as target,
    ):
        target.obey(KvAccept(1, TARGET_IDS, 0, 28))
        assert target.event() == Accepted(1)
        source.obey(KvOpen(1, target.peer, SOURCE_IDS, TARGET_IDS))
        events = []
        with torch.cuda.stream(torch.cuda.Stream()):
            for layer, sides in enumerate(source.caches[0]):
                torch.cuda._sleep(SLEEP_CYCLES // 4)
                for side, cache in enumerate(sides.tensors):
                    cache.copy_(blocks[layer, side].pin_memory(), non_blocking=True)
                events.append(torch.cuda.Event())
                events[-1].record()
        source.endpoints[0].obey(KvRange(1, 0, 28, True), layers_ready=events)
        assert source.event() == Sent(1)
        assert isinstance(target.event(), Received)
        equal(target.whole(empty), expected(blocks, empty, SOURCE_IDS, TARGET_IDS))


def test_blocks_are_accepted_once_steps_that_may_still_use_them_are_over():
    empty = nan_blocks(random_blocks(EVEN, num_blocks=10, block_size=7))
    with KvGang(shards_of(EVEN), empty, device=CUDA) as target:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP_CYCLES)
            target.obey(KvAccept(1, TARGET_IDS, 0, 28))
        target.obey(KvRevoke(2))
        assert target.event() == Revoked(2)  # asked later, answered at once
        assert target.event() == Accepted(1)
        assert stream.query()


def test_transfers_go_on_while_graphs_are_captured():
    blocks = random_blocks(EVEN, num_blocks=10, block_size=7)
    empty = nan_blocks(blocks)
    with (
        KvGang(shards_of(EVEN), blocks, device=CUDA) as source,
        KvGang(shards_of(EVEN), empty, device=CUDA) as target,
    ):
        ended = threading.Event()
        values = torch.zeros(1 << 20, device=CUDA)
        num_graphs = 0

        def transfer() -> None:
            try:
                for generation in range(40):
                    hand_over(source, target, generation, SOURCE_IDS, TARGET_IDS, num_tokens=27)
            finally:
                ended.set()

        thread = threading.Thread(target=transfer)
        with torch.cuda.stream(torch.cuda.Stream()):
            capture = GraphCapture()
            thread.start()
            while not ended.is_set() or not num_graphs:
                graph = capture.capture(lambda: [values.add_(1) for _ in range(50)])
                graph.replay()
                torch.cuda.current_stream().synchronize()
                num_graphs += 1
        thread.join()
        assert values[0] == 100 * num_graphs
        equal(target.whole(empty), expected(blocks, empty, SOURCE_IDS, TARGET_IDS))


def test_frames_of_a_revoked_generation_are_drained_on_a_gpu_too():
    shape = model_shape(num_layers=2, num_heads=2, num_kv_heads=2, head_dim=4)
    before = nan_blocks(random_blocks(shape, num_blocks=8, block_size=4))
    a_block = 2 * 4 * 2 * 4 * 4
    limits = longer(QUICK, silence_s=60.0)
    with (
        KvGang(shards_of(shape), before, device=CUDA, limits=limits) as gang,
        RawSender(gang.peer.rank_urls[0], gang.key) as sender,
    ):
        sender.hello(Geometry(4, 4, "float32"))
        assert isinstance(sender.answer(), Welcome)
        gang.obey(KvAccept(1, [5, 6], 0, 8))
        assert gang.event() == Accepted(1)
        sender.say(Announce(1))
        sender.say(Frame(1, 1, (0, 1), (0, 2), (0, 1), a_block), b"\1" * a_block)
        assert sender.answer() == Ack(1)
        gang.obey(KvRevoke(1))
        assert gang.event() == Revoked(1)
        written = gang.whole(before)
        assert isinstance(sender.answer(), Drop)
        sender.say(Frame(2, 1, (0, 1), (0, 2), (1, 2), a_block), b"\2" * a_block)
        assert sender.answer() == Ack(2)
        torch.cuda.synchronize()
        equal(gang.whole(before), written)


MANY = list(range(NUM_BLOCKS))
NUM_TOKENS = NUM_BLOCKS * BLOCK_SIZE


def begin(source: Any, target: Any, generation: int) -> None:
    target.obey(KvAccept(generation, MANY, 0, NUM_TOKENS))
    assert target.event() == Accepted(generation)
    source.obey(KvOpen(generation, target.peer, MANY, MANY))
    source.obey(KvRange(generation, 0, BLOCK_SIZE, False))


two_devices = pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        pytest.param(CUDA, CUDA, id="one GPU"),
        pytest.param("cuda:0", "cuda:1", id="two GPUs", marks=needs_two_gpus),
        pytest.param("cuda:1", "cuda:0", id="two GPUs, turned", marks=needs_two_gpus),
    ],
)


@two_devices
def test_another_process_sends_from_its_gpu_memory_into_ours(ours: str, theirs: str):
    blocks = random_blocks(SHAPE, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)  # what the process holds, too
    empty = nan_blocks(blocks)
    with KvGang(shards_of(SHAPE), empty, device=ours, limits=QUICK) as target, KvProcess(theirs) as source:
        num_bytes = 0
        for generation in range(5):
            begin(source, target, generation)
            source.obey(KvRange(generation, BLOCK_SIZE, NUM_TOKENS, True))
            assert source.event() == Sent(generation)
            event = target.event()
            assert isinstance(event, Received), event
            num_bytes += event.num_bytes
        equal(target.whole(empty), blocks)
        assert target.endpoints[0].num_shared_bytes == num_bytes


@two_devices
def test_a_process_that_is_killed_while_it_sends_leaves_the_target_unharmed(ours: str, theirs: str):
    blocks = random_blocks(SHAPE, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    empty = nan_blocks(blocks)
    with KvGang(shards_of(SHAPE), empty, device=ours, limits=QUICK) as target:
        for generation in range(0, 6, 2):
            with KvProcess(theirs) as source:
                before = target.endpoints[0].num_shared_bytes
                begin(source, target, generation)
                source.obey(KvRange(generation, BLOCK_SIZE, NUM_TOKENS - BLOCK_SIZE, False))
                while target.endpoints[0].num_shared_bytes == before:
                    assert source.process.poll() is None
                source.process.kill()
                assert source.process.wait() == -signal.SIGKILL
                event = target.event()
                assert isinstance(event, Failed), event
                target.obey(KvRevoke(generation))
                assert target.event() == Revoked(generation)
            with KvGang(shards_of(SHAPE), blocks, device=ours, limits=QUICK) as other:
                hand_over(other, target, generation + 1, MANY, MANY, num_tokens=NUM_TOKENS)
                equal(target.whole(empty), blocks)


@two_devices
def test_a_target_that_is_killed_while_we_send_leaves_this_process_unharmed(ours: str, theirs: str):
    blocks = random_blocks(SHAPE, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    with KvGang(shards_of(SHAPE), blocks, device=ours, limits=QUICK) as source:
        for generation in range(0, 6, 2):
            with KvProcess(theirs) as target:
                begin(source, target, generation)
                source.obey(KvRange(generation, BLOCK_SIZE, NUM_TOKENS - BLOCK_SIZE, False))
                target.process.kill()
                assert target.process.wait() == -signal.SIGKILL
                event = source.event()
                assert isinstance(event, Failed), event
                source.obey(KvStop(generation))
                assert source.event() == Stopped(generation)
            with KvProcess(theirs) as other:
                begin(source, other, generation + 1)
                source.obey(KvRange(generation + 1, BLOCK_SIZE, NUM_TOKENS, True))
                assert source.event() == Sent(generation + 1)
                event = other.event()
                assert isinstance(event, Received), event
        torch.cuda.synchronize()
        equal(source.whole(blocks), blocks)


@pytest.mark.alone
def test_no_gpu_memory_stays_behind_when_endpoints_close():
    blocks = random_blocks(EVEN, num_blocks=10, block_size=7)

    def transfer() -> None:
        with (
            KvGang(shards_of(EVEN), blocks, device=CUDA, limits=None) as source,
            KvGang(shards_of(EVEN), nan_blocks(blocks), device=CUDA, limits=None) as target,
        ):
            hand_over(source, target, 1, SOURCE_IDS, TARGET_IDS, num_tokens=27)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    transfer()
    free_bytes = torch.cuda.mem_get_info()[0]  # of the device: nothing else may run on it beside this test
    for _ in range(4):
        transfer()
    assert free_bytes - torch.cuda.mem_get_info()[0] < 8 << 20


@pytest.mark.model
@pytest.mark.parametrize("shares", [True, False], ids=["gpu to gpu", "through the host"])
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_two_engines_on_a_gpu_give_the_golden_tokens(shares: bool, graphs: bool):
    options: dict[str, Any] = {
        "device": "cuda",
        "num_blocks": 400,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
        "max_model_len": 512,
        "memory_fraction": 0.5,
        "cuda_graphs": graphs,
        "kv_gpu_sharing": shares,
    }
    greedy = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, seed=0)
    with Pair(start("smollm2-135m", **options), start("smollm2-135m", **options)) as pair:
        for number, golden in enumerate(GOLDEN):
            pair.begin(str(number), golden["prompt_ids"], greedy)
        pair.run_until(lambda: len(pair.ended) == len(GOLDEN))
        for number, golden in enumerate(GOLDEN):
            wanted = golden["continuation_ids"][:40]
            assert pair.tokens[str(number)][: len(wanted)] == wanted
        snapshot = pair.d.snapshot()
        assert (snapshot.num_kv_received, snapshot.num_kv_recomputed) == (len(GOLDEN), 0)

"""What a device settles at start-up, and the start of a real one, alone or split over ranks. Loads torch late."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from .config import EngineConfig, max_num_seqs_of, with_overrides
from .cuda_context import begin_cuda_context
from .kv_transfer.ranks import KV_KEY, GangRanks, LocalRanks, shards_of
from .kv_transfer.start import StartedKv, new_kv_key, open_endpoint, times_of
from .model_shape import ModelShape
from .model_source import ModelSource
from .parallel.here import devices_of_ranks
from .parallel.layout import ShardLayout
from .parallel.local_gang import LocalGang
from .parallel.member import GangMember, GangSeat
from .parallel.place import RankPlace
from .plan import Runner
from .precision import precision_of
from .step_time import Hardware, StepShape, StepTimeModel, hardware_of

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

    from .model_runner import BuiltRunner

Report = Callable[[str, float], None]
"""Called when a phase of start-up is over, with its name and seconds."""


@dataclass
class Phases:
    """Measures the phases of start-up and passes each on as it ends."""

    report: Report
    seconds: dict[str, float] = field(default_factory=dict)
    _since_s: float = field(default_factory=time.monotonic)

    def end(self, name: str) -> None:
        now_s = time.monotonic()
        self.add(name, now_s - self._since_s)
        self._since_s = now_s

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self.report(name, seconds)


@dataclass(frozen=True)
class StartedDevice:
    """What either kind of device settles: the runner and the sizes that follow from its memory."""

    runner: Runner
    name: str
    dtype: str
    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    memory_ledger_bytes: dict[str, int]
    notes: tuple[str, ...]
    predict: Callable[[StepShape], float] | None
    """Seconds of a step; None on a device of unknown speed."""
    kv: StartedKv | None = None
    """Where KV comes and goes; None: it does not."""


def step_times(config: EngineConfig, shape: ModelShape, hardware: Hardware, dtype: str) -> StepTimeModel | None:
    """Measured here, measured elsewhere on the same GPU, or from the peaks alone; None for a quantization scheme
    without kernels."""
    folder, parallel = config.scheduler.step_profiles, config.parallel
    precision, kv_cache = precision_of(config.quantization), config.quantization.kv_cache
    if precision is None:
        return None
    return StepTimeModel.known(
        shape,
        hardware,
        dtype=dtype,
        profile_folders=[] if folder is None else [Path(folder)],
        tp=parallel.tp_size,
        pp=parallel.pp_size,
        precision=precision,
        kv_dtype=None if kv_cache == "auto" else kv_cache,
    )


def start_device(
    config: EngineConfig, source: ModelSource, shape: ModelShape, phases: Phases, *, host: str
) -> StartedDevice:
    """The only device of an engine. `host`: this machine's address for others that send KV."""
    wait_for_context = begin_cuda_context(config.device)

    phases.end("import torch")
    from .model_runner import build_model_runner

    phases.end("import")
    wait_for_context()
    phases.end("cuda context")
    built = build_model_runner(config, source, shape, report=phases.add)
    kv = None
    if config.cache.kv_transfer:
        ranks, shards, key = LocalRanks(), shards_of(shape, tp_size=1, pp_size=1), new_kv_key()
        url = open_endpoint(
            built.runner, config, shards, 0, key=key, host=host, on_event=lambda event: ranks.inbox.put(0, event)
        )
        is_cpu = built.device.type == "cpu"
        kv = StartedKv(ranks, key, host, [url], shards, times_of(config, is_cpu=is_cpu))
    return _built(config, shape, built, built.runner, kv)


def start_gang_device(
    config: EngineConfig, source: ModelSource, shape: ModelShape, phases: Phases, seat: GangSeat
) -> StartedDevice:
    """Rank 0's device and those of its gang's followers, as one."""
    from .parallel.driver import start_gang
    from .parallel.rank import build_rank

    phases.end("import torch")
    member = seat.member
    built: list[BuiltRunner] = []
    built_at_s = 0.0
    ranks: GangRanks | None = None

    def build(store: TCPStore) -> Runner:
        nonlocal built_at_s, ranks
        if config.cache.kv_transfer:
            ranks = GangRanks(member, store)
        built.append(build_rank(config, source, shape, member, store, phases.add))
        built_at_s = time.monotonic()
        return built[0].runner

    def on_closed() -> None:
        built[0].runner.leave()
        seat.on_closed()

    runner = start_gang(replace(seat, on_closed=on_closed), build, abort=lambda: built[0].runner.abort())
    phases.add("followers", time.monotonic() - built_at_s)
    kv = None if ranks is None else _gang_kv(config, shape, member, built[0], ranks)
    return _built(config, shape, built[0], runner, kv)


def _gang_kv(
    config: EngineConfig, shape: ModelShape, member: GangMember, built: BuiltRunner, ranks: GangRanks
) -> StartedKv:
    """Rank 0's endpoint beside those of its followers, which listen by now."""
    shards, key = shards_of(shape, tp_size=member.place.tp_size, pp_size=member.place.pp_size), member.key(KV_KEY)
    url = open_endpoint(
        built.runner, config, shards, 0, key=key, host=member.host, on_event=lambda event: ranks.inbox.put(0, event)
    )
    times = times_of(config, is_cpu=built.device.type == "cpu")
    return StartedKv(ranks, key, member.host, [url, *ranks.follower_urls()], shards, times)


def start_local_gang(config: EngineConfig, source: ModelSource, shape: ModelShape, phases: Phases) -> StartedDevice:
    """The same with followers that are started here, as processes of this machine."""
    from .parallel.sharded_runner import ShardedRunner

    tp_size, pp_size = config.parallel.tp_size, config.parallel.pp_size
    for rank in range(tp_size * pp_size):  # what cannot be split is refused before anything is started
        ShardLayout.of(shape, RankPlace(rank, tp_size, pp_size))
    devices = devices_of_ranks(config.device, tp_size * pp_size)
    gang = LocalGang(config, tp_size=tp_size, pp_size=pp_size, devices=devices)
    try:

        def on_closed() -> None:
            gang.wait()
            atexit.unregister(close)

        def close() -> None:
            device.runner.close()

        seat = GangSeat(gang.member, gang.store_socket, gang.break_off, on_closed, gang.check)
        own = with_overrides(config, {"device": devices[0]})
        device = start_gang_device(own, source, shape, phases, seat)
        atexit.register(close)  # a script need not close its engine: threads of the exchange end before the interpreter
        runner = device.runner
        assert isinstance(runner, ShardedRunner)
        gang.watch_for(lambda: runner.is_waiting)
        return device
    except BaseException:
        gang.close()
        raise


def _built(
    config: EngineConfig, shape: ModelShape, built: BuiltRunner, runner: Runner, kv: StartedKv | None
) -> StartedDevice:
    import torch

    name = torch.cuda.get_device_name(built.device) if built.device.type == "cuda" else built.device.type
    hardware = hardware_of(name)
    model = None if hardware is None else step_times(config, shape, hardware, built.dtype)
    return StartedDevice(
        runner=runner,
        name=str(built.device),
        dtype=built.dtype,
        num_blocks=built.num_blocks,
        block_size=built.block_size,
        max_model_len=built.max_model_len,
        max_num_seqs=max_num_seqs_of(config, built.device.type),
        max_num_batched_tokens=built.max_num_batched_tokens,
        memory_ledger_bytes=built.memory_ledger_bytes,
        notes=built.notes,
        predict=None if model is None else model.predict,
        kv=kv,
    )

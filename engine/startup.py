"""From a configuration to a running engine core, phase by phase. Loads torch only for a device that needs it."""

from __future__ import annotations

import socket
from collections.abc import Callable

from .config import EngineConfig
from .core import EngineCore
from .errors import ConfigError
from .model_shape import ModelShape
from .model_source import ModelSource, load_shape, resolve_model
from .parallel.here import settle_sizes
from .parallel.member import GangMember, GangSeat
from .parallel.watch import end_process
from .prefix_cache import BlockHasher, PrefixCache
from .scheduler import Scheduler, SchedulerLimits
from .sim_device import start_simulated
from .started_device import Phases, Report, StartedDevice, start_device, start_gang_device, start_local_gang
from .stats import EngineInfo
from .step_budget import StepBudget
from .step_costs import StepCosts
from .step_time import HARDWARE


def start_engine(
    config: EngineConfig,
    report: Report = lambda name, seconds: None,
    member: GangMember | None = None,
    store_socket: socket.socket | None = None,
    *,
    on_broken: Callable[[str], None] = end_process,
    hash_key: bytes = b"",
    host: str = "127.0.0.1",
) -> EngineCore:
    """Load the model and return a core that is ready for requests.

    With `member`, rank 0 of a gang whose other ranks were started elsewhere (parallel/follower.py): they meet at
    `store_socket` (None: at the member's port), and `on_broken(reason)` is called by another thread when one of them
    dies, freezes or hangs later. Without, ranks that the configuration asks for are started as processes of this
    machine, and an engine that breaks raises EngineFailed. `hash_key` is that of the cluster's block hashes, `host`
    this machine's address for other engines, where KV comes from them or goes to them.

    Raises ConfigError or CheckpointError, of whatever rank, with a sentence that says what to change.
    """
    phases = Phases(report)
    source = resolve_model(config.model)
    shape = load_shape(source)
    phases.end("resolve")
    settled = settle_sizes(config, shape)
    config = settled.config
    seat = None
    if member is not None and member.place.world_size > 1:
        seat = GangSeat(member, store_socket, on_broken)
    if config.device.startswith("sim"):
        device = start_simulated(config, shape, seat, kv_host=host)
        phases.end("simulated device")
    elif seat is not None:
        device = start_gang_device(config, source, shape, phases, seat)
    elif config.parallel.num_ranks > 1:
        device = start_local_gang(config, source, shape, phases)
    else:
        device = start_device(config, source, shape, phases, host=host)
    try:
        return _core(config, source, shape, device, phases, settled.reason, hash_key)
    except BaseException:
        device.runner.close()
        raise


def _core(
    config: EngineConfig,
    source: ModelSource,
    shape: ModelShape,
    device: StartedDevice,
    phases: Phases,
    sizes_note: str | None,
    hash_key: bytes,
) -> EngineCore:
    if device.max_num_batched_tokens < device.max_num_seqs:
        raise ConfigError(
            f"scheduler.max_num_batched_tokens = {device.max_num_batched_tokens}: must be at least "
            f"scheduler.max_num_seqs = {device.max_num_seqs}, so that every running request can decode",
            field="scheduler.max_num_batched_tokens",
        )
    limits = SchedulerLimits(
        max_num_seqs=device.max_num_seqs,
        max_num_batched_tokens=device.max_num_batched_tokens,
        max_mixed_prefill_tokens=config.scheduler.max_mixed_prefill_tokens,
        max_num_waiting=config.scheduler.max_num_waiting,
        max_model_len=device.max_model_len,
        vocab_size=shape.vocab_size,
        eos_token_ids=shape.eos_token_ids,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        num_micro_batches=config.parallel.pp_size,
    )
    hasher = BlockHasher(device.block_size, domain=source.name, key=hash_key)
    scheduler = Scheduler(limits, PrefixCache(device.num_blocks), hasher, _step_budget(config, device))
    handovers = None
    if device.kv is not None:
        handovers = device.kv.handovers(
            scheduler,
            device.runner,
            model=source.name,
            head_dim=shape.head_dim,
            block_size=device.block_size,
            dtype=device.dtype,
        )
    info = EngineInfo(
        model_name=config.model.served_model_name or source.name,
        max_model_len=device.max_model_len,
        vocab_size=shape.vocab_size,
        block_size=device.block_size,
        num_blocks=device.num_blocks,
        max_num_seqs=limits.max_num_seqs,
        max_num_waiting=limits.max_num_waiting,
        device=device.name,
        dtype=device.dtype,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_mixed_prefill_tokens=limits.max_mixed_prefill_tokens,
        tpot_target_s=None if config.scheduler.tpot_target_ms is None else config.scheduler.tpot_target_ms / 1e3,
        step_costs=None if device.predict is None else StepCosts.of(device.predict),
        memory_ledger_bytes=device.memory_ledger_bytes,
        startup_s=phases.seconds,
        hash_domain=source.name if limits.enable_prefix_caching else None,
        notes=[
            *device.notes,
            *([] if sizes_note is None else [sizes_note]),
            *_seqs_note(config.scheduler.max_num_seqs, device.max_num_seqs),
            *_length_note(config.model.max_model_len, shape.max_position_embeddings),
        ],
        kv=None if handovers is None else handovers.own,
    )
    return EngineCore(scheduler, device.runner, info, handovers)


def _seqs_note(asked: int | None, settled: int) -> list[str]:
    if asked is not None:
        return []
    return [f"up to {settled} requests run at once, which scheduler.max_num_seqs leaves open"]


def _length_note(asked: int | None, trained: int) -> list[str]:
    if asked is None or asked <= trained:
        return []
    return [f"max_model_len = {asked} was asked for, but the model knows {trained} positions"]


def _step_budget(config: EngineConfig, device: StartedDevice) -> StepBudget | None:
    target_ms = config.scheduler.tpot_target_ms
    if target_ms is None:
        return None
    if device.predict is None:
        raise ConfigError(
            f"scheduler.tpot_target_ms = {target_ms:g}: how long steps take on {device.name} is not known, only on "
            f"{', '.join(sorted(HARDWARE))}; leave it out here",
            field="scheduler.tpot_target_ms",
        )
    return StepBudget(device.predict, target_s=target_ms / 1e3, max_tokens=device.max_num_batched_tokens)

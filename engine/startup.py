"""From a configuration to a running engine core, phase by phase. Loads torch only for a device that needs it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from .config import EngineConfig, max_num_seqs_of
from .core import EngineCore
from .cuda_context import begin_cuda_context
from .errors import ConfigError
from .model_shape import ModelShape
from .model_source import ModelSource, load_shape, resolve_model
from .plan import Runner
from .prefix_cache import BlockHasher, PrefixCache
from .scheduler import Scheduler, SchedulerLimits
from .sim import SimRunner, fixed_step_s
from .stats import EngineInfo
from .step_budget import StepBudget
from .step_time import (
    BYTES_PER_ELEMENT,
    HARDWARE,
    Hardware,
    StepShape,
    StepTimeModel,
    hardware_named,
    hardware_of,
)

Report = Callable[[str, float], None]
"""Called when a phase of start-up is over, with its name and seconds."""

MOST_SIMULATED_BLOCKS = 2**17
"""A block costs the host memory, however large the device is that is simulated."""


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
class _Device:
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


def start_engine(config: EngineConfig, report: Report = lambda name, seconds: None) -> EngineCore:
    """Load the model and return a core that is ready for requests.

    Raises ConfigError or CheckpointError with a sentence that says what to change.
    """
    phases = Phases(report)
    source = resolve_model(config.model)
    shape = load_shape(source)
    phases.end("resolve")
    device = _simulated(config, shape) if config.device.startswith("sim") else _real(config, source, shape, phases)
    if config.device.startswith("sim"):
        phases.end("simulated device")
    if device.max_num_batched_tokens < device.max_num_seqs:
        raise ConfigError(
            f"scheduler.max_num_batched_tokens = {device.max_num_batched_tokens}: must be at least "
            f"scheduler.max_num_seqs = {device.max_num_seqs}, so that every running request can decode",
            field="scheduler.max_num_batched_tokens",
        )
    limits = SchedulerLimits(
        max_num_seqs=device.max_num_seqs,
        max_num_batched_tokens=device.max_num_batched_tokens,
        max_num_waiting=config.scheduler.max_num_waiting,
        max_model_len=device.max_model_len,
        vocab_size=shape.vocab_size,
        eos_token_ids=shape.eos_token_ids,
        enable_prefix_caching=config.cache.enable_prefix_caching,
    )
    hasher = BlockHasher(device.block_size, domain=source.name)
    scheduler = Scheduler(limits, PrefixCache(device.num_blocks), hasher, _step_budget(config, device))
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
        memory_ledger_bytes=device.memory_ledger_bytes,
        startup_s=phases.seconds,
        notes=[
            *device.notes,
            *_seqs_note(config.scheduler.max_num_seqs, device.max_num_seqs),
            *_length_note(config.model.max_model_len, shape.max_position_embeddings),
        ],
    )
    return EngineCore(scheduler, device.runner, info)


def _seqs_note(asked: int | None, settled: int) -> list[str]:
    if asked is not None:
        return []
    return [f"up to {settled} requests run at once, which scheduler.max_num_seqs leaves open"]


def _length_note(asked: int | None, trained: int) -> list[str]:
    if asked is None or asked <= trained:
        return []
    return [f"max_model_len = {asked} was asked for, but the model knows {trained} positions"]


def _step_budget(config: EngineConfig, device: _Device) -> StepBudget | None:
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


def _step_times(config: EngineConfig, shape: ModelShape, hardware: Hardware, dtype: str) -> StepTimeModel:
    """Measured here, measured elsewhere on the same GPU, or from the peaks alone."""
    folder = config.scheduler.step_profiles
    return StepTimeModel.known(shape, hardware, dtype=dtype, profile_folders=[] if folder is None else [Path(folder)])


def _real(config: EngineConfig, source: ModelSource, shape: ModelShape, phases: Phases) -> _Device:
    wait_for_context = begin_cuda_context(config.device)
    import torch

    phases.end("import torch")
    from .model_runner import build_model_runner

    phases.end("import")
    wait_for_context()
    phases.end("cuda context")
    built = build_model_runner(config, source, shape, report=phases.add)
    name = torch.cuda.get_device_name(built.device) if built.device.type == "cuda" else built.device.type
    hardware = hardware_of(name)
    return _Device(
        runner=built.runner,
        name=str(built.device),
        dtype=built.dtype,
        num_blocks=built.num_blocks,
        block_size=built.block_size,
        max_model_len=built.max_model_len,
        max_num_seqs=max_num_seqs_of(config, built.device.type),
        max_num_batched_tokens=built.max_num_batched_tokens,
        memory_ledger_bytes=built.memory_ledger_bytes,
        notes=built.notes,
        predict=None if hardware is None else _step_times(config, shape, hardware, built.dtype).predict,
    )


def _simulated(config: EngineConfig, shape: ModelShape) -> _Device:
    step_s = fixed_step_s(config.device)
    name = "h200" if step_s is not None else config.device.partition(":")[2] or "h200"
    hardware = hardware_named(name)
    dtype = shape.dtype if config.model.dtype == "auto" else config.model.dtype
    model = _step_times(config, shape, hardware, dtype)
    weight_bytes = shape.num_parameters * BYTES_PER_ELEMENT[dtype]
    block_size = config.cache.block_size or 64
    block_bytes = model.kv_bytes_per_token * block_size
    room = int(hardware.memory_bytes * config.cache.memory_fraction) - weight_bytes
    if room < 2 * block_bytes and config.cache.num_blocks is None:
        raise ConfigError(
            f"{weight_bytes / 1e9:.1f} GB of weights do not fit {hardware.name}'s "
            f"{hardware.memory_bytes / 1e9:.0f} GB with memory_fraction {config.cache.memory_fraction}",
            field="device",
        )
    most_blocks = 2**17
    num_blocks = config.cache.num_blocks or min(room // block_bytes, most_blocks)
    reason = (
        "as cache.num_blocks says"
        if config.cache.num_blocks
        else f"what fits beside the weights, at most {most_blocks}"
    )
    notes = [f"{num_blocks} blocks, {reason}"]
    wanted_len = min(config.model.max_model_len or shape.max_position_embeddings, shape.max_position_embeddings)
    max_model_len = min(wanted_len, num_blocks * block_size)
    if max_model_len < wanted_len:
        notes.append(f"max_model_len is clipped from {wanted_len} to the {max_model_len} tokens that the blocks hold")

    def predict(step: StepShape) -> float:
        return model.predict(step) if step_s is None else step_s

    runner = SimRunner(
        predict,
        vocab_size=shape.vocab_size,
        excluded_token_ids=frozenset(
            (*shape.eos_token_ids, *(() if shape.bos_token_id is None else (shape.bos_token_id,)))
        ),
    )
    return _Device(
        runner=runner,
        name=config.device,
        dtype=dtype,
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs_of(config, "cuda"),
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens or 8192,
        memory_ledger_bytes={"weights": weight_bytes, "kv_cache": num_blocks * block_bytes},
        notes=tuple(notes),
        predict=predict,
    )

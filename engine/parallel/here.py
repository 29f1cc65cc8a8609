"""How an engine is split over the devices of this machine, where nobody else has settled it. Starts nothing."""

from __future__ import annotations

from dataclasses import dataclass

from manta.engine.config import EngineConfig, with_overrides
from manta.engine.errors import ConfigError
from manta.engine.model_shape import ModelShape
from manta.engine.step_time import BYTES_PER_ELEMENT

from .auto_sizes import CannotFit, NodeGpus, choose_sizes

_SIZES = ("parallel.tensor_parallel_size", "parallel.pipeline_parallel_size")


@dataclass(frozen=True)
class Settled:
    """A configuration whose sizes are numbers, and why they are what they are (None: they were given)."""

    config: EngineConfig
    reason: str | None = None


def settle_sizes(config: EngineConfig, shape: ModelShape) -> Settled:
    """Numbers for `auto`, from this machine's GPUs. Raises ConfigError when they cannot hold the model."""
    parallel = config.parallel
    if parallel.is_settled:
        return Settled(config)
    given = {
        name: size
        for name, size in (
            ("tp_size", parallel.tensor_parallel_size),
            ("pp_size", parallel.pipeline_parallel_size),
        )
        if isinstance(size, int)
    }
    dtype = shape.dtype if config.model.dtype == "auto" else config.model.dtype
    found = choose_sizes(
        shape,
        [_gpus_here(config.device)],
        bytes_per_element=BYTES_PER_ELEMENT[dtype],
        memory_fraction=config.cache.memory_fraction,
        max_model_len=config.model.max_model_len,
        **given,
    )
    if isinstance(found, CannotFit):
        raise ConfigError(f"the model cannot be split over this machine's GPUs: it {found.missing}", field=_SIZES[0])
    sizes: dict[str, int] = {_SIZES[0]: found.tp_size, _SIZES[1]: found.pp_size}
    reason = f"tensor parallel {found.tp_size}, pipeline parallel {found.pp_size}: {found.reason}"
    return Settled(with_overrides(config, sizes), reason)


def devices_of_ranks(device: str, num_ranks: int) -> list[str]:
    """The device of each rank on this machine: GPUs one by one, or the one that is named for all of them.

    Raises ConfigError when there are fewer GPUs than ranks.
    """
    num_gpus = _gpus_here(device).num_gpus
    if device == "cpu" or (device == "auto" and not num_gpus):
        return ["cpu"] * num_ranks
    if device not in ("auto", "cuda"):  # cuda:N
        return [device] * num_ranks
    if num_gpus < num_ranks:
        raise ConfigError(
            f"parallel: {num_ranks} ranks need {num_ranks} GPUs, of which {num_gpus} are usable here; choose smaller "
            f"sizes, or device=cuda:0 to let all ranks share one GPU (for trying out, not for speed)",
            field=_SIZES[0],
        )
    return [f"cuda:{rank}" for rank in range(num_ranks)]


def _gpus_here(device: str) -> NodeGpus:
    if device == "cpu" or device.startswith("sim"):
        return NodeGpus(0, 0)
    import torch

    if not torch.cuda.is_available():
        return NodeGpus(0, 0)
    num_gpus = torch.cuda.device_count() if ":" not in device else 1
    memory_bytes = min(torch.cuda.get_device_properties(index).total_memory for index in range(num_gpus))
    return NodeGpus(num_gpus, memory_bytes)

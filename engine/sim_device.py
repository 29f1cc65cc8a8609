"""The start of a simulated device: sizes and step times from a GPU's figures and the model's shape. Torch-free."""

from __future__ import annotations

from .config import EngineConfig, max_num_seqs_of
from .errors import ConfigError
from .kv_transfer.messages import KvShard
from .kv_transfer.ranks import LocalRanks
from .kv_transfer.sim_endpoint import SimEndpoint
from .kv_transfer.start import StartedKv, new_kv_key, times_of
from .model_shape import ModelShape
from .parallel.member import GangSeat
from .precision import PRECISIONS
from .sim import SimRunner, fixed_step_s
from .started_device import StartedDevice, step_times
from .step_time import StepShape, hardware_named

MOST_BLOCKS = 2**17
"""A block costs the host memory, however large the device is that is simulated."""


def start_simulated(
    config: EngineConfig, shape: ModelShape, seat: GangSeat | None = None, *, kv_host: str | None = None
) -> StartedDevice:
    """A device that takes the predicted time. Split over ranks, it is the gang's whole: one simulation for all of them,
    with `seat` behind the link to real followers (which simulate the same), so that gangs can be tried out. KV that
    comes and goes is rank 0's, at the address `kv_host` (None: not of this process).

    Raises ConfigError for a GPU that is not known or does not hold the model.
    """
    step_s = fixed_step_s(config.device)
    name = "h200" if step_s is not None else config.device.partition(":")[2] or "h200"
    tp_size, pp_size = config.parallel.tp_size, config.parallel.pp_size
    hardware = hardware_named(name)
    dtype = shape.dtype if config.model.dtype == "auto" else config.model.dtype
    model = step_times(config, shape, hardware, dtype)
    if model is None:
        raise ConfigError(
            f"quantization.weights = {config.quantization.weights!r}: is dequantized for each step, and a simulated "
            f"device has no step times for that; it has some for {', '.join(PRECISIONS)}",
            field="quantization.weights",
        )
    weight_bytes = model.resident_bytes
    block_size = config.cache.block_size or 64
    block_bytes = model.kv_bytes_per_token * block_size
    memory_bytes = hardware.memory_bytes * tp_size * pp_size
    room = int(memory_bytes * config.cache.memory_fraction) - weight_bytes
    if room < 2 * block_bytes and config.cache.num_blocks is None:
        raise ConfigError(
            f"{weight_bytes / 1e9:.1f} GB of weights do not fit {_ranks_name(hardware.name, tp_size * pp_size)}'s "
            f"{memory_bytes / 1e9:.0f} GB with memory_fraction {config.cache.memory_fraction}",
            field="device",
        )
    most_blocks = MOST_BLOCKS
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

    runner = own = SimRunner(
        predict,
        vocab_size=shape.vocab_size,
        num_stages=pp_size,
        excluded_token_ids=frozenset(
            (*shape.eos_token_ids, *(() if shape.bos_token_id is None else (shape.bos_token_id,)))
        ),
    )
    kv = None
    if config.cache.kv_transfer and kv_host is not None:
        ranks, key, shards = LocalRanks(), new_kv_key(), [KvShard((0, shape.num_layers), (0, shape.num_kv_heads))]
        endpoint = SimEndpoint(
            key=key,
            on_event=lambda event: ranks.inbox.put(0, event),
            bytes_per_token=int(model.kv_bytes_per_token),
            host=kv_host,
        )
        own.attach(endpoint)
        kv = StartedKv(ranks, key, kv_host, [endpoint.url], shards, times_of(config))
    if seat is not None:
        from .parallel.driver import start_gang

        runner = start_gang(seat, lambda store: own)
    return StartedDevice(
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
        kv=kv,
    )


def _ranks_name(name: str, num_ranks: int) -> str:
    """How a gang's devices are named together."""
    return name if num_ranks == 1 else f"{name} x {num_ranks}"

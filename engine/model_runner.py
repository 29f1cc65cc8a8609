"""From a configuration to a runner that is ready: device, weights, memory, cache, warm-up. Knows no requests.

A rank of a gang builds its part in the same way: all of them go through the same steps and exchange what they must.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from manta.kernels.attention_decode import DecodeWorkspace
from manta.kernels.runtime import capability, keep_freed_memory

from .compile_steps import compile_steps, sizes_with_own_kernels
from .config import EngineConfig, max_num_seqs_of
from .errors import ConfigError
from .kv_cache import GIB, CacheLayout, NumBlocks, blocks_in_device_memory, blocks_in_host_memory, blocks_wanted
from .layers.attention import LayerCache
from .model_shape import ModelShape
from .model_source import ModelSource
from .models.decoder import Decoder
from .parallel.groups import Groups
from .parallel.layout import ShardLayout
from .parallel.place import RankPlace
from .parallel.rank_runner import RankRunner, share_of
from .profiling import measure_graph_bytes, measure_peak_bytes, warm_up
from .runner import ModelRunner, RunnerOptions
from .weights.load import load_weights

RESERVE_MARGIN_BYTES = 512 << 20
"""Of a GPU, kept free beside the measured peak: the allocator's fragments and what libraries load late."""

Report = Callable[[str, float], None]


class MakeRunner(Protocol):
    """Puts a rank's decoder and caches behind a runner; called by all ranks, in the same order."""

    def __call__(
        self, model: Decoder, caches: list[LayerCache], *, device: torch.device, options: RunnerOptions
    ) -> ModelRunner: ...


@dataclass(frozen=True)
class BuiltRunner:
    """A runner and the sizes that were settled while it was built, in tokens unless they say otherwise."""

    runner: ModelRunner
    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_batched_tokens: int
    device: torch.device
    dtype: str
    memory_ledger_bytes: dict[str, int]
    """weights, kv_cache, workspace (buffers that live as long as the runner), reserve (activations of a step), graphs
    (what captured decode steps hold)."""
    notes: tuple[str, ...]
    """Sentences for the operator: why so many blocks, and whether the context had to be clipped."""


def build_model_runner(
    config: EngineConfig,
    source: ModelSource,
    shape: ModelShape,
    *,
    place: RankPlace | None = None,
    groups: Groups | None = None,
    report: Report = lambda name, seconds: None,
    make_runner: MakeRunner | None = None,
) -> BuiltRunner:
    """Load the weights, size and allocate the cache, compile what steps need.

    With `place` (None: the only rank) that rank's part: its slices, its layers' caches, as many blocks as the rank
    with the least room has. All ranks call it with the same configuration; `groups` connects them. `make_runner`
    (None: ModelRunner, or RankRunner in a gang) makes the runner, also those that only measure; all ranks give them the
    same plans.

    `report` is told each phase's name and seconds: weights, compile (CUDA), profile (CUDA), kv_cache, warmup (CUDA).
    Raises ConfigError or CheckpointError with a sentence that says what to change.
    """
    phases = _Phases(report)
    place = RankPlace(0) if place is None else place
    assert place.world_size == 1 or groups is not None, "ranks of a gang need groups"
    shard = ShardLayout.of(shape, place)
    is_alone = place.world_size == 1
    if make_runner is None:
        make_runner = ModelRunner if is_alone or groups is None else partial(RankRunner, groups=groups)
    device = choose_device(config.device)
    dtype_name = config.model.dtype if config.model.dtype != "auto" else shape.dtype
    if device.type == "cpu":
        keep_freed_memory()
        dtype_name = "float32" if config.model.dtype == "auto" else dtype_name
    else:
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("highest")  # no TF32
    dtype: torch.dtype = getattr(torch, dtype_name)
    max_num_seqs = max_num_seqs_of(config, device.type)
    max_num_batched_tokens = config.scheduler.max_num_batched_tokens or (8192 if device.type == "cuda" else 512)
    block_size = config.cache.block_size or (64 if device.type == "cuda" else 16)
    wanted_len = min(config.model.max_model_len or shape.max_position_embeddings, shape.max_position_embeddings)
    kv_dtype = config.quantization.kv_cache
    check_kv_dtype(config, device)
    layout = CacheLayout.of(shape, block_size=block_size, dtype=dtype, layout=shard, kv_dtype=kv_dtype)
    deterministic = config.execution.deterministic
    # What goes through the host, or to another stage, is not captured: steps of such ranks run eagerly.
    can_capture = is_alone or (groups is not None and groups.can_capture)
    has_graphs = device.type == "cuda" and config.execution.cuda_graphs and can_capture

    if deterministic and device.type == "cuda" and dtype.itemsize == 2:
        check_deterministic(shape, device, shard)
    with _explained(f"the weights of {source.name} do not fit {device}", field="device"):
        workspace = _decode_workspace(shape, shard, max_num_seqs, device)
        parameters = load_weights(
            source,
            shape,
            dtype=dtype,
            device=device,
            layout=shard,
            seed=config.model.seed,
            quantization=config.quantization,
        )
        weight_notes = parameters.notes
        model = Decoder(
            shape,
            parameters,
            max_position=wanted_len + block_size,
            workspace=workspace,
            deterministic=deterministic,
            layout=shard,
            group=None if groups is None else groups.tensor,
        )
        del parameters
    phases.end("weights")

    ledger = {"weights": model.num_weight_bytes, "workspace": _workspace_bytes(model, workspace)}
    if device.type == "cuda":
        tensor = None if groups is None else groups.tensor
        if can_capture:  # a stage lacks a beginning or an end; ranks that share a GPU may be threads of one process
            with nullcontext() if tensor is None else tensor.silent():
                compile_steps(
                    model,
                    layout,
                    max_num_seqs=max_num_seqs,
                    max_model_len=wanted_len,
                    max_num_tokens=max_num_batched_tokens,
                    decode_sizes=sizes_with_own_kernels(max_num_seqs),
                    deterministic=deterministic,
                    device=device,
                )
        phases.end("compile")
        with _explained(
            f"a step of scheduler.max_num_batched_tokens = {max_num_batched_tokens} does not fit beside the weights",
            field="scheduler.max_num_batched_tokens",
        ):
            peak_bytes = measure_peak_bytes(
                model,
                layout,
                max_num_seqs=max_num_seqs,
                max_num_tokens=max_num_batched_tokens,
                device=device,
                make_runner=make_runner,
            )
            if has_graphs:
                ledger["graphs"] = measure_graph_bytes(
                    model,
                    layout,
                    max_num_seqs=max_num_seqs,
                    max_padded_tokens=max_num_batched_tokens,
                    device=device,
                    share=None if groups is None else share_of(groups),
                )
        ledger["reserve"] = peak_bytes + RESERVE_MARGIN_BYTES
        phases.end("profile")
    reserve_bytes = ledger.get("reserve", 0) + ledger.get("graphs", 0)
    num_blocks = _num_blocks(config, layout, device, reserve_bytes=reserve_bytes, groups=groups)
    if groups is not None:
        num_blocks = _agreed(num_blocks, groups)
    ledger["kv_cache"] = num_blocks.count * layout.block_bytes
    max_model_len = min(wanted_len, num_blocks.count * block_size)
    cache_gib = num_blocks.count * layout.block_bytes / GIB
    with _explained(
        f"a cache of {num_blocks.count} blocks ({cache_gib:.1f} GiB) does not fit", field="cache.num_blocks"
    ):
        caches = layout.allocate(num_blocks.count, device)
    phases.end("kv_cache")

    options = RunnerOptions(
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        block_size=block_size,
        pads_decodes=has_graphs,
        max_padded_tokens=max_num_batched_tokens if has_graphs else 0,
        deterministic=deterministic,
    )
    runner = make_runner(model, caches, device=device, options=options)
    if device.type == "cuda":
        warm_up(runner)
        phases.end("warmup")
    notes = [num_blocks.reason, *weight_notes]
    if max_model_len < wanted_len:
        notes.append(f"max_model_len is clipped from {wanted_len} to the {max_model_len} tokens that the blocks hold")
    return BuiltRunner(
        runner=runner,
        num_blocks=num_blocks.count,
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        device=device,
        dtype=dtype_name,
        memory_ledger_bytes=ledger,
        notes=tuple(notes),
    )


def check_kv_dtype(config: EngineConfig, device: torch.device) -> None:
    """Raises ConfigError where a cache in 8 bits is asked for and cannot be had."""
    field, kv_dtype = "quantization.kv_cache", config.quantization.kv_cache
    if kv_dtype == "auto":
        return
    if kv_dtype == "fp8" and device.type == "cuda" and capability(device) < 89:
        name = torch.cuda.get_device_name(device)
        raise ConfigError(
            f"{field} = {kv_dtype!r}: needs a GPU of compute capability 8.9 or higher, not {name}; use int8",
            field=field,
        )


def check_deterministic(shape: ModelShape, device: torch.device, shard: ShardLayout | None = None) -> None:
    """Raises ConfigError where the one kernel of the deterministic mode's linear layers does not take the model (or a
    rank's part of it)."""
    shard = ShardLayout.whole(shape) if shard is None else shard
    field = "execution.deterministic"
    if capability(device) < 90:
        name = torch.cuda.get_device_name(device)
        raise ConfigError(f"{field} = True: needs a GPU of compute capability 9.0 or higher, not {name}", field=field)
    sizes = {
        "hidden_size": shape.hidden_size,
        "intermediate_size": len(shard.intermediate),
        "vocab_size": len(shard.vocab),
        "num_heads * head_dim": len(shard.heads) * shape.head_dim,
        "num_kv_heads * head_dim": len(shard.kv_heads) * shape.head_dim,
    }
    odd = [f"{name} = {size}" for name, size in sizes.items() if size % 16]
    if odd:
        raise ConfigError(f"{field} = True: needs sizes that are multiples of 16, not {', '.join(odd)}", field=field)


def choose_device(name: str) -> torch.device:
    """The device that `device` names, with its index on CUDA. Raises ConfigError when it cannot be used."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = device.index or 0
    if index >= count:
        found = f"{count} CUDA devices are" if count else "no CUDA device is"
        raise ConfigError(f"device = {name!r}: {found} usable here; use device=cpu or another number", field="device")
    return torch.device("cuda", index)


class _Phases:
    def __init__(self, report: Report) -> None:
        self._report = report
        self._since_s = time.monotonic()

    def end(self, name: str) -> None:
        now_s = time.monotonic()
        self._report(name, now_s - self._since_s)
        self._since_s = now_s


def _decode_workspace(
    shape: ModelShape, shard: ShardLayout, max_num_seqs: int, device: torch.device
) -> DecodeWorkspace | None:
    if device.type != "cuda":
        return None
    return DecodeWorkspace.allocate(
        max_num_seqs=max_num_seqs,
        num_heads=len(shard.heads),
        num_kv_heads=len(shard.kv_heads),
        head_dim=shape.head_dim,
        device=device,
    )


def _workspace_bytes(model: Decoder, workspace: DecodeWorkspace | None) -> int:
    tensors = [model.cos_sin] + ([] if workspace is None else [workspace.partial, workspace.log_sum])
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _num_blocks(
    config: EngineConfig, layout: CacheLayout, device: torch.device, *, reserve_bytes: int, groups: Groups | None
) -> NumBlocks:
    if config.cache.num_blocks is not None:
        return blocks_wanted(config.cache.num_blocks)
    if device.type == "cpu":
        return blocks_in_host_memory(layout, config.cache.cpu_cache_gib)
    torch.cuda.empty_cache()
    if groups is not None and groups.everyone is not None:
        groups.everyone.barrier()  # ranks that share the device have their weights by then
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return blocks_in_device_memory(
        layout,
        total_bytes=total_bytes,
        used_bytes=total_bytes - free_bytes,
        reserve_bytes=reserve_bytes,
        memory_fraction=config.cache.memory_fraction,
        num_sharing=1 if groups is None else groups.num_on_device,
    )


def _agreed(own: NumBlocks, groups: Groups) -> NumBlocks:
    """The same for all ranks: a block is a piece of every rank's cache."""
    (count,) = groups.smallest([own.count])
    if count == own.count:
        return own
    return NumBlocks(count, f"{count} blocks, as many as the rank with the least room holds (here {own.reason})")


@contextmanager
def _explained(what: str, *, field: str) -> Iterator[None]:
    """Turn a lack of memory into a ConfigError that says what did not fit."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"{what}: {error}", field=field) from None
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):  # what torch says on CPU
            raise
        raise ConfigError(f"{what}: {error}", field=field) from None

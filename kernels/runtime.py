"""Where an operation runs and with which tile sizes: reference or Triton, device queries, static configuration tables.

Knows no operation and no model. There is no autotuning at run time: the tables below and in tuned/ were measured with
bench/kernels.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs

# Fused multiply-add, as in every release so far; Triton 3.9 warns at each compilation unless the choice is explicit.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

jit: Any = triton.jit
"""Triton's decorator, untyped: its stubs know neither launch options nor plain values for constexpr parameters."""

INTERPRETED: bool = bool(knobs.runtime.interpret)
"""Kernels run in Triton's interpreter (tests only). Decided when Triton is first imported, like Triton's own switch."""


def use_triton(tensor: torch.Tensor) -> bool:
    """Whether launchers take the Triton kernel for this tensor. Tests replace this to reach the interpreter."""
    return tensor.is_cuda


def has_inline_ptx(tensor: torch.Tensor) -> bool:
    """Whether kernels may contain NVIDIA assembly: not in the interpreter and not on AMD."""
    return tensor.is_cuda and not INTERPRETED and torch.version.hip is None


def keep_freed_memory() -> None:
    """Let glibc keep what tensors on CPU free instead of returning it to the system; for processes that run the model.

    Activations of a megabyte come and go at every layer; where page faults are dear (virtual machines, sandboxes)
    handing the pages back costs several times the work done in them. No effect with another C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD: large blocks come from the heap,
        mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD: whose top is not given back
        mallopt(-2, 64 << 20)  # M_TOP_PAD: and grows by 64 MiB at a time


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; an H100's count for anything else, so that grids stay comparable."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


TUNED_FOLDER: Path = Path(__file__).parent / "tuned"
"""One JSON file a GPU model, named by `file_stem`; written by `manta bench kernels --tune`."""


def file_stem(device_name: str) -> str:
    """The name a device's files go by: "NVIDIA H200" -> nvidia_h200."""
    return re.sub(r"[^a-z0-9]+", "_", device_name.lower()).strip("_")


@cache
def tuned_tables(device_name: str) -> Mapping[str, Mapping[str, Any]]:
    """The measured tables of a GPU by operation; of the files whose name the device's contains the longest one.

    Empty without such a file, and then operations take their documented defaults.
    """
    name = file_stem(device_name)
    files = [file for file in TUNED_FOLDER.glob("*.json") if file.stem in name]
    return json.loads(max(files, key=lambda file: len(file.stem)).read_text()) if files else {}


@cache
def tuned_table(op: str, device: torch.device) -> Mapping[str, Any]:
    """One operation's measured configurations on this device, {shape key: what the operation keeps there}, or empty."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return tuned_tables(name).get(op, {})


@dataclass(frozen=True)
class AttentionTiles:
    """Tile sizes of an attention kernel: query rows and keys a tile, and how the compiler schedules it."""

    block_m: int
    tile: int
    num_warps: int
    num_stages: int


def prefill_tiles(*, head_dim: int, itemsize: int, group_size: int, capability: int) -> AttentionTiles:
    """Many queries a sequence: 64 rows of (token, head of the group), so that two programs share a multiprocessor.

    `capability` is the device's compute capability times ten, 90 for an H100 or H200. fp32 has no matrix instructions,
    and before 90 the accumulators need more registers: both take smaller tiles.
    """
    if itemsize > 2:
        return AttentionTiles(max(32, triton.next_power_of_2(group_size)), 16, 8, 2)
    block_m = max(64, triton.next_power_of_2(group_size))
    tile = 64 if head_dim <= 128 and capability >= 90 else 32
    return AttentionTiles(block_m, tile, 4 if block_m == 64 and head_dim <= 128 else 8, 3)


@cache
def capability(device: torch.device) -> int:
    """Compute capability times ten; an H100's for anything that is not an NVIDIA GPU."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor

"""Which of the prefill attention kernels runs for a shape, with which tile sizes. Knows no kernel and no batch.

Measured tables (`manta bench kernels --tune attention_prefill`) decide where a device has one, defaults elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch

from . import runtime

BOX = 64
"""Rows and 16-bit columns that the specialized kernel copies at a time: the largest box in its shared memory layout."""


@dataclass(frozen=True)
class PrefillPlan:
    """A kernel and its tiles.

    `pointers` takes every shape; `descriptors` is the same kernel with keys and values copied by the tensor memory
    accelerator; `specialized` is the one written for Hopper, in which some warps copy while others compute.
    """

    kernel: Literal["pointers", "descriptors", "specialized"]
    block_m: int
    """Rows of a program: (token, head of the group)."""
    tile: int
    """Keys a step."""
    num_warps: int
    num_stages: int
    """Tiles of keys in flight."""
    masked_stages: int = 1
    """The same in the last steps, where some queries do not see all keys."""
    heads_first: bool = True
    """Programs of all heads next to each other; else those of all queries: for keys larger than the L2 cache."""
    persistent: bool = False
    """`specialized` only: one program a multiprocessor, which copies the next tile's keys while it ends the last."""
    pinned: bool = False
    """`specialized` only: weights are rounded to 16 bits before the previous product has ended."""
    turns: bool = False
    """`specialized` only: the two computing groups issue their products in turn, so that one computes weights while
    the tensor cores work for the other."""


@dataclass(frozen=True)
class Memory:
    """An address with a type, which is all that a launch asks of a descriptor's tensor; keeps no cache alive."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


def has_descriptors(*, head_dim: int, itemsize: int, page_size: int, tile: int, capability: int) -> bool:
    """Whether the tensor memory accelerator can copy a tile: 16-bit rows of a power of two, inside one page."""
    return capability >= 90 and itemsize == 2 and page_size % tile == 0 and head_dim in (64, 128, 256)


def has_specialized(*, head_dim: int, itemsize: int, page_size: int, group_size: int, capability: int) -> bool:
    """Whether the Hopper kernel takes the shape. Its instructions exist on compute capability 9.0 alone."""
    return capability == 90 and itemsize == 2 and page_size % BOX == 0 and head_dim in (64, 128) and group_size <= 128


def default_plan(
    *, head_dim: int, itemsize: int, group_size: int, page_size: int, capability: int, has_codes: bool = False
) -> PrefillPlan:
    """What a shape without a measured entry takes, always the same for a model."""
    tiles = runtime.prefill_tiles(head_dim=head_dim, itemsize=itemsize, group_size=group_size, capability=capability)
    shape = {"head_dim": head_dim, "itemsize": itemsize, "page_size": page_size, "capability": capability}
    kernel = "descriptors" if not has_codes and has_descriptors(**shape, tile=tiles.tile) else "pointers"
    return PrefillPlan(kernel, tiles.block_m, tiles.tile, tiles.num_warps, tiles.num_stages, tiles.num_stages)


def table_key(head_dim: int, group_size: int, deterministic: bool, has_codes: bool = False) -> str:
    name = f"{head_dim}x{group_size}" + (" over codes" if has_codes else "")
    return name + (" deterministic" if deterministic else "")


@lru_cache(maxsize=1024)
def plan_for(
    *,
    head_dim: int,
    itemsize: int,
    group_size: int,
    page_size: int,
    max_seq_len: int,
    deterministic: bool,
    device: torch.device,
    has_codes: bool = False,
) -> PrefillPlan:
    """The first measured plan whose `max_seq_len` is not below this one's and which takes the shape, or the default.

    With `deterministic` the answer does not depend on `max_seq_len`: results are equal bit by bit only within a plan.
    `has_codes`: of a cache in 8 bits, `itemsize` being that of the queries.
    """
    capability = runtime.capability(device)
    shape = {"head_dim": head_dim, "itemsize": itemsize, "page_size": page_size, "capability": capability}
    entries: list[dict[str, Any]] = runtime.tuned_table("attention_prefill", device).get(
        table_key(head_dim, group_size, deterministic, has_codes), []
    )
    for entry in entries:
        bound = entry.get("max_seq_len")
        plan = PrefillPlan(**{name: value for name, value in entry.items() if name != "max_seq_len"})
        if bound is not None and max_seq_len > bound and not deterministic:
            continue
        if has_codes and plan.kernel != "pointers":
            continue
        if plan.kernel == "descriptors" and not has_descriptors(**shape, tile=plan.tile):
            continue
        if plan.kernel == "specialized" and not has_specialized(**shape, group_size=group_size):
            continue
        return plan
    return default_plan(**shape, group_size=group_size, has_codes=has_codes)

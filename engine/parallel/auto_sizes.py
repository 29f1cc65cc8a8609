"""How many ranks a model needs on given GPUs, and in what arrangement, with the reason. Pure; knows no cluster.

As few GPUs as hold the weights with room for a useful cache. Tensor parallelism first, inside a node: it makes every
step shorter. Pipeline stages only where one node's GPUs are too few: they add throughput, not speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from manta.engine.model_shape import ModelShape

from .layout import ShardLayout, shard_parameters
from .place import RankPlace

GB = 10**9
CACHE_SHARE = 0.2
"""Of what the engine may use of a GPU, at least left to the cache: below it few requests run at once."""
STEP_SHARE = 0.08
"""Of the same, for activations, workspaces and CUDA itself."""


@dataclass(frozen=True)
class NodeGpus:
    """The GPUs of one node that a gang may have, all alike."""

    num_gpus: int
    memory_bytes: float
    """Of each."""


@dataclass(frozen=True)
class ParallelSizes:
    """What `auto` has come to."""

    tp_size: int
    pp_size: int
    reason: str


@dataclass(frozen=True)
class CannotFit:
    """No arrangement holds the model."""

    missing: str
    """What is missing, as a sentence without its end."""


def choose_sizes(
    shape: ModelShape,
    nodes: Sequence[NodeGpus],
    *,
    bytes_per_element: int,
    memory_fraction: float = 0.9,
    max_model_len: int | None = None,
    tp_size: int | None = None,
    pp_size: int | None = None,
) -> ParallelSizes | CannotFit:
    """Sizes for one replica on `nodes`; a size that is given stays as it is.

    `max_model_len` tokens must fit the cache (None: the model's own). One rank where there is no GPU at all.
    """
    total_bytes = shape.num_parameters * bytes_per_element
    if not any(node.num_gpus for node in nodes):
        return ParallelSizes(tp_size or 1, pp_size or 1, "there is no GPU to split the model over")
    context = min(max_model_len or shape.max_position_embeddings, shape.max_position_embeddings)
    what = f"{_gb(total_bytes)} of weights and a cache of at least {context} tokens"
    nearest: _Need | None = None
    for candidate_tp, candidate_pp in _candidates(shape, nodes, tp_size, pp_size):
        need = _Need.of(shape, candidate_tp, candidate_pp, bytes_per_element, context)
        memory_bytes = _memory_of_blocks(nodes, candidate_tp, candidate_pp)
        if memory_bytes is None:
            continue
        usable = memory_bytes * memory_fraction
        if need.fits(usable):
            return ParallelSizes(
                candidate_tp, candidate_pp, _reason(candidate_tp, candidate_pp, what, need, usable, nodes)
            )
        nearest = need
    most = max(node.num_gpus for node in nodes)
    gpus = f"{sum(node.num_gpus for node in nodes)} GPUs (at most {most} in one node)"
    if nearest is None:
        asked = " x ".join(
            f"{name} {size}" for name, size in (("tensor", tp_size), ("pipeline", pp_size)) if size is not None
        )
        return CannotFit(f"needs blocks of GPUs in one node for {asked or 'one rank'}, and there are {gpus}")
    return CannotFit(
        f"needs room for {what}: split over tensor {nearest.tp_size} x pipeline {nearest.pp_size} that is "
        f"{_gb(nearest.weight_bytes)} of weights a GPU, of which {_gb(max(node.memory_bytes for node in nodes))} are "
        f"there, on {gpus}"
    )


@dataclass(frozen=True)
class _Need:
    """Bytes on the rank that needs most."""

    tp_size: int
    pp_size: int
    weight_bytes: int
    cache_bytes: int

    @classmethod
    def of(cls, shape: ModelShape, tp_size: int, pp_size: int, size: int, context: int) -> _Need:
        layouts = [ShardLayout.of(shape, RankPlace(rank, tp_size, pp_size)) for rank in range(tp_size * pp_size)]
        kv_heads = max(len(layout.layers) * len(layout.kv_heads) for layout in layouts)
        return cls(
            tp_size,
            pp_size,
            size * max(shard_parameters(shape, layout) for layout in layouts),
            size * 2 * kv_heads * shape.head_dim * context,
        )

    def fits(self, usable_bytes: float) -> bool:
        cache_bytes = max(self.cache_bytes, CACHE_SHARE * usable_bytes)
        return self.weight_bytes + cache_bytes + STEP_SHARE * usable_bytes <= usable_bytes


def _candidates(
    shape: ModelShape, nodes: Sequence[NodeGpus], tp_size: int | None, pp_size: int | None
) -> Iterator[tuple[int, int]]:
    """Within a node the fewest GPUs first; then stages, of as many GPUs as a node has, as few as can be. Only sizes
    that split heads evenly are proposed."""
    most = max(node.num_gpus for node in nodes)
    total = sum(node.num_gpus for node in nodes)
    tps = [tp_size] if tp_size else [tp for tp in range(1, most + 1) if _splits_evenly(shape, tp)]
    pps = [pp_size] if pp_size else range(1, min(total, shape.num_layers) + 1)
    found = [(tp, pp) for tp in tps for pp in pps if tp * pp <= total]

    def order(sizes: tuple[int, int]) -> tuple[bool, int, int]:
        tp, pp = sizes
        crosses = pp_size is None and pp > 1
        return crosses, -tp if crosses else tp, pp

    return iter(sorted(found, key=order))


def _splits_evenly(shape: ModelShape, tp_size: int) -> bool:
    if shape.num_heads % tp_size or shape.intermediate_size % tp_size:
        return False
    return shape.num_kv_heads % tp_size == 0 or tp_size % shape.num_kv_heads == 0


def _memory_of_blocks(nodes: Sequence[NodeGpus], tp_size: int, pp_size: int) -> float | None:
    """Memory of the smallest GPU when `pp_size` blocks of `tp_size` GPUs take the largest ones; None without room."""
    blocks = sorted((node.memory_bytes for node in nodes for _ in range(node.num_gpus // tp_size)), reverse=True)
    return blocks[pp_size - 1] if len(blocks) >= pp_size else None


def _reason(tp_size: int, pp_size: int, what: str, need: _Need, usable_bytes: float, nodes: Sequence[NodeGpus]) -> str:
    room = f"{_gb(usable_bytes)} that may be used of each"
    if tp_size == pp_size == 1:
        return f"one GPU holds {what} in the {room}"
    share = f"{_gb(need.weight_bytes)} of weights on each, in the {room}"
    if pp_size == 1:
        return f"{what} need {tp_size} GPUs of one node: {share}"
    if tp_size * pp_size > max(node.num_gpus for node in nodes):
        return f"{what} need {tp_size * pp_size} GPUs, more than a node has: {pp_size} stages of {tp_size}, {share}"
    return f"{what} need {tp_size * pp_size} GPUs, and heads split evenly over {tp_size}: {pp_size} stages, {share}"


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / GB:.1f} GB"

"""Settles how a model is split over ranks, before the cluster is asked for room. Loads no weights, starts nothing.

`auto` looks at all GPUs of nodes with the right labels, free or not: a split is made for the machines, not the moment.
"""

from __future__ import annotations

from collections.abc import Mapping

from manta.cluster.hardware import GPU_LABEL, MEMORY_LABEL
from manta.cluster.spec import matches
from manta.cluster.topology import Node, Topology
from manta.engine.config import EngineConfig, with_overrides
from manta.engine.errors import ConfigError
from manta.engine.model_source import load_shape, resolve_model
from manta.engine.parallel.auto_sizes import CannotFit, NodeGpus, choose_sizes
from manta.engine.step_time import BYTES_PER_ELEMENT, hardware_of

ACCELERATOR_LABEL = "ray.io/accelerator-type"
"""Ray's own label."""
AUTO = "auto"


def resolve_parallel(
    engine: EngineConfig, topology: Topology, *, uses_gpus: bool, labels: Mapping[str, str]
) -> tuple[EngineConfig, str]:
    """The same configuration with numbers for both sizes, and why they are what they are, as a sentence.

    Raises ConfigError when `auto` finds no way, or does not know how much memory the GPUs have.
    """
    parallel = engine.parallel
    asked = (parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
    if AUTO not in asked:
        return engine, f"tensor parallel {asked[0]} x pipeline parallel {asked[1]}, as configured"
    usable = [node for node in topology.nodes if uses_gpus and node.num_gpus >= 1 and matches(labels, node.labels)]
    shape = load_shape(resolve_model(engine.model))
    chosen = choose_sizes(
        shape,
        [_gpus_of(node) for node in usable],
        bytes_per_element=BYTES_PER_ELEMENT[shape.dtype if engine.model.dtype == "auto" else engine.model.dtype],
        memory_fraction=engine.cache.memory_fraction,
        max_model_len=engine.model.max_model_len,
        tp_size=_given(asked[0]),
        pp_size=_given(asked[1]),
    )
    if isinstance(chosen, CannotFit):
        raise ConfigError(
            f"parallel sizes {asked[0]} x {asked[1]}: {chosen.missing}", field="engine.parallel.tensor_parallel_size"
        )
    settled = {
        "parallel.tensor_parallel_size": chosen.tp_size,
        "parallel.pipeline_parallel_size": chosen.pp_size,
    }
    reason = f"tensor parallel {chosen.tp_size} x pipeline parallel {chosen.pp_size}: {chosen.reason}"
    return with_overrides(engine, settled), reason


def _given(size: int | str) -> int | None:
    return size if isinstance(size, int) else None


def _gpus_of(node: Node) -> NodeGpus:
    """Raises ConfigError when the node does not say how much memory its GPUs have."""
    mib = node.labels.get(MEMORY_LABEL, "")
    if mib.isdigit():
        return NodeGpus(int(node.num_gpus), int(mib) * 2.0**20)
    name = node.labels.get(GPU_LABEL) or node.labels.get(ACCELERATOR_LABEL)
    hardware = hardware_of(name.replace("-", " ")) if name else None
    if hardware is None:
        raise ConfigError(
            f"parallel sizes auto: it is not known how much memory the GPUs ({name or 'no type'}) of node "
            f"{node.address} have; start nodes with `manta cluster start`, which labels them, or give both sizes",
            field="engine.parallel.tensor_parallel_size",
        )
    return NodeGpus(int(node.num_gpus), hardware.memory_bytes)

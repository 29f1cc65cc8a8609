"""Reserves CPUs on every node for engines, as another user of the cluster would, until standard input ends."""

from __future__ import annotations

import logging
import sys

import ray
from ray.util.placement_group import placement_group


def occupy(address: str, num_nodes: int, num_cpus: float) -> None:
    """Says "occupied" once the CPUs are held; they are free again when this process ends."""
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    bundles = [{"CPU": num_cpus}] * num_nodes
    labels = [{"role": "engine"}] * num_nodes
    group = placement_group(bundles, strategy="STRICT_SPREAD", bundle_label_selector=labels)
    ray.get(group.ready(), timeout=30)
    print("occupied", flush=True)
    sys.stdin.read()
    ray.shutdown()


if __name__ == "__main__":
    occupy(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))

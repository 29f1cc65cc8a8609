"""`manta bench routing-cost`: what a routing decision costs an edge, beside hashing and the index's memory. CPU only.

The real policy, views and prefix index over replicas that exist as numbers. Prompts are conversations: all begin with
the same system prompt, which every replica holds, and go on as a few replicas hold them, for different lengths. In the
worst case every replica holds a different part of the prompt.
"""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from manta.cluster.routing.load_table import LoadTable
from manta.cluster.routing.policy import RouteRequest, RoutingSettings, decide
from manta.cluster.routing.prefix_index import PrefixIndex
from manta.cluster.routing.replica_view import ReplicaView
from manta.engine.prefix_cache import BlockHasher, CacheEvents
from manta.engine.stats import Snapshot
from manta.engine.step_costs import StepCosts

from .report import Report

BLOCK_SIZE = 64
PROMPT_LENS = {"4k": 4096, "128k": 128 * 1024}
"""Tokens."""
TARGET_US = {"4k": 100.0, "128k": 1000.0}
"""What a decision may take at the median."""
SYSTEM_BLOCKS = 8
BLOCKS_A_REPLICA = 16_384
COSTS = StepCosts(overhead_s=6e-4, weights_s=3.1e-3, token_s=1.8e-5, pair_s=6.6e-10, context_token_s=2.9e-8)
"""About those of an 8B model on an H200."""


class Fleet:
    """Views and an index of that many replicas, all busy, their caches full."""

    def __init__(self, num_replicas: int, *, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.views = [
            ReplicaView(
                f"replica-{number}",
                block_size=BLOCK_SIZE,
                num_blocks=BLOCKS_A_REPLICA,
                max_num_seqs=256,
                tokens_a_step=8192,
                max_requests=512,
                costs=COSTS,
            )
            for number in range(num_replicas)
        ]
        self.table = LoadTable(self.views)
        self.index = PrefixIndex(max_blocks=2 * num_replicas * BLOCKS_A_REPLICA)
        self.system = [self._hash() for _ in range(SYSTEM_BLOCKS)]
        self._sequences = dict.fromkeys((view.replica_id for view in self.views), 0)
        for view in self.views:
            self.index.add_replica(view.replica_id)
            self.store(view, self.system)
            self.store(view, [self._hash() for _ in range(BLOCKS_A_REPLICA)])
        self.learn(0.0)

    def store(self, view: ReplicaView, hashes: list[bytes]) -> None:
        events = CacheEvents(sequence=self._sequences[view.replica_id], stored=hashes)
        assert self.index.apply(view.replica_id, events)
        self._sequences[view.replica_id] += 1

    def learn(self, now_s: float) -> None:
        """A snapshot of every replica."""
        for view in self.views:
            view.learn(self.snapshot(), now_s)

    def snapshot(self) -> Snapshot:
        rng = self.rng
        return Snapshot(
            num_running=rng.randint(60, 140),
            num_waiting=rng.randint(0, 4),
            num_blocks=BLOCKS_A_REPLICA,
            num_used_blocks=rng.randint(4000, 12_000),
            num_prefill_tokens=rng.randint(0, 40_000),
            num_context_tokens=rng.randint(60_000, 200_000),
            last_step_s=0.02,
        )

    def conversation(self, num_tokens: int) -> list[bytes]:
        """Hashes of a prompt of which one to three replicas hold a part; as objects that nobody has looked at yet."""
        hashes = [*self.system, *(self._hash() for _ in range(num_tokens // BLOCK_SIZE - SYSTEM_BLOCKS))]
        for view in self.rng.sample(self.views, self.rng.randint(1, 3)):
            self.store(view, hashes[SYSTEM_BLOCKS : self.rng.randint(SYSTEM_BLOCKS, len(hashes))])
        return [bytes(bytearray(block_hash)) for block_hash in hashes]

    def held_by_all(self, num_tokens: int) -> list[bytes]:
        """Hashes of a prompt of which every replica holds a part of another length."""
        hashes = [self._hash() for _ in range(num_tokens // BLOCK_SIZE)]
        for number, view in enumerate(self.views, 1):
            self.store(view, hashes[: number * len(hashes) // len(self.views)])
        return [bytes(bytearray(block_hash)) for block_hash in hashes]

    def _hash(self) -> bytes:
        return self.rng.randbytes(16)


def request(hashes: list[bytes], num_tokens: int) -> RouteRequest:
    return RouteRequest(
        request_id="request", num_prompt_tokens=num_tokens, block_hashes=hashes, expected_output_tokens=256
    )


def microseconds(calls: Iterator[Callable[[], object]]) -> list[tuple[float, float]]:
    """Wall and CPU time of each call. The first is not counted."""
    found = []
    for call in calls:
        start_ns, cpu_start_ns = time.perf_counter_ns(), time.thread_time_ns()
        call()
        cpu_ns, wall_ns = time.thread_time_ns() - cpu_start_ns, time.perf_counter_ns() - start_ns
        found.append((wall_ns / 1e3, cpu_ns / 1e3))
    return found[1:]


def decisions(
    fleet: Fleet, num_tokens: int, repeats: int, prompt: Callable[[int], list[bytes]]
) -> Iterator[Callable[[], object]]:
    """Each after new snapshots of all replicas, with its own prompt."""
    settings = RoutingSettings()
    for number in range(repeats + 1):
        one, now_s = request(prompt(num_tokens), num_tokens), number * 0.02
        fleet.learn(now_s)
        yield partial(decide, one, fleet.table, fleet.index, now_s=now_s, settings=settings, tie=0.5)


def expectations(fleet: Fleet, num_tokens: int, repeats: int) -> Iterator[Callable[[], object]]:
    for number in range(repeats + 1):
        hashes, view = fleet.conversation(num_tokens), fleet.rng.choice(fleet.views)
        yield partial(fleet.index.expect, view.replica_id, hashes, until_s=number + 10.0)


def hashings(num_tokens: int, repeats: int) -> Iterator[Callable[[], object]]:
    hasher, rng = BlockHasher(BLOCK_SIZE, domain="bench"), random.Random(1)
    for _ in range(repeats + 1):
        token_ids = [rng.randrange(128_000) for _ in range(num_tokens)]
        yield partial(hasher.extend, [], token_ids, salt=None)


def snapshots(fleet: Fleet, repeats: int) -> Iterator[Callable[[], object]]:
    for number in range(repeats + 1):
        view, snapshot = fleet.rng.choice(fleet.views), fleet.snapshot()
        yield partial(view.learn, snapshot, float(number))


def index_bytes(num_blocks: int, num_replicas: int) -> tuple[float, float]:
    """Bytes of an index of so many blocks, hashes included: each on one replica, and each on a quarter of them."""
    found = []
    for num_copies in (1, num_replicas // 4):
        rng = random.Random(2)
        tracemalloc.start()
        index = PrefixIndex(max_blocks=num_blocks)
        ids = [f"replica-{number}" for number in range(num_replicas)]
        for replica_id in ids:
            index.add_replica(replica_id)
        sequences = dict.fromkeys(ids, 0)
        for first in range(num_replicas):
            hashes = [rng.randbytes(16) for _ in range(num_blocks // num_replicas)]
            for offset in range(num_copies):
                replica_id = ids[(first + offset) % num_replicas]
                assert index.apply(replica_id, CacheEvents(sequence=sequences[replica_id], stored=hashes))
                sequences[replica_id] += 1
            del hashes
        found.append(tracemalloc.get_traced_memory()[0] / max(index.num_blocks, 1))
        tracemalloc.stop()
    return found[0], found[1]


def run(
    *,
    num_replicas: int = 64,
    repeats: int = 300,
    num_memory_blocks: int = 1_000_000,
    json_path: Path | None = None,
    console: Console | None = None,
) -> Report:
    """Measure and report."""
    fleet = Fleet(num_replicas)
    figures: dict[str, float] = {}

    def note(name: str, calls: Iterator[Callable[[], object]]) -> None:
        wall_us, cpu_us = zip(*microseconds(calls), strict=True)
        figures[f"{name}_us_p50"] = float(np.median(wall_us))
        figures[f"{name}_us_p99"] = float(np.percentile(wall_us, 99))
        figures[f"{name}_cpu_us_p50"] = float(np.median(cpu_us))

    for name, num_tokens in PROMPT_LENS.items():
        few = max(repeats // 10, 2) if num_tokens > 10_000 else repeats
        note(f"decide_{name}", decisions(fleet, num_tokens, few, fleet.conversation))
        note(f"decide_{name}_worst", decisions(fleet, num_tokens, few, fleet.held_by_all))
        note(f"expect_{name}", expectations(fleet, num_tokens, few))
        note(f"hash_{name}", hashings(num_tokens, few))
    note("learn", snapshots(fleet, repeats * 4))
    one, quarter = index_bytes(num_memory_blocks, num_replicas)
    figures["index_mb_per_million_blocks"] = one
    figures["index_mb_per_million_blocks_on_a_quarter"] = quarter
    workload: dict[str, Any] = {
        "replicas": num_replicas,
        "block_size": BLOCK_SIZE,
        "blocks_in_index": fleet.index.num_blocks,
        "repeats": repeats,
        "target_us": TARGET_US,
    }
    report = Report("routing_cost", {}, workload, figures)
    report.finish(console, json_path)
    return report

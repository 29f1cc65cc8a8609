"""What is offered to a simulated fleet: traces and a hot prefix, as lengths, arrivals and hashes. Knows no policy."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from manta.autoscaling.simulator.workload import SimRequest, shared_hash
from manta.engine.errors import ConfigError

from .traces import MOONCAKE_BLOCK, TraceRow, find_trace, read_trace
from .workloads import lognormal_lengths, poisson_arrivals

PLAIN_BLOCK = 64
"""Block size for traces that name no blocks: that of the engine on CUDA."""
ZIPF = "zipf"


@dataclass(frozen=True)
class ZipfPrefixes:
    """Requests that begin with one of some long prefixes, one of which most of them share. Lengths in tokens."""

    num_requests: int = 12_000
    num_prefixes: int = 400
    exponent: float = 1.2
    """Prefix k comes 1 / k ** exponent as often as the first, which has a quarter of all requests."""
    prefix_len: int = 8192
    suffix_median: float = 1500.0
    output_median: float = 50.0
    sigma: float = 0.8
    seed: int = 0


@dataclass(frozen=True)
class Load:
    """Requests in the order of arrival, at a rate of their own."""

    name: str
    requests: tuple[SimRequest, ...]
    block_size: int
    num_left_out: int = 0
    """Requests of the trace that no replica has room for."""

    @property
    def mean_output_tokens(self) -> float:
        return sum(request.num_output_tokens for request in self.requests) / len(self.requests)

    @property
    def mean_prompt_tokens(self) -> float:
        return sum(request.num_prompt_tokens for request in self.requests) / len(self.requests)

    def at_rate(self, rate: float) -> list[SimRequest]:
        """The same requests, their arrivals stretched or squeezed to `rate` requests a second."""
        first_s, last_s = self.requests[0].arrival_s, self.requests[-1].arrival_s
        if last_s <= first_s:
            raise ConfigError(f"the load {self.name!r} has no arrival times to be scaled")
        scale = (len(self.requests) - 1) / rate / (last_s - first_s)
        return [replace(request, arrival_s=(request.arrival_s - first_s) * scale) for request in self.requests]

    def at_once(self) -> list[SimRequest]:
        """The same requests, all there from the beginning, in their order."""
        return [replace(request, arrival_s=0.0) for request in self.requests]

    @property
    def highest_hit_rate(self) -> float:
        """Share of prompt tokens that one cache without bounds would have, were every request done before the next."""
        known: set[bytes] = set()
        num_cached = 0
        for request in self.requests:
            usable = request.block_hashes[: (request.num_prompt_tokens - 1) // self.block_size]
            fresh = next((i for i, block_hash in enumerate(usable) if block_hash not in known), len(usable))
            num_cached += fresh * self.block_size
            known.update(request.block_hashes)
        return num_cached / sum(request.num_prompt_tokens for request in self.requests)


def find_load(name: str, *, limit: int | None, longest: int, zipf: ZipfPrefixes | None = None) -> Load:
    """`zipf`, of which `limit` requests are made; a trace's file or the name of one that comes with Manta, of which the
    first `limit` are taken, none longer than `longest` tokens. Raises ConfigError."""
    if name == ZIPF:
        made = zipf or ZipfPrefixes()
        return zipf_load(made if limit is None else replace(made, num_requests=limit))
    path = find_trace(name)
    return trace_load(path.name.split(".")[0], read_trace(Path(path), limit), longest=longest)


def trace_load(name: str, rows: Sequence[TraceRow], *, longest: int) -> Load:
    """Blocks as the trace names them, else of 64 tokens that no two requests share."""
    block_size = MOONCAKE_BLOCK if any(row.block_ids for row in rows) else PLAIN_BLOCK
    next_block = 1 << 40
    requests = []
    for index, row in enumerate(rows):
        if row.prompt_len < 1 or row.output_len < 1 or row.prompt_len + row.output_len > longest:
            continue
        num_blocks = row.prompt_len // block_size
        named = row.block_ids[:num_blocks]
        own = range(next_block, next_block + num_blocks - len(named))
        next_block += len(own)
        hashes = tuple(shared_hash(number) for number in (*named, *own))
        requests.append(SimRequest(f"{index}", row.arrival_s, row.prompt_len, row.output_len, hashes))
    if not requests:
        raise ConfigError(f"no request of {name} fits into {longest} tokens")
    return Load(name, tuple(requests), block_size, len(rows) - len(requests))


def zipf_load(made: ZipfPrefixes) -> Load:
    """A hot prefix and its lesser ones, with Poisson arrivals."""
    rng, count = random.Random(made.seed), made.num_requests
    cumulated = list(accumulate(1 / rank**made.exponent for rank in range(1, made.num_prefixes + 1)))
    suffixes = lognormal_lengths(count, median=made.suffix_median, sigma=made.sigma, low=16, high=8192, seed=made.seed)
    outputs = lognormal_lengths(
        count, median=made.output_median, sigma=made.sigma, low=4, high=1024, seed=made.seed + 1
    )
    arrivals = poisson_arrivals(count, 1.0, seed=made.seed + 2)
    blocks_a_prefix = made.prefix_len // MOONCAKE_BLOCK
    next_block = 1 << 40
    requests = []
    for index in range(count):
        draw = rng.random() * cumulated[-1]
        prefix = next(rank for rank, bound in enumerate(cumulated) if draw <= bound)
        num_prompt_tokens = made.prefix_len + suffixes[index]
        num_own = num_prompt_tokens // MOONCAKE_BLOCK - blocks_a_prefix
        numbers = [*range(prefix * blocks_a_prefix, (prefix + 1) * blocks_a_prefix)]
        numbers += range(next_block, next_block + num_own)
        next_block += num_own
        hashes = tuple(shared_hash(number) for number in numbers)
        requests.append(SimRequest(f"{index}", arrivals[index], num_prompt_tokens, outputs[index], hashes))
    return Load(ZIPF, tuple(requests), MOONCAKE_BLOCK)


def share_of_first(made: ZipfPrefixes) -> float:
    """Share of the requests that have the hot prefix."""
    return 1.0 / math.fsum(1 / rank**made.exponent for rank in range(1, made.num_prefixes + 1))

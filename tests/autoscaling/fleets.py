"""Small simulated fleets of literal sizes: a step takes 1 ms and a tenth of a millisecond for each prompt token."""

from __future__ import annotations

from manta.autoscaling.simulator.events import EventQueue
from manta.autoscaling.simulator.fleet import Fleet, Route
from manta.autoscaling.simulator.replica import Frame, ReplicaSpec
from manta.autoscaling.simulator.workload import SimRequest, own_hash, shared_hash
from manta.engine.step_time import StepShape

BLOCK = 16


def step_s(shape: StepShape) -> float:
    return 1e-3 + 1e-4 * shape.num_prefill_tokens + 1e-6 * shape.num_decode_context_tokens


def spec(**changes: object) -> ReplicaSpec:
    sizes: dict = {"num_blocks": 64, "block_size": BLOCK, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    return ReplicaSpec(step_s, **{**sizes, **changes})


def request(
    name: str, num_prompt_tokens: int, num_output_tokens: int, *, at_s: float = 0.0, prefix: int | None = None
) -> SimRequest:
    """Requests of the same `prefix` share all full blocks of the shorter one."""
    num_blocks = num_prompt_tokens // BLOCK
    if prefix is None:
        hashes = tuple(own_hash(hash(name) % 2**60 + index) for index in range(num_blocks))
    else:
        hashes = tuple(shared_hash(prefix * 1000 + index) for index in range(num_blocks))
    return SimRequest(name, at_s, num_prompt_tokens, num_output_tokens, hashes)


class InTurn:
    """Sends to the replicas in turn, and keeps what it learns."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._next = 0
        self.frames: list[tuple[float, Frame]] = []

    def route(self, request: SimRequest, now_s: float) -> Route | None:
        ids = list(self._fleet.replicas)
        self._next += 1
        return Route(ids[(self._next - 1) % len(ids)])

    def learn(self, frame: Frame, now_s: float) -> None:
        self.frames.append((now_s, frame))


def fleet_of(num_replicas: int, *, takes_stretches: bool = True, **changes: object) -> Fleet:
    fleet = Fleet(EventQueue())
    for index in range(num_replicas):
        fleet.add_replica(f"r{index}", spec(**changes), takes_stretches=takes_stretches)
    fleet.routers.append(InTurn(fleet))
    return fleet

"""`manta bench step-plan`: what it takes to get a step's plan from rank 0's scheduler to followers.

The real scheduler plans decode steps; followers are processes that receive and decode over the real link, on this
machine. Nothing is computed: between two steps rank 0 sleeps about as long as a step takes. Followers wait as those
of a gang on GPUs do: with two cores a rank they look for the plan before they sleep, else they sleep at once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console

from manta.engine.errors import ConfigError
from manta.engine.parallel.link import DriverLink, FollowerLink
from manta.engine.parallel.member import GangMember, new_gang_id
from manta.engine.parallel.place import RankPlace
from manta.engine.parallel.plan_codec import Order, decode, encode
from manta.engine.plan import StepPlan, StepResult
from manta.engine.prefix_cache import BlockHasher, PrefixCache
from manta.engine.request import EngineRequest, SamplingParams
from manta.engine.scheduler import Scheduler, SchedulerLimits

from .report import ROOT, Report

BLOCK_SIZE = 64
PROMPT_LEN = 100
WARM_UP_STEPS = 20
TARGET_US = 200.0
"""What the median may take inside a node."""

_COMMAND = "import sys; sys.path.insert(0, sys.argv[1]); from manta.bench.step_plan import follow; follow()"


class FollowerTask(msgspec.Struct):
    """What a follower's process is told over its standard input, as one line."""

    member: GangMember
    addresses: dict[str, str]
    num_steps: int
    looks: bool


class Addresses(dict[str, str]):
    """The store of ranks that know where everything is."""

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key].encode()


@dataclass(frozen=True)
class StepCosts:
    """Microseconds of each step, and the bytes of its message."""

    schedule_us: list[float]
    encode_us: list[float]
    send_us: list[float]
    arrived_us: list[float]
    """From the moment that the plan is made until the last follower has decoded it."""
    message_bytes: list[int]


def measure(
    *, num_ranks: int, num_requests: int, num_steps: int, num_nodes: int = 1, step_s: float = 0.005, looks: bool = True
) -> StepCosts:
    """`num_steps` decode steps of `num_requests` running requests. With more nodes than one, the ranks of the others
    are reached as over a network (loopback addresses stand for nodes). `looks`: followers may look before they sleep.
    """
    hosts = tuple(f"127.0.0.{1 + rank * num_nodes // num_ranks}" for rank in range(num_ranks))
    gang_id = new_gang_id()
    members = [GangMember(RankPlace(rank, num_ranks), hosts[0], 0, hosts, gang_id) for rank in range(num_ranks)]
    addresses = Addresses()
    costs = StepCosts([], [], [], [], [])
    with ExitStack() as stack:
        link = stack.enter_context(closing(DriverLink(members[0], addresses)))
        followers = [
            stack.enter_context(_follower(FollowerTask(member, dict(addresses), num_steps, looks)))
            for member in members[1:]
        ]
        for follower in followers:
            assert follower.stdout is not None
            assert follower.stdout.readline() == "ready\n", "a follower did not start"
        link.wait_for_followers(60, lambda: None)
        made_at_ns = []
        steps = _decode_steps(num_requests, WARM_UP_STEPS + num_steps)
        for index in range(WARM_UP_STEPS + num_steps):
            start_ns = time.monotonic_ns()
            plan = next(steps)
            made_ns = time.monotonic_ns()
            data = encode(plan)
            encoded_ns = time.monotonic_ns()
            link.send(data, lambda: None)
            sent_ns = time.monotonic_ns()
            if index >= WARM_UP_STEPS:
                made_at_ns.append(made_ns)
                costs.schedule_us.append((made_ns - start_ns) / 1e3)
                costs.encode_us.append((encoded_ns - made_ns) / 1e3)
                costs.send_us.append((sent_ns - encoded_ns) / 1e3)
                costs.message_bytes.append(len(data))
            time.sleep(step_s)
        link.send(encode(Order.END), lambda: None)
        arrivals = []
        for follower in followers:
            assert follower.stdout is not None
            arrivals.append(json.loads(follower.stdout.readline()))
        for made_ns, *arrived_ns in zip(made_at_ns, *arrivals, strict=True):
            costs.arrived_us.append((max(arrived_ns) - made_ns) / 1e3)
    return costs


def follow() -> None:
    """The process of a follower: says `ready`, receives, and says when it had decoded each step's plan."""
    task = msgspec.json.decode(sys.stdin.buffer.readline(), type=FollowerTask)
    decoded_at_ns = []
    with closing(FollowerLink(task.member, Addresses(task.addresses))) as link:
        if task.looks:
            link.look_for_plans(task.member)
        print("ready", flush=True)
        while True:
            data = link.receive(60.0)
            assert data is not None, "rank 0 sends nothing"
            message = decode(data)
            decoded_at_ns.append(time.monotonic_ns())
            if message is Order.END:
                break
    print(json.dumps(decoded_at_ns[WARM_UP_STEPS:-1]), flush=True)


def _follower(task: FollowerTask) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", _COMMAND, str(ROOT)], stdin=pipe, stdout=pipe, text=True)
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(task).decode() + "\n")
    process.stdin.flush()
    return process


def _decode_steps(num_requests: int, num_steps: int) -> Iterator[StepPlan]:
    """Plans of the real scheduler, one step ahead as in service; the first are prefills of all requests."""
    length = PROMPT_LEN + num_steps + 2
    limits = SchedulerLimits(
        max_num_seqs=num_requests,
        max_num_batched_tokens=num_requests * PROMPT_LEN,
        max_num_waiting=num_requests,
        max_model_len=length,
        vocab_size=1000,
    )
    num_blocks = num_requests * -(-length // BLOCK_SIZE) + num_requests
    scheduler = Scheduler(limits, PrefixCache(num_blocks), BlockHasher(BLOCK_SIZE, domain="bench"))
    for index in range(num_requests):
        prompt = [index % 1000, index // 1000] * (PROMPT_LEN // 2)
        params = SamplingParams(temperature=0.0, max_tokens=num_steps + 2, seed=0)
        refusal = scheduler.add(EngineRequest(request_id=str(index), prompt_token_ids=prompt, params=params))
        assert refusal is None, refusal
    before = scheduler.schedule()
    while before is not None:
        plan = scheduler.schedule()
        scheduler.update(before, StepResult([7] * sum(row.samples for row in before.rows)))
        before = plan
        if plan is not None and all(row.is_decode for row in plan.rows):
            yield plan


def run(
    *,
    num_ranks: int,
    num_requests: int,
    num_steps: int,
    num_nodes: int = 1,
    looks: bool = True,
    json_path: Path | None = None,
    console: Console | None = None,
) -> Report:
    """Measure and report. Raises ConfigError for sizes that make no gang."""
    if num_ranks < 2 or not 1 <= num_nodes <= num_ranks:
        raise ConfigError("a plan travels between at least 2 ranks, on at most as many nodes", field="--tp")
    costs = measure(
        num_ranks=num_ranks, num_requests=num_requests, num_steps=num_steps, num_nodes=num_nodes, looks=looks
    )
    figures: dict[str, float] = {}
    for name, values in asdict(costs).items():
        figures[f"{name}_p50"] = float(np.median(values))
        figures[f"{name}_p99"] = float(np.percentile(values, 99))
    workload: dict[str, Any] = {
        "ranks": num_ranks,
        "nodes": num_nodes,
        "running_requests": num_requests,
        "steps": num_steps,
        "cores": len(os.sched_getaffinity(0)),
        "followers_may_look": looks,
        "target_us": TARGET_US,
    }
    report = Report("step_plan", {}, workload, figures)
    report.finish(console, json_path)
    return report

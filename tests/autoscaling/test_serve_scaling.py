"""Scaling on Ray Serve, over HTTP, with simulated replicas: a spike, to zero and back, failures; nothing is refused.

One application for all of it, whose cases follow one another. How soon replicas start is the machine's; what is looked
at is what is decided, why, and that every request is answered.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.deploy.test_serve import Served
from tests.replicas.edge.server import eventually

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.timeout(400)]

SETTINGS = (
    "autoscaling.enabled=true", "autoscaling.min_replicas=0", "autoscaling.max_replicas=6", "num_replicas=2",
    "slo.ttft_s=2", "slo.tpot_s=0.1", "quiet_s=6", "to_zero_s=8", "cold_start_s=5", "gpu_budget=6", "max_num_seqs=4",
)  # fmt: skip
OUTPUT_TOKENS = 50
"""A second on the simulated device."""


class Traffic:
    """Requests at a rate, from a thread, until it is stopped; every answer is kept."""

    def __init__(self, url: str, rate: float) -> None:
        self.rate = rate
        self.problems: list[str] = []
        self.num_good = 0
        self._http = httpx.Client(base_url=url, timeout=90, trust_env=False, limits=httpx.Limits(max_connections=None))
        self._stopped = threading.Event()
        self._asking: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopped.set()
        self._thread.join()
        for thread in self._asking:
            thread.join()
        self._http.close()

    def _run(self) -> None:
        while not self._stopped.wait(1 / self.rate):
            thread = threading.Thread(target=self._ask)
            thread.start()
            self._asking.append(thread)

    def _ask(self) -> None:
        body = {"model": "sim-h200", "prompt": "Hello there", "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
        try:
            reply = self._http.post("/v1/completions", json=body)
        except httpx.HTTPError as error:
            self.problems.append(repr(error))
            return
        if reply.status_code == 200 and reply.json()["usage"]["completion_tokens"] == OUTPUT_TOKENS:
            self.num_good += 1
        else:
            self.problems.append(f"{reply.status_code} {reply.text[:200]}")


class Scaled:
    """The running application and what it says of its scaling."""

    def __init__(self, served: Served) -> None:
        self.url = served.url
        self.http = httpx.Client(base_url=served.url, timeout=60, trust_env=False)

    def status(self) -> dict[str, Any]:
        reply = self.http.get("/autoscaling")
        assert reply.status_code == 200, reply.text
        return reply.json()

    def pool(self) -> dict[str, Any]:
        return self.status()["pools"][0]

    def decided(self) -> list[dict[str, Any]]:
        return self.status()["decided"]

    def wait(self, condition: Callable[[dict[str, Any]], bool], *, within_s: float = 60) -> None:
        """Until the pool is as it should be."""
        assert eventually(lambda: condition(self.pool()), within_s=within_s, every_s=0.25), self.status()

    def metrics(self) -> dict[str, float]:
        lines = [line for line in self.http.get("/metrics").text.splitlines() if line and line[0] != "#"]
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}

    def ready(self) -> dict[str, Any]:
        return self.http.get("/ready").json()


@pytest.fixture(scope="module")
def scaled() -> Iterator[Scaled]:
    served = Served(*SETTINGS)
    try:
        served.wait_line("Ctrl-C stops it.")
        one = Scaled(served)
        assert eventually(lambda: one.http.get("/autoscaling").status_code == 200, within_s=20)
        yield one
        one.http.close()
        served.process.send_signal(signal.SIGINT)
        assert served.wait_exit() == 0, served.output
        served.assert_nothing_left()
    finally:
        served.close()


def test_a_spike_brings_replicas_and_its_end_takes_them_without_a_failed_request(scaled: Scaled) -> None:
    assert scaled.pool()["max_replicas"] == 6
    with Traffic(scaled.url, 4) as steady:
        scaled.wait(lambda pool: pool["num_ready"] >= 2)
        with Traffic(scaled.url, 14) as spike:
            scaled.wait(lambda pool: pool["desired"] >= 5)
            scaled.wait(lambda pool: pool["num_ready"] >= 5, within_s=90)
            assert scaled.status()["gpus_used"] <= 6
        scaled.wait(lambda pool: 1 <= pool["desired"] <= 3)
        scaled.wait(lambda pool: pool["num_ready"] + pool["num_draining"] == pool["desired"])
    assert steady.problems == []
    assert spike.problems == []
    assert min(steady.num_good, spike.num_good) > 50


def test_every_change_has_a_reason_a_sentence_and_a_metric(scaled: Scaled) -> None:
    decided = scaled.decided()
    changes = [one for one in decided if one["after"] != one["before"]]
    assert [one["before"] for one in changes[1:]] == [one["after"] for one in changes[:-1]]
    assert max(one["after"] for one in changes) >= 5
    assert all(len(one["sentence"]) > 10 for one in decided)
    down = [one for one in changes if one["after"] < one["before"]]
    assert {one["reason"] for one in down} <= {"quiet", "to_zero"}
    metrics = scaled.metrics()
    counted = sum(value for name, value in metrics.items() if name.startswith("manta_scaling_decisions_total{"))
    assert counted == len(decided)
    assert metrics['manta_scaling_desired_replicas{pool="engine"}'] == scaled.pool()["desired"]


def test_after_silence_there_is_no_replica_and_the_first_request_starts_one(scaled: Scaled) -> None:
    scaled.wait(lambda pool: pool["desired"] == pool["num_ready"] == pool["num_draining"] == 0)
    asleep = scaled.http.get("/ready")
    assert (asleep.status_code, asleep.json()["status"]) == (200, "asleep")
    seen: list[dict[str, Any]] = []
    with Traffic(scaled.url, 1000) as first:
        first._stopped.wait(0.003)
        first._stopped.set()
        assert eventually(lambda: bool(seen.append(scaled.ready()) or seen[-1]["roles"]["mixed"]), within_s=60)
    assert first.problems == []
    assert first.num_good >= 1
    waking = [one for one in seen if one["status"] == "waking"]
    assert waking
    assert {one["starting"][0]["state"] for one in waking} <= {"waiting", "processes", "engine"}
    (replica,) = scaled.ready()["replicas"]
    assert set(replica["startup_s"]) >= {"resolve", "simulated device"}
    assert [one["reason"] for one in scaled.decided()][-2:] == ["to_zero", "from_zero"]


def test_a_lost_replica_is_replaced_and_said(scaled: Scaled) -> None:
    with Traffic(scaled.url, 1) as traffic:
        scaled.wait(lambda pool: pool["num_ready"] >= 1)
        gangs = scaled.http.get("/cluster").json()["gangs"]
        before = scaled.ready()["replicas"][0]["replica_id"]
        [pid] = [rank["pid"] for gang in gangs if gang["replica_id"] == before for rank in gang["ranks"]]
        os.kill(pid, signal.SIGKILL)
        assert eventually(lambda: "replace_failed" in [one["reason"] for one in scaled.decided()], within_s=30)
        others = lambda: [one for one in scaled.ready()["replicas"] if one["ready"] and one["replica_id"] != before]  # noqa: E731
        assert eventually(lambda: bool(others()), within_s=60)
    assert traffic.problems == []


def test_another_autoscaler_goes_on_with_the_decisions_of_the_one_that_died(scaled: Scaled) -> None:
    before = scaled.decided()
    killed = [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and is_autoscaler(int(pid))]
    assert killed
    with Traffic(scaled.url, 1) as traffic:
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        since = scaled.status()["time_s"]
        assert eventually(lambda: scaled.status()["time_s"] > since + 3, within_s=60)
        assert scaled.decided()[: len(before)] == before
    assert traffic.problems == []


def is_autoscaler(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            return "ServeReplica:manta:autoscaler" in file.read()
    except OSError:
        return False


def test_a_steady_load_keeps_a_steady_count(scaled: Scaled) -> None:
    """Public case P23: nothing that ended keeps replicas alive, nothing flaps."""
    with Traffic(scaled.url, 2) as traffic:
        time.sleep(15)
        num_decided = len([one for one in scaled.decided() if one["before"] != one["after"]])
        time.sleep(15)
        assert len([one for one in scaled.decided() if one["before"] != one["after"]]) - num_decided <= 1
    assert traffic.problems == []
    assert eventually(lambda: scaled.metrics()['manta_scaling_replicas{pool="engine",state="ready"}'] == 0, within_s=60)

"""`manta advise` against a double of Prometheus' HTTP API: Manta's names, vLLM's, and each mistake people make."""

from __future__ import annotations

import re
from collections.abc import Callable

import httpx
import pytest

from manta.autoscaling.advice import Sample, advise
from manta.autoscaling.policy_settings import PolicySettings
from manta.autoscaling.signals import Counters, PoolState
from manta.cluster.slo import Slo
from manta.deploy.advise import PrometheusReader, window_of
from manta.engine.errors import ConfigError, Unavailable
from tests.autoscaling.policy_runs import COSTS, SLO

WINDOW = window_of(range_s=600, step_s=5, now_s=10_000.0)


def reader(values: dict[str, Callable[[float], float]]) -> PrometheusReader:
    """Of a Prometheus in which the metrics have these values at a second of the window; others are not there."""

    def answer(request: httpx.Request) -> httpx.Response:
        query = request.url.params["query"]
        names = re.findall(r"(?:manta_|vllm:)\w+", query)
        name = next((one for one in names if one in values), None)
        if request.url.path.endswith("/query"):
            result = [{"metric": {"le": bound}, "value": [0, "1"]} for bound in ("0.5", "1.0", "2.5", "+Inf")]
            return httpx.Response(200, json={"status": "success", "data": {"result": result if name else []}})
        series = [] if name is None else [[at, str(values[name](at - WINDOW.times_s[0]))] for at in WINDOW.times_s]
        data = {"result": [{"metric": {}, "values": series}] if series else []}
        return httpx.Response(200, json={"status": "success", "data": data})

    return PrometheusReader("http://prometheus:9090", client=httpx.Client(transport=httpx.MockTransport(answer)))


VLLM = {
    "vllm:num_requests_running": lambda at: 40.0,
    "vllm:num_requests_waiting": lambda at: 0.0,
    "vllm:request_success_total": lambda at: 20.0 * at,
    "vllm:prompt_tokens_total": lambda at: 20_000.0 * at,
    "vllm:generation_tokens_total": lambda at: 5_000.0 * at,
}


def test_vllms_names_are_read_and_their_rates_come_out() -> None:
    dialect, samples = reader(VLLM).samples(WINDOW, Slo())
    assert dialect == "vllm"
    assert len(samples) == 121
    news = samples[-1].counters.plus(samples[0].counters, sign=-1)
    assert (news.num_arrived, news.num_prompt_tokens, news.num_output_tokens) == (12_000, 12_000_000, 3_000_000)
    assert samples[-1].num_running == 40


def test_mantas_names_are_preferred() -> None:
    both = {**VLLM, "manta_replica_ready": lambda at: 3.0, "manta_requests_running": lambda at: 1.0,
            "manta_request_seconds_count": lambda at: at}  # fmt: skip
    dialect, samples = reader(both).samples(WINDOW, Slo())
    assert (dialect, samples[-1].num_replicas) == ("manta", 3)


def test_a_restart_of_counters_is_no_fall() -> None:
    restarted = {**VLLM, "vllm:request_success_total": lambda at: at if at < 300 else at - 300}
    _, samples = reader(restarted).samples(WINDOW, Slo())
    finished = [sample.counters.num_finished for sample in samples]
    assert finished == sorted(finished)
    assert finished[-1] in (595, 600)


def test_what_is_above_the_nearest_bound_below_the_limit_counts_as_late() -> None:
    timed = {
        **VLLM,
        "vllm:time_to_first_token_seconds_count": lambda at: 20.0 * at,
        "vllm:time_to_first_token_seconds_bucket": lambda at: 15.0 * at,
    }
    _, samples = reader(timed).samples(WINDOW, Slo(ttft_s=2.0))
    assert samples[-1].counters.num_late_ttft == 3000
    assert samples[-1].counters.num_good == 9000


def test_more_replicas_are_advised_where_the_load_needs_them() -> None:
    samples = [
        Sample(time_s=float(second), num_replicas=2, num_running=40,
               counters=Counters(num_arrived=150 * second, num_prompt_tokens=150_000 * second,
                                 num_finished=150 * second, num_output_tokens=37_500 * second,
                                 num_good=150 * second))
        for second in range(0, 300, 5)
    ]  # fmt: skip
    pool = PoolState(name="engine", max_replicas=16, step_costs=COSTS)
    advice = advise(samples, PolicySettings(slo=SLO), pool, gpu_budget=None)
    assert advice.desired in (5, 6)
    assert "150 requests/s of 1000 + 250 tokens" in advice.sentence
    held = advise(samples, PolicySettings(slo=SLO), pool, gpu_budget=3)
    assert held.desired == 3
    assert "budget" in held.sentence


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (httpx.Response(200, text="<html>"), "is no Prometheus"),
        (httpx.Response(401, json={}), "wants a login"),
        (httpx.Response(400, json={"status": "error", "error": "parse error"}), "parse error"),
        (
            httpx.Response(200, json={"status": "success", "data": {"result": []}}),
            "has neither manta_replica_ready nor",
        ),
    ],
)
def test_each_mistake_is_a_sentence(reply: httpx.Response, problem: str) -> None:
    client = httpx.Client(transport=httpx.MockTransport(lambda request: reply))
    with pytest.raises(ConfigError, match=problem):
        PrometheusReader("http://prometheus:9090", client=client).samples(WINDOW, Slo())


def test_a_prometheus_that_is_not_there_is_said() -> None:
    def fail(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("connection refused")

    client = httpx.Client(transport=httpx.MockTransport(fail))
    with pytest.raises(Unavailable, match="does not answer: connection refused"):
        PrometheusReader("http://prometheus:9090", client=client).samples(WINDOW, Slo())


def test_addresses_and_windows_are_checked() -> None:
    with pytest.raises(ConfigError, match="write an address as"):
        PrometheusReader("prometheus:9090")
    with pytest.raises(ConfigError, match="at least ten steps"):
        window_of(range_s=60, step_s=30)

"""Rates and quantiles between two pages of metrics, and the live view that is made of them."""

from __future__ import annotations

import io
from typing import Any

import httpx
import pytest
from rich.console import Console

from manta.deploy.chat import ServerClient, ServerError
from manta.deploy.metrics_text import Numbers, Rise
from manta.deploy.top import watch
from manta.engine.stats import Snapshot
from manta.replicas.edge.client import ReplicaStatus
from manta.replicas.metric_families import render_text
from tests.replicas.test_metrics import busy_metrics, record

HISTOGRAM = """# TYPE wait_seconds histogram
wait_seconds_bucket{{le="0.1"}} {0}
wait_seconds_bucket{{le="0.2"}} {1}
wait_seconds_bucket{{le="+Inf"}} {2}
wait_seconds_sum 1.0
wait_seconds_count {2}
"""


def page(at_s: float, text: str) -> Numbers:
    return Numbers.read(text, at_s)


def test_rates_are_rises_over_seconds_and_survive_a_restart() -> None:
    text = '# TYPE a counter\na_total{{pool="x"}} {0}\na_total{{pool="y"}} {1}\n'
    first, second, anew = page(10, text.format(5, 1)), page(12, text.format(9, 2)), page(14, text.format(1, 0))
    assert Rise(first, second).rate("a_total") == 2.5
    assert Rise(first, second).rate("a_total", pool="y") == 0.5
    assert Rise(second, anew).count("a_total") == 1
    assert Rise(first, second).rate("b_total") == 0


def test_quantiles_are_of_what_came_between_the_pages() -> None:
    before, after = page(0, HISTOGRAM.format(100, 100, 100)), page(1, HISTOGRAM.format(100, 110, 112))
    rise = Rise(before, after)
    assert rise.quantile(0.5, "wait_seconds") == pytest.approx(0.16)
    assert rise.quantile(0.99, "wait_seconds") == 0.2, "no more is known of what is above the last bound"
    assert Rise(after, after).quantile(0.5, "wait_seconds") is None
    assert rise.quantile(0.5, "other_seconds") is None


def test_the_view_shows_load_latencies_pools_replicas_and_why_it_scaled() -> None:
    metrics = busy_metrics()
    pages: list[bytes] = []
    for num_tokens in (1000, 3000):
        status = ReplicaStatus("r7", ready=True, snapshot=Snapshot(num_generated_tokens=num_tokens, num_running=3))
        pages.append(render_text(metrics.families([status])))
        metrics.request_finished(record())
    answers: dict[str, Any] = {
        "/ready": {
            "model": "m",
            "status": "ready",
            "replicas": [{"replica_id": "r7", "ready": True, "num_running": 3}],
        },
        "/autoscaling": {
            "decided": [
                {
                    "time_s": 0.0,
                    "pool": "engine",
                    "before": 2,
                    "after": 3,
                    "reason": "forecast",
                    "sentence": "More come.",
                }
            ]
        },
    }

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/metrics":
            return httpx.Response(200, content=pages.pop(0))
        return httpx.Response(200, json=answers[request.url.path])

    now_s = iter((0.0, 2.0))
    out = io.StringIO()
    watch(
        "http://one",
        Console(file=out, width=160),
        interval_s=2.0,
        once=True,
        client=ServerClient("http://one", transport=httpx.MockTransport(answer)),
        sleep=lambda seconds: None,
        clock=lambda: next(now_s),
    )
    shown = out.getvalue()
    for words in ("http://one", "1,000", "TTFT", "0.500", "engine", "r7", "2 to 3", "forecast", "More come.", "100.0%"):
        assert words in shown, f"{words!r} is not in:\n{shown}"


def test_a_page_that_is_none_is_an_error_in_a_sentence() -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text="<html>a portal {</html>"))
    with pytest.raises(ServerError, match="is no page of metrics"):
        watch("http://one", Console(), interval_s=1, once=True, client=ServerClient("http://one", transport=transport))

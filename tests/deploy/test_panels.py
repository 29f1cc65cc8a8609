"""Every panel's query, alert and annotation on a real Prometheus after real traffic: none malformed, none empty."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from manta.deploy.observability.panels import BOARDS, DECISIONS, Panel, Query
from manta.deploy.observability.queries import metrics_in, with_values
from manta.deploy.observability.rules import ALERTS, prometheus_rules
from manta.deploy.observability_config import ObservabilityConfig
from manta.deploy.prometheus_local import LocalPrometheus
from manta.replicas.metrics_table import METRICS
from tests.deploy.observed_service import ObservedService, observed_service
from tests.replicas.edge.local_server import write_byte_model

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None,
    reason="PROMETHEUS IS NOT INSTALLED: no query was tried (apt-get install prometheus)",
)

PANELS = [(board.uid, panel) for board in BOARDS for panel in board.panels]


@dataclass
class Watched:
    """A service with its Prometheus."""

    service: ObservedService
    prometheus: LocalPrometheus
    http: httpx.Client

    def query(self, expression: str) -> list[dict[str, Any]]:
        """An instant query's series. Fails for a malformed one."""
        reply = self.http.get("/api/v1/query", params={"query": with_values(expression, window="1m")})
        assert reply.status_code == 200, f"{expression}: {reply.text}"
        return reply.json()["data"]["result"]

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < until, f"waited in vain for {what}"
            time.sleep(0.05)

    def count(self, expression: str) -> float:
        return sum(float(one["value"][1]) for one in self.query(expression))


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """After traffic of every kind: long and short, repeated, refused, and while scaling."""
    model = write_byte_model(tmp_path_factory.mktemp("model") / "bytes")
    config = ObservabilityConfig(scrape_interval_s=0.25)
    with observed_service(model, max_queued_requests=8) as service:
        prometheus = LocalPrometheus(config, server_url=service.url, server_port=int(service.url.rsplit(":", 1)[1]))
        try:
            prometheus.start()
            with httpx.Client(base_url=prometheus.url, timeout=10, trust_env=False) as http:
                one = Watched(service, prometheus, http)
                one.wait(lambda: len(one.query('up{job="manta"} == 1')) == 2, "both edges to be found")
                _traffic(one)
                yield one
        finally:
            prometheus.stop()


def _traffic(one: Watched) -> None:
    service = one.service
    for edge in service.edges:
        edge.learn(desired=1, num_decided=0)
    for turn in range(2):
        assert service.complete("refused for its length", max_tokens=-1).status_code == 400
        assert service.complete([[7] * 20] * 4, n=100, max_tokens=4).status_code == 429
        with ThreadPoolExecutor(16) as pool:
            replies = list(pool.map(lambda n: service.complete([n % 4] * 130, max_tokens=24).status_code, range(48)))
        assert set(replies) == {200}
        assert service.complete([turn], max_tokens=8).status_code == 200
        num = 49 * (turn + 1)
        one.wait(lambda num=num: one.count("sum(manta_requests_total)") >= num, f"the count of {num} requests")
        for edge in service.edges:
            edge.learn(desired=2, num_decided=turn + 1)
    finished = sum(core.snapshot().num_finished for core in service.cores.values())
    one.wait(lambda: one.count("sum(max by (pool) (manta_engine_finished_total))") == finished, "the last scrape")


@needs_prometheus
@pytest.mark.parametrize(("board", "panel"), PANELS, ids=[f"{board}: {panel.title}" for board, panel in PANELS])
def test_every_panel_shows_something(watched: Watched, board: str, panel: Panel) -> None:
    for query in panel.queries:
        series = watched.query(query.expression)
        values = [float(one["value"][1]) for one in series]
        assert values, f"{board}, {panel.title}: empty: {query.expression}"
        assert any(math.isfinite(value) for value in values), f"{panel.title}: {values}: {query.expression}"
        _check_legend(query, series)


def _check_legend(query: Query, series: list[dict[str, Any]]) -> None:
    """Each line has a name of its own: the labels that the legend names are there."""
    named = {part.split("}}")[0] for part in query.legend.split("{{")[1:]}
    for one in series:
        assert named == one["metric"].keys(), (query.legend, one["metric"])


@needs_prometheus
def test_annotations_and_alerts_are_queries_that_prometheus_understands(watched: Watched) -> None:
    decisions = watched.query(DECISIONS)
    assert [one["metric"] for one in decisions] == [{"pool": "decode", "reason": "forecast"}]
    for alert in ALERTS:
        watched.query(alert.expression)
    loaded = watched.http.get("/api/v1/rules").json()["data"]["groups"]
    assert [len(group["rules"]) for group in loaded] == [len(prometheus_rules()["groups"][0]["rules"])]


@needs_prometheus
def test_numbers_that_both_edges_show_count_once(watched: Watched) -> None:
    (panel,) = (panel for _, panel in PANELS if panel.title == "Ready")
    ready = watched.query(panel.queries[0].expression)
    assert sorted((one["metric"]["pool"], one["metric"]["replica"], one["value"][1]) for one in ready) == [
        ("decode", "0", "1"),
        ("prefill", "0", "1"),
    ]
    assert watched.count("count(manta_replica_ready)") == 4, "both edges are asked"


def test_every_metric_of_the_table_is_on_a_dashboard() -> None:
    shown = {name for _, panel in PANELS for name in panel.metrics}
    assert shown == {spec.name for spec in METRICS}


def test_queries_name_no_metric_that_is_not_in_the_table() -> None:
    with pytest.raises(KeyError):
        metrics_in("sum(rate(manta_no_such_total[1m]))")
    for alert in ALERTS:
        assert alert.metrics
    for _, panel in PANELS:
        assert panel.metrics, panel.title


def test_panels_have_titles_of_their_own_and_say_what_they_show() -> None:
    for board in BOARDS:
        titles = [panel.title for row in board.rows for panel in row.panels]
        assert len(set(titles)) == len(titles), board.uid
    for _, panel in PANELS:
        assert all(name in panel.description for name in panel.metrics)

"""An edge's own page of metrics on a port of its own."""

from __future__ import annotations

import asyncio
import socket

import httpx
import pytest
from prometheus_client.core import GaugeMetricFamily, Metric

from manta.replicas.exposition import Exposition


def metrics() -> list[Metric]:
    gauge = GaugeMetricFamily("manta_test", "For this test.")
    gauge.add_metric([], 7.0)
    return [gauge]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_its_page_needs_no_name_service(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where none answers, each question takes seconds, in which a new edge would serve nobody."""

    def ask(*_: object) -> None:
        raise AssertionError("a name service was asked")

    for name in ("getfqdn", "gethostbyaddr", "gethostbyname", "gethostbyname_ex", "getnameinfo"):
        monkeypatch.setattr(socket, name, ask)

    async def page() -> httpx.Response:
        exposition = Exposition(metrics, model_name="any", host=host)
        try:
            async with httpx.AsyncClient(trust_env=False) as client:
                return await client.get(f"http://{exposition.target}/metrics")
        finally:
            exposition.close()

    answer = asyncio.run(page())
    assert answer.status_code == 200
    assert "manta_test 7.0" in answer.text

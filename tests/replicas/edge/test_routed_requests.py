"""The API over a router and simulated engines in this process: tenants, deadlines, headers and explanations by HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from manta.cluster.routing.admission import Tenant
from manta.engine.model_source import resolve_model
from manta.engine.startup import start_engine
from manta.engine.tokenizer import Tokenizer
from manta.replicas.edge.app import create_app
from manta.replicas.edge.client import EdgeContext, TenantKey
from tests.replicas.edge.local_server import sim_config, write_byte_model
from tests.replicas.fleet import KEYS, Fleet, become_true, fleet

COMPLETIONS = "/v1/completions"
EXPLAIN = {"X-Manta-Explain": "1"}
PROMPT = [5] * 320


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_model(tmp_path_factory.mktemp("bytes"))


class Edge:
    """An edge's application over a fleet."""

    def __init__(self, one: Fleet, http: httpx.AsyncClient) -> None:
        self.fleet = one
        self.http = http

    async def complete(self, *, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        body = {"model": "bytes", "prompt": PROMPT, "max_tokens": 2, "temperature": 0, **fields}
        return await self.http.post(COMPLETIONS, json=body, headers=headers)


@asynccontextmanager
async def edge(
    folder: Path,
    *,
    device: str = "sim:2ms",
    limits: dict[str, Any] | None = None,
    max_num_seqs: int = 64,
    **context: Any,
) -> AsyncIterator[Edge]:
    config = sim_config(folder, device=device, max_num_batched_tokens=64, max_num_seqs=max_num_seqs)
    async with fleet(**(limits or {})) as one:
        for name in "ab":
            core = start_engine(config, hash_key=KEYS.for_engines.block_hashes)
            one.start(name, core, core.info)
        await one.ready("a", "b")

        async def explain(request_id: str) -> dict[str, Any] | None:
            return one.router.explain(request_id)

        tokenizer = Tokenizer.load(resolve_model(config.model), chat_template=None)
        app = create_app(
            EdgeContext(
                one.router, tokenizer, "bytes", hash_key=KEYS.for_engines.block_hashes, explain=explain, **context
            )
        )
        transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://edge") as http:
            yield Edge(one, http)


async def test_headers_say_where_a_request_went_when_they_are_asked_for(folder: Path) -> None:
    async with edge(folder) as one:
        plain = await one.complete()
        assert not [name for name in plain.headers if name.startswith("x-manta")]
        reply = await one.complete(headers=EXPLAIN)
        assert reply.headers["x-manta-request-id"] == reply.json()["id"]
        assert reply.headers["x-manta-replica"] in ("a", "b")
        assert reply.headers["x-manta-cached-tokens"] == "304"
        assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 304
        assert 0 < float(reply.headers["x-manta-estimated-seconds"]) < 0.1
        assert 0 < float(reply.headers["x-manta-actual-seconds"]) < 5.0


async def test_headers_of_a_stream_know_the_time_of_its_first_token(folder: Path) -> None:
    async with edge(folder) as one:
        reply = await one.complete(headers=EXPLAIN, stream=True, max_tokens=20)
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert reply.headers["x-manta-replica"] in ("a", "b")
        assert reply.headers["x-manta-cached-tokens"] == "0"
        assert float(reply.headers["x-manta-actual-seconds"]) > 0.01


async def test_headers_name_the_replica_of_each_choice(folder: Path) -> None:
    async with edge(folder) as one:
        reply = await one.complete(headers=EXPLAIN, n=3)
        assert len(reply.headers["x-manta-replica"].split(", ")) == 3
        assert len(reply.headers["x-manta-actual-seconds"].split(", ")) == 3


@pytest.mark.parametrize("fields", [{"n": 2}, {"stream": True, "stream_options": {"include_usage": True}}], ids=str)
async def test_cached_tokens_are_in_every_usage(folder: Path, fields: dict[str, Any]) -> None:
    async with edge(folder) as one:
        await one.complete()
        reply = await one.complete(**fields)
        if "n" in fields:
            usage = reply.json()["usage"]
        else:
            usage = httpx.Response(200, content=reply.text.strip().split("\n\n")[-2][6:]).json()["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 304}
        assert usage["prompt_tokens"] == 320


async def test_a_request_is_explained_by_the_id_of_its_response(folder: Path) -> None:
    async with edge(folder) as one:
        response_id = (await one.complete()).json()["id"]
        found = (await one.http.get(f"/explain/{response_id}")).json()
        decision = found["sequences"][0]["decisions"][0]
        assert decision["outcome"] == "finished"
        assert {candidate["replica_id"] for candidate in decision["candidates"]} == {"a", "b"}
        terms = decision["candidates"][0]["terms"]
        assert terms["total_s"] == pytest.approx(
            sum(terms[f"{name}_s"] for name in ("queue", "prefill", "transfer", "decode", "interference", "affinity")),
            abs=1e-5,
        )


async def test_an_unknown_request_is_a_404_that_says_so(folder: Path) -> None:
    async with edge(folder) as one:
        reply = await one.http.get("/explain/cmpl-nobody")
        assert reply.status_code == 404
        assert reply.json()["error"]["code"] == "request_not_found"


@pytest.mark.parametrize("how", ["header", "field", "tenant", "server"])
async def test_a_deadline_that_cannot_be_met_is_a_429_with_the_wait(folder: Path, how: str) -> None:
    hurried = TenantKey("key-1", Tenant(name="hurried", deadline_s=0.001))
    context: dict[str, Any] = {"tenant": {"tenant_keys": (hurried,)}, "server": {"deadline_s": 0.001}}.get(how, {})
    limits = {"tenants": (hurried.tenant,)} if how == "tenant" else {}
    async with edge(folder, device="sim:20ms", limits=limits, **context) as one:
        headers = {"header": {"X-Manta-Deadline": "0.001"}, "tenant": {"Authorization": "Bearer key-1"}}.get(how, {})
        reply = await one.complete(headers={**headers, **EXPLAIN}, **({"deadline_s": 0.001} if how == "field" else {}))
        assert reply.status_code == 429
        error = reply.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "deadline_exceeded")
        assert error["estimated_wait_s"] > 0.05
        assert int(reply.headers["retry-after"]) >= 1
        found = (await one.http.get(f"/explain/{reply.headers['x-manta-request-id']}", headers=headers)).json()
        assert found["sequences"][0]["decisions"][0]["outcome"].startswith("refused: ")


async def test_the_header_s_deadline_wins_over_all_others(folder: Path) -> None:
    async with edge(folder, device="sim:20ms", deadline_s=0.001) as one:
        reply = await one.complete(headers={"X-Manta-Deadline": "30"}, deadline_s=0.001)
        assert reply.status_code == 200


@pytest.mark.parametrize("value", ["soon", "-1", "nan", "inf"])
async def test_a_deadline_that_is_no_number_of_seconds_is_a_400(folder: Path, value: str) -> None:
    async with edge(folder) as one:
        reply = await one.complete(headers={"X-Manta-Deadline": value})
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "X-Manta-Deadline"


async def test_keys_of_tenants_are_accepted_beside_the_others_and_nobody_else(folder: Path) -> None:
    known = TenantKey("key-1", Tenant(name="research"))
    async with edge(folder, limits={"tenants": (known.tenant,)}, api_keys=("plain",), tenant_keys=(known,)) as one:
        for key, status in (("key-1", 200), ("plain", 200), ("wrong", 401)):
            assert (await one.complete(headers={"Authorization": f"Bearer {key}"})).status_code == status
        text = (await one.fleet.router.render_metrics()).decode()
        assert 'manta_tenant_tokens_total{edge="edge",tenant="research"} 322.0' in text
        assert 'manta_tenant_tokens_total{edge="edge",tenant="default"} 322.0' in text


async def test_a_tenant_beyond_his_rate_gets_429_and_others_go_on(folder: Path) -> None:
    limited = TenantKey("key-1", Tenant(name="limited", tokens_per_s=1.0, burst_tokens=350.0))
    other = TenantKey("key-2", Tenant(name="other"))
    async with edge(folder, limits={"tenants": (limited.tenant, other.tenant)}, tenant_keys=(limited, other)) as one:
        first = await one.complete(headers={"Authorization": "Bearer key-1"})
        second = await one.complete(headers={"Authorization": "Bearer key-1"})
        assert (first.status_code, second.status_code) == (200, 429)
        assert second.json()["error"]["code"] == "rate_limit_exceeded"
        assert int(second.headers["retry-after"]) == 60
        assert (await one.complete(headers={"Authorization": "Bearer key-2"})).status_code == 200


async def test_limits_follow_demand_over_the_edges(folder: Path) -> None:
    """Edges tell engines what is asked of them, and the engines tell the others."""
    limited = Tenant(name="limited", tokens_per_s=1000.0)
    async with edge(folder, limits={"tenants": (limited,), "num_edges": 2}) as one:
        client = one.fleet.router._links["a"].channel
        assert client is not None
        told: list[dict[str, dict[str, float]]] = []
        learn = one.fleet.router._demands.learn
        one.fleet.router._demands.learn = lambda demands: (told.append(dict(demands)), learn(demands))[1]  # type: ignore[method-assign]
        from manta.replicas.channel_client import ChannelClient

        other = ChannelClient(await one.fleet.locate("a"), edge_id="other", keys=KEYS)
        await other.connect(5.0)
        other.tell_demand({"limited": 900.0})
        await become_true(lambda: {"other": {"limited": 900.0}} in told)
        bucket = one.fleet.router._gate._admission._buckets["limited"]
        await become_true(lambda: bucket._rate == pytest.approx(50.0))  # no demand here: half of the part kept for all
        other.close()


async def test_a_session_s_requests_go_to_one_replica_where_that_costs_nothing(folder: Path) -> None:
    async with edge(folder) as one:
        went = set()
        for number in range(6):
            reply = await one.complete(headers=EXPLAIN, prompt=[number + 1] * 8, prompt_cache_key="conversation 7")
            went.add(reply.headers["x-manta-replica"])
        assert len(went) == 1


async def test_refusals_of_an_overloaded_edge_leave_nothing_behind(folder: Path) -> None:
    async with edge(folder, limits={"max_queued_requests": 2}, max_num_seqs=2) as one:
        replies = await asyncio.gather(
            *(one.complete(prompt=[number % 99] * 64, max_tokens=100) for number in range(40))
        )
        statuses = [reply.status_code for reply in replies]
        assert set(statuses) == {200, 429}
        assert statuses.count(200) >= 8
        for reply in replies:
            assert reply.status_code == 200 or int(reply.headers["retry-after"]) >= 1
        text = (await one.fleet.router.render_metrics()).decode()
        assert (
            f'manta_admission_refused_total{{edge="edge",reason="full",tenant="default"}} {statuses.count(429)}.0'
            in text
        )
        assert 'manta_edge_requests_in_flight{edge="edge"} 0.0' in text

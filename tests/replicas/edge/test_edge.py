"""The edge's own behaviour: overload, draining, keys, failures, time limits, and what the observer is told."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from manta.cluster.routing.roles import Role
from manta.engine.errors import EngineFailed, Overloaded
from manta.engine.request import EngineRequest, FinishReason, RequestDelta
from manta.replicas.edge.client import EngineClient, ReplicaStatus, RequestTerms, RouteNote, Take
from tests.replicas.edge.cases import assert_envelope
from tests.replicas.edge.local_server import LocalServer, local_server, sim_config, write_byte_model
from tests.replicas.edge.server import CHAT, COMPLETIONS, Server, at_once, eventually

ENDLESS: dict[str, Any] = {"prompt": [5] * 8, "max_tokens": 900, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_model(tmp_path_factory.mktemp("bytes"))


@pytest.fixture
def local(folder: Path) -> Iterator[LocalServer]:
    with local_server(sim_config(folder)) as local:
        yield local


def open_stream(server: Server, **fields: Any) -> Iterator[Any]:
    """A stream whose first event has come."""
    events = server.events(COMPLETIONS, **{**ENDLESS, **fields})
    next(events)
    return events


class FailingClient:
    """Passes a few deltas on, then fails as told."""

    def __init__(self, inner: EngineClient, *, after: int, error: Exception) -> None:
        self._inner = inner
        self._after = after
        self._error = error

    @property
    def info(self) -> Any:
        return self._inner.info

    def replicas(self) -> list[ReplicaStatus]:
        return self._inner.replicas()

    async def render_metrics(self) -> bytes:
        raise RuntimeError("secret of the inside")

    async def run(
        self, request: EngineRequest, take: Take, terms: RequestTerms = RequestTerms(), note: RouteNote | None = None
    ) -> None:
        num_left = self._after

        def take_some(delta: RequestDelta) -> bool:
            nonlocal num_left
            if not num_left:
                raise self._error
            num_left -= 1
            return take(delta)

        await self._inner.run(request, take_some)


class TestOverload:
    @pytest.fixture
    def local(self, folder: Path) -> Iterator[LocalServer]:
        with local_server(sim_config(folder, max_num_seqs=1, max_num_waiting=0, device="sim:5ms")) as local:
            yield local

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_full_queue_says_429_at_once(self, local: LocalServer, stream: bool) -> None:
        running = open_stream(local.server)
        start_s = time.monotonic()
        reply = local.server.post(COMPLETIONS, prompt="x", stream=stream)
        assert time.monotonic() - start_s < 1
        assert_envelope(reply, 429)
        assert int(reply.headers["retry-after"]) >= 1
        assert local.observer.refusals == [("completions", 429, "overloaded")]
        running.close()  # type: ignore[attr-defined]
        local.server.assert_idle(within_s=2)
        assert local.server.post(COMPLETIONS, prompt="x").status_code == 200

    def test_choices_that_find_no_room_refuse_the_request(self, local: LocalServer) -> None:
        assert_envelope(local.server.post(COMPLETIONS, prompt="x", n=3, max_tokens=50, stream=True), 429)
        local.server.assert_idle(within_s=2)


class TestDrain:
    def test_running_streams_finish_and_new_work_is_refused(self, local: LocalServer) -> None:
        server = local.server
        assert server.http.get("/ready").status_code == 200
        streams = [open_stream(server, max_tokens=300) for _ in range(4)]
        assert local.context.num_open_requests == 4
        local.context.drain()
        for path, fields in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": [{"role": "user", "content": "x"}]})):
            reply = server.post(path, **fields)
            assert_envelope(reply, 503)
            assert int(reply.headers["retry-after"]) >= 1
        ready = server.http.get("/ready")
        assert_envelope(ready, 503)
        assert ready.json()["status"] == "draining"
        assert server.http.get("/health").status_code == 200
        for stream in streams:
            *events, done = stream
            assert done == "[DONE]"
            assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert eventually(lambda: local.context.num_open_requests == 0, within_s=2)

    def test_when_time_runs_out_each_open_request_gets_an_error(self, local: LocalServer) -> None:
        streams = [open_stream(local.server, max_tokens=1000) for _ in range(2)]
        waiting: list[httpx.Response] = []
        thread = threading.Thread(
            target=lambda: waiting.append(local.server.post(COMPLETIONS, **{**ENDLESS, "max_tokens": 1000}))
        )
        thread.start()
        assert eventually(lambda: local.context.num_open_requests == 3, within_s=5)
        call_on_loop(local, local.context.abort_open_requests)
        for stream in streams:
            last = list(stream)[-1]
            assert last["error"]["type"] == "service_unavailable_error"
        thread.join()
        assert_envelope(waiting[0], 503)
        local.server.assert_idle(within_s=2)


def call_on_loop(local: LocalServer, call: Any) -> None:
    """Run `call` where it belongs: on the edge's event loop."""
    client: Any = local.context.client
    loop = next(iter(client._streams.values()))[0]
    loop.call_soon_threadsafe(call)


class TestKeys:
    @pytest.fixture
    def local(self, folder: Path) -> Iterator[LocalServer]:
        with local_server(sim_config(folder), api_keys=("first-key", "second-key")) as local:
            yield local

    @pytest.mark.parametrize("given", [None, "Bearer wrong", "Bearer", "Basic first-key", "first-key"])
    def test_wrong_keys_are_refused(self, local: LocalServer, given: str | None) -> None:
        headers = {} if given is None else {"Authorization": given}
        for path in ("/v1/models", "/version", "/nowhere"):
            assert_envelope(local.server.http.get(path, headers=headers), 401)
        reply = local.server.http.post(COMPLETIONS, json={"model": "bytes", "prompt": "x"}, headers=headers)
        assert_envelope(reply, 401)
        assert reply.json()["error"]["code"] == "invalid_api_key"

    def test_each_key_opens_and_probes_need_none(self, local: LocalServer) -> None:
        for key in ("first-key", "second-key"):
            with openai.OpenAI(base_url=f"{local.server.base_url}/v1", api_key=key, max_retries=0) as client:
                assert client.completions.create(model="bytes", prompt="x", max_tokens=1).choices
        for path in ("/health", "/ready", "/metrics"):
            assert local.server.http.get(path).status_code == 200


class TestFailures:
    def test_a_stream_that_breaks_ends_with_an_error_event(self, local: LocalServer) -> None:
        local.context.client = FailingClient(local.context.client, after=3, error=EngineFailed("The engine died."))
        events = list(local.server.events(COMPLETIONS, prompt="x", max_tokens=50, temperature=0, logit_bias={"70": 9}))
        assert events[-1]["error"]["message"] == "The engine died."
        assert events[-1]["error"]["code"] == "engine_failed"
        assert "[DONE]" not in events
        assert_envelope(local.server.post(COMPLETIONS, prompt="x", max_tokens=50), 500)
        with openai.OpenAI(base_url=f"{local.server.base_url}/v1", api_key="-", max_retries=0) as client:
            stream = client.completions.create(model="bytes", prompt="x", max_tokens=50, stream=True)
            with pytest.raises(openai.APIError, match="The engine died"):
                list(stream)
        assert [choice.finish_reason for record in local.observer.records for choice in record.choices] == [
            FinishReason.ERROR
        ] * 3

    @pytest.mark.parametrize("after", [0, 3])
    def test_the_inside_of_an_unexpected_error_stays_inside(
        self, local: LocalServer, after: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        error = ZeroDivisionError("secret of the inside")
        local.context.client = FailingClient(local.context.client, after=after, error=error)
        reply = local.server.post(COMPLETIONS, prompt="x", max_tokens=50)
        assert_envelope(reply, 500)
        assert "secret" not in reply.text
        assert [record.exc_info[1] for record in caplog.records if record.exc_info] == [error]

    def test_an_error_of_another_endpoint_stays_inside_too(
        self, local: LocalServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        local.context.client = FailingClient(local.context.client, after=0, error=EngineFailed())
        reply = local.server.http.get("/metrics")
        assert_envelope(reply, 500)
        assert "secret" not in reply.text
        assert len([record for record in caplog.records if record.exc_info]) == 1

    def test_late_overload_of_one_choice_waits_for_room(self, local: LocalServer) -> None:
        client = LateOverload(local.context.client)
        local.context.client = client
        answer = local.server.complete("x", n=2, max_tokens=30, ignore_eos=True)
        assert client.num_refused == 1
        assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "length"]
        assert answer["usage"]["completion_tokens"] == 60

    def test_a_choice_that_comes_too_late_comes_late_when_others_have_begun(self, local: LocalServer) -> None:
        client = LateOverload(local.context.client, while_in_time=True)
        local.context.client = client
        answer = local.server.complete("x", n=2, max_tokens=30, ignore_eos=True, deadline_s=30)
        assert client.num_refused == 1
        assert answer["usage"]["completion_tokens"] == 60

    def test_bodies_are_bounded(self, local: LocalServer) -> None:
        local.context.max_body_bytes = 1000
        reply = local.server.post(COMPLETIONS, prompt="x" * 2000)
        assert_envelope(reply, 413)
        assert local.server.post(COMPLETIONS, prompt="x" * 500).status_code == 200

    def test_sequences_are_bounded(self, local: LocalServer) -> None:
        local.context.max_sequences = 5
        assert_envelope(local.server.post(COMPLETIONS, prompt=["a", "b", "c"], n=2), 400)

    def test_large_prompts_are_tokenized_beside_the_loop(self, local: LocalServer) -> None:
        reply = local.server.post(COMPLETIONS, prompt="x" * 100_000)
        assert_envelope(reply, 400)
        assert "100000" in reply.json()["error"]["message"]

    @pytest.mark.parametrize("stream", [False, True])
    def test_requests_end_when_their_time_is_over(self, local: LocalServer, stream: bool) -> None:
        local.context.request_timeout_s = 0.2
        if stream:
            last = list(local.server.events(COMPLETIONS, **ENDLESS))[-1]
            assert last["error"]["code"] == "timeout"
        else:
            assert_envelope(local.server.post(COMPLETIONS, **ENDLESS), 504)
        local.server.assert_idle(within_s=1)


class LateOverload(FailingClient):
    """Refuses the second sequence until the first one runs, or, `while_in_time`, for as long as it has a deadline."""

    def __init__(self, inner: EngineClient, *, while_in_time: bool = False) -> None:
        super().__init__(inner, after=10**6, error=EngineFailed())
        self._while_in_time = while_in_time
        self.num_refused = 0
        self._has_begun: Any = None

    async def run(
        self, request: EngineRequest, take: Take, terms: RequestTerms = RequestTerms(), note: RouteNote | None = None
    ) -> None:
        self._has_begun = has_begun = self._has_begun or asyncio.Event()
        refuses = terms.deadline_s is not None if self._while_in_time else not self.num_refused
        if request.request_id.endswith("-1") and refuses:
            await has_begun.wait()
            await asyncio.sleep(0.05)
            self.num_refused += 1
            raise Overloaded("No room.", retry_after_s=0.01)

        def take_and_tell(delta: RequestDelta) -> bool:
            is_wanted = take(delta)
            has_begun.set()
            return is_wanted

        await super().run(request, take_and_tell)


class TestObserver:
    def test_one_record_a_request(self, local: LocalServer) -> None:
        for stream in (False, True):
            fields = {"prompt": [5] * 40, "n": 2, "max_tokens": 20, "ignore_eos": True, "cache_salt": str(stream)}
            if stream:
                list(local.server.events(COMPLETIONS, **fields))
            else:
                local.server.ok(COMPLETIONS, **fields)
        assert eventually(lambda: len(local.observer.records) == 2, within_s=2)
        for record, stream in zip(local.observer.records, (False, True), strict=True):
            assert (record.endpoint, record.stream, record.num_prompt_tokens) == ("completions", stream, 40)
            assert [choice.num_completion_tokens for choice in record.choices] == [20, 20]
            assert [choice.finish_reason for choice in record.choices] == [FinishReason.LENGTH] * 2
            for choice in record.choices:
                assert choice.time_to_first_token_s is not None
                assert choice.time_per_output_token_s is not None
                assert 0 <= record.queue_s < choice.time_to_first_token_s < record.e2e_s
                assert 0.0005 < choice.time_per_output_token_s < 0.1

    def test_a_client_that_leaves_is_recorded_as_cancelled(self, local: LocalServer) -> None:
        open_stream(local.server).close()  # type: ignore[attr-defined]
        assert eventually(lambda: len(local.observer.records) == 1, within_s=2)
        assert local.observer.records[0].choices[0].finish_reason is FinishReason.CANCELLED

    def test_refusals_are_counted_apart(self, local: LocalServer) -> None:
        local.server.post(CHAT, messages=[])
        local.server.post(COMPLETIONS, prompt=[5] * 5000)
        assert local.observer.refusals == [
            ("chat.completions", 400, "invalid_value"),
            ("completions", 400, "context_length_exceeded"),
        ]
        assert not local.observer.records


class TestStatus:
    def test_ready_lists_replicas(self, local: LocalServer) -> None:
        answer = local.server.http.get("/ready").json()
        assert answer["status"] == "ready"
        assert [replica["replica_id"] for replica in answer["replicas"]] == ["local"]
        assert {"ready", "draining", "num_running", "kv_cache_usage"} <= set(answer["replicas"][0])

    def test_loading_is_503(self, local: LocalServer) -> None:
        class Loading(FailingClient):
            @property
            def info(self) -> Any:
                return None

            def replicas(self) -> list[ReplicaStatus]:
                return [ReplicaStatus("a", ready=False)]

        local.context.client = Loading(local.context.client, after=0, error=EngineFailed())
        ready = local.server.http.get("/ready")
        assert_envelope(ready, 503)
        assert ready.json()["status"] == "loading"
        assert int(ready.headers["retry-after"]) >= 1
        reply = local.server.post(COMPLETIONS, prompt="x")
        assert_envelope(reply, 503)
        assert local.server.http.get("/health").status_code == 200
        assert local.server.http.get("/v1/models").json()["data"][0]["max_model_len"] is None

    def test_ready_says_what_a_replica_waits_for(self, local: LocalServer) -> None:
        missing = "needs 8 GPUs in one node, the largest free block is 6 (of 8, node 10.0.0.7)"
        local.context.set_missing(missing)
        answer = local.server.http.get("/ready").json()
        assert (answer["status"], answer["missing"]) == ("ready", missing)

        class Unready(FailingClient):
            def replicas(self) -> list[ReplicaStatus]:
                return [ReplicaStatus("a", ready=False)]

        local.context.client = Unready(local.context.client, after=0, error=RuntimeError())
        ready = local.server.http.get("/ready")
        assert_envelope(ready, 503)
        assert ready.json()["error"]["message"] == f"No replica is ready: one that is to start {missing}."

    def test_the_cluster_is_shown_where_there_is_one(self, local: LocalServer) -> None:
        assert_envelope(local.server.http.get("/cluster"), 404)

        async def status() -> dict[str, Any]:
            return {"nodes": []}

        local.context.cluster_status = status
        assert local.server.http.get("/cluster").json() == {"nodes": []}

    def test_a_role_is_asked_for_by_name_where_roles_can_change(self, local: LocalServer) -> None:
        body = {"replica": "a", "role": "decode"}
        assert_envelope(local.server.http.post("/cluster/role", json=body), 404)
        asked: list[tuple[str, str]] = []
        local.context.set_role = lambda replica_id, role: asked.append((replica_id, role))
        accepted = local.server.http.post("/cluster/role", json=body)
        assert (accepted.status_code, accepted.json()) == (202, body)
        assert asked == [("a", "decode")]
        for wrong in ({"replica": "a", "role": "both"}, {"replica": 3, "role": "decode"}, {"role": "decode"}):
            assert_envelope(local.server.http.post("/cluster/role", json=wrong), 400)
        assert len(asked) == 1

    def test_it_is_ready_when_every_role_has_a_replica(self, local: LocalServer) -> None:
        class Pools(FailingClient):
            roles = (Role.PREFILL, Role.DECODE)

            def replicas(self) -> list[ReplicaStatus]:
                return [ReplicaStatus(role, ready=True, role=role) for role in self.roles]

        client = local.context.client = Pools(local.context.client, after=0, error=RuntimeError())
        local.context.roles = (Role.PREFILL, Role.DECODE)
        ready = local.server.http.get("/ready")
        assert (ready.status_code, ready.json()["roles"]) == (200, {"prefill": 1, "decode": 1})
        client.roles = (Role.DECODE,)
        ready = local.server.http.get("/ready")
        assert_envelope(ready, 503)
        assert ready.json()["roles"] == {"prefill": 0, "decode": 1}
        assert ready.json()["error"]["message"] == "No replica is ready for prefill."

    def test_version(self, local: LocalServer) -> None:
        assert set(local.server.http.get("/version").json()) == {"version"}


class TestSmallCache:
    def test_p12_what_can_never_fit_is_refused_and_blocks_nobody(self, folder: Path) -> None:
        pool = 32 * 16
        with local_server(sim_config(folder, num_blocks=32, max_num_batched_tokens=64)) as local:
            server = local.server
            assert server.max_model_len == pool
            assert server.http.get("/v1/models").json()["data"][0]["max_model_len"] == pool

            def big() -> None:
                reply = server.post(COMPLETIONS, prompt=[9] * (pool + 200), max_tokens=4)
                assert_envelope(reply, 400)
                assert str(pool) in reply.json()["error"]["message"]
                assert str(pool + 200) in reply.json()["error"]["message"]

            def small() -> None:
                server.text("hello", max_tokens=8)

            at_once([big, *[small] * 8])
            edge = server.complete([9] * (pool - 64), max_tokens=64, ignore_eos=True)
            assert edge["choices"][0]["finish_reason"] == "length"
            server.assert_alive()

    def test_p13_a_stream_that_is_preempted_goes_on_without_a_trace(self, folder: Path) -> None:
        prompts = [[3 + i] * (17 + 5 * i) for i in range(6)]
        fields: dict[str, Any] = {
            "max_tokens": 120,
            "ignore_eos": True,
            "seed": 5,
            "stream_options": {"include_usage": True},
        }

        def run(num_blocks: int) -> tuple[list[Any], int]:
            with local_server(sim_config(folder, num_blocks=num_blocks, max_model_len=256)) as local:
                calls = [lambda p=p: list(local.server.events(COMPLETIONS, prompt=p, **fields)) for p in prompts]
                streams = at_once(calls)
                answers = []
                for events in streams:
                    text = "".join(c["text"] for e in events[:-1] for c in e["choices"])
                    usage = events[-2]["usage"]
                    answers.append((text, usage["prompt_tokens"], usage["completion_tokens"]))
                return answers, local.core.snapshot().num_preemptions

        roomy, none = run(1024)
        tight, some = run(30)
        assert none == 0
        assert some > 0
        assert tight == roomy
        assert all(num_tokens == 120 for _, _, num_tokens in tight)

"""Traces: one span for the request, one for each stage, in the caller's trace; sent by OTLP over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from manta.engine.request import FinishReason
from manta.replicas.edge.client import ChoiceRecord, RequestRecord, RouteNote
from manta.replicas.edge.tracing import TraceObserver

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def record(
    *,
    note: RouteNote | None = None,
    traceparent: str | None = None,
    reason: FinishReason = FinishReason.STOP,
    ttft_s: float | None = 0.5,
) -> RequestRecord:
    """It came at 100 s of a clock, was submitted at 100.1 and ended at 102."""
    choice = ChoiceRecord(reason, 16, ttft_s, 0.1 if ttft_s else None, note)
    return RequestRecord(
        "chat.completions", True, 7, 3, queue_s=0.1, e2e_s=2.0, choices=(choice,), arrival_s=100.0,
        response_id="chatcmpl-1", traceparent=traceparent,
    )  # fmt: skip


def spans_of(*records: RequestRecord, share: float = 1.0) -> list[ReadableSpan]:
    exporter = InMemorySpanExporter()
    observer = TraceObserver(
        None, model_name="m", edge_id="e", share=share, exporter=exporter, wall_s=lambda: 1102.0, clock=lambda: 102.0
    )
    for one in records:
        observer.request_finished(one)
    observer.close()
    return list(exporter.get_finished_spans())


def times(spans: list[ReadableSpan]) -> dict[str, tuple[float, float]]:
    found = {}
    for span in spans:
        assert span.start_time is not None
        assert span.end_time is not None
        found[span.name] = (round(span.start_time / 1e9, 3), round(span.end_time / 1e9, 3))
    return found


def test_each_stage_is_one_span_with_its_own_time_and_replica() -> None:
    note = RouteNote(replica_id="d", prefill_replica_id="p", sent_at_s=100.2, handed_over_at_s=100.7)
    spans = spans_of(record(note=note))
    assert times(spans) == {
        "chat.completions": (1100.0, 1102.0),
        "read": (1100.0, 1100.1),
        "wait": (1100.1, 1100.2),
        "prefill": (1100.2, 1100.5),
        "hand_over": (1100.5, 1100.7),
        "decode": (1100.7, 1102.0),
    }
    by_name = {span.name: span for span in spans}
    root = by_name["chat.completions"]
    assert root.attributes is not None
    assert root.attributes["gen_ai.usage.output_tokens"] == 16
    assert root.attributes["gen_ai.response.id"] == "chatcmpl-1"
    assert root.context is not None
    for name in ("read", "wait", "prefill", "hand_over", "decode"):
        parent = by_name[name].parent
        assert parent is not None
        assert parent.span_id == root.context.span_id
    replicas = {name: (by_name[name].attributes or {})["manta.replica"] for name in ("prefill", "decode")}
    assert replicas == {"prefill": "p", "decode": "d"}


def test_spans_belong_to_the_caller_s_trace() -> None:
    root = spans_of(record(note=RouteNote(replica_id="r", sent_at_s=100.2), traceparent=CALLER), share=1e-9)[-1]
    assert root.context is not None
    assert f"{root.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert root.parent is not None
    assert f"{root.parent.span_id:016x}" == "b7ad6b7169203331"


def test_a_share_of_nearly_nothing_traces_nobody_who_does_not_ask() -> None:
    assert spans_of(*[record() for _ in range(20)], share=1e-9) == []


def test_a_request_that_broke_before_its_first_token_ends_in_the_stage_where_it_was() -> None:
    note = RouteNote(replica_id="r", sent_at_s=100.2)
    spans = spans_of(record(note=note, reason=FinishReason.ERROR, ttft_s=None))
    assert times(spans)["prefill"] == (1100.2, 1102.0)
    assert "decode" not in times(spans)
    (root,) = (span for span in spans if span.name == "chat.completions")
    assert root.status.status_code is StatusCode.ERROR
    assert times(spans_of(record(ttft_s=None)))["wait"] == (1100.1, 1102.0), "no replica ever had it"


@pytest.fixture
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """What an OpenTelemetry collector's port is told."""
    received: list[ExportTraceServiceRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", received
    server.shutdown()
    thread.join()
    server.server_close()


def test_spans_are_sent_by_otlp_over_http(collector: tuple[str, list[ExportTraceServiceRequest]]) -> None:
    endpoint, received = collector
    observer = TraceObserver(endpoint, model_name="m", edge_id="e")
    observer.request_finished(record(note=RouteNote(replica_id="r", sent_at_s=100.2)))
    observer.close()
    (group,) = received[0].resource_spans
    assert {"service.name", "service.instance.id"} <= {one.key for one in group.resource.attributes}
    names = [span.name for span in group.scope_spans[0].spans]
    assert names == ["read", "wait", "prefill", "decode", "chat.completions"]

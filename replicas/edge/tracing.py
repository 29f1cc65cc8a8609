"""OpenTelemetry traces of requests: one span for the request, one for each stage of each sequence. Off by default.

Spans are made when a request is over, from the times that it left behind, so that tracing costs nothing while tokens
come. A `traceparent` header of the caller's makes them part of his trace. Requests that are refused at once are counted
by metrics and not traced.

    request     arrival to the last token
      read      arrival to submission: reading, template, tokens
      wait      until a replica takes it: admission and the choice of a replica
      prefill   sent to first token; with pools, at the replica that computes the prompt
      hand_over with pools: first token to the first one of the replica that decodes
      decode    the tokens after that
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from manta.engine.errors import ConfigError
from manta.engine.request import FinishReason

from .client import ChoiceRecord, RequestRecord

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter

SERVICE_NAME = "manta"
FLUSH_INTERVAL_MS = 1000


def check_installed() -> None:
    """Raise ConfigError when the packages are missing that traces need."""
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"observability.traces_endpoint needs a package that is not installed ({error.name}): "
            "pip install 'manta-llm[observability]', or leave the field out",
            field="observability.traces_endpoint",
        ) from None


class TraceObserver:
    """Implements RequestObserver. `close` sends what is left."""

    def __init__(
        self,
        endpoint: str | None,
        *,
        model_name: str,
        edge_id: str,
        share: float = 1.0,
        exporter: SpanExporter | None = None,
        wall_s: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Send spans to an OTLP/HTTP endpoint, or to `exporter`. `share` of the requests that no caller traces.

        Raises ConfigError when OpenTelemetry is not installed.
        """
        check_installed()
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

        resource = Resource.create({"service.name": SERVICE_NAME, "service.instance.id": edge_id})
        self._provider = TracerProvider(resource=resource, sampler=ParentBased(TraceIdRatioBased(share)))
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint=endpoint), schedule_delay_millis=FLUSH_INTERVAL_MS)
        )
        self._tracer = self._provider.get_tracer("manta.replicas.edge")
        self._model_name = model_name
        self._wall_s, self._clock = wall_s, clock

    def request_finished(self, record: RequestRecord) -> None:
        """A request that was taken is over, however it ended."""
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {} if record.traceparent is None else {"traceparent": record.traceparent}
        parent = TraceContextTextMapPropagator().extract(carrier)
        epoch_s = self._wall_s() - self._clock()
        """What turns monotonic seconds into those of the calendar."""
        root = self._tracer.start_span(
            record.endpoint,
            context=parent,
            kind=trace.SpanKind.SERVER,
            start_time=_ns(epoch_s + record.arrival_s),
            attributes={
                "gen_ai.operation.name": "chat" if record.endpoint.startswith("chat") else "text_completion",
                "gen_ai.request.model": self._model_name,
                "gen_ai.response.id": record.response_id,
                "gen_ai.response.finish_reasons": [str(choice.finish_reason) for choice in record.choices],
                "gen_ai.usage.input_tokens": record.num_prompt_tokens,
                "gen_ai.usage.output_tokens": sum(choice.num_completion_tokens for choice in record.choices),
                "manta.cached_tokens": record.num_cached_tokens,
                "manta.stream": record.stream,
            },
        )
        if any(choice.finish_reason is FinishReason.ERROR for choice in record.choices):
            root.set_status(trace.StatusCode.ERROR, "the engine failed")
        context = trace.set_span_in_context(root)
        self._stage("read", context, epoch_s + record.arrival_s, epoch_s + record.arrival_s + record.queue_s)
        for index, choice in enumerate(record.choices):
            self._stages(context, record, choice, index, epoch_s)
        root.end(_ns(epoch_s + record.arrival_s + record.e2e_s))

    def request_refused(self, endpoint: str, status: int, code: str) -> None:
        """Not traced."""

    def close(self) -> None:
        """Send what was not sent yet."""
        self._provider.shutdown()

    def _stages(
        self, context: Context, record: RequestRecord, choice: ChoiceRecord, index: int, epoch_s: float
    ) -> None:
        note, submitted_s = choice.note, record.arrival_s + record.queue_s
        if note is None or note.sent_at_s is None:  # no replica ever had it
            self._stage("wait", context, epoch_s + submitted_s, epoch_s + record.arrival_s + record.e2e_s, choice=index)
            return
        replica = {"manta.replica": note.replica_id or ""}
        prefill = {"manta.replica": note.prefill_replica_id or note.replica_id or ""}
        self._stage("wait", context, epoch_s + submitted_s, epoch_s + note.sent_at_s, choice=index)
        if choice.time_to_first_token_s is None:
            end_s = record.arrival_s + record.e2e_s
            self._stage("prefill", context, epoch_s + note.sent_at_s, epoch_s + end_s, choice=index, **prefill)
            return
        first_s = record.arrival_s + choice.time_to_first_token_s
        gaps = choice.num_completion_tokens - 1
        last_s = first_s + (choice.time_per_output_token_s or 0.0) * gaps
        self._stage("prefill", context, epoch_s + note.sent_at_s, epoch_s + first_s, choice=index, **prefill)
        begin_s = first_s
        if note.handed_over_at_s is not None:
            begin_s = note.handed_over_at_s
            self._stage("hand_over", context, epoch_s + first_s, epoch_s + begin_s, choice=index, **replica)
        if gaps > 0:
            self._stage("decode", context, epoch_s + begin_s, epoch_s + max(last_s, begin_s), choice=index, **replica)

    def _stage(
        self, name: str, context: Context, begin_s: float, end_s: float, *, choice: int = 0, **attributes: str
    ) -> None:
        """One span, over seconds of the calendar."""
        span = self._tracer.start_span(
            name, context=context, start_time=_ns(begin_s), attributes={"manta.choice": choice, **attributes}
        )
        span.end(_ns(max(end_s, begin_s)))


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)

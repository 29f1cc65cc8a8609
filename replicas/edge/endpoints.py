"""The life of a generation request over ASGI: read, run, answer, and end when the client leaves. Knows no field.

One task a request: a watcher beside it turns a disconnect into its cancellation, which cancels the engines' work.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

from manta.engine.errors import ModelNotFound, Unavailable
from manta.engine.request import FinishReason
from manta.engine.stats import EngineInfo

from .body import Receive, parse_object, read_body
from .client import EdgeContext, OpenRequest
from .direct import direct_writer
from .errors import ClientGone, ErrorReply, RequestTimedOut, reply_for
from .generate import run_choices
from .job import Job
from .schema import ChatFields, CompletionFields, read_fields
from .sse import DONE, EventStream, Send, send_error, send_json
from .stream import Piece
from .terms import route_headers, set_terms, wants_route

logger = logging.getLogger(__name__)

THREAD_BODY_BYTES = 64 * 1024
"""Larger requests are parsed, tokenized and hashed beside the event loop, so that streams do not stall."""


class GenerationEndpoint:
    """An ASGI application for one path. `make_job(context, info, fields, arrival_s)` reads the fields."""

    def __init__(
        self,
        context: EdgeContext,
        name: str,
        fields: type[ChatFields] | type[CompletionFields],
        make_job: Callable[[EdgeContext, EngineInfo, Any, float], Job],
    ) -> None:
        self._context = context
        self._name = name
        self._fields = fields
        self._make_job = make_job

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        arrival_s = time.monotonic()
        stream = EventStream(send, self._context.outbox, write_part=direct_writer(receive))
        job: Job | None = None
        error: Exception | None = None
        shows_route = wants_route(scope)
        with self._context.open_request() as request:
            try:
                body = await read_body(receive, max_bytes=self._context.max_body_bytes)
                with _Interruptions(self._context, request, receive):
                    job = read = await self._read(body, scope, arrival_s)
                    if shows_route:
                        stream.headers = lambda: route_headers(read)
                    await self._run(job, stream, send)
            except asyncio.CancelledError:
                if request.reason is None:  # not ours: the server itself ends this task
                    self._observe(job, ClientGone(), None)
                    stream.close()
                    raise
                task = asyncio.current_task()
                assert task is not None
                task.uncancel()
                error = request.reason
            except Exception as raised:
                error = raised
        try:
            await self._conclude(job, error, stream, send)
        finally:
            stream.close()

    async def _read(self, body: bytes, scope: MutableMapping[str, Any], arrival_s: float) -> Job:
        context = self._context
        if context.client.info is None and context.hold is not None and not context.is_draining:
            await context.hold()
        if len(body) > THREAD_BODY_BYTES:
            return await asyncio.to_thread(self._parse, body, scope, arrival_s)
        return self._parse(body, scope, arrival_s)

    def _parse(self, body: bytes, scope: MutableMapping[str, Any], arrival_s: float) -> Job:
        context = self._context
        if context.is_draining:
            raise Unavailable("This server is stopping.", retry_after_s=context.drain_retry_after_s)
        tree = parse_object(body)
        fields = read_fields(self._fields, tree)
        check_model(context, fields.model)
        info = context.client.info
        if info is None:
            raise Unavailable("The model is still loading.", retry_after_s=context.drain_retry_after_s)
        job = self._make_job(context, info, fields, arrival_s)
        set_terms(context, scope, fields, job, arrival_s)
        return job

    async def _run(self, job: Job, stream: EventStream, send: Send) -> None:
        client, form = self._context.client, job.form
        if job.stream:
            await run_choices(client, job.choices, lambda pieces: stream.write(form.events(pieces)))
            await stream.end(form.usage_event(job.usage()) + DONE if job.include_usage else DONE)
            return
        collected: list[list[Piece]] = [[] for _ in job.choices]

        def collect(pieces: Sequence[Piece]) -> None:
            for piece in pieces:
                collected[piece.choice.index].append(piece)

        await run_choices(client, job.choices, collect)
        await send_json(send, form.body(job.choices, collected, job.usage()), headers=stream.headers())

    async def _conclude(self, job: Job | None, error: Exception | None, stream: EventStream, send: Send) -> None:
        """Tell observer, log and client how it ended."""
        reply = None if error is None or isinstance(error, ClientGone) else reply_for(error)
        if reply is not None and reply.status == 500:
            request_id = job.choices[0].request.request_id if job is not None else "-"
            logger.error("%s request %s failed", self._name, request_id, exc_info=error)
        self._observe(job, error, reply)
        if reply is not None:
            await (stream.fail(reply) if stream.has_begun else send_error(send, reply, headers=stream.headers()))

    def _observe(self, job: Job | None, error: Exception | None, reply: ErrorReply | None) -> None:
        has_token = job is not None and any(choice.num_tokens for choice in job.choices)
        if reply is not None and not has_token:
            self._context.observer.request_refused(self._name, reply.status, reply.code or reply.type)
        elif job is not None:
            is_cancelled = isinstance(error, ClientGone | RequestTimedOut | Unavailable)
            self._context.observer.request_finished(
                job.record(FinishReason.CANCELLED if is_cancelled else FinishReason.ERROR)
            )


class _Interruptions:
    """While entered, a disconnect or the end of the allowed time interrupts the request."""

    def __init__(self, context: EdgeContext, request: OpenRequest, receive: Receive) -> None:
        self._request = request
        self._receive = receive
        self._timeout_s = context.request_timeout_s
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        loop = asyncio.get_running_loop()
        self._watcher = loop.create_task(self._watch())
        if self._timeout_s is not None:
            reason = RequestTimedOut(f"The request took longer than {self._timeout_s:g} s.")
            self._timer = loop.call_later(self._timeout_s, self._request.interrupt, reason)

    def __exit__(self, *exception: object) -> None:
        self._watcher.cancel()
        if self._timer is not None:
            self._timer.cancel()

    async def _watch(self) -> None:
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                return self._request.interrupt(ClientGone())


def check_model(context: EdgeContext, model: str | None) -> None:
    """Raise ModelNotFound unless `model` is the one that is served here (None: whatever is)."""
    if model is not None and model != context.model_name:
        raise ModelNotFound(f"The model {model[:200]!r} does not exist here; this server has {context.model_name!r}.")

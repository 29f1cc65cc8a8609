"""Sends a workload to an OpenAI-compatible server, in open or closed loop, and records each stream. Knows no engine.

Every stream is checked: its usage must give the tokens that were asked for and its finish reason must be `length`.
"""

from __future__ import annotations

import asyncio
import json
import resource
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from manta.engine.errors import MantaError

from .http_client import HttpClient, RequestFailed
from .stats import LoadResult, RequestRecord
from .workloads import Item

_PLAIN = (b'"finish_reason":null', b'"finish_reason": null')


class ServerProblem(MantaError):
    """The server does not answer as an OpenAI-compatible one that is ready."""


@dataclass
class Load:
    """What one run of a workload gave."""

    records: list[RequestRecord] = field(default_factory=list)
    client_cpu_s: float = 0.0
    """CPU of this process during the run: it shares the machine with the server, or may be the bottleneck itself."""


@dataclass(frozen=True)
class Target:
    """A served model."""

    model: str
    max_model_len: int | None
    has_event_a_token: bool = False
    """Whether to ask for an event for each token: without text there is none, and random tokens seldom are text."""


async def find_target(client: HttpClient, model: str | None = None) -> Target:
    """The named model of the server, else its first. Raises ServerProblem."""
    try:
        reply = await client.request("GET", "/v1/models", timeout_s=30.0)
        listed = json.loads(reply.body)["data"] if reply.status == 200 else None
    except RequestFailed as error:
        raise ServerProblem(f"{error}: start one with `manta serve`, or name another with --url") from None
    except (ValueError, KeyError, TypeError):
        listed = None
    if not listed:
        raise ServerProblem("the server has no model ready at /v1/models")
    entry = next((entry for entry in listed if model in (None, entry["id"])), None)
    if entry is None:
        raise ServerProblem(f"the server serves {', '.join(entry['id'] for entry in listed)}, not {model}")
    return Target(entry["id"], entry.get("max_model_len"))


async def open_loop(client: HttpClient, target: Target, items: Sequence[Item]) -> Load:
    """Send each item when it is due, whatever the answers do."""
    load = Load()
    begin_s, cpu_s = time.monotonic() + 0.05, _cpu_s()

    async def send(item: Item) -> None:
        due_s = begin_s + item.arrival_s
        await asyncio.sleep(due_s - time.monotonic())
        load.records.append(await send_one(client, target, item, due_s))

    async with asyncio.TaskGroup() as group:
        for item in items:
            group.create_task(send(item))
    load.client_cpu_s = _cpu_s() - cpu_s
    return load


async def closed_loop(client: HttpClient, target: Target, items: Sequence[Item], *, concurrency: int) -> Load:
    """Keep `concurrency` requests in flight until all items were sent."""
    load = Load()
    cpu_s = _cpu_s()
    waiting = iter(items)

    async def work() -> None:
        for item in waiting:
            load.records.append(await send_one(client, target, item, time.monotonic()))

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work())
    load.client_cpu_s = _cpu_s() - cpu_s
    return load


async def send_one(client: HttpClient, target: Target, item: Item, due_s: float) -> RequestRecord:
    """One streamed completion. What goes wrong is recorded, not raised."""
    record = RequestRecord(due_s, len(item.prompt_token_ids), item.max_tokens)
    reader = StreamReader(record)
    body: dict[str, object] = {
        "model": target.model,
        "prompt": item.prompt_token_ids,
        "max_tokens": item.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if target.has_event_a_token:
        body["return_token_ids"] = True
    try:
        reply = await client.request("POST", "/v1/completions", json.dumps(body).encode(), on_body=reader.feed)
    except RequestFailed as error:
        record.error = error.kind
        return record
    record.finished_s = time.monotonic()
    record.error = f"http_{reply.status}" if reply.status != 200 else reader.problem()
    return record


class StreamReader:
    """Server-sent events of one completion: arrival times into the record, then usage and finish reason."""

    def __init__(self, record: RequestRecord) -> None:
        self._record = record
        self._rest = b""
        self._is_done = False
        self._error: str | None = None

    def feed(self, now_s: float, data: bytes) -> None:
        """Take a part of the body that arrived at `now_s`."""
        *events, self._rest = (self._rest + data).split(b"\n\n")
        num_before = self._record.num_events
        for event in events:
            if any(mark in event for mark in _PLAIN):
                # A token whose text is held back (half a character) arrives with the next one, as for any client.
                self._record.num_events += 1
            elif event == b"data: [DONE]":
                self._is_done = True
            elif event.startswith(b"data: "):
                self._record.num_events += self._read(event)
        if self._record.num_events > num_before:
            self._record.arrivals_s.append(now_s)

    def problem(self) -> str | None:
        """What is wrong with the whole stream, as a short kind; None when all was well."""
        record = self._record
        if self._error is not None or not self._is_done:
            return self._error or "truncated"
        if record.num_output_tokens != record.num_expected_tokens:
            return "wrong_token_count"
        return None if record.finish_reason == "length" else "wrong_finish_reason"

    def _read(self, event: bytes) -> bool:
        """An event that is not plain text. Whether it brings output."""
        try:
            tree = json.loads(event[6:])
        except ValueError:
            self._error = "bad_event"
            return False
        if "error" in tree:
            self._error = "error_event"
            return False
        if usage := tree.get("usage"):
            self._record.num_output_tokens = usage["completion_tokens"]
        for choice in tree.get("choices", ()):
            self._record.finish_reason = choice.get("finish_reason") or self._record.finish_reason
        return bool(tree.get("choices"))


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


@dataclass(frozen=True)
class Knee:
    """The largest load that was good and the smallest that was not; None where none was found."""

    good: float | None
    bad: float | None


async def find_knee(
    measure: Callable[[float], Awaitable[LoadResult]],
    is_good: Callable[[LoadResult], bool],
    *,
    start: float,
    tolerance: float = 0.1,
    max_doublings: int = 12,
    max_halvings: int = 6,
) -> Knee:
    """Search the largest load that is good: double from `start` (or halve, when that is bad already), then bisect
    until good and bad are within `tolerance` of each other (relative to the good one)."""
    good: float | None = None
    bad: float | None = None
    load = start
    for _ in range(max_doublings + 1):
        if is_good(await measure(load)):
            good, load = load, load * 2
            if bad is not None:
                break
        else:
            bad, load = load, load / 2
            if good is not None or start / load > 2**max_halvings:
                break
    while good is not None and bad is not None and bad - good > tolerance * good:
        middle = (good + bad) / 2
        if is_good(await measure(middle)):
            good = middle
        else:
            bad = middle
    return Knee(good, bad)

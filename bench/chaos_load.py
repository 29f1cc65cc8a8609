"""Load whose every answer is known beforehand: requests, answers as clients see them, comparison. Knows no fault.

A few dozen different requests (streamed or not, with seeds, log-probabilities, stop strings, penalties and choices) are
first asked undisturbed, then again and again while things break: each answer must be the one from before.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .http_client import HttpClient, RequestFailed

PATH = "/v1/completions"
LOGPROB_TOLERANCE = 2e-3
"""A real model's sums are rounded differently in other batches; its tokens are not."""


@dataclass
class ChoiceSeen:
    """What a client has of one choice; everything is joined over the events of a stream."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprob_tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text_offsets: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: Any = None

    def add(self, choice: dict[str, Any]) -> None:
        """Take the next part, or the whole."""
        self.text += choice["text"]
        self.token_ids += choice.get("token_ids") or []
        if choice["logprobs"] is not None:
            self.logprob_tokens += choice["logprobs"]["tokens"]
            self.logprobs += choice["logprobs"]["token_logprobs"]
            self.text_offsets += choice["logprobs"]["text_offset"]
        if choice["finish_reason"] is not None:
            self.finish_reason, self.stop_reason = choice["finish_reason"], choice.get("stop_reason")

    def difference(self, expected: ChoiceSeen, *, is_whole: bool) -> str | None:
        """What is not as expected; of an answer that was broken off the beginning counts."""
        for name in ("text", "token_ids", "logprob_tokens", "text_offsets"):
            seen, wanted = getattr(self, name), getattr(expected, name)
            if seen != (wanted if is_whole else wanted[: len(seen)]):
                return f"{name} {seen!r} instead of {wanted!r}"
        if any(abs(a - b) > LOGPROB_TOLERANCE for a, b in zip(self.logprobs, expected.logprobs, strict=is_whole)):
            return f"logprobs {self.logprobs} instead of {expected.logprobs}"
        ends = (self.finish_reason, self.stop_reason), (expected.finish_reason, expected.stop_reason)
        if is_whole and ends[0] != ends[1]:
            return f"end {ends[0]} instead of {ends[1]}"
        return None


@dataclass
class Answer:
    """What a client has of one request."""

    choices: dict[int, ChoiceSeen] = field(default_factory=dict)
    num_prompt_tokens: int | None = None
    num_completion_tokens: int | None = None
    error: str | None = None
    """Why it is no whole answer."""
    longest_gap_s: float = 0.0
    """Longest time between two events of the stream."""

    def add(self, body: dict[str, Any]) -> None:
        """Take an event of a stream, or a whole body."""
        if "error" in body:
            self.error = f"error in the stream: {body['error']}"
            return
        for choice in body["choices"]:
            self.choices.setdefault(choice["index"], ChoiceSeen()).add(choice)
        if body.get("usage"):
            self.num_prompt_tokens = body["usage"]["prompt_tokens"]
            self.num_completion_tokens = body["usage"]["completion_tokens"]

    def difference(self, expected: Answer, *, is_whole: bool = True) -> str | None:
        """The first thing that is not as expected, None when all is."""
        if is_whole:
            mine = (len(self.choices), self.num_prompt_tokens, self.num_completion_tokens)
            theirs = (len(expected.choices), expected.num_prompt_tokens, expected.num_completion_tokens)
            if mine != theirs:
                return f"(choices, prompt tokens, completion tokens) {mine} instead of {theirs}"
        for index, choice in self.choices.items():
            if (found := choice.difference(expected.choices[index], is_whole=is_whole)) is not None:
                return f"choice {index}: {found}"
        return None


def make_bodies(
    model: str, *, count: int, seed: int, max_tokens: int, longest_prompt: int = 30
) -> list[dict[str, Any]]:
    """Different requests, reproducibly; every one has an answer that depends on nothing but itself. Prompts repeat a
    phrase of about four tokens up to `longest_prompt` times."""
    rng = random.Random(seed)
    bodies = []
    for index in range(count):
        body: dict[str, Any] = {
            "model": model,
            "prompt": f"Story {index} of {rng.randrange(10**6)}: " + "and so on, " * rng.randrange(longest_prompt),
            "max_tokens": rng.randint(max_tokens // 4, max_tokens), "temperature": rng.choice((0.0, 0.7, 1.0)),
            "seed": rng.randrange(2**31), "ignore_eos": True, "return_token_ids": True, "stream": rng.random() < 0.8,
        }  # fmt: skip
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        if index % 2:
            body |= {"presence_penalty": 0.5, "frequency_penalty": 0.4, "repetition_penalty": 1.1}
        if index % 3 == 0:
            body["logprobs"] = rng.randint(0, 3)
        if index % 4 == 0:
            body["stop"] = ["ing", "?!"]
        if index % 5 == 0:
            body["n"] = 2
        if index % 7 == 0:
            body |= {"top_p": 0.9, "top_k": 50, "min_tokens": 5}
        bodies.append(body)
    return bodies


async def ask(client: HttpClient, body: dict[str, Any], *, leave_after: int | None = None) -> Answer:
    """One request to its end, or until the client leaves after so many events. Failures are in the answer."""
    answer, rest, left = Answer(), b"", asyncio.Event()
    num_events, last_at_s = 0, time.monotonic()
    is_done = False

    def take(now_s: float, part: bytes) -> None:
        nonlocal rest, num_events, last_at_s, is_done
        answer.longest_gap_s = max(answer.longest_gap_s, now_s - last_at_s)
        last_at_s = now_s
        *lines, rest = (rest + part).split(b"\n\n")
        for line in lines:
            data = line.removeprefix(b"data: ")
            if data == b"[DONE]":
                is_done = True
            else:
                answer.add(json.loads(data))
                num_events += 1
        if leave_after is not None and num_events >= leave_after:
            left.set()

    request = asyncio.ensure_future(
        client.request("POST", PATH, json.dumps(body).encode(), on_body=take if body["stream"] else None)
    )
    leaving = asyncio.ensure_future(left.wait())
    try:
        await asyncio.wait((request, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not request.done():
            return answer
        reply = request.result()
        if reply.status != 200:
            answer.error = f"status {reply.status}: {reply.body[:300].decode(errors='replace')}"
        elif not body["stream"]:
            answer.add(json.loads(reply.body))
        elif not is_done:
            answer.error = answer.error or "the stream ended without [DONE]"
    except RequestFailed as error:
        answer.error = f"{error.kind}: {error}"
    finally:
        for task in (request, leaving):
            task.cancel()
        await asyncio.gather(request, leaving, return_exceptions=True)
    return answer


@dataclass
class LoadCounts:
    """What happened to all requests."""

    requests: int = 0
    """Answered or failed; those that the client left are not among them."""
    disconnects: int = 0
    tokens: int = 0
    failed: int = 0
    altered: int = 0
    longest_gap_s: float = 0.0
    problems: list[str] = field(default_factory=list)
    """The first of them, in words."""

    def note(self, answer: Answer, expected: Answer, *, has_left: bool) -> None:
        """Count one request."""
        self.disconnects += has_left
        self.requests += not has_left
        self.tokens += sum(len(choice.token_ids) for choice in answer.choices.values())
        self.longest_gap_s = max(self.longest_gap_s, answer.longest_gap_s)
        if answer.error is not None:
            self.failed += 1
            self._keep(answer.error)
        elif (difference := answer.difference(expected, is_whole=not has_left)) is not None:
            self.altered += 1
            self._keep(difference)

    def _keep(self, problem: str) -> None:
        if len(self.problems) < 20:
            self.problems.append(problem)


class Load:
    """Keeps `num_streams` requests open until it is stopped."""

    def __init__(self, url: str, bodies: Sequence[dict[str, Any]], *, num_streams: int, seed: int) -> None:
        self.counts = LoadCounts()
        self._client = HttpClient(url)
        self._bodies = bodies
        self._expected: list[Answer] = []
        self._num_streams = num_streams
        self._rng = random.Random(seed)
        self._tasks: list[asyncio.Task[None]] = []
        self._is_stopping = False

    async def learn(self) -> list[str]:
        """Ask everything undisturbed, twice: what is expected from now on. Returns what was wrong already then."""
        limit = asyncio.Semaphore(self._num_streams)

        async def one(body: dict[str, Any]) -> Answer:
            async with limit:
                return await ask(self._client, body)

        self._expected = await asyncio.gather(*map(one, self._bodies))
        again = await asyncio.gather(*map(one, reversed(self._bodies)))
        problems = [answer.error for answer in self._expected if answer.error is not None]
        pairs = zip(again, reversed(self._expected), strict=True)
        return problems + [found for a, b in pairs if (found := a.error or a.difference(b)) is not None]

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._keep_asking()) for _ in range(self._num_streams)]

    async def stop(self) -> None:
        """Let what is open end."""
        self._is_stopping = True
        await asyncio.gather(*self._tasks)
        await self._client.close()

    async def _keep_asking(self) -> None:
        while not self._is_stopping:
            index = self._rng.randrange(len(self._bodies))
            body, expected = self._bodies[index], self._expected[index]
            leaves = body["stream"] and self._rng.random() < 0.1
            leave_after = self._rng.randint(1, 30) if leaves else None
            answer = await ask(self._client, body, leave_after=leave_after)
            is_whole = answer.num_completion_tokens is not None
            self.counts.note(answer, expected, has_left=leaves and not is_whole)
            if answer.error is not None:
                await asyncio.sleep(0.2)  # a server that refuses is not asked in a tight loop

"""The edge's watch over replicas that wait for room: asks only when some are missing, tells and logs each news once."""

from __future__ import annotations

import asyncio
import logging

import pytest

from manta.replicas.room_watch import RoomWatch

MISSING = "needs 8 GPUs in one node, the largest free block is 6"


async def told(answers: list[str | Exception | None], *, is_needed: bool = True) -> list[str | None]:
    """What is told while the questions are answered like that, one after the other."""
    news: list[str | None] = []
    done = asyncio.Event()

    def ask() -> str | None:
        answer = answers[min(len(news), len(answers) - 1)]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def tell(missing: str | None) -> None:
        news.append(missing)
        if len(news) == len(answers):
            done.set()

    task = asyncio.create_task(RoomWatch(ask, is_needed=lambda: is_needed, tell=tell, period_s=0).run())
    await asyncio.wait_for(done.wait(), 5)
    task.cancel()
    return news[: len(answers)]


async def test_what_is_missing_is_told_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert await told([MISSING, MISSING, None]) == [MISSING, MISSING, None]
    assert [record.message for record in caplog.records] == [f"an engine replica cannot be placed: it {MISSING}"]


async def test_nothing_is_asked_while_all_replicas_are_there() -> None:
    assert await told([RuntimeError("asked")], is_needed=False) == [None]


async def test_a_head_that_does_not_answer_changes_nothing() -> None:
    assert await told([MISSING, RuntimeError("no head"), None]) == [MISSING, MISSING, None]

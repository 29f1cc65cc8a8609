"""Runs the choices of one request on the engines and hands on their pieces. Knows no HTTP and no JSON.

When `deliver` is first called every choice has been taken by an engine or waits for one; a refusal before that ends
the whole request. A single choice delivers as its tokens arrive, in no task; several share one delivery a step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from manta.engine.errors import EngineFailed, Overloaded
from manta.engine.request import RequestDelta

from .client import EngineClient
from .stream import Choice, Piece

MOST_PAUSE_S = 1.0
"""Before a choice of a request that has begun tries again to find room."""

Deliver = Callable[[Sequence[Piece]], None]
"""Shows pieces to the client. Must not block."""


async def run_choices(client: EngineClient, choices: Sequence[Choice], deliver: Deliver) -> None:
    """Run all choices to their end. Cancelling this task, or an error, cancels all their work.

    Raises what EngineClient.run and `deliver` raise, and EngineFailed when a sequence breaks off.
    """
    if len(choices) == 1:
        await _run_one(client, choices[0], deliver)
    else:
        await _run_many(client, choices, deliver)


async def _run_one(client: EngineClient, choice: Choice, deliver: Deliver) -> None:
    def take(delta: RequestDelta) -> bool:
        piece = choice.add(delta)
        if piece is not None:
            deliver((piece,))
        return choice.finish_reason is None

    await client.run(choice.request, take, choice.terms, choice.note)
    if not choice.is_finished:
        raise EngineFailed("The engine ended the request before it was complete.")


async def _run_many(client: EngineClient, choices: Sequence[Choice], deliver: Deliver) -> None:
    ready: asyncio.Queue[Piece | Exception] = asyncio.Queue()
    has_begun = False

    def put(pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            ready.put_nowait(piece)

    async def run(choice: Choice) -> None:
        while True:
            try:
                return await _run_one(client, choice, put)
            except Overloaded as error:
                # The others run already: this one waits for room, as it would in a queue, and rather comes late than
                # never.
                if not has_begun:
                    return ready.put_nowait(error)
                choice.terms = replace(choice.terms, deadline_s=None)
                await asyncio.sleep(min(error.retry_after_s, MOST_PAUSE_S))
            except Exception as error:
                return ready.put_nowait(error)

    tasks = [asyncio.create_task(run(choice)) for choice in choices]
    try:
        num_open = len(choices)
        while num_open:
            batch = [await ready.get()]
            while not ready.empty():
                batch.append(ready.get_nowait())
            for item in batch:
                if isinstance(item, Exception):
                    raise item
            has_begun = True
            pieces = [item for item in batch if isinstance(item, Piece)]
            num_open -= sum(piece.finish_reason is not None for piece in pieces)
            deliver(pieces)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

"""The edges of one application, asked all at once through Ray Serve. Knows no request: a method's name and arguments.

For questions of operators only: every call costs every edge some milliseconds.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 3.0


class Peers:
    """Made in one of the edges; its own answer is among those of `ask`."""

    def __init__(self, app_name: str, deployment: str) -> None:
        self._app_name, self._deployment = app_name, deployment
        self._handle: DeploymentHandle[Any] | None = None

    async def ask(self, method: str, *arguments: Any) -> list[Any]:
        """What every edge's method returns; of those that fail or do not answer in time nothing."""
        # In a context of its own: the calls belong to no HTTP request, whose internal id Serve would give to them.
        asked = asyncio.get_running_loop().create_task(self._ask(method, arguments), context=contextvars.Context())
        return await asked

    async def _ask(self, method: str, arguments: tuple[Any, ...]) -> list[Any]:
        if self._handle is None:
            self._handle = serve.get_deployment_handle(self._deployment, self._app_name)
        try:
            response = self._handle.broadcast(method, *arguments)
            answers = await response.results_async(timeout_s=ANSWER_TIMEOUT_S, return_exceptions=True)
        except (RayError, RayServeException, TimeoutError) as error:
            logger.warning("the other edges do not answer: %s", type(error).__name__)
            return []
        return [answer for answer in answers if not isinstance(answer, BaseException)]

"""The edge's HTTP application: every path, and one error envelope around them all. Knows no engine and no Ray."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from manta.engine.errors import MantaError

from .chat import chat_job
from .client import EdgeContext
from .completions import completions_job
from .endpoints import GenerationEndpoint
from .errors import ErrorReply, reply_for, reply_for_status
from .middleware import App, DirectPosts, ErrorBoundary, RequireApiKey
from .schema import ChatFields, CompletionFields
from .status import StatusEndpoints
from .tokens import TokenEndpoints

CHAT_PATH, COMPLETIONS_PATH = "/v1/chat/completions", "/v1/completions"


def create_app(context: EdgeContext) -> App:
    """The OpenAI-compatible API over `context.client`, an ASGI application.

    The two paths on which streams run lie beside the framework: its middlewares would be passed once a token.
    """
    status, tokens = StatusEndpoints(context), TokenEndpoints(context)
    chat = GenerationEndpoint(context, "chat.completions", ChatFields, chat_job)
    completions = GenerationEndpoint(context, "completions", CompletionFields, completions_job)
    # redirect_slashes off: a redirect would be the one answer without the envelope.
    app = FastAPI(title="Manta", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.router.routes.extend(
        [
            Route(CHAT_PATH, chat, methods=["POST"]),
            Route(COMPLETIONS_PATH, completions, methods=["POST"]),
            Route("/v1/models", status.models, methods=["GET"]),
            Route("/v1/models/{model:path}", status.model, methods=["GET"]),
            Route("/tokenize", tokens.tokenize, methods=["POST"]),
            Route("/detokenize", tokens.detokenize, methods=["POST"]),
            Route("/health", status.health, methods=["GET"]),
            Route("/ready", status.ready, methods=["GET"]),
            Route("/cluster", status.cluster, methods=["GET"]),
            Route("/autoscaling", status.autoscaling, methods=["GET"]),
            Route("/cluster/role", status.set_role, methods=["POST"]),
            Route("/metrics", status.metrics, methods=["GET"]),
            Route("/metrics/targets", status.metrics_targets, methods=["GET"]),
            Route("/explain/{request_id}", status.explain, methods=["GET"]),
            Route("/version", status.version, methods=["GET"]),
        ]
    )
    app.add_exception_handler(HTTPException, _refused_by_framework)
    app.add_exception_handler(MantaError, _refused)
    app.add_middleware(ErrorBoundary)
    streams = {CHAT_PATH: ErrorBoundary(chat), COMPLETIONS_PATH: ErrorBoundary(completions)}
    routed = DirectPosts(streams, otherwise=app)
    if not context.api_keys and not context.tenant_keys:
        return routed
    return RequireApiKey(routed, context.api_keys, context.tenant_keys)


def _refused(request: Request, error: Exception) -> Response:
    return _response(reply_for(error))


def _refused_by_framework(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    reply = reply_for_status(error.status_code, request.url.path, request.method)
    return _response(reply, dict(error.headers or {}))


def _response(reply: ErrorReply, headers: dict[str, str] | None = None) -> Response:
    headers = {**(headers or {}), **reply.headers}
    return Response(reply.body, status_code=reply.status, headers=headers, media_type="application/json")

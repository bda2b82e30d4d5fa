"""The application: its paths, and what each answers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from serving.http.backend import Backend
from serving.http.bodies import ChatBody, CompletionBody
from serving.http.problems import ApiError, answer_api_error, answer_failure, answer_http_error
from serving.http.service import Endpoint, Limits, Service

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def build_app(backend: Backend, limits: Limits | None = None, *, drain_s: float | None = None) -> Starlette:
    """An ASGI application over ``backend``, which it starts and closes with its own life.

    When it ends it takes nothing new and waits for what is being answered, at most ``drain_s`` seconds. ``app.state.service`` is its service.
    """
    service = Service(backend, limits or Limits())
    created = int(time.time())

    async def models(request: Request) -> Response:
        card = {"id": backend.llm, "object": "model", "created": created, "owned_by": "twinserve", "max_model_len": backend.max_model_len}
        return JSONResponse({"object": "list", "data": [card, *({**card, "id": name, "parent": backend.llm} for name in backend.adapters)]})

    async def health(request: Request) -> Response:
        service.check_open()
        return Response()

    async def metrics(request: Request) -> Response:
        return Response(backend.streams.telemetry.render(backend.stats), media_type=METRICS_TYPE)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await backend.start()
        yield
        await service.drain(drain_s)
        await backend.close()

    app = Starlette(
        routes=[
            Route("/v1/completions", Endpoint(service, CompletionBody), methods=["POST"]),
            Route("/v1/chat/completions", Endpoint(service, ChatBody), methods=["POST"]),
            Route("/v1/models", models),
            Route("/health", health),
            Route("/metrics", metrics),
        ],
        exception_handlers={ApiError: answer_api_error, HTTPException: answer_http_error, Exception: answer_failure},
        lifespan=lifespan,
    )
    app.state.service = service
    return app

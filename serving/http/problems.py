"""Errors as the OpenAI API words them."""

from __future__ import annotations

import json
import math
from http import HTTPStatus
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from serving.refusal import FOR_GOOD

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """Answered with ``status`` and an error object; ``retry_after_s`` tells the client when to come back."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: int | None = None) -> None:
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        super().__init__(message)

    def body(self) -> dict[str, Any]:
        """The error object."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The error as a response."""
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        return JSONResponse(self.body(), self.status, headers)


def refused(limit: str, retry_after_s: float) -> ApiError:
    """What a client is told whose request was turned away at ``limit``, and is to come back after so many seconds; infinite: never."""
    if limit in FOR_GOOD:
        return ApiError(400, f"the request can never be served: it exceeds the limit '{limit}'", code=limit)
    if retry_after_s == math.inf:
        return ApiError(429, f"refused by the limit '{limit}', which this request would not pass later either: make it smaller", code=limit)
    seconds = max(1, math.ceil(retry_after_s))
    return ApiError(429, f"too many requests: refused by the limit '{limit}'; try again later", code=limit, retry_after_s=seconds)


def invalid(error: ValidationError) -> ApiError:
    """What is wrong with a body, by its first mistake."""
    first = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(map(str, first["loc"])) or None
    message = first["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{where}: {message}" if where else f"the body {message}", param=where, code="invalid_value")


async def answer_api_error(request: Request, error: Exception) -> Response:
    """The response to an ``ApiError``."""
    return error.response()


async def answer_http_error(request: Request, error: HTTPException) -> Response:
    """The response to a wrong path or method."""
    response = ApiError(error.status_code, f"{HTTPStatus(error.status_code).phrase}: {request.method} {request.url.path}").response()
    response.headers.update(error.headers or {})
    return response


async def answer_failure(request: Request, error: Exception) -> Response:
    """The response to a fault of ours."""
    return ApiError(500, f"internal error: {type(error).__name__}").response()


async def read_json(request: Request, limit_bytes: int) -> Any:
    """The body's JSON. Raises ApiError when it is longer than ``limit_bytes`` or no JSON."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit_bytes:
            raise ApiError(413, f"the body is longer than {limit_bytes} bytes", code="body_too_large")
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON: {error}", code="invalid_json") from None

"""Errors as OpenAI's API tells them: `{"error": {"message", "type", "param", "code"}}` and an HTTP status.

Knows Baton's errors and what they are called there; must not know requests.

    400 invalid_request_error   the request is wrong; `param` names the field
    404 model_not_found         there is no model of this name; without a code: no such path
    429 overloaded              no room now; Retry-After says when to try again
    500 request_failed          accepted, then lost to a fault on our side
    503 not_ready               no worker that could run it is there
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from baton.errors import (
    BatonError,
    CodecError,
    InvalidRequestError,
    ModelError,
    OverloadedError,
    RequestTooLargeError,
)
from baton.protocol import Failed


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(msgspec.Struct, frozen=True):
    """The body of every answer that is an error."""

    error: ErrorDetail


class ApiError(Exception):
    """Ends a request with this status and error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        type: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.detail = ErrorDetail(message, type or _type_of(status), param, code)
        self.headers = dict(headers or {})

    @property
    def body(self) -> bytes:
        return msgspec.json.encode(ErrorAnswer(self.detail))

    def response(self) -> Response:
        return Response(self.body, self.status, self.headers, "application/json")


def _type_of(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def invalid(message: str, param: str | None = None) -> ApiError:
    """The request is wrong."""
    return ApiError(400, message, param=param)


def too_deep() -> ApiError:
    """What JSON nests deeper than anything here follows it."""
    return invalid("the body is nested too deeply")


def from_decoding(error: msgspec.DecodeError) -> ApiError:
    """A body that is no JSON, or not what was to be sent."""
    if not isinstance(error, msgspec.ValidationError):
        return invalid(f"the body is not valid JSON: {error}")
    problem, _, where = str(error).partition(" - at ")
    path = where.partition("$")[2].strip("`.").replace("[...]", "")
    missing = _MISSING.fullmatch(problem)
    if missing is not None:
        path = f"{path}.{missing[1]}" if path else missing[1]
        problem = "this field is required"
    problem = problem.replace("`", "")
    if not path:
        return invalid(f"the body is not what is expected: {problem}")
    return invalid(f"{path}{' (a key of it)' if where.startswith('`key`') else ''}: {problem}", path)


_MISSING = re.compile(r"Object missing required field `(.*)`")


def from_baton(
    code: str,
    message: str,
    field: str | None,
    names: Mapping[str, str],
    *,
    not_ready: str | None = None,
    retry_after_s: float | None = None,
) -> ApiError:
    """What the router said of a request. `names`: what the client calls Baton's fields.

    `not_ready`: why no worker could run anything now, if so.
    """
    too_long = code == RequestTooLargeError.code and field in _LENGTHS
    if field is not None:
        name = names.get(field, field)
        # Without an underscore it may as well be a word of the sentence.
        message = re.sub(rf"\b{field}\b" if "_" in field else rf"^{field}(?= is )", name, message)
        field = name
    if too_long:
        return ApiError(400, f"{TOO_LONG}: {message}", param=field, code="context_length_exceeded")
    if code in _WRONG:
        return ApiError(400, message, param=field, code="invalid_value" if field else None)
    if code == OverloadedError.code:
        if not_ready is not None:
            return ApiError(503, not_ready, code="not_ready", headers={"retry-after": "1"})
        after = 1 if retry_after_s is None else max(1, math.ceil(retry_after_s))
        return ApiError(429, message, code="overloaded", headers={"retry-after": str(after)})
    if not_ready is not None:  # it was lost because the router stops, or its workers are gone
        return ApiError(503, message, code=code, headers={"retry-after": "1"})
    return ApiError(500, message, code=code)


TOO_LONG = "this model's maximum context length is exceeded"
"""Clients look for some of these words."""
_LENGTHS = (None, "prompt", "text", "messages", "token_ids", "max_tokens")
_WRONG = (RequestTooLargeError.code, InvalidRequestError.code, CodecError.code, ModelError.code)


def from_failed(failed: Failed, names: Mapping[str, str], not_ready: str | None = None) -> ApiError:
    """A request's end."""
    return from_baton(
        failed.code, failed.message, failed.field, names, not_ready=not_ready, retry_after_s=failed.retry_after_s
    )


def from_exception(error: BatonError, names: Mapping[str, str]) -> ApiError:
    """The same, of what was raised before there was a request."""
    return from_baton(error.code, str(error), getattr(error, "field", None), names)


# --- for Starlette -----------------------------------------------------------------------------------


async def on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Unknown paths and methods."""
    assert isinstance(error, HTTPException)
    message = {
        404: f"there is no {request.url.path} here",
        405: f"{request.url.path} does not take {request.method}",
    }.get(error.status_code, error.detail)
    return ApiError(error.status_code, message, headers=error.headers).response()


async def on_too_deep(request: Request, error: Exception) -> Response:
    """Only what clients send nests as deep as they want."""
    return too_deep().response()


async def on_crash(request: Request, error: Exception) -> Response:
    """A bug of ours; the server logs it."""
    return ApiError(500, "the router failed to answer; its log says why", code="internal_error").response()


HANDLERS = {
    ApiError: on_api_error,
    HTTPException: on_http_exception,
    RecursionError: on_too_deep,
    Exception: on_crash,
}
"""For `Starlette(exception_handlers=...)`."""

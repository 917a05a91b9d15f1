"""Who may ask, from where, and how much: API keys, web pages' origins, the size of a body.

ASGI middleware in front of all routes. Must not know what the paths answer, but for the few that need no key.

    Origin of a web page that is not the server's own and not allowed  403, but for what only reads
    API keys are set, and the request has none of them                401 invalid_api_key
    a body beyond the limit                                           413, and the connection ends
"""

from __future__ import annotations

import asyncio
import hmac

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.config import HttpConfig
from router.http.errors import ApiError

OPEN_PATHS = frozenset(("/health", "/ready", "/ping", "/version", "/", "/ui"))
"""They need no key: what balancers and orchestrators ask, and the page, which holds nothing before it has one."""
READING = frozenset(("GET", "HEAD", "OPTIONS"))
LINGER_S = 1.0
"""How long what a refused client is still sending is read away, so that it gets to read its answer."""


def middleware(http: HttpConfig) -> list[Middleware]:
    """In the order in which a request passes."""
    guard = Middleware(Guard, http=http)
    if not http.cors_origins:
        return [guard]
    cors = Middleware(
        CORSMiddleware,
        allow_origins=http.cors_origins,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["retry-after", "x-request-id", "x-baton-request-id"],
        max_age=600,
    )
    return [cors, guard]  # a preflight has no key


class Guard:
    """Lets a request pass, or answers it with an error."""

    def __init__(self, app: ASGIApp, http: HttpConfig):
        self._app = app
        self._keys = [key.reveal().encode() for key in http.api_keys]
        self._origins = frozenset(origin.encode() for origin in http.cors_origins)
        self._limit = http.max_body_mib << 20

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        authorization = host = origin = length = None
        chunked = False
        for name, value in scope["headers"]:
            if name == b"authorization":
                authorization = value
            elif name == b"content-length":
                length = int(value)
            elif name == b"transfer-encoding":
                chunked = True
            elif name == b"origin":
                origin = value
            elif name == b"host":
                host = value
        if self._keys and scope["path"] not in OPEN_PATHS and not self._is_known(authorization):
            await _no_key(authorization is not None).response()(scope, receive, send)
        elif origin is not None and scope["method"] not in READING and not self._may_ask(origin, host):
            await _foreign_page(origin).response()(scope, receive, send)
        elif length is not None and length > self._limit:
            await _answer_and_linger(_too_large(self._limit), receive, send, self._limit)
        else:
            await self._app(scope, self._limited(receive) if chunked else receive, send)

    def _is_known(self, authorization: bytes | None) -> bool:
        """Compares with every key in full, whatever matches: how long it takes tells nothing."""
        scheme, _, key = (authorization or b"").partition(b" ")
        found = [hmac.compare_digest(key.strip(), known) for known in self._keys]
        return scheme.lower() == b"bearer" and any(found)

    def _may_ask(self, origin: bytes, host: bytes | None) -> bool:
        """Whether a page of this origin may do more than read: the server's own may, and those of `cors_origins`.

        A browser sends simple requests of any page to any server, without asking and for the page not to see the
        answer; that must not be enough to drain a worker.
        """
        return origin in self._origins or b"*" in self._origins or origin.partition(b"://")[2] == host

    def _limited(self, receive: Receive) -> Receive:
        """Of a body whose length is not known before."""
        left = self._limit

        async def counted() -> Message:
            nonlocal left
            message = await receive()
            if message["type"] == "http.request":
                left -= len(message.get("body", b""))
                if left < 0:
                    raise _too_large(self._limit)
            return message

        return counted


def _no_key(given: bool) -> ApiError:
    problem = "the API key is not one of this server's" if given else "an API key is needed"
    return ApiError(
        401,
        f"{problem}; send it as `Authorization: Bearer KEY`",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )


def _foreign_page(origin: bytes) -> ApiError:
    shown = origin.decode("latin-1")[:200]
    return ApiError(
        403, f"web pages of {shown} may not ask here; http.cors_origins names those that may", code="origin_not_allowed"
    )


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"the request's body is larger than {limit >> 20} MiB (http.max_body_mib)",
        code="request_too_large",
        headers={"connection": "close"},
    )


async def _answer_and_linger(error: ApiError, receive: Receive, send: Send, limit: int) -> None:
    """Answer, and read away what comes of the body: a client that is cut off while it sends may miss the answer."""
    response = error.response()
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    try:
        async with asyncio.timeout(LINGER_S):
            while limit > 0:
                message = await receive()
                if not message.get("more_body"):
                    break
                limit -= len(message["body"])
    except TimeoutError:
        pass
    await send({"type": "http.response.body", "body": b""})

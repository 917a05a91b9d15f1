"""One HTTP request and its answer: body, headers, a watch on the client, one write at a time.

Knows ASGI; must not know what is asked or answered.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from starlette.types import Receive, Scope, Send

from router.desk import Desk
from router.http.call import Call, Gone
from router.http.errors import ApiError

WRITE_PART = "baton.write_part"
"""In an ASGI scope: `Connection.write_part`."""
JSON = (b"content-type", b"application/json")
EVENT_STREAM = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the chunks
)


class Exchange:
    """`close` at its end. `call` is left as soon as the client is gone."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, desk: Desk):
        self.received_at = time.monotonic()
        self.body_size = 0
        """Bytes, once it has come."""
        self.call = Call(desk)
        self.headers: dict[str, str] = {}
        """Of the answer, beside its type and length."""
        self.streaming = False
        """The head of a streamed answer has been sent."""
        self._request_headers: list[tuple[bytes, bytes]] = scope["headers"]
        if (parent := self.header(b"traceparent")) is not None:
            self.call.trace_headers = {"traceparent": parent, "tracestate": self.header(b"tracestate") or ""}
        self._write_part: Callable[[bytes], bool] | None = scope.get(WRITE_PART)
        self._receive = receive
        self._send = send
        self._watch: asyncio.Task[None] | None = None

    def header(self, name: bytes) -> str | None:
        """A header of the request, by its name in lower case."""
        for key, value in self._request_headers:
            if key == name:
                return value.decode("latin-1")
        return None

    async def body(self) -> bytes:
        """All of the request's body; the client is watched from then on. Raises Gone."""
        chunks: list[bytes] = []
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Gone
            chunks.append(message.get("body", b""))
            if not message.get("more_body", False):
                break
        self._watch = asyncio.get_running_loop().create_task(self._leave_with_client())
        body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        self.body_size = len(body)
        return body

    async def _leave_with_client(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.call.leave()

    async def answer(self, body: bytes, status: int = 200) -> None:
        """The whole answer, in JSON."""
        headers = [JSON, (b"content-length", b"%d" % len(body)), *self._own_headers(self.headers)]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    async def refuse(self, error: ApiError) -> None:
        """The whole answer: an error."""
        self.headers |= error.headers
        await self.answer(error.body, error.status)

    async def stream(self, data: bytes, *, more: bool = True) -> None:
        """The next part of an answer of server-sent events; waits while the client does not read."""
        if not self.streaming:
            self.streaming = True
            headers = [*EVENT_STREAM, *self._own_headers(self.headers)]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    def stream_now(self, data: bytes) -> bool:
        """Like `stream` for a further part, without waiting. False: it must wait, or this server cannot."""
        return self.streaming and self._write_part is not None and self._write_part(data)

    def close(self) -> None:
        """End what the request has open, and the watch. Idempotent."""
        self.call.leave()
        if self._watch is not None:
            self._watch.cancel()

    @staticmethod
    def _own_headers(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
        return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]

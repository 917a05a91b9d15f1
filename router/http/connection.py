"""One connection to the HTTP server, and how long it may take and how much it may say.

uvicorn's protocol with limits that it does not have: time for a request to arrive, size of its head, time in which
the client takes none of its answer. Must not know paths or what is asked.

A connection that has been idle since its last answer is uvicorn's to end (`timeout_keep_alive`).
"""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from baton.config import HttpConfig
from router.http.errors import ApiError
from router.http.exchange import WRITE_PART

log = logging.getLogger("baton.router")

MAX_HEAD = 64 * 1024
"""Bytes of a request's line and headers, beyond those that came with its first packet."""


def connection_class(http: HttpConfig) -> type[HttpToolsProtocol]:
    """For `uvicorn.Config(http=...)`."""
    limits = {"read_timeout_s": http.read_timeout_s, "write_timeout_s": http.write_timeout_s}
    return type("LimitedConnection", (Connection,), limits)


class Connection(HttpToolsProtocol):
    """Its limits are those of its class, as uvicorn makes it."""

    read_timeout_s: float
    write_timeout_s: float

    def __init__(self, *args: Any, **parts: Any):
        super().__init__(*args, **parts)
        self._arrival: asyncio.TimerHandle | None = None
        """Rings when a request has taken too long to arrive."""
        self._takes: asyncio.TimerHandle | None = None
        """Rings when the client has taken none of its answer for too long."""
        self._untaken = 0
        self._in_head = False
        self._head_bytes = 0

    # --- the request ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_request()

    def data_received(self, data: bytes) -> None:
        in_head = self._in_head
        super().data_received(data)
        if in_head and self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD and not self.transport.is_closing():
                self._refuse(431, f"the request's headers are too large: more than {MAX_HEAD >> 10} KiB")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        scope: Any = self.scope
        scope[WRITE_PART] = self.write_part
        self._in_head, self._head_bytes = True, 0
        if self._arrival is None:
            self._expect_request()

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None

    def _expect_request(self) -> None:
        self._arrival = self.loop.call_later(self.read_timeout_s, self._on_late)

    def _on_late(self) -> None:
        self._arrival = None
        if self.transport.is_closing():
            return
        if self._in_head and self.cycle is not None and not self.cycle.response_complete:
            self._expect_request()  # it waits behind another one, which is being answered
        elif self.cycle is None and not self._in_head:
            self.transport.close()  # nothing came at all
        else:
            self._refuse(408, f"the request did not arrive within {self.read_timeout_s:g} s")

    def _refuse(self, status: int, message: str) -> None:
        """Answer, if nothing has been answered yet, and hang up."""
        cycle = self.cycle
        if self._in_head or not (cycle.response_started or cycle.response_complete):
            body = ApiError(status, message).body
            self.transport.write(
                b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s"
                % (status, HTTPStatus(status).phrase.encode(), len(body), body)
            )
        if cycle is not None:
            cycle.disconnected = True
        self.transport.close()

    # --- the answer -----------------------------------------------------------------------------------

    def write_part(self, data: bytes) -> bool:
        """Write the next part of an answer whose head has been sent; False, and nothing is: it must wait its turn.

        ASGI's `send` does the same through a task and all middleware, which have nothing to do with it.
        """
        if self.flow.write_paused or self.transport.is_closing():
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_takes()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._takes is not None:
            self._takes.cancel()
            self._takes = None

    def _watch_takes(self) -> None:
        self._untaken = self.transport.get_write_buffer_size()
        self._takes = self.loop.call_later(self.write_timeout_s, self._on_not_taken)

    def _on_not_taken(self) -> None:
        if self.transport.get_write_buffer_size() < self._untaken:
            self._watch_takes()
            return
        self._takes = None
        log.info("a client took none of its answer for %g s and is disconnected", self.write_timeout_s)
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._arrival, self._takes):
            if timer is not None:
                timer.cancel()
        self._arrival = self._takes = None
        super().connection_lost(exc)

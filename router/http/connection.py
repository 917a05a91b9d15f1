"""One connection to the HTTP server, and how long it may take and how much it may say.

uvicorn's protocol with limits that it does not have: time for a request to arrive, size of its head, requests that
wait behind another one, time in which the client takes none of its answer. Must not know paths or what is asked.

A connection that has been idle since its last answer is uvicorn's to end (`timeout_keep_alive`).
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from baton.config import HttpConfig
from baton.security import worth_saying
from router.http.errors import ApiError
from router.http.exchange import WRITE_PART

log = logging.getLogger("baton.router")

MAX_HEAD = 64 * 1024
"""Bytes of a request's line and headers, beyond those that came with its first packet."""
MAX_PIPELINED = 64
"""Requests of a connection that wait behind the one that is being answered."""


def connection_class(http: HttpConfig) -> type[HttpToolsProtocol]:
    """For `uvicorn.Config(http=...)`."""
    limits = {"read_timeout_s": http.read_timeout_s, "write_timeout_s": http.write_timeout_s}
    return type("LimitedConnection", (Connection,), limits)


class Connection(HttpToolsProtocol):
    """Its limits are those of its class, as uvicorn makes it."""

    read_timeout_s: float
    write_timeout_s: float
    num_malformed = 0
    """Requests that were none, of all connections."""

    def __init__(self, *args: Any, **parts: Any):
        super().__init__(*args, **parts)
        self._arrival: asyncio.TimerHandle | None = None
        """Rings when a request has taken too long to arrive."""
        self._takes: asyncio.TimerHandle | None = None
        """Rings when the client has taken none of its answer for too long."""
        self._untaken = 0
        self._in_head = False
        self._head_began = False
        """With the packet that is being read."""
        self._head_bytes = 0
        self._answering: Any = None
        """The request that is being answered; `cycle` is the last one that came."""
        self._replays_head = False
        self._declined: list[tuple[bytes, bytes]] | None = None
        """Headers of a request that asks for another protocol and has a body, until that has arrived."""

    # --- the request ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_request()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._head_began = False
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self._on_malformed()
            return
        if self._in_head and not self._head_began:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD and not self.transport.is_closing():
                self._refuse(431, f"the request's headers are too large: more than {MAX_HEAD >> 10} KiB")

    def _feed(self, data: bytes) -> None:
        """Raises HttpParserError for what is no HTTP. Who asks for another protocol is answered in this one.

        The parser stops behind such a request's head, as if its body were the other protocol's: what follows is read
        by another parser, which is told of the body first. (Java's HttpClient asks with every first request.)
        """
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
            if self._declined is not None:
                self.parser = httptools.HttpRequestParser(self)
                self._replays_head = True
                try:
                    self.parser.feed_data(_head_of_body(self._declined))
                finally:
                    self._replays_head, self._declined = False, None

    def _on_malformed(self) -> None:
        kind = type(self)
        kind.num_malformed += 1
        if worth_saying(kind.num_malformed):
            log.warning("what a client sent is no HTTP request (%d such until now)", kind.num_malformed)
        if not self.transport.is_closing():
            self._refuse(400, "what was sent is no HTTP request, or not one that this server takes")

    # What the parser tells of a head that is only replayed is known already.

    def on_url(self, url: bytes) -> None:
        if not self._replays_head:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._replays_head:
            super().on_header(name, value)

    def on_message_begin(self) -> None:
        if self._replays_head:
            return
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError("too many requests wait behind another one")
        super().on_message_begin()
        scope: Any = self.scope
        scope[WRITE_PART] = self.write_part
        self._in_head, self._head_began, self._head_bytes = True, True, 0
        if self._arrival is None:
            self._expect_request()

    def on_headers_complete(self) -> None:
        if self._replays_head:
            return
        self._in_head = False
        super().on_headers_complete()
        if self.parser.should_upgrade() and _has_body(self.headers):
            self._declined = self.headers

    def on_message_complete(self) -> None:
        if self._declined is not None:
            return  # its body is still to come
        super().on_message_complete()
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def _waits(self) -> bool:
        """Whether what is arriving comes behind a request that is still being answered."""
        answering = self._answering
        if answering is None or answering.response_complete:
            return False
        return self._in_head or self.cycle is not answering

    def _expect_request(self) -> None:
        self._arrival = self.loop.call_later(self.read_timeout_s, self._on_late)

    def _on_late(self) -> None:
        self._arrival = None
        if self.transport.is_closing():
            return
        if self._waits():
            self._expect_request()
        elif self.cycle is None and not self._in_head:
            self.transport.close()  # nothing came at all
        else:
            self._refuse(408, f"the request did not arrive within {self.read_timeout_s:g} s")

    def _refuse(self, status: int, message: str) -> None:
        """Answer what is arriving, if no other answer is due before, and hang up."""
        answering, last = self._answering, self.cycle
        if answering is None or answering.response_complete:
            is_due = self._in_head or last is None or not last.more_body
        else:
            is_due = not answering.response_started and answering.more_body and not self._waits()
        if is_due:
            body = ApiError(status, message).body
            self.transport.write(
                b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s"
                % (status, HTTPStatus(status).phrase.encode(), len(body), body)
            )
        self._give_up()
        self.transport.close()

    def _give_up(self) -> None:
        """Nobody reads what is being answered, and what waits behind it is not begun."""
        self.pipeline.clear()
        cycle = self._answering
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()

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
        # Closed with a reset: else the kernel keeps what it has taken, and offers it to this client for minutes.
        connection = self.transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._arrival, self._takes):
            if timer is not None:
                timer.cancel()
        self._arrival = self._takes = None
        self._give_up()
        super().connection_lost(exc)


def _has_body(headers: list[tuple[bytes, bytes]]) -> bool:
    return any(n == b"transfer-encoding" or (n == b"content-length" and int(v) > 0) for n, v in headers)


def _head_of_body(headers: list[tuple[bytes, bytes]]) -> bytes:
    """A head that says of the body what these headers say, and nothing else."""
    kept = [b"%b: %b\r\n" % (n, v) for n, v in headers if n in (b"content-length", b"transfer-encoding")]
    return b"POST / HTTP/1.1\r\n" + b"".join(kept) + b"\r\n"

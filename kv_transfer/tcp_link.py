"""Links over TCP, for transports that pull between machines: the messages of `kv_transfer.pull_messages`, with lengths.

    source   connects, in the background ◄──[GREETING]── target   accepts
             ──[Export]──►   ◄──[Finished]──

The greeting makes the source's socket readable when the link is up, so nothing has to poll for that; what was to be
sent until then goes out behind it. A peer that vanished without a word is noticed by TCP's keep-alive.

Knows sockets and messages; must not know what is lent or wanted.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections import deque
from typing import Any

from baton.errors import ConfigError
from baton.protocol import TransferId
from kv_transfer.accepting import Accepting
from kv_transfer.pull_messages import EXPORT, FINISHED, MAX_LINK_MESSAGE_BYTES, MAX_REFS, Export, Finished

GREETING = b"baton-kv 1"
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES = 4, 2, 3
UNACKNOWLEDGED_MS = 10_000
"""A link is cut about this long after its peer's machine went silent."""

_LENGTH = struct.Struct("!I")
_UNDER_WAY = {0, errno.EINPROGRESS, errno.EWOULDBLOCK}


class _Stream:
    """Messages over a TCP connection, each behind its length in four bytes."""

    def __init__(self, sock: socket.socket):
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            ("TCP_KEEPIDLE", KEEPALIVE_IDLE_S),
            ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_S),
            ("TCP_KEEPCNT", KEEPALIVE_PROBES),
            ("TCP_USER_TIMEOUT", UNACKNOWLEDGED_MS),
        ):
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self.sock = sock
        self._arrived = bytearray()
        self._outbox: deque[memoryview] = deque()

    def _queue(self, message: bytes) -> None:
        self._outbox.append(memoryview(_LENGTH.pack(len(message)) + message))

    def _read_message(self) -> bytes | None:
        """A message; None: there is none now; empty: the other end is gone, or sends what is no message."""
        while (message := self._take()) is None:
            try:
                data = self.sock.recv(MAX_LINK_MESSAGE_BYTES)
            except BlockingIOError:
                return None
            except OSError:
                return b""
            if not data:
                return b""
            self._arrived += data
        return message

    def _take(self) -> bytes | None:
        if len(self._arrived) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._arrived)
        if not 0 < length <= MAX_LINK_MESSAGE_BYTES:
            return b""
        end = _LENGTH.size + length
        if len(self._arrived) < end:
            return None
        message = bytes(self._arrived[_LENGTH.size : end])
        del self._arrived[:end]
        return message

    def flush(self) -> None:
        """Send what waits, as far as the other end reads."""
        try:
            while self._outbox:
                sent = self.sock.send(self._outbox[0])
                if sent == len(self._outbox[0]):
                    self._outbox.popleft()
                else:
                    self._outbox[0] = self._outbox[0][sent:]
        except BlockingIOError:
            pass
        except OSError:
            self._outbox.clear()  # it is gone, as reading will tell


class TcpToTarget(_Stream):
    """The source's end of a link, which is being made when this returns. Raises OSError where that cannot start."""

    def __init__(self, name: str):
        """`name`: `HOST:PORT`."""
        self.name = name
        self.is_lost = False
        self.is_up = False
        host, _, port = name.rpartition(":")
        # Addresses, not names: a look-up could block.
        family, _, _, _, where = socket.getaddrinfo(
            host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )[0]
        super().__init__(socket.socket(family, socket.SOCK_STREAM))
        failed = self.sock.connect_ex(where)
        if failed not in _UNDER_WAY:
            self.sock.close()
            raise OSError(failed, os.strerror(failed))

    def export(self, export: Export, fds: tuple[int, ...]) -> None:
        """Goes out when the link is up."""
        self._queue(EXPORT.encode(export))
        self.flush()

    def receive(self) -> bytes | None:
        """A message; None: there is none now; empty: the other end is gone."""
        message = self._read_message()
        if message and not self.is_up:
            if message != GREETING:
                return b""
            self.is_up = True
            self.flush()
            message = self._read_message()
        return message

    def flush(self) -> None:
        if self.is_up:
            super().flush()

    @property
    def is_stuck(self) -> bool:
        return self.is_up and bool(self._outbox)


class TcpToSource(_Stream):
    """The target's end of a link."""

    def __init__(self, sock: socket.socket):
        super().__init__(sock)
        self.peer = ""
        """The source's incarnation; empty until its Export has come."""
        self.pool: Any = None
        self._queue(GREETING)
        self.flush()

    def check_peer(self) -> None:
        """Whoever reaches the port may be linked: see `baton.config.UNENCRYPTED_TRANSPORTS`."""

    def receive(self) -> tuple[bytes | None, list[int]]:
        return self._read_message(), []

    def tell_finished(self, transfer: TransferId, refs: tuple[int, ...]) -> None:
        for start in range(0, len(refs), MAX_REFS):
            self._queue(FINISHED.encode(Finished(transfer, refs[start : start + MAX_REFS])))
        self.flush()

    @property
    def is_stuck(self) -> bool:
        return bool(self._outbox)


class TcpListener(Accepting):
    """Where sources connect to: any free port of `host` if `port` is 0. Raises ConfigError if it cannot listen."""

    def __init__(self, host: str, port: int):
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, _, _, _, where = found[0]
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind(where)
                sock.listen(1024)
            except OSError:
                sock.close()
                raise
        except OSError as e:
            raise ConfigError("transfer.transport", f"cannot listen: {e.strerror}", value=f"{host}:{port}") from e
        sock.setblocking(False)
        super().__init__(sock, "links of KV memory")
        self.port: int = sock.getsockname()[1]

    def accept(self) -> list[TcpToSource]:
        """The links that were made since the last call."""
        links: list[TcpToSource] = []
        for sock in self.accepted():
            try:
                links.append(TcpToSource(sock))
            except OSError:  # it has given up already
                sock.close()
        return links

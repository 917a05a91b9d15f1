"""Links within a machine, for transports that pull: Unix sockets with abstract names.

A name in the abstract space is no file: it goes with the socket, whatever ended the process. A link carries the
messages of `kv_transfer.pull_messages`, the files that come with them, and the news that the other end is gone.

Knows sockets and messages; must not know what is lent or wanted.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections import deque
from pathlib import Path
from typing import Any

from baton.protocol import TransferId
from kv_transfer.accepting import Accepting
from kv_transfer.pull_messages import EXPORT, FINISHED, MAX_LINK_MESSAGE_BYTES, MAX_REFS, Export, Finished

log = logging.getLogger(__name__)


class ToTarget:
    """The source's end of a link. Raises OSError where nobody of this user listens at `name`."""

    is_up = True
    """Whether there has been another end: what was never up is not lost."""
    is_stuck = False

    def __init__(self, name: str):
        self.name = name
        self.is_lost = False
        self.sock = _socket()
        try:
            self.sock.connect(_abstract(name))
            require_same_user(self.sock)
        except OSError:
            self.sock.close()
            raise

    def export(self, export: Export, fds: tuple[int, ...]) -> None:
        """Raises OSError if the other end is gone."""
        socket.send_fds(self.sock, [EXPORT.encode(export)], fds)

    def receive(self) -> bytes | None:
        """A message; None: there is none now; empty: the other end is gone."""
        try:
            return self.sock.recv(MAX_LINK_MESSAGE_BYTES + 1)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def flush(self) -> None:
        """All has been sent."""


class ToSource:
    """The target's end of a link."""

    def __init__(self, sock: socket.socket):
        sock.setblocking(False)
        self.sock = sock
        self.peer = ""
        """The source's incarnation; empty until its Export has come."""
        self.pool: Any = None
        """As the transport reads it; None until its Export has come."""
        self._outbox: deque[bytes] = deque()

    def check_peer(self) -> None:
        """Raises PermissionError if it may not be linked."""
        require_same_user(self.sock)

    def receive(self) -> tuple[bytes | None, list[int]]:
        """As `ToTarget.receive`, with the files that came along, which the caller has to close."""
        try:
            data, fds, _, _ = socket.recv_fds(self.sock, MAX_LINK_MESSAGE_BYTES + 1, 4, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return None, []
        except OSError:
            return b"", []
        return data, fds

    def tell_finished(self, transfer: TransferId, refs: tuple[int, ...]) -> None:
        for start in range(0, len(refs), MAX_REFS):
            self._outbox.append(FINISHED.encode(Finished(transfer, refs[start : start + MAX_REFS])))
        self.flush()

    def flush(self) -> None:
        """Send what waits, as far as the source reads."""
        try:
            while self._outbox:
                self.sock.send(self._outbox[0])
                self._outbox.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self._outbox.clear()  # it is gone, as `receive` will tell

    @property
    def is_stuck(self) -> bool:
        return bool(self._outbox)


class Listener(Accepting):
    """Where sources connect to, under `name`."""

    def __init__(self, name: str):
        sock = _socket()
        sock.bind(_abstract(name))
        sock.listen(1024)
        super().__init__(sock, "links of shared memory")

    def accept(self) -> list[ToSource]:
        """The links that were made since the last call, by processes of this user. Others are hung up on at once."""
        links: list[ToSource] = []
        for sock in self.accepted():
            try:
                require_same_user(sock)
            except OSError as e:
                log.warning("closed a link of shared memory: %s", e)
                sock.close()
            else:
                links.append(ToSource(sock))
        return links


def reach() -> str:
    """Equal for processes that can be linked: same machine, network namespace (the space of names) and user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"machine {boot}, {os.readlink('/proc/self/ns/net')}, user {os.getuid()}"


def require_same_user(sock: socket.socket) -> None:
    """Raises PermissionError: whoever may map a pool reads everybody's prompts."""
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    if user != os.getuid():
        raise PermissionError(f"the peer belongs to user {user}, this worker to {os.getuid()}")


def _socket() -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.setblocking(False)
    return sock


def _abstract(name: str) -> str:
    return f"\0baton-kv-{name[:64]}"

"""A listening socket that leaves its callers waiting while this process has no file descriptors for them.

Such a socket stays readable: whoever waits for it would turn, and log, as fast as it can. So after a failure it is left
out of what is waited for, until a deadline.

Knows sockets; must not know what is said on them, or clocks.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence

from baton.security import worth_saying

log = logging.getLogger(__name__)

MAX_ACCEPTS = 64
"""New connections of one call."""
PAUSE_S = 0.5
"""From a failure until the socket is looked at again, if nothing else has it looked at before."""


class Accepting:
    """`sock` listens and does not block. `what`: that is accepted, in the plural, for the log."""

    def __init__(self, sock: socket.socket, what: str):
        self.sock = sock
        self.num_failures = 0
        self._what = what
        self._is_pausing = False
        self._again_at: float | None = None

    def accepted(self) -> list[socket.socket]:
        """The connections that were made since the last call, `MAX_ACCEPTS` at most."""
        connections: list[socket.socket] = []
        self._is_pausing, self._again_at = False, None
        for _ in range(MAX_ACCEPTS):
            try:
                connections.append(self.sock.accept()[0])
            except BlockingIOError:
                break
            except ConnectionError:  # it has given up already
                continue
            except OSError as e:  # out of file descriptors, as a rule: the callers wait
                self._is_pausing = True
                self.num_failures += 1
                if worth_saying(self.num_failures):
                    log.warning("%s cannot be accepted now (%d times so far): %s", self._what, self.num_failures, e)
                break
        return connections

    def pollables(self) -> Sequence[socket.socket]:
        return () if self._is_pausing else (self.sock,)

    def next_deadline(self, now: float) -> float | None:
        """When `accepted` must be called even if nothing became readable."""
        if not self._is_pausing:
            return None
        if self._again_at is None:
            self._again_at = now + PAUSE_S
        return self._again_at

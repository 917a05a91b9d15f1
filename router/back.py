"""The workers' side of the router's thread: their socket, and which connection is which worker's life.

Turns bytes of workers into events of `router.core` and its messages into bytes. Must not know clients
or requests. Used by the router's thread only.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import Any

from baton.codec import Codec
from baton.errors import CodecError, VersionError
from baton.protocol import Heartbeat, Join, JoinRefused, Submit, ToRouterFromWorker, ToWorker
from baton.security import worth_saying
from router.actions import RouterAction, SendWorker
from router.core import RouterCore
from router.sockets import RouterSocket, Unreachable

log = logging.getLogger("baton.router")


class Back:
    """A worker chooses its routing id; a Join ties that to the life (incarnation) it names."""

    def __init__(self, socket: RouterSocket, core: RouterCore, counters: Counter[str]):
        self.socket = socket
        self._core = core
        self._counters = counters
        self._in: Codec[Any] = Codec(ToRouterFromWorker)
        self._out: Codec[Any] = Codec(ToWorker, often=(Submit,))
        self._routes: dict[str, bytes] = {}
        """Incarnation -> routing id."""
        self._lives: dict[bytes, str] = {}
        """The reverse."""

    def on_frames(self, peer: bytes, frames: list[bytes]) -> list[RouterAction]:
        """One message of a worker; what is malformed or comes before a Join is counted and dropped."""
        now = time.monotonic()
        try:
            if len(frames) != 1:
                raise CodecError(f"{len(frames)} frames, expected 1")
            message = self._in.decode(frames[0])
        except (CodecError, VersionError) as e:
            self._counters["malformed_from_workers"] += 1
            if worth_saying(count := self._counters["malformed_from_workers"]):
                log.warning("malformed message from %s (%d so far): %s", self._lives.get(peer, peer.hex()), count, e)
            if isinstance(e, VersionError):
                self._deliver(peer, JoinRefused(str(e)))
            return []
        if type(message) is Join:
            incarnation = message.worker.incarnation
            self._forget_former()
            if self._routes.get(incarnation, peer) != peer:
                # A worker reconnects under its own routing id: this is somebody else, who may not take its place.
                self._counters["foreign_lives"] += 1
                if worth_saying(self._counters["foreign_lives"]):
                    log.warning("a Join names %s, which another connection speaks for", incarnation)
                self._deliver(peer, JoinRefused(f"incarnation {incarnation} has joined over another connection"))
                return []
            self._tie(peer, incarnation)
            log.info("worker %s joins (%s)", message.worker.worker_id, message.worker.incarnation)
        life = self._lives.get(peer)
        if life is None:
            self._counters["not_joined"] += 1
            if type(message) is Heartbeat:
                # It joined a former router at this address: told that another one answers, it joins again.
                self._deliver(peer, Heartbeat(self._core.incarnation))
            return []
        return self._core.on_worker_message(life, message, now)

    def on_action(self, action: SendWorker, now: float) -> list[RouterAction]:
        """Send it. A worker that cannot be reached is lost; returns what follows from that."""
        peer = self._routes.get(action.incarnation)
        problem = "has no connection" if peer is None else self._deliver(peer, action.message)
        if type(action.message) is JoinRefused:
            self._counters["refused_joins"] += 1
            if worth_saying(self._counters["refused_joins"]):
                log.warning("worker %s refused: %s", action.worker_id, action.message.reason)
            self._untie(action.incarnation)
        elif problem is not None:
            self._counters["unreachable_workers"] += 1
            return self._core.on_worker_lost(action.incarnation, problem, now)
        return []

    def _tie(self, peer: bytes, incarnation: str) -> None:
        former_life = self._lives.get(peer)
        if former_life is not None and former_life != incarnation:
            self._routes.pop(former_life, None)
        self._lives[peer] = incarnation
        self._routes[incarnation] = peer

    def _forget_former(self) -> None:
        """Lives that others have replaced are not sent to any more."""
        for incarnation in [life for life in self._routes if self._core.view.find(life) is None]:
            self._untie(incarnation)

    def _untie(self, incarnation: str) -> None:
        peer = self._routes.pop(incarnation, None)
        if peer is not None:
            self._lives.pop(peer, None)

    def _deliver(self, peer: bytes, message: ToWorker) -> str | None:
        """None, or why it cannot be sent."""
        try:
            self.socket.send(peer, self._out.encode(message))
        except Unreachable as e:
            return str(e)
        return None

"""The native clients' side of the router's thread: their ZeroMQ socket, and who cannot be reached.

Bytes into messages and back. Must not know text, workers or HTTP. Used by the router's thread only.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any

import msgspec

from baton.codec import Codec
from baton.errors import BatonError, CodecError, VersionError
from baton.ledger import LedgerRequest
from baton.protocol import (
    Alive,
    Cancel,
    Delta,
    Deltas,
    Drain,
    Explain,
    Explained,
    Failed,
    Generate,
    Overview,
    OverviewRequest,
    Records,
    RecordsRequest,
    ToClient,
    ToRouterFromClient,
)
from router.actions import RouterAction
from router.core import RouterCore
from router.records import without_rankings
from router.sockets import RouterSocket, Unreachable
from router.translator import Translator

log = logging.getLogger("baton.router")

_SKETCH = msgspec.msgpack.Decoder(tuple[int, Annotated[tuple[msgspec.Raw, ...], msgspec.Meta(max_length=64)]])
"""A message without its fields' contents."""


LOOK_AFTER_S, LOOK_FOR_S = 0.02, 0.05
"""When a connection has ended: between two looks for clients that are gone, and for how long."""


class Front:
    """A client is known by its connection's routing id: bytes."""

    def __init__(
        self,
        socket: RouterSocket,
        core: RouterCore,
        translator: Translator,
        counters: Counter[str],
        alive_s: float,
        overview: Callable[[float], dict[str, Any]],
    ):
        self.socket = socket
        self.alive_at = math.inf
        """When `say_alive` is due."""
        self._core = core
        self._translator = translator
        self._counters = counters
        self._alive_s = alive_s
        self._look_until = -math.inf
        self._overview = overview
        self._in: Codec[Any] = Codec(ToRouterFromClient)
        self._out: Codec[Any] = Codec(ToClient, often=(Delta, Deltas))
        self._gone: dict[bytes, str] = {}
        """Clients found unreachable, whose requests have not been ended yet, and why."""

    def on_frames(self, peer: bytes, frames: list[bytes]) -> list[RouterAction]:
        """One message of a client. Whatever the bytes are, the answer is an event's actions or a Failed."""
        received_at = time.monotonic()
        try:
            if len(frames) != 1:
                raise CodecError(f"{len(frames)} frames, expected 1")
            message = self._in.decode(frames[0])
        except (CodecError, VersionError) as e:
            self._counters["malformed_from_clients"] += 1
            self.send(peer, Failed(label=_label_of(frames), code=e.code, message=str(e)))
            return []
        if type(message) is Generate:
            self.alive_at = min(self.alive_at, received_at + self._alive_s)
            return self._translator.on_generate(peer, message, received_at)
        if type(message) is Cancel:
            return self._core.on_cancel(peer, message.label, received_at, message.sample)
        try:
            if type(message) is Drain:
                actions = self._core.on_drain(message.worker_id, message.undo, received_at)
                self.send(peer, self._core.status(message.label, received_at))
                return actions
            if type(message) is LedgerRequest:
                return self._core.on_ledger(peer, message, received_at)
            if type(message) is OverviewRequest:
                self.send(peer, Overview(message.label, self._overview(received_at)))
                return []
            if type(message) is RecordsRequest:
                found = map(without_rankings, self._core.recent(message.limit))
                self.send(peer, Records(message.label, tuple(msgspec.to_builtins(record) for record in found)))
                return []
            if type(message) is Explain:
                record = self._core.explain(message.request_id, received_at)
                self.send(peer, Explained(message.label, msgspec.to_builtins(record)))
                return []
        except BatonError as e:
            self.send(peer, Failed(message.label, e.code, str(e), getattr(e, "field", None)))
            return []
        self.send(peer, self._core.status(message.label, received_at))
        return []

    def look_soon(self, now: float) -> None:
        """A connection has ended: a client may be gone whose requests go on. ZeroMQ takes a moment to know whose."""
        self.alive_at = min(self.alive_at, now + LOOK_AFTER_S)
        self._look_until = now + LOOK_FOR_S

    def say_alive(self, now: float) -> None:
        """To every client with open requests. It is also how one that left while it waited is found."""
        clients = [client for client in self._core.clients() if type(client) is bytes]
        for client in clients:
            self.send(client, Alive())
        pause_s = LOOK_AFTER_S if now < self._look_until else self._alive_s
        self.alive_at = now + pause_s if clients else math.inf

    def gone(self, now: float) -> Iterator[list[RouterAction]]:
        """End what unreachable clients have open; do each list of actions before asking for the next.

        A client stays known as gone until its requests have ended, so that nothing is sent to it in between.
        """
        while self._gone:
            peer, problem = next(iter(self._gone.items()))
            log.info("a client %s; its requests are aborted", problem)
            yield self._core.on_client_gone(peer, now)
            del self._gone[peer]

    def send_deltas(self, peer: bytes, deltas: list[Delta]) -> None:
        """In one message, where there are several: most of what a token costs here is the message."""
        small = []
        for delta in deltas:
            if delta.prompt_logprobs is not None:  # as large as a message may be
                self.send(peer, delta)
            else:
                small.append(delta)
        for first in range(0, len(small), MAX_DELTAS):
            part = small[first : first + MAX_DELTAS]
            self.send(peer, part[0] if len(part) == 1 else Deltas(tuple(part)))

    def tell(self, peer: bytes, messages: Iterable[ToClient]) -> None:
        for message in messages:
            self.send(peer, message)

    def send(self, peer: bytes, message: ToClient) -> None:
        """Never waits; a client that cannot be reached is remembered for `gone`."""
        if peer in self._gone:
            return
        try:
            self.socket.send(peer, self._out.encode(message))
        except Unreachable as e:
            self._counters["stuck_clients" if e.stuck else "gone_clients"] += 1
            self._gone[peer] = str(e)


MAX_DELTAS = 256
"""In one message: its size stays far below what a codec takes."""


def _label_of(frames: list[bytes]) -> str:
    """The label of a message that is malformed elsewhere, so that its sender learns which request it was."""
    try:
        _, (_, field, *_) = _SKETCH.decode(frames[0])
        label = msgspec.msgpack.decode(field, type=str)
    except Exception:  # noqa: BLE001  (whatever the bytes are, they name no request)
        return ""
    return label if len(label) <= 200 else ""

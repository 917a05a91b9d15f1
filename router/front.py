"""The native clients' side of the router's thread: their ZeroMQ socket, and who cannot be reached.

Bytes into messages and back. Must not know text, workers or HTTP. Used by the router's thread only.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Annotated, Any

import msgspec

from baton.codec import Codec
from baton.errors import BatonError, CodecError, OverloadedError, VersionError
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
from router.forms import Forms
from router.records import without_rankings
from router.sockets import RouterSocket, Unreachable
from router.translator import Translator

log = logging.getLogger("baton.router")

_SKETCH = msgspec.msgpack.Decoder(tuple[int, Annotated[tuple[msgspec.Raw, ...], msgspec.Meta(max_length=64)]])
"""A message without its fields' contents."""


MAX_HELD = 256
"""Requests whose form is still to be looked at."""
LOOK_AFTER_S, LOOK_FOR_S = 0.02, 0.05
"""When a connection has ended: between two looks for clients that are gone, and for how long."""


class _Held:
    """A request whose form is being looked at, and what its client took back meanwhile."""

    __slots__ = ("cancelled", "is_looked_at", "message", "peer", "received_at")

    def __init__(self, peer: bytes, message: Generate, received_at: float):
        self.peer = peer
        self.message = message
        self.received_at = received_at
        self.cancelled: list[int | None] = []
        """Samples; None: all."""
        self.is_looked_at = False


class Front:
    """A client is known by its connection's routing id: bytes. `wake`: asks for a turn soon."""

    def __init__(
        self,
        socket: RouterSocket,
        core: RouterCore,
        translator: Translator,
        counters: Counter[str],
        alive_s: float,
        overview: Callable[[float], dict[str, Any]],
        forms: Forms,
        wake: Callable[[], None],
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
        self._forms = forms
        self._wake = wake
        self._held: list[_Held] = []
        """In the order of asking."""
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
            if message.sampling.structured is not None:
                self._hold(_Held(peer, message, received_at))
                return []
            return self._translator.on_generate(peer, message, received_at)
        if type(message) is Cancel:
            held = next((h for h in self._held if (h.peer, h.message.label) == (peer, message.label)), None)
            if held is not None:
                held.cancelled.append(message.sample)
                return []
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

    def _hold(self, held: _Held) -> None:
        if len(self._held) >= MAX_HELD:
            message = f"the forms of {MAX_HELD} requests wait to be looked at; ask again in a moment"
            self.send(held.peer, Failed(held.message.label, OverloadedError.code, message))
            return
        self._held.append(held)
        structured = held.message.sampling.structured
        assert structured is not None
        self._forms.look(structured, partial(self._on_looked_at, held))

    def _on_looked_at(self, held: _Held) -> None:
        held.is_looked_at = True
        self._wake()

    def looked_at(self, now: float) -> Iterator[list[RouterAction]]:
        """Go on with the requests whose form has been looked at; do each list of actions before asking for the next."""
        looked_at = [held for held in self._held if held.is_looked_at]
        if not looked_at:
            return
        self._held = [held for held in self._held if not held.is_looked_at]
        for held in looked_at:
            yield self._translator.on_generate(held.peer, held.message, held.received_at)
            for sample in held.cancelled:
                yield self._core.on_cancel(held.peer, held.message.label, now, sample)

    def close(self) -> None:
        """Fail what the core does not know of."""
        for held in self._held:
            text = "the router was stopped before the request began"
            self.send(held.peer, Failed(held.message.label, "request_failed", text))
        self._held.clear()

    def look_soon(self, now: float) -> None:
        """A connection has ended: a client may be gone whose requests go on. ZeroMQ takes a moment to know whose."""
        self.alive_at = min(self.alive_at, now + LOOK_AFTER_S)
        self._look_until = now + LOOK_FOR_S

    def say_alive(self, now: float) -> None:
        """To every client with open requests. It is also how one that left while it waited is found."""
        held = (held.peer for held in self._held)
        clients = {client for client in itertools.chain(self._core.clients(), held) if type(client) is bytes}
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
            self._held = [held for held in self._held if held.peer != peer]
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

"""The router's thread, without its clock and event loop: joins the core with who speaks to it.

    native clients ── Front ──┐                        ┌── Back ── workers
                              ├── Translator ── core ──┤
    HTTP clients ─── Sink ────┘                        └── Observer (metrics, traces)

Does what the core says, in order. Must not know sockets, HTTP or text. A client is bytes (a connection of the
front's) or a `Sink` (an object within this process); nothing else here tells the two apart.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from baton.protocol import Delta, Generate, ToClient
from baton.security import worth_saying
from router.actions import NewTokens, RouterAction, SendWorker
from router.back import Back
from router.core import RouterCore
from router.forms import Forms
from router.front import Front
from router.latencies import Latencies
from router.text import Text
from router.translator import Translator

log = logging.getLogger("baton.router")


class Sink:
    """A client within the router's process; compared by identity. Both methods must return at once and not raise."""

    trace_headers: Mapping[str, str] = {}
    """The headers `traceparent` and `tracestate` (W3C) that its requests came with."""
    operation = "text_completion"
    """What its requests are in OpenTelemetry's words; else `chat`."""

    def on_deltas(self, deltas: list[Delta]) -> None:
        """What its requests got since the last call, oldest first."""
        raise NotImplementedError

    def on_message(self, message: ToClient) -> None:
        """The end of a request (Done, Failed), the end of one of several samples (Delta), or an answer."""
        raise NotImplementedError


class Observer(Protocol):
    """Sees everything that the core wants done; must not do any of it."""

    def on_action(self, action: RouterAction, now: float) -> None: ...


class Desk:
    """Used by the router's thread only. `wake`: asks for a `turn` soon."""

    def __init__(
        self,
        core: RouterCore,
        text: Text,
        translator: Translator,
        front: Front,
        back: Back,
        counters: Counter[str],
        wake: Callable[[], None],
        latencies: Latencies,
        forms: Forms,
    ):
        self.core = core
        self.text = text
        self.translator = translator
        self.counters = counters
        self.front = front
        self.back = back
        self.latencies = latencies
        self.forms = forms
        self.observers: list[Observer] = [latencies]
        self.request_observers: list[Observer] = []
        """They are told of all but NewTokens, so a token costs nothing for those that do not care."""
        self._wake = wake

    # --- for clients within this process ------------------------------------------------------------

    def generate(
        self,
        client: Sink,
        message: Generate,
        received_at: float,
        *,
        prompt: tuple[int, ...] | None = None,
        request_id: str | None = None,
    ) -> None:
        """Start a request. What becomes of it comes to `client`, a refusal (Failed) before this returns.

        `prompt`, `request_id`: see `Translator.on_generate`.
        """
        actions = self.translator.on_generate(client, message, received_at, prompt=prompt, request_id=request_id)
        self.act(actions, time.monotonic())
        self._wake()

    def leave(self, client: Sink) -> None:
        """End all that the client has open."""
        now = time.monotonic()
        self.act(self.core.on_client_gone(client, now), now)
        self._wake()

    def drain(self, worker_id: str, undo: bool) -> None:
        """Place nothing more on this worker, or again. Raises InvalidRequestError if there is none of this id."""
        now = time.monotonic()
        self.act(self.core.on_drain(worker_id, undo, now), now)
        self._wake()

    # --- what the core says ---------------------------------------------------------------------------

    def act(self, actions: list[RouterAction], now: float) -> None:
        """Do it. What a failed send leads to comes after."""
        todo = deque(actions)
        while todo:
            action = todo.popleft()
            self._show(action, self.observers, now)
            if type(action) is NewTokens:
                self.translator.on_tokens(action)
                continue
            self._show(action, self.request_observers, now)
            if type(action) is SendWorker:
                todo.extend(self.back.on_action(action, now))
            else:
                self._tell(action)

    def _show(self, action: RouterAction, observers: list[Observer], now: float) -> None:
        """What only watches must not harm what it watches."""
        for observer in observers:
            try:
                observer.on_action(action, now)
            except Exception:  # noqa: BLE001  (whatever it is, it is only told)
                self._complain(observer)

    def _complain(self, observer: Observer) -> None:
        self.counters["observers_failed"] += 1
        if worth_saying(self.counters["observers_failed"]):
            log.exception("%s failed, and is asked again", type(observer).__name__)

    def _tell(self, action: RouterAction) -> None:
        messages = self.translator.messages(action)  # type: ignore[arg-type]
        client: Any = action.client  # type: ignore[union-attr]
        if type(client) is bytes:
            self.front.tell(client, messages)
        else:
            for message in messages:
                client.on_message(message)

    def flush(self) -> None:
        """Tell everybody the tokens that wait."""
        for client, deltas in self.translator.take_deltas().items():
            if type(client) is bytes:
                self.front.send_deltas(client, deltas)
            else:
                sink: Any = client
                sink.on_deltas(deltas)

    def handle(
        self, on_frames: Callable[[bytes, list[bytes]], list[RouterAction]], peer: bytes, frames: list[bytes]
    ) -> None:
        """One message; a bug that it meets must not end the service for all others."""
        try:
            self.act(on_frames(peer, frames), time.monotonic())
        except Exception:
            log.exception("a message could not be handled")
            self.counters["internal_errors"] += 1

    def on_time(self, now: float) -> None:
        """Whatever is due."""
        for actions in self.front.looked_at(now):
            self.act(actions, now)
        deadline = self.core.next_deadline()
        if deadline is not None and deadline <= now:
            self.act(self.core.on_deadline(now), now)
            self._tell_roles()
        if self.front.alive_at <= now:
            self.front.say_alive(now)

    def _tell_roles(self) -> None:
        if self.core.roles is not None:
            for line in self.core.roles.planner.take_news():
                log.warning("role planner: %s", line)

    def next_deadline(self) -> float:
        """When `on_time` must be called at the latest; infinite: only after another event."""
        deadline = self.core.next_deadline()
        return self.front.alive_at if deadline is None else min(deadline, self.front.alive_at)

    def end_gone(self, now: float) -> None:
        """End what native clients that cannot be reached have open."""
        for actions in self.front.gone(now):
            self.act(actions, now)

    def close(self, now: float) -> None:
        """Fail what is open, and tell everybody."""
        self.act(self.core.on_shutdown(now), now)
        self.front.close()

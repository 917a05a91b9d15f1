"""The router's wall-clock driver: one thread, a ZeroMQ socket for clients and one for workers.

Owns clock and thread, and decides nothing: `router.front` and `router.back` turn bytes into events of
`router.core` and its actions into bytes. Must not know placements, attempts or text.

    client ──Generate──► front ─► tokenize, mint ids ─► RouterCore ─► back ──Submit──► worker
    client ◄──Delta───── front ◄─ detokenize ◄───────── RouterCore ◄─ back ◄─Tokens─── worker

Nothing polls: the thread sleeps until a socket, the core's deadline or another thread wakes it.
Nothing blocks: a peer that does not read is dropped (clients) or counts as lost (workers).
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import zmq

from baton.clock import clock_id
from baton.config import ClusterConfig
from baton.errors import ClusterError
from baton.protocol import Status
from baton.security import Security
from router.actions import RouterAction, SendWorker
from router.back import Back
from router.core import RouterCore
from router.front import Front
from router.sockets import BACK_HWM, FRONT_HWM, RouterSocket, WakeUp
from router.text import Text, TokenizerText

log = logging.getLogger("baton.router")

BACK_BATCH = 512
FRONT_BATCH = 16
"""Messages read from a socket before the other gets its turn; a prompt may take milliseconds to tokenize."""
LINGER_S = 1.0
STOP_S = 10.0

T = TypeVar("T")


class RouterServer:
    """A router. `start`, `stop`, `wait_ready` and `status` may be called from any thread.

    `text` replaces the tokenizer of `model_path` (for tests, or to share one). `back_host`: the address of
    this machine at which workers reach it, where that is another than clients do (`router.host`); `back_port`
    its port, 0 for any. Without
    `fingerprint` the first worker to join decides which model this cluster serves.
    """

    def __init__(
        self,
        config: ClusterConfig,
        model_path: str | Path | None = None,
        fingerprint: str | None = None,
        *,
        text: Text | None = None,
        back_host: str | None = None,
        back_port: int = 0,
    ):
        if text is None:
            if model_path is None:
                raise ClusterError("a router needs a model_path to take its tokenizer from, or a text")
            text = TokenizerText(model_path)
        self.incarnation = secrets.token_hex(8)
        self.counters: Counter[str] = Counter()
        """What went wrong and was survived, by kind; read it from any thread."""
        self._text = text
        self._config = config
        self._back_host, self._back_port = back_host or config.router.host, back_port
        self._security = Security(config.security.secret)
        self._core = RouterCore(config, router_incarnation=self.incarnation, fingerprint=fingerprint, clock=clock_id())
        self._calls: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._num_ready = 0
        self._running = False
        self._thread: threading.Thread | None = None

    # --- any thread -------------------------------------------------------------------------------

    def start(self) -> tuple[str, str]:
        """Bind and serve. Returns the addresses for clients and for workers; ClusterError if one cannot be had."""
        assert self._thread is None, "a router starts once"
        router, liveness = self._config.router, self._config.liveness
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._guard = self._security.guard(self._context)
        try:
            front = self._bind(router.host, router.port, hwm=FRONT_HWM, key="router.port")
            back = self._bind(self._back_host, self._back_port, hwm=BACK_HWM, key="router.host")
        except ClusterError:
            self._guard.close()
            self._context.destroy(linger=0)
            raise
        self._front = Front(front, self._core, self._text, self.counters, liveness.heartbeat_s)
        self._back = Back(back, self._core, self.counters)
        self._wake = WakeUp()
        self._running = True
        self._thread = threading.Thread(target=self._run, name="baton-router", daemon=True)
        self._thread.start()
        return front.address, back.address

    def _bind(self, host: str, port: int, *, hwm: int, key: str) -> RouterSocket:
        return RouterSocket(self._context, host, port, hwm=hwm, key=key, security=self._security)

    def stop(self) -> None:
        """End open requests as failed and close; what is queued gets a second to leave. Idempotent."""
        if self._thread is None:
            return
        with self._changed:
            self._running = False
        self._wake.set()
        self._thread.join(STOP_S)
        if self._thread.is_alive():
            raise ClusterError(f"the router's thread did not end within {STOP_S:g} s; it is stuck in a message")

    def wait_ended(self) -> None:
        """Return when the router's thread has ended: by `stop`, or because it failed."""
        assert self._thread is not None, "start() first"
        self._thread.join()

    def wait_ready(self, num_workers: int, timeout: float) -> None:
        """Return once `num_workers` live; ClusterError after `timeout` seconds, or if the router has stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_ready >= num_workers or not self._running, timeout)
            if self._num_ready < num_workers:
                state = f"within {timeout:g} s" if self._running else "before the router stopped"
                raise ClusterError(
                    f"{self._num_ready} of {num_workers} workers joined {state}; "
                    f"look at the workers' logs, or raise start_timeout_s"
                )

    def status(self) -> Status:
        """The cluster as of now; ClusterError if the router is not running."""
        return self._call(lambda: self._core.status("status", time.monotonic()))

    def _call(self, function: Callable[[], T]) -> T:
        """Run `function` in the router's thread and return what it returns."""
        result: Future[T] = Future()

        def run() -> None:
            try:
                result.set_result(function())
            except Exception as e:  # noqa: BLE001  (it is the caller's)
                result.set_exception(e)

        with self._changed:
            if not self._running:
                raise ClusterError("the router is not running")
            self._calls.append(run)
        self._wake.set()
        return result.result(STOP_S)

    # --- the router's thread ----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            poller = zmq.Poller()
            for source in (self._front.socket.socket, self._back.socket.socket, self._wake.fd):
                poller.register(source, zmq.POLLIN)
            while self._running:
                self._step({source for source, _ in poller.poll(self._wait_ms())})
        except Exception:
            log.exception("the router's thread failed; the router stops")
            self.counters["thread_failed"] += 1
        finally:
            self._close()

    def _step(self, ready: set[Any]) -> None:
        # Workers first: a message that has arrived proves its worker alive before silence is judged below.
        if self._back.socket.socket in ready:
            for peer, frames in self._back.socket.received(BACK_BATCH):
                self._handle(self._back.on_frames, peer, frames)
        if self._front.socket.socket in ready:
            for peer, frames in self._front.socket.received(FRONT_BATCH):
                self._handle(self._front.on_frames, peer, frames)
        if self._wake.fd in ready:
            self._wake.clear()
        while self._calls:
            self._calls.popleft()()
        now = time.monotonic()
        deadline = self._core.next_deadline()
        if deadline is not None and deadline <= now:
            self._act(self._core.on_deadline(now), now)
        if self._front.alive_at <= now:
            self._front.say_alive(now)
        self._front.flush()
        for actions in self._front.gone(now):
            self._act(actions, now)
        self._publish_ready()

    def _wait_ms(self) -> int | None:
        """How long the poll may sleep; rounded up, so that it does not wake just before the deadline."""
        deadline = self._core.next_deadline()
        at = self._front.alive_at if deadline is None else min(deadline, self._front.alive_at)
        return None if at == math.inf else max(0, math.ceil((at - time.monotonic()) * 1000))

    def _handle(
        self, on_frames: Callable[[bytes, list[bytes]], list[RouterAction]], peer: bytes, frames: list[bytes]
    ) -> None:
        """One message; a bug that it meets must not end the service for all others."""
        try:
            self._act(on_frames(peer, frames), time.monotonic())
        except Exception:
            log.exception("a message could not be handled")
            self.counters["internal_errors"] += 1

    def _act(self, actions: list[RouterAction], now: float) -> None:
        """Do what the core says, in order. What a failed send leads to comes after."""
        todo = deque(actions)
        while todo:
            action = todo.popleft()
            if type(action) is SendWorker:
                todo.extend(self._back.on_action(action, now))
            else:
                self._front.on_action(action)  # type: ignore[arg-type]

    def _publish_ready(self) -> None:
        num_ready = sum(1 for _ in self._core.view.ready())
        if num_ready != self._num_ready:
            with self._changed:
                self._num_ready = num_ready
                self._changed.notify_all()

    def _close(self) -> None:
        try:
            for action in self._core.on_shutdown(time.monotonic()):
                self._front.on_action(action)  # type: ignore[arg-type]
        except Exception:
            log.exception("open requests could not be told that the router stops")
        with self._changed:
            self._running = False
            self._changed.notify_all()
        while self._calls:  # whoever asked while we stopped
            self._calls.popleft()()
        self._front.socket.close(LINGER_S)
        self._back.socket.close(0.0)
        self._guard.close()
        self._context.term()
        self._wake.close()

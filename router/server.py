"""The router's wall-clock driver: one thread with an event loop, on which all of its sockets are served.

Owns clock, thread and loop, and decides nothing: `router.desk` joins what turns bytes into events of `router.core`
and its actions into bytes. Must not know placements, attempts or text.

    client ──Generate──► front ─► tokenize, mint ids ─► RouterCore ─► back ──Submit──► worker
    client ◄──Delta───── front ◄─ detokenize ◄───────── RouterCore ◄─ back ◄─Tokens─── worker
    client ──HTTP──────► http ──┘ (the same, without a socket in between)

Nothing polls: the thread sleeps until a socket, the core's deadline or another thread wakes it.
Nothing blocks: a peer that does not read is dropped (clients) or counts as lost (workers).
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TypeVar

import uvloop
import zmq

from baton.clock import clock_id
from baton.config import ClusterConfig
from baton.errors import ClusterError
from baton.protocol import Status
from baton.security import Security
from router.back import Back
from router.core import RouterCore
from router.desk import Desk
from router.forms import Forms
from router.front import Front
from router.http.models import names_of
from router.http.server import HttpServer
from router.latencies import Latencies
from router.overview import make_overview
from router.request_log import RequestLog
from router.request_log import log as request_log
from router.roles import RoleOrder
from router.sockets import BACK_HWM, FRONT_HWM, RouterSocket
from router.text import Text, TokenizerText
from router.tracing import open_tracing
from router.translator import Translator

log = logging.getLogger("baton.router")

BACK_BATCH = 512
FRONT_BATCH = 16
"""Messages read from a socket before the others get their turn; a prompt may take milliseconds to tokenize."""
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
        self.url: str | None = None
        """Where HTTP is served, once started; None: nowhere."""
        self._text = text
        self._config = config
        self._back_host, self._back_port = back_host or config.router.host, back_port
        self._security = Security(config.security.secret)
        self._core = RouterCore(config, router_incarnation=self.incarnation, fingerprint=fingerprint, clock=clock_id())
        self._changed = threading.Condition()
        self._num_ready = 0
        self._running = False
        self._stop_asked = False
        self._thread: threading.Thread | None = None

    # --- any thread -------------------------------------------------------------------------------

    def start(self) -> tuple[str, str]:
        """Bind and serve. Returns the addresses for clients and for workers; ClusterError if one cannot be had."""
        assert self._thread is None, "a router starts once"
        config, router = self._config, self._config.router
        self._tracing = open_tracing(config, names_of(config)[0], self._core, self.counters)
        self._http = HttpServer(config) if config.http.enabled else None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._guard = self._security.guard(self._context)
        try:
            if self._http is not None:
                self.url = self._core.url = self._http.bind()
            front = self._bind(router.host, router.port, hwm=FRONT_HWM, key="router.port", watched=True)
            back = self._bind(self._back_host, self._back_port, hwm=BACK_HWM, key="router.host")
        except BaseException:
            if self._http is not None:
                self._http.close()
            if self._tracing is not None:
                self._tracing.close()
            self._guard.close()
            self._context.destroy(linger=0)
            raise
        translator = Translator(self._core, self._text)
        latencies = Latencies(self._core, time.monotonic())
        overview = partial(make_overview, config, self._core, latencies)
        self._forms = Forms(lambda call: self._loop.call_soon_threadsafe(call))
        alive_s = config.liveness.heartbeat_s
        self._front = Front(front, self._core, translator, self.counters, alive_s, overview, self._forms, self._wake)
        self._back = Back(back, self._core, self.counters)
        self._desk = Desk(
            self._core,
            self._text,
            translator,
            self._front,
            self._back,
            self.counters,
            self._wake,
            latencies,
            self._forms,
        )
        if self._tracing is not None:
            self._desk.request_observers.append(self._tracing)
        if request_log.isEnabledFor(logging.INFO):
            self._desk.request_observers.append(RequestLog(self._core))
        self._loop = uvloop.new_event_loop()
        self._stopped = asyncio.Event()
        self._failure: Exception | None = None
        self._turn_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._running = True
        self._thread = threading.Thread(target=self._run, name="baton-router", daemon=True)
        self._thread.start()
        return front.address, back.address

    def _bind(self, host: str, port: int, *, hwm: int, key: str, watched: bool = False) -> RouterSocket:
        return RouterSocket(self._context, host, port, hwm=hwm, key=key, security=self._security, watched=watched)

    def stop(self) -> None:
        """Let nothing more in, give what is open `router.shutdown_grace_s`, end the rest as failed, and close.

        At once where nothing is open. A second call, or Ctrl-C in this one, cuts the grace short. What is queued in
        sockets gets a second to leave. Idempotent.
        """
        if self._thread is None:
            return
        grace_s = self._config.router.shutdown_grace_s
        with self._changed:
            if self._running:
                if self._stop_asked:
                    self._loop.call_soon_threadsafe(self._stopped.set)
                else:
                    self._stop_asked = True
                    self._loop.call_soon_threadsafe(self._begin_stop, grace_s)
        try:
            self._thread.join(grace_s + STOP_S)
        except BaseException:
            with self._changed:
                if self._running:
                    self._loop.call_soon_threadsafe(self._stopped.set)
            raise
        if self._thread.is_alive():
            waited_s = grace_s + STOP_S
            raise ClusterError(f"the router's thread did not end within {waited_s:g} s; it is stuck in a message")

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

    def role_order(self) -> RoleOrder | None:
        """Which worker its launcher is to start anew in another pool now. ClusterError if the router is not running."""
        return self._call(lambda: None if self._core.roles is None else self._core.roles.order())

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
            self._loop.call_soon_threadsafe(run)
        return result.result(STOP_S)

    # --- the router's thread ----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        except Exception:
            log.exception("the router's thread failed; the router stops")
            self.counters["thread_failed"] += 1
        finally:
            self._close()

    async def _serve(self) -> None:
        # What is there by now stays: models' libraries make a million objects, and whenever the collector looked
        # through them, all streams would stand still for a third of a second.
        gc.freeze()
        for socket in (self._back.socket, self._front.socket):
            self._loop.add_reader(socket.fd, self._wake)
        self._loop.add_reader(self._front.socket.lost_fd, self._on_lost_client)
        self._on_lost_client()
        self._wake()
        if self._http is not None:
            await self._http.start(self._desk)
        await self._stopped.wait()
        with self._changed:
            self._running = False  # whoever asked before gets an answer when the loop ends
        self._end_requests()
        for socket in (self._back.socket, self._front.socket):
            self._loop.remove_reader(socket.fd)
        self._loop.remove_reader(self._front.socket.lost_fd)
        if self._http is not None:
            await self._http.stop()
        if self._failure is not None:
            raise self._failure

    def _wake(self) -> None:
        """Have a turn soon. Whoever sends over a ZeroMQ socket needs one: it tells of what came in only once."""
        if not self._turn_due:
            self._turn_due = True
            self._loop.call_soon(self._turn)

    def _on_lost_client(self) -> None:
        if self._front.socket.num_lost():
            self._front.look_soon(time.monotonic())
            self._wake()

    def _turn(self) -> None:
        """Read what has come, a limited number of messages; do what is due; tell what there is to tell."""
        self._turn_due = False
        if not self._running:
            return
        try:
            self._read_and_tell()
        except Exception as e:  # noqa: BLE001  (it is raised again, where the loop ends)
            self._failure = e
            self._stopped.set()

    def _read_and_tell(self) -> None:
        desk, front, back = self._desk, self._front, self._back
        # Workers first: a message that has arrived proves its worker alive before silence is judged below.
        for peer, frames in back.socket.received(BACK_BATCH):
            desk.handle(back.on_frames, peer, frames)
        for peer, frames in front.socket.received(FRONT_BATCH):
            desk.handle(front.on_frames, peer, frames)
        now = time.monotonic()
        desk.on_time(now)
        desk.flush()
        desk.end_gone(now)
        self._publish_ready()
        if self._core.stopping:
            self._stop_when_idle()
        # Only now: to send is to look, too, and what that saw is not told of again.
        if back.socket.has_news() or front.socket.has_news():
            self._wake()
        self._set_timer(desk.next_deadline())

    def _set_timer(self, at: float) -> None:
        """A turn at `at` (monotonic seconds). A timer that would ring earlier stays, as most deadlines move on."""
        if at >= self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        # The loop counts in whole milliseconds: rounded up, or it would ring before the deadline and again at once.
        self._timer = self._loop.call_later(max(0.0, at - time.monotonic()) + 0.001, self._on_timer)

    def _on_timer(self) -> None:
        self._timer, self._timer_at = None, math.inf
        self._wake()

    def _publish_ready(self) -> None:
        num_ready = sum(1 for _ in self._core.view.ready())
        if num_ready != self._num_ready:
            lost = sorted(w.worker_id for w in self._core.view.workers.values() if not w.ready)
            level = logging.WARNING if num_ready < self._num_ready else logging.INFO
            log.log(level, "%d workers are ready; lost: %s", num_ready, ", ".join(lost) or "none")
            with self._changed:
                self._num_ready = num_ready
                self._changed.notify_all()

    def _begin_stop(self, grace_s: float) -> None:
        """Whatever is open may end by itself within `grace_s`."""
        now = time.monotonic()
        self._desk.act(self._core.on_stopping(now), now)
        if self._core.num_requests:
            log.info("stopping: %d open requests have %g s to end", self._core.num_requests, grace_s)
        self._loop.call_later(grace_s, self._stopped.set)
        self._stop_when_idle()

    def _stop_when_idle(self) -> None:
        if not self._core.num_requests:
            self._stopped.set()

    def _end_requests(self) -> None:
        try:
            self._desk.close(time.monotonic())
        except Exception:
            log.exception("open requests could not be told that the router stops")

    def _close(self) -> None:
        gc.unfreeze()
        self._forms.close()
        with self._changed:
            self._running = False
            self._changed.notify_all()
        if self._tracing is not None:
            self._tracing.close()
        self._front.socket.close(LINGER_S)
        self._back.socket.close(0.0)
        self._guard.close()
        self._context.term()

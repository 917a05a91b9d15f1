"""EngineWorker: one worker's threads, the wall-clock driver of a `WorkerCore`.

    engine thread   schedule ─► run the step ─► complete, again and again; waits where there is nothing to do
    I/O thread      owns every socket: the router's, and through `PeerLinks` those to other workers

Both act on the core under one lock that is held for microseconds and never while a step runs, so an
offer, an abort or an arriving block does not wait for a step to end. What the core answers is
executed by the I/O thread; an eventfd wakes it. Nothing polls: an idle worker only sends heartbeats.
With each heartbeat an idle worker checks that it holds no block (`baton.audit`).
This module decides nothing, that is the core's; and it does not know how blocks move.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from baton.clock import clock_id
from baton.codec import MAX_MESSAGE_BYTES, Codec
from baton.errors import ClusterError, JoinRefusedError, ProtocolError
from baton.ledger import AskLedger
from baton.ports import Action, PeerEvent, PeerLinks, ToRouter
from baton.protocol import (
    PROTOCOL_VERSION,
    Abort,
    AskPrefixes,
    Heartbeat,
    Join,
    Joined,
    JoinRefused,
    Leaving,
    LoadReport,
    Peers,
    Replace,
    Submit,
    Tokens,
    ToRouterFromWorker,
    ToWorker,
)
from baton.security import HANDSHAKE_EVENTS, Handshakes, Security, worth_saying
from baton.step_log import StepLog, StepRecord, StepShape
from baton.worker_core import WorkerCore

if TYPE_CHECKING:
    from baton.engine.runner import Runner

log = logging.getLogger(__name__)

_FROM_ROUTER: Codec[Any] = Codec(ToWorker)
_TO_ROUTER: Codec[Any] = Codec(ToRouterFromWorker, often=(Tokens,))

MAX_PROBLEM = 4000
"""Characters of what a step raised that are handed on: of what libraries say there may be pages."""
ROUTER_LOST_AFTER = 5
"""Times the liveness timeout that the router may be silent before a worker ends the router's requests:
ending work too early costs more than ending it late."""


class EngineWorker:
    """Runs `core` with `runner`, towards one router and, through `links`, towards other workers.

    `cores`: CPU cores that both threads are pinned to, and the number of compute threads; None leaves
    both as they are. `heartbeat_s`, `timeout_s`: see `LivenessConfig`. `step_timeout_s`: a step that
    takes longer makes the worker unhealthy. `log_steps`: log every step's plan and its reasons. `record_steps`: keep
    what steps were and took, for `take_steps`. `security`: by what it may connect to the router.
    """

    def __init__(
        self,
        core: WorkerCore,
        runner: Runner,
        links: PeerLinks,
        *,
        router_address: str,
        context: zmq.Context[Any],
        heartbeat_s: float = 0.5,
        timeout_s: float = 2.0,
        step_timeout_s: float = 60.0,
        log_steps: bool = False,
        record_steps: bool = False,
        cores: tuple[int, ...] | None = None,
        security: Security | None = None,
    ):
        self.core = core
        self.info = core.info
        self._runner = runner
        self._links = links
        self._heartbeat_s = heartbeat_s
        self._router_timeout_s = timeout_s * ROUTER_LOST_AFTER
        self._step_timeout_s = step_timeout_s
        self._log_steps = log_steps
        self._step_log = StepLog() if record_steps else None
        self._cores = cores
        self._router: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self._router.setsockopt(zmq.ROUTING_ID, self.info.incarnation.encode())
        # Nothing is queued for a router that is not there: a Join would reach the next one late, as a second life.
        self._router.setsockopt(zmq.IMMEDIATE, 1)
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        security = security or Security(None)
        security.secure_client(self._router)
        self._handshakes = Handshakes(security)
        self._monitor = self._router.get_monitor_socket(HANDSHAKE_EVENTS | int(zmq.EVENT_DISCONNECTED))
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.SNDHWM, 0)  # a lost token is lost for ever; a stuck router is noticed by liveness
        self._router_address = router_address

        self._condition = threading.Condition()
        """Its lock guards the core; notified when the engine thread may find work."""
        self._outbox: deque[Action] = deque()
        """Filled under the lock and emptied in order by the I/O thread, so that actions happen in the order
        in which the core decided them, whichever thread asked: a block that was announced, released and
        announced again must not be announced in another order (I5)."""
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = False
        self._leaving: bool | None = None
        """None: stays. False: asked to leave. True: the router knows, nothing new will come."""
        self._idle = threading.Event()
        """Leaving, and nothing is left here."""
        self._leaving_told = False
        self._linger_ms = 0
        self._joined = threading.Event()
        self._ended = threading.Event()
        self._router_incarnation: str | None = None
        self._refusal: str | None = None
        self._shut_out: str | None = None
        """Why the router's socket does not let this worker in."""
        self._failure: BaseException | None = None
        self._offset = 0.0
        """Router's monotonic clock minus ours, measured at the first join; zero on the same machine."""
        self._router_seen = 0.0
        self._connected = False
        self._num_refused = 0
        """Messages of peers that no correct peer sends."""
        self._join_sent = 0.0
        self._step_since: float | None = None
        self._threads = [
            # Daemons: a worker that its owner forgot must not keep the process from exiting.
            threading.Thread(target=self._guarded, args=(loop,), name=f"{self.info.worker_id}-{name}", daemon=True)
            for name, loop in (("io", self._io_loop), ("engine", self._engine_loop))
        ]

    # --- control, from any thread -------------------------------------------------------------------

    def start(self, timeout_s: float = 30.0) -> None:
        """Start both threads and join the router.

        Raises JoinRefusedError where the router will not have this worker, ClusterError where it does not answer, or
        does not let it in.
        """
        for thread in self._threads:
            thread.start()
        if not self._joined.wait(timeout_s):
            self.stop()
            raise ClusterError(
                f"{self.info.worker_id}: no answer from the router at {self._router_address} within {timeout_s:g} s"
            )
        if self._shut_out is not None:
            self.stop()
            raise ClusterError(f"{self.info.worker_id}: the router at {self._router_address} {self._shut_out}")
        if self._refusal is not None:
            self.stop()
            raise JoinRefusedError(f"{self.info.worker_id}: {self._refusal}")
        if self._failure is not None:
            self.stop()
            raise ClusterError(f"{self.info.worker_id} failed to start: {self._failure}") from self._failure

    def stop(self) -> None:
        """End both threads after the step that runs, and close every socket. Idempotent."""
        with self._condition:
            self._stopping = True
            self._condition.notify_all()
        self._wake()
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join()
        self._close_sockets()  # of a worker that was never started
        if self._wake_fd >= 0:
            fd, self._wake_fd = self._wake_fd, -1
            os.close(fd)

    def leave(self, timeout_s: float = 60.0) -> bool:
        """Take nothing new, finish what is here, hand over what is owed, then stop.

        False if that took longer than `timeout_s`: then it stops all the same, and the router places the rest anew.
        """
        if self._leaving is None:
            self._leaving = False
        self._wake()
        finished = self._idle.wait(timeout_s)
        self._linger_ms = 1000  # the last tokens may still be on their way out
        self.stop()
        return finished

    def wait_ended(self) -> None:
        """Return when either thread has ended: by `stop`, or because it died."""
        self._ended.wait()

    def health(self) -> dict[str, Any]:
        """Healthy means that the engine makes progress, not only that the process exists."""
        problem, step_s = self._problem()
        with self._condition:
            load = self._load()
        return {"healthy": problem is None, "problem": problem, "step_s": step_s, "load": load}

    def _problem(self) -> tuple[str | None, float]:
        """Why this worker is not healthy, or None; seconds that the present step has taken."""
        since = self._step_since
        step_s = 0.0 if since is None else time.monotonic() - since
        if self._failure is not None:
            return f"a thread died: {self._failure!r}", step_s
        if step_s > self._step_timeout_s:
            return f"a step has been running for {step_s:.0f} s", step_s
        if self._shut_out is not None:
            return f"the router at {self._router_address} {self._shut_out}", step_s
        return None, step_s

    def num_held_blocks(self) -> int:
        """Blocks that are not free now."""
        with self._condition:
            return self.core.num_held_blocks()

    def take_steps(self) -> list[StepRecord]:
        """The steps that ended since the last call, in order; none where they are not recorded."""
        if self._step_log is None:
            return []
        with self._condition:
            return self._step_log.take()

    # --- engine thread --------------------------------------------------------------------------------

    def _engine_loop(self) -> None:
        self._pin(compute=True)
        core, condition, step_log = self.core, self._condition, self._step_log
        while True:
            with condition:
                plan = None
                while not self._stopping and (plan := core.next_step(started := self._now())) is None:
                    condition.wait()  # any event that could make work notifies
                if plan is not None and step_log is not None:
                    shape, occupancy = StepShape.of(plan), core.engine.occupancy()
            if plan is None:
                return
            if self._log_steps:
                log.info("%s: step %d: %s", self.info.worker_id, core.engine.num_steps, plan.describe())
            self._step_since = time.monotonic()
            try:
                tokens = self._runner.run(plan)
            except Exception as e:  # whatever a step raises ends its requests, not the worker
                log.exception("%s: a step of %d tokens failed", self.info.worker_id, plan.total_tokens)
                problem = f"{type(e).__name__}: {e}"[:MAX_PROBLEM]
                with condition:
                    self._outbox.extend(core.fail_step(plan, problem, self._now()))
            else:
                with condition:
                    ended = self._now()
                    if step_log is not None:  # before its tokens go out: who has them all has all steps
                        step_log.add(StepRecord(self.info.worker_id, started, ended - started, shape, *occupancy))
                    self._outbox.extend(core.finish_step(plan, tokens, ended))
            self._step_since = None
            if self._outbox:
                self._wake()

    def _pin(self, *, compute: bool = False) -> None:
        if self._cores is None:
            return
        os.sched_setaffinity(0, self._cores)  # of the calling thread; compute threads it starts inherit it
        if compute:
            self._runner.set_num_threads(len(self._cores))

    # --- I/O thread -----------------------------------------------------------------------------------

    def _io_loop(self) -> None:
        self._pin()
        self._router.connect(self._router_address)
        next_beat = time.monotonic() + self._heartbeat_s
        try:
            while not self._stopping:
                self._wait_for_news(next_beat)
                self._read_router()
                self._read_monitor()
                self._check_deadlines()
                # Before `events`, in which blocks are written: what has been cancelled must not be (I5).
                self._execute_outbox()
                for event in self._links.events():
                    self._handle_peer_event(event)
                self._execute_outbox()
                self._check_leaving()
                if (now := time.monotonic()) >= next_beat:
                    self._beat(now)
                    next_beat = now + self._heartbeat_s
        finally:
            self._close_sockets()

    def _close_sockets(self) -> None:
        self._links.close()
        if not self._router.closed:
            self._router.disable_monitor()
            self._monitor.close(linger=0)
            self._router.close(linger=self._linger_ms)

    def _wait_for_news(self, next_beat: float) -> None:
        poller = zmq.Poller()
        for source in (self._wake_fd, self._router, self._monitor, *self._links.pollables()):
            poller.register(source, zmq.POLLIN)
        now = time.monotonic()
        deadlines = [next_beat]
        if (links_deadline := self._links.next_deadline(now)) is not None:
            deadlines.append(links_deadline)
        with self._condition:
            core_deadline = self.core.next_deadline()
        if core_deadline is not None:
            deadlines.append(core_deadline - self._offset)
        # Rounded up: a deadline polled for a fraction of a millisecond too early would spin.
        timeout_ms = max(0, int((min(deadlines) - now) * 1000) + 1)
        if not self._outbox:
            poller.poll(timeout_ms)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)

    def _check_deadlines(self) -> None:
        with self._condition:
            deadline = self.core.next_deadline()
        if deadline is not None and deadline <= self._now():
            self._handle(self.core.on_deadline)

    def _check_leaving(self) -> None:
        if self._leaving is False and not self._leaving_told:
            self._leaving_told = True
            self._send_router(Leaving(self.info.incarnation))
        if self._leaving and not self._idle.is_set():
            with self._condition:
                idle = not self._outbox and self.core.is_idle
            if idle:
                self._idle.set()

    def _handle(self, handler: Callable[..., list[Action]], *event: Any) -> None:
        """Give one event to a handler of the core; `_execute_outbox` does what it answers."""
        with self._condition:
            self._outbox.extend(handler(*event, self._now()))
            self._condition.notify()

    def _handle_peer_event(self, event: PeerEvent) -> None:
        try:
            self._handle(self.core.on_peer_event, event)
        except ProtocolError as e:  # a port refuses a message before it changes anything
            self._num_refused += 1
            if worth_saying(self._num_refused):
                log.warning("%s: %s (%d so far)", self.info.worker_id, e, self._num_refused)

    def _execute_outbox(self) -> None:
        """Execute the actions, and those that follow from what the links report at once."""
        while self._outbox:
            action = self._outbox.popleft()
            if isinstance(action, ToRouter):
                message = action.message
                if isinstance(message, Tokens) and message.load is not None:
                    message = msgspec.structs.replace(message, load=self._with_traffic(message.load))
                self._send_router(message)
                continue
            for event in self._links.execute(action):
                self._handle_peer_event(event)

    # --- the router -------------------------------------------------------------------------------------

    def _read_router(self) -> None:
        while True:
            try:
                data = self._router.recv(flags=zmq.DONTWAIT)
            except zmq.Again:
                return
            try:
                message = _FROM_ROUTER.decode(data)
            except ProtocolError as e:
                log.warning("%s: dropped a malformed message of the router: %s", self.info.worker_id, e)
                continue
            self._router_seen = time.monotonic()
            match message:
                case Joined():
                    self._on_joined(message)
                case JoinRefused(reason):
                    self._refusal = reason
                    self._joined.set()
                case Heartbeat(incarnation):
                    if self._router_incarnation not in (None, incarnation):
                        self._router_lost("another router answers at its address")
                case Leaving(incarnation) if incarnation == self.info.incarnation:
                    self._leaving = True
                case AskLedger():
                    self._send_ledger(message)
                case Submit() | Replace() | Abort() | Peers() | AskPrefixes():
                    self._handle(self.core.on_router_message, message)

    def _read_monitor(self) -> None:
        """Join at every new connection. A message may have been lost with the old one, so it ends what ran over it."""
        while self._monitor.poll(0):
            message = parse_monitor_message(self._monitor.recv_multipart())
            event = int(message["event"])
            if (problem := self._handshakes.problem(event, int(message["value"]))) is not None:
                log.error("%s: the router at %s %s", self.info.worker_id, self._router_address, problem)
                self._shut_out = problem
                self._joined.set()
            self._connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if self._connected:
                self._shut_out = None
                self._send_join()
            elif self._router_incarnation is not None:
                self._router_lost("the connection was lost")

    def _on_joined(self, message: Joined) -> None:
        same_clock = message.clock != "" and message.clock == clock_id()
        if not same_clock and self._router_incarnation is None and not self._joined.is_set():
            now = time.monotonic()
            self._offset = ((message.received_at - message.echo) + (message.sent_at - now)) / 2
        self._router_incarnation = message.router_incarnation
        if self._leaving is not None:
            self._leaving, self._leaving_told = False, False  # this router, or this life with it, was not told yet
        self._joined.set()

    def _send_join(self) -> None:
        self._join_sent = time.monotonic()
        self._send_router(Join(PROTOCOL_VERSION, self.info, time.monotonic(), clock_id()))

    def _beat(self, now: float) -> None:
        with self._condition:
            self.core.audit_if_idle(self._now())
        self._tell_findings()
        if self._router_incarnation is None:
            if self._connected and now - self._join_sent > self._router_timeout_s:
                self._send_join()
            return
        if now - self._router_seen > self._router_timeout_s:
            self._router_lost(f"silent for {self._router_timeout_s:g} s")
            return
        with self._condition:
            load, prefixes = self._load(), self.core.take_prefix_news()
        self._send_router(Heartbeat(self.info.incarnation, load, prefixes))

    def _send_ledger(self, ask: AskLedger) -> None:
        problem, _ = self._problem()
        with self._condition:
            report = self.core.ledger_report(ask, self._now(), problem)
        self._tell_findings()
        self._send_router(report)

    def _tell_findings(self) -> None:
        """Log what audits have found, each finding once."""
        for finding in self.core.take_findings():
            log.error(
                "%s: %s. That is a bug of Baton. The blocks stay held, as nobody can tell whether something still uses "
                "them; to have them back drain this worker and start it anew",
                self.info.worker_id,
                finding,
            )

    def _router_lost(self, problem: str) -> None:
        with self._condition:
            level = logging.WARNING if self.core.engine.live() else logging.INFO
        log.log(level, "%s: router lost (%s); its requests end here", self.info.worker_id, problem)
        self._router_incarnation = None
        self._handle(self.core.on_router_lost)
        if self._connected:
            self._send_join()

    def _send_router(self, message: Any) -> None:
        try:
            self._router.send(_TO_ROUTER.encode(message), flags=zmq.DONTWAIT)
        except zmq.ZMQError as e:
            log.warning("%s: message %s to the router lost: %s", self.info.worker_id, type(message).__name__, e)

    def _load(self) -> LoadReport:
        return self._with_traffic(self.core.load())

    def _with_traffic(self, load: LoadReport) -> LoadReport:
        return msgspec.structs.replace(
            load, bytes_sent=self._links.bytes_sent, bytes_received=self._links.bytes_received
        )

    # --- both ---------------------------------------------------------------------------------------------

    def _now(self) -> float:
        """Seconds on the router's clock, as every time in the core is."""
        return time.monotonic() + self._offset

    def _wake(self) -> None:
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)

    def _guarded(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except BaseException as e:  # a thread's end must be seen, whatever ended it
            log.exception("%s: thread %s died", self.info.worker_id, threading.current_thread().name)
            self._failure = e
            self._joined.set()
            with self._condition:
                self._stopping = True
                self._condition.notify_all()
            self._wake()
        finally:
            self._ended.set()

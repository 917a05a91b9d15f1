"""`AsyncRouterClient`: a router's client for asyncio. (`router.client` has the one for ordinary code.)

One DEALER socket carries many requests at once, told apart by label; one task reads it. Knows of
workers only their names.

How a client notices that the router is gone, so that no call hangs: the connection's end (a socket
monitor tells within milliseconds that the process died), or silence: while requests are open the
router's own thread sends `Alive` every heartbeat, so a router that is stuck or was cut off is noticed
too, which ZeroMQ's heartbeats would miss because its I/O threads go on without ours.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from typing import Any, Unpack

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from baton.codec import MAX_MESSAGE_BYTES, Codec
from baton.config import Secret
from baton.errors import BatonError, ClusterError, CodecError, RequestFailedError, VersionError, error_from_code
from baton.ledger import ClusterLedger, LedgerRequest
from baton.protocol import (
    Cancel,
    Delta,
    Deltas,
    Done,
    Drain,
    Explain,
    Explained,
    Failed,
    Generate,
    Overview,
    OverviewRequest,
    Records,
    RecordsRequest,
    Status,
    StatusRequest,
    ToClient,
    ToRouterFromClient,
)
from baton.security import HANDSHAKE_EVENTS, Handshakes, Security
from router.completion import Collector, Completion, GenerateOptions, Prompt, StreamDelta, build_generate
from router.records import RequestRecord

CONNECT_TIMEOUT_S = 5.0
SILENCE_TIMEOUT_S = 10.0
LEDGER_TIMEOUT_S = 60.0
"""For the whole ledger; the router gives each worker `liveness.timeout_s`."""
LINGER_MS = 200
LEFT_EARLY = "this stream was left before its end, which cancelled its request; start a new one"
GRACE_S = 0.05
"""After the connection ends: messages that came before it may still lie in the socket."""

Event = StreamDelta | Completion | BatonError
Question = StatusRequest | Drain | Explain | LedgerRequest | OverviewRequest | RecordsRequest
ANSWERS = (Status, Explained, ClusterLedger, Overview, Records)


class _Call:
    """One open request: where its events go."""

    __slots__ = ("cancelled", "collector", "sink")

    def __init__(self, sink: Callable[[Event], None], started_at: float, message: Generate):
        wants_logprobs = message.sampling.logprobs is not None
        self.collector = Collector(started_at, message.n, wants_logprobs=wants_logprobs)
        self.sink = sink
        self.cancelled: list[Cancel] | None = None
        """Taken back before the request itself could be sent; None: it has been."""


class AsyncStream:
    """The deltas of one request; iterate it once. Leaving the loop early, or `cancel`, ends the request.

    After the loop `completion` is set. As a context manager it also ends a request that nobody iterates.
    """

    def __init__(self, client: AsyncRouterClient, label: str, timeout: float | None):
        self.completion: Completion | None = None
        self._abandoned = False
        self._client = client
        self._label = label
        self._timeout = timeout
        self._give_up_at = None if timeout is None else time.monotonic() + timeout
        self._events: asyncio.Queue[Event] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[StreamDelta]:
        if self._abandoned:
            raise RequestFailedError(LEFT_EARLY)
        try:
            while self.completion is None:
                event = await self._next()
                if isinstance(event, StreamDelta):
                    yield event
                elif isinstance(event, Completion):
                    self.completion = event
                else:
                    raise event
        finally:
            self._abandon()

    async def _next(self) -> Event:
        if self._give_up_at is None or not self._events.empty():
            return await self._events.get()
        try:
            async with asyncio.timeout(self._give_up_at - time.monotonic()):
                return await self._events.get()
        except TimeoutError:
            raise RequestFailedError(f"not complete within {self._timeout:g} s; the request was cancelled") from None

    async def result(self) -> Completion:
        """Wait for the end; raises the request's error."""
        async for _ in self:
            pass
        assert self.completion is not None
        return self.completion

    def cancel(self, sample: int | None = None) -> None:
        """Ask for the end, of all or of one sample: the completion's or the choice's finish reason is `abort` then."""
        self._client._cancel(self._label, sample)

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._abandon()

    def _abandon(self) -> None:
        if self.completion is None:
            self._abandoned = True
            self._client._abandon(self._label)


class AsyncRouterClient:
    """One connection to a router, for one event loop. Connects at the first call, or by `async with`.

    `connect_timeout`: seconds for the router's first answer, then ClusterError. `silence_timeout`:
    seconds without any message while requests are open, then they fail with RequestFailedError. `secret`: the
    cluster's `security.secret`; a router that does not share it is a ClusterError.
    """

    def __init__(
        self,
        address: str,
        *,
        connect_timeout: float = CONNECT_TIMEOUT_S,
        silence_timeout: float = SILENCE_TIMEOUT_S,
        secret: Secret | str | None = None,
    ):
        self.address = address
        self._connect_timeout = connect_timeout
        self._silence_timeout = silence_timeout
        self._security = Security(secret)
        self._shut_out: str | None = None
        """Why the router does not let us in."""
        self._in: Codec[Any] = Codec(ToClient)
        self._out: Codec[Any] = Codec(ToRouterFromClient)
        self._labels = itertools.count()
        self._calls: dict[str, _Call] = {}
        self._asked: dict[str, asyncio.Future[Any]] = {}
        self._connecting: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._context: zmq.asyncio.Context | None = None
        self._heard_at = 0.0
        self._closed = False

    # --- what users call --------------------------------------------------------------------------

    async def connect(self) -> None:
        """Reach the router; ClusterError if it does not answer. The calls below do it too."""
        if self._closed:
            raise ClusterError("this client is closed; make a new one")
        if self._connecting is None or (self._connecting.done() and self._failed_to_connect()):
            self._connecting = asyncio.create_task(self._connect())
        await asyncio.shield(self._connecting)

    async def generate(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Completion:
        """Run one request to its end; cancelling the coroutine ends it. `prompt`: text, token ids or chat messages.

        `options`: see `GenerateOptions`. Raises the typed errors of `baton.errors`; RequestFailedError also after
        `timeout` seconds.
        """
        stream = self.stream(
            prompt,
            timeout=timeout,
            **options,
        )
        return await stream.result()

    def stream(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncStream:
        """Start a request now and return its stream. Wrong arguments raise InvalidRequestError at once."""
        message = build_generate(
            self._new_label(),
            prompt,
            **options,
        )
        stream = AsyncStream(self, message.label, timeout)
        self._start(message, stream._events.put_nowait, time.monotonic())
        return stream

    async def status(self) -> Status:
        """The cluster as the router sees it; ClusterError if the router does not answer."""
        await self.connect()
        status: Status = await self._ask(StatusRequest)
        return status

    async def explain(self, request_id: str) -> RequestRecord:
        """Where a request went and why, open or ended: candidates' scores, attempts, marks. By id or the start of one.

        InvalidRequestError if the router knows none.
        """
        await self.connect()
        answer: Explained = await self._ask(lambda label: Explain(label, request_id))
        return msgspec.convert(answer.record, RequestRecord)

    async def overview(self) -> dict[str, Any]:
        """Pools, workers, latencies and the last requests in short: what `GET /baton/overview` answers."""
        await self.connect()
        answer: Overview = await self._ask(OverviewRequest)
        return answer.data

    async def records(self, limit: int = 50) -> list[RequestRecord]:
        """What became of the last requests that ended, at most `limit` (1 to 1024), the latest first.

        Without what candidates cost, which `explain` tells of one.
        """
        await self.connect()
        answer: Records = await self._ask(lambda label: RecordsRequest(label, limit))
        return msgspec.convert(answer.records, list[RequestRecord])

    async def drain(self, worker_id: str, *, undo: bool = False) -> Status:
        """Let a worker finish what it has and get nothing new (`undo`: again); the cluster as of then.

        It is drained when its `num_outstanding` in the status is 0. InvalidRequestError for an unknown worker.
        """
        await self.connect()
        status: Status = await self._ask(lambda label: Drain(label, worker_id, undo))
        return status

    async def ledger(
        self, worker_id: str | None = None, *, block_ids: bool = False, timeout: float = LEDGER_TIMEOUT_S
    ) -> ClusterLedger:
        """Who holds which KV blocks and why, by worker (or of this one), with the open requests beside them.

        A worker that does not answer within `liveness.timeout_s` is shown as silent. InvalidRequestError for an unknown
        worker, ClusterError if the router does not answer within `timeout` seconds.
        """
        await self.connect()
        ledger: ClusterLedger = await self._ask(lambda label: LedgerRequest(label, worker_id, block_ids), timeout)
        return ledger

    async def close(self) -> None:
        """End all open requests and the connection."""
        if self._closed:
            return
        self._closed = True
        for label in list(self._calls):
            self._cancel(label)
        self._fail_all(RequestFailedError("the client was closed"))
        await asyncio.sleep(0)  # lets the cancellations that were just queued reach the socket
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._context is not None:
            self._context.destroy(linger=LINGER_MS)

    async def __aenter__(self) -> AsyncRouterClient:
        try:
            await self.connect()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # --- the connection ---------------------------------------------------------------------------

    async def _connect(self) -> None:
        if self._context is None:
            self._context = zmq.asyncio.Context()
            self._socket: zmq.asyncio.Socket = self._context.socket(zmq.DEALER)
            self._socket.setsockopt(zmq.LINGER, LINGER_MS)
            self._socket.setsockopt(zmq.RCVHWM, 0)  # the router's limit applies; ours would only hide it
            self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
            self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
            self._security.secure_client(self._socket)
            if self.address.startswith("tcp://["):
                self._socket.setsockopt(zmq.IPV6, 1)
            monitor: zmq.asyncio.Socket = self._socket.get_monitor_socket(
                HANDSHAKE_EVENTS | int(zmq.EVENT_DISCONNECTED)
            )
            try:
                self._socket.connect(self.address)
            except zmq.ZMQError as e:
                raise ClusterError(
                    f"{self.address!r} is not an address of a router ({e.strerror}); it looks like tcp://127.0.0.1:5555"
                ) from e
            for loop in (self._read(), self._watch_connection(monitor), self._watch_silence()):
                self._spawn(loop)
        if self._shut_out is not None:
            raise ClusterError(self._shut_out)
        await self._ask(StatusRequest)

    def _failed_to_connect(self) -> bool:
        task = self._connecting
        return task is not None and (task.cancelled() or task.exception() is not None)

    async def _ask(self, question: Callable[[str], Question], timeout: float | None = None) -> Any:
        timeout = self._connect_timeout if timeout is None else timeout
        label = f"status-{next(self._labels)}"
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._asked[label] = answer
        self._send(question(label))
        try:
            async with asyncio.timeout(timeout):
                return await answer
        except TimeoutError:
            raise ClusterError(
                f"no router answered at {self.address} within {timeout:g} s; see whether it runs "
                f"with `baton status`, start it with `baton up`, and check the address"
            ) from None
        finally:
            self._asked.pop(label, None)

    async def _read(self) -> None:
        while True:
            data = await self._socket.recv()
            self._heard_at = at = time.monotonic()
            try:
                message = self._in.decode(data)
            except (CodecError, VersionError) as e:
                self._fail_all(e)
                continue
            kind = type(message)
            if kind is Delta:
                self._on_delta(message, at)
            elif kind is Deltas:
                for delta in message.deltas:
                    self._on_delta(delta, at)
            elif kind is Done:
                call = self._calls.pop(message.label, None)
                if call is not None:
                    if message.text:
                        call.sink(call.collector.add(Delta(message.label, (), message.text), at))
                    call.sink(call.collector.complete(message, at))
            elif kind is Failed:
                self._on_failed(message)
            elif kind in ANSWERS:
                answer = self._asked.get(message.label)
                if answer is not None and not answer.done():
                    answer.set_result(message)

    def _on_delta(self, delta: Delta, at: float) -> None:
        call = self._calls.get(delta.label)
        if call is not None:
            call.sink(call.collector.add(delta, at))

    def _on_failed(self, message: Failed) -> None:
        error = error_from_code(message.code, message.message, field=message.field, retry_after_s=message.retry_after_s)
        call = self._calls.pop(message.label, None)
        answer = self._asked.get(message.label)
        if call is not None:
            call.sink(error)
        elif answer is not None:
            if not answer.done():
                answer.set_exception(error)
        elif not message.label:  # about bytes in which the router found no label: it understands nothing of ours
            self._fail_all(error)

    async def _watch_connection(self, monitor: zmq.asyncio.Socket) -> None:
        handshakes = Handshakes(self._security)
        while True:
            message = parse_monitor_message(await monitor.recv_multipart())
            event = int(message["event"])
            if (problem := handshakes.problem(event, int(message["value"]))) is not None:
                self._shut_out = f"the router at {self.address} {problem}"
                self._fail_all(ClusterError(self._shut_out))
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._shut_out = None
            if event != zmq.EVENT_DISCONNECTED:
                continue
            lost = list(self._calls)
            self._connecting = None  # ZeroMQ reconnects by itself, but is a router there? The next call asks
            await asyncio.sleep(GRACE_S)
            self._fail_all(RequestFailedError(f"the connection to the router at {self.address} was lost"), lost)

    async def _watch_silence(self) -> None:
        """One timer however many requests: wakes when the silence could be too long at the earliest."""
        while True:
            await asyncio.sleep(self._silence_timeout / 4)
            since = time.monotonic() - self._silence_timeout
            if self._calls and self._heard_at < since:
                silent = [label for label, call in self._calls.items() if call.collector.started_at < since]
                text = f"the router at {self.address} was silent for {self._silence_timeout:g} s"
                self._fail_all(RequestFailedError(text), silent)

    # --- requests ---------------------------------------------------------------------------------

    def _new_label(self) -> str:
        return str(next(self._labels))

    def _start(self, message: Generate, sink: Callable[[Event], None], started_at: float) -> None:
        """Send it, after connecting if need be. `sink` gets what happens, last a Completion or an error."""
        label = message.label
        call = self._calls[label] = _Call(sink, started_at, message)
        if self._connecting is not None and self._connecting.done() and not self._failed_to_connect():
            self._send(message)
            return

        call.cancelled = []

        async def connect_and_send() -> None:
            try:
                await self.connect()
            except BatonError as e:
                if self._calls.pop(label, None) is not None:
                    sink(e)
                return
            if self._calls.get(label) is call:
                self._send(message)
                for cancel in call.cancelled or ():
                    self._send(cancel)
                call.cancelled = None

        self._spawn(connect_and_send())

    def _cancel(self, label: str, sample: int | None = None) -> None:
        call = self._calls.get(label)
        if call is None:
            return
        if call.cancelled is None:
            self._send(Cancel(label, sample))
        else:
            call.cancelled.append(Cancel(label, sample))

    def _abandon(self, label: str) -> None:
        """End it and do not wait for the answer."""
        if self._calls.pop(label, None) is not None:
            self._send(Cancel(label))

    def _fail_all(self, error: BatonError, labels: Iterable[str] | None = None) -> None:
        for label in list(self._calls if labels is None else labels):
            call = self._calls.pop(label, None)
            if call is not None:
                call.sink(error)
        if labels is None:
            for answer in self._asked.values():
                if not answer.done():
                    answer.set_exception(error)

    def _send(self, message: Any) -> None:
        if self._context is not None and not self._socket.closed:
            future: Any = self._socket.send(self._out.encode(message))
            future.add_done_callback(_consume)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _consume(future: asyncio.Future[Any]) -> None:
    """A send that fails shows as silence or a lost connection; asyncio shall not report it again."""
    if not future.cancelled():
        future.exception()

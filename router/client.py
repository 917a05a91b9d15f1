"""`RouterClient`: a router's client for ordinary code, safe to use from many threads at once.

It is `AsyncRouterClient` on an event loop of its own in a background thread; callers wait on plain
queues, so Ctrl-C interrupts a call at once and ends its request.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar, Unpack

from baton.config import Secret
from baton.errors import ClusterError, RequestFailedError
from baton.ledger import ClusterLedger
from baton.protocol import Status
from router.async_client import (
    CONNECT_TIMEOUT_S,
    LEDGER_TIMEOUT_S,
    LEFT_EARLY,
    SILENCE_TIMEOUT_S,
    AsyncRouterClient,
    AsyncStream,
    Event,
)
from router.completion import Choice, Completion, GenerateOptions, Prompt, StreamDelta, build_generate
from router.records import RequestRecord

__all__ = [
    "AsyncRouterClient",
    "AsyncStream",
    "Choice",
    "Completion",
    "GenerateOptions",
    "Prompt",
    "RouterClient",
    "Stream",
    "StreamDelta",
]

T = TypeVar("T")


class Stream:
    """The deltas of one request; iterate it once. Leaving the loop early, or `cancel`, ends the request.

    After the loop `completion` is set. As a context manager it also ends a request that nobody iterates.
    """

    def __init__(self, client: RouterClient, label: str, timeout: float | None):
        self.completion: Completion | None = None
        self._abandoned = False
        self._client = client
        self._label = label
        self._timeout = timeout
        self._give_up_at = None if timeout is None else time.monotonic() + timeout
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def __iter__(self) -> Iterator[StreamDelta]:
        if self._abandoned:
            raise RequestFailedError(LEFT_EARLY)
        try:
            while self.completion is None:
                event = self._next()
                if isinstance(event, StreamDelta):
                    yield event
                elif isinstance(event, Completion):
                    self.completion = event
                else:
                    raise event
        finally:
            self._abandon()

    def result(self) -> Completion:
        """Wait for the end; raises the request's error."""
        for _ in self:
            pass
        assert self.completion is not None
        return self.completion

    def cancel(self, sample: int | None = None) -> None:
        """Ask for the end, of all or of one sample: the completion's or the choice's finish reason is `abort` then."""
        self._client._post(self._client._async._cancel, self._label, sample)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self._abandon()

    def _next(self) -> Event:
        if self._give_up_at is None:
            return self._events.get()
        try:
            return self._events.get(timeout=max(0.0, self._give_up_at - time.monotonic()))
        except queue.Empty:
            raise RequestFailedError(f"not complete within {self._timeout:g} s; the request was cancelled") from None

    def _abandon(self) -> None:
        if self.completion is None:
            self._abandoned = True
            self._client._post(self._client._async._abandon, self._label)


class RouterClient:
    """One connection to a router. Connects at the first call, or by `with`.

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
        self._async = AsyncRouterClient(
            address, connect_timeout=connect_timeout, silence_timeout=silence_timeout, secret=secret
        )
        self._lock = threading.Lock()
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="baton-client", daemon=True)
        self._thread.start()

    def connect(self) -> None:
        """Reach the router; ClusterError if it does not answer. The calls below do it too."""
        self._run(self._async.connect())

    def generate(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Completion:
        """Run one request to its end. `prompt`: text, token ids or chat messages.

        `options`: see `GenerateOptions`. Raises the typed errors of `baton.errors`; RequestFailedError also after
        `timeout` seconds.
        """
        stream = self.stream(
            prompt,
            timeout=timeout,
            **options,
        )
        return stream.result()

    def stream(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Stream:
        """Start a request now and return its stream. Wrong arguments raise InvalidRequestError at once."""
        started_at = time.monotonic()
        message = build_generate(
            self._async._new_label(),
            prompt,
            **options,
        )
        stream = Stream(self, message.label, timeout)
        if not self._post(self._async._start, message, stream._events.put, started_at):
            raise ClusterError("this client is closed; make a new one")
        return stream

    def status(self) -> Status:
        """The cluster as the router sees it; ClusterError if the router does not answer."""
        return self._run(self._async.status())

    def explain(self, request_id: str) -> RequestRecord:
        """Where a request went and why, open or ended; see `AsyncRouterClient.explain`."""
        return self._run(self._async.explain(request_id))

    def overview(self) -> dict[str, Any]:
        """Pools, workers, latencies and the last requests in short; see `AsyncRouterClient.overview`."""
        return self._run(self._async.overview())

    def records(self, limit: int = 50) -> list[RequestRecord]:
        """What became of the last requests that ended; see `AsyncRouterClient.records`."""
        return self._run(self._async.records(limit))

    def ledger(
        self, worker_id: str | None = None, *, block_ids: bool = False, timeout: float = LEDGER_TIMEOUT_S
    ) -> ClusterLedger:
        """Who holds which KV blocks and why; see `AsyncRouterClient.ledger`."""
        return self._run(self._async.ledger(worker_id, block_ids=block_ids, timeout=timeout))

    def drain(self, worker_id: str, *, undo: bool = False) -> Status:
        """Let a worker finish what it has and get nothing new; see `AsyncRouterClient.drain`."""
        return self._run(self._async.drain(worker_id, undo=undo))

    def close(self) -> None:
        """End all open requests and the connection. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        asyncio.run_coroutine_threadsafe(self._async.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> RouterClient:
        try:
            self.connect()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        with self._lock:
            if self._closed:
                coroutine.close()
                raise ClusterError("this client is closed; make a new one")
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _post(self, function: Any, *arguments: Any) -> bool:
        """Call it on the loop's thread, soon; False if the client is closed."""
        with self._lock:
            if not self._closed:
                self._loop.call_soon_threadsafe(function, *arguments)
            return not self._closed

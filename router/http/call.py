"""One HTTP request's share of the router: its requests (one per prompt), and what has come of them.

Knows the desk; must not know HTTP or JSON.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from baton.protocol import Delta, Done, Failed, Generate, ToClient
from router.desk import Desk, Sink

MAX_WAITING = 1 << 14
"""Messages that wait for a client that does not read; some megabytes. More, and it has lost its requests."""


class Gone(Exception):
    """The client has left: nobody wants an answer any more."""


class TooSlow(Exception):
    """The client took its answer so slowly that it lost the rest."""


class Call(Sink):
    """Collects what the router tells until somebody asks. `leave` when nobody will any more."""

    def __init__(self, desk: Desk):
        self.num_open = 0
        """Requests that have not ended."""
        self.failed = False
        """One of them has ended without an answer."""
        self.left = False
        self.at_once: Callable[[list[Delta]], bool] | None = None
        """Tells the client and returns True, or neither. Asked only while `news` waits, so all before has been told."""
        self._too_slow = False
        self._desk = desk
        self._news: list[ToClient] = []
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None

    def start(
        self, message: Generate, received_at: float, *, prompt: tuple[int, ...] | None = None, request_id: str
    ) -> None:
        """Begin a request; its label must be unique in this call. Refusals come as news, too (Failed).

        Raises Gone if the client has left.
        """
        if self.left:
            raise Gone
        self.num_open += 1
        self._desk.generate(self, message, received_at, prompt=prompt, request_id=request_id)

    async def news(self) -> list[ToClient]:
        """What has come since the last call, at least one message: Delta, and Done or Failed at a request's end.

        Raises Gone once the client has left, TooSlow if too much waited for this call.
        """
        if not self._news and not self.left:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self.left:
            raise TooSlow if self._too_slow else Gone
        news, self._news = self._news, []
        return news

    def leave(self) -> None:
        """End what is open; nothing is told of it any more. Idempotent."""
        if self.left:
            return
        self.left = True
        if self.num_open:
            self._desk.leave(self)
        self._news.clear()
        self._tell()

    # --- called by the desk ---------------------------------------------------------------------------

    def on_deltas(self, deltas: list[Delta]) -> None:
        if self.left:
            return
        if self.at_once is not None and self._waiter is not None and not self._waiter.done() and self.at_once(deltas):
            return  # without waking a task, which costs as much as the rest of it
        self._news += deltas
        if self._waiter is not None:
            self._tell()
        elif len(self._news) > MAX_WAITING and not self._too_slow:
            self._too_slow = True
            self._loop.call_soon(self.leave)  # not while the desk is telling its clients

    def on_message(self, message: ToClient) -> None:
        if type(message) is Done or type(message) is Failed:
            self.num_open -= 1
            self.failed = self.failed or type(message) is Failed
        if not self.left:
            self._news.append(message)
            self._tell()

    def _tell(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

"""One HTTP request's share of the router: its requests (one per prompt), and what has come of them.

Knows the desk; must not know HTTP or JSON.
"""

from __future__ import annotations

import asyncio

from baton.protocol import Delta, Done, Failed, Generate, ToClient
from router.desk import Desk, Sink


class Call(Sink):
    """Collects what the router tells until somebody asks. `leave` when nobody will any more."""

    def __init__(self, desk: Desk):
        self.num_open = 0
        """Requests that have not ended."""
        self._desk = desk
        self._news: list[ToClient] = []
        self._waiter: asyncio.Future[None] | None = None

    def start(self, message: Generate, received_at: float, *, prompt: tuple[int, ...] | None = None) -> None:
        """Begin a request; its label must be unique in this call. Refusals come as news, too (Failed)."""
        self.num_open += 1
        self._desk.generate(self, message, received_at, prompt=prompt)

    async def news(self) -> list[ToClient]:
        """What has come since the last call, at least one message: Delta, and Done or Failed at a request's end."""
        if not self._news:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        news, self._news = self._news, []
        return news

    def cancel(self, label: str, sample: int | None = None) -> None:
        """End one request, or one of its samples, with finish reason `abort`."""
        self._desk.cancel(self, label, sample)

    def leave(self) -> None:
        """End what is open; nothing is told of it any more."""
        if self.num_open:
            self._desk.leave(self)

    # --- called by the desk ---------------------------------------------------------------------------

    def on_deltas(self, deltas: list[Delta]) -> None:
        self._news += deltas
        self._tell()

    def on_message(self, message: ToClient) -> None:
        if type(message) is Done or type(message) is Failed:
            self.num_open -= 1
        self._news.append(message)
        self._tell()

    def _tell(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

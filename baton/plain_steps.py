"""PlainSteps: what most of a decode worker's messages say, in columns.

Most steps tell one token of each running request, and nothing else. Whoever carries bytes has to say that token by
token (`baton.protocol.Tokens`); a driver that hands objects over tells it of all requests, and of several steps, at
once. Plain data; must not know engines or routers.
"""

from __future__ import annotations

from typing import Any

import msgspec

from baton.protocol import LoadReport, RequestKey, TokenOut, Tokens, WorkerInfo


class PlainSteps:
    """Consecutive steps of one worker, each of which told the same `token` of each of the same requests."""

    __slots__ = ("arrivals", "first", "keys", "loads", "requests", "rest", "token")

    def __init__(self, token: int, keys: list[RequestKey], first: list[int]):
        self.token = token
        self.keys = keys
        self.first = first
        """By request, the index of its token of the first of these steps."""
        self.rest: Tokens | None = None
        """What else a step told, if it is only one."""
        self.arrivals: list[float] = []
        """By step, when the router hears of it, in seconds."""
        self.loads: list[LoadReport] = []
        """By step, what the worker reports with it."""
        self.requests: Any = None
        """The router's requests of these keys, once it has looked them up."""

    def add(self, arrival: float, load: LoadReport) -> None:
        """One step more."""
        self.arrivals.append(arrival)
        self.loads.append(load)

    def in_full(self, worker: WorkerInfo) -> Tokens:
        """The same token by token, of a single step."""
        (load,) = self.loads
        rows = [TokenOut(*key, index, self.token, None) for key, index in zip(self.keys, self.first, strict=True)]
        if self.rest is None:
            return Tokens(worker.worker_id, worker.incarnation, tuple(rows), load=load)
        return msgspec.structs.replace(self.rest, tokens=(*rows, *self.rest.tokens))

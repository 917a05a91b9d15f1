"""In which order waiting requests are served: by priority, then fairly among short and long prompts.

Within a priority the order is that of start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996) with every request
a flow of its own: a request's *finish tag* is the virtual time at which it came plus the tokens that it has to compute,
and the virtual time is the number of tokens computed since. So a short prompt passes a long one that came a moment
before, and a long one waits for no more later work than it is itself: nobody starves.

Pure. Knows nothing of blocks and steps.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from baton.engine.request import EngineRequest


class FairQueue:
    """The waiting requests, next one first. Whoever was served and comes back keeps the place that it had."""

    def __init__(self) -> None:
        self._requests: list[EngineRequest] = []
        self._virtual_time = 0
        self._arrivals = 0

    def stamp(self, request: EngineRequest) -> None:
        """The request has come: its place depends on what is computed from now on, whenever it is pushed."""
        self._arrivals += 1
        tag = self._virtual_time + len(request.tokens) - request.num_computed
        request.order = (request.priority, tag, self._arrivals)

    def push(self, request: EngineRequest) -> None:
        insort(self._requests, request, key=order)

    def push_back(self, request: EngineRequest) -> None:
        """A request that ran and lost its blocks: it goes on before all others of its priority that did not."""
        request.order = (request.priority, -1, request.order[2])
        self.push(request)

    def remove(self, request: EngineRequest) -> None:
        self._requests.remove(request)

    def advance(self, num_tokens: int) -> None:
        """So many tokens of prompts were computed."""
        self._virtual_time += num_tokens

    def __iter__(self) -> Iterator[EngineRequest]:
        return iter(self._requests)

    def __reversed__(self) -> Iterator[EngineRequest]:
        return reversed(self._requests)

    def __len__(self) -> int:
        return len(self._requests)


def order(request: EngineRequest) -> tuple[int, int, int]:
    """The key of the order: priority, finish tag, number of arrival."""
    return request.order

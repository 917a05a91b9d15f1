"""The router's queue: samples of requests that wait for a worker with room, and how fast they leave.

Pure data and arithmetic: time is an argument. Must not know workers or placements.

Order: priority (lower first), then arrival; a sample that is placed again keeps its place in it. How long a request
will wait here is told from the rate at which others left: `leave_rate` requests per second, measured while somebody
waited, the last `MEMORY_S` seconds of such time weighing most.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator

from router.request import ClientRequest, RoutedRequest

MEMORY_S = 10.0
MIN_MEASURED_S = 0.25
"""Of a shorter time no rate is told: the first to leave may have come a moment ago."""

_Entry = tuple[int, int, int, RoutedRequest]


class RequestQueue:
    """Samples in the state QUEUED, each once."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._left = 0.0
        """Requests that left, the older ones counting less."""
        self._busy_s = 0.0
        """Seconds in which somebody waited, likewise."""
        self._counted_at: float | None = None
        """Until when `_busy_s` is right; None: nobody waits."""

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[RoutedRequest]:
        """In order."""
        return (entry[3] for entry in self._entries)

    def add(self, request: RoutedRequest, now: float) -> None:
        if self._counted_at is None:
            self._counted_at = now
        insort(self._entries, _entry(request))

    def remove(self, request: RoutedRequest, now: float) -> None:
        """It waits no more: it ended."""
        entry = _entry(request)
        at = bisect_left(self._entries, entry)
        assert self._entries[at] == entry, f"not in the queue: {request}"
        del self._entries[at]
        if not self._entries:
            self._count(now)
            self._counted_at = None

    def leave(self, request: RoutedRequest, now: float) -> None:
        """It waits no more: it goes to a worker."""
        self._count(now)
        self._left += 1
        self.remove(request, now)

    def first(self, limit: int) -> list[RoutedRequest]:
        """The next ones, at most `limit`."""
        return [entry[3] for entry in self._entries[:limit]]

    def goes_first(self, owner: ClientRequest) -> bool:
        """Whether this request, which is not here, would be the next."""
        return not self._entries or (owner.priority, owner.order) < self._entries[0][:2]

    def num_before(self, owner: ClientRequest) -> int:
        """Samples that would be placed before this request."""
        return bisect_left(self._entries, (owner.priority, owner.order), key=_place)

    def less_important(self, priority: int) -> Iterator[ClientRequest]:
        """Requests here that have not begun and are less important than `priority`, the last one first."""
        seen: ClientRequest | None = None
        for _, _, _, request in reversed(self._entries):
            owner = request.owner
            if owner.priority <= priority:
                return
            if owner is not seen and all(s.attempt == 0 and not s.placements for s in owner.open_samples()):
                seen = owner
                yield owner

    def leave_rate(self, now: float) -> float | None:
        """Samples per second that leave for a worker while some wait; None: nothing to tell it from."""
        self._count(now)
        return self._left / self._busy_s if self._left and self._busy_s >= MIN_MEASURED_S else None

    def wait_s(self, num_before: int, now: float) -> float | None:
        """Until one that has so many before it has left, like them: `(num_before + 1) / leave_rate`."""
        rate = self.leave_rate(now)
        return None if rate is None else (num_before + 1) / rate

    def _count(self, now: float) -> None:
        if self._counted_at is None or now <= self._counted_at:
            return
        elapsed, self._counted_at = now - self._counted_at, now
        kept = math.exp(-elapsed / MEMORY_S)
        self._left *= kept
        # The integral of what a second still counts: elapsed seconds do not all count as one.
        self._busy_s = self._busy_s * kept + MEMORY_S * (1 - kept)


def _entry(request: RoutedRequest) -> _Entry:
    return request.owner.priority, request.owner.order, request.sample, request


def _place(entry: _Entry) -> tuple[int, int]:
    return entry[:2]

"""Which of many keys is due next, where most deadlines move on before they are reached.

Pure; knows neither clocks nor what the keys mean.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from itertools import count
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Deadlines(Generic[K]):
    """A heap whose entries are corrected when they surface, so that moving a deadline on is O(1)."""

    def __init__(self) -> None:
        self._when: dict[K, float] = {}
        self._queued: dict[K, float] = {}
        """The time under which a key lies in the heap: never later than its deadline."""
        self._heap: list[tuple[float, int, K]] = []
        self._order = count()

    def set(self, key: K, when: float | None) -> None:
        """`key` is due at `when` (seconds); None: it never is."""
        if when is None:
            self._when.pop(key, None)
            return
        self._when[key] = when
        if when < self._queued.get(key, float("inf")):
            self._push(key, when)

    def next(self) -> float | None:
        """No later than the earliest deadline; None: there is none."""
        while self._heap:
            queued, _, key = self._heap[0]
            when = self._when.get(key)
            if self._queued.get(key) == queued and when is not None and when <= queued:
                return queued
            heapq.heappop(self._heap)
            if self._queued.get(key) == queued:
                del self._queued[key]
                if when is not None:
                    self._push(key, when)
        return None

    def due(self, now: float) -> list[K]:
        """The keys whose deadline has come, which then have none any more."""
        keys: list[K] = []
        while (when := self.next()) is not None and when <= now:
            _, _, key = heapq.heappop(self._heap)
            del self._queued[key], self._when[key]
            keys.append(key)
        return keys

    def _push(self, key: K, when: float) -> None:
        self._queued[key] = when
        heapq.heappush(self._heap, (when, next(self._order), key))

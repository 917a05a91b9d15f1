"""VirtualClock: what happens next, and when. The simulator's only source of time.

Pure. Events at the same instant happen in the order in which they were asked for, so a run repeats exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class VirtualClock:
    """`now` in seconds; `after` and `at` plan calls, `step` does the next one."""

    def __init__(self, start: float = 0.0):
        self.now = start
        self.num_events = 0
        self.limit = float("inf")
        """Nobody will call `step` for what is later than this, for now."""
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def after(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        self.num_events = number = self.num_events + 1
        heappush(self._heap, (self.now + seconds if seconds > 0 else self.now, number, call, args))

    def at(self, when: float, call: Callable[..., None], *args: Any) -> None:
        """Plan `call(*args)`. What would lie in the past happens now."""
        self.num_events = number = self.num_events + 1
        heappush(self._heap, (when if when > self.now else self.now, number, call, args))

    def next_at(self) -> float | None:
        """When the next event is; None: nothing is planned."""
        return self._heap[0][0] if self._heap else None

    def horizon(self) -> float:
        """Until then nothing happens, beside what is happening now."""
        heap = self._heap
        return heap[0][0] if heap and heap[0][0] < self.limit else self.limit

    def step(self) -> None:
        """Go on to the next event and do it."""
        self.now, _, call, args = heappop(self._heap)
        call(*args)


class Alarm:
    """Wakes a core at its `next_deadline`, with few events: moved deadlines are looked up when the old one comes."""

    def __init__(self, clock: VirtualClock, next_deadline: Callable[[], float | None], ring: Callable[[], None]):
        self._clock = clock
        self._next_deadline = next_deadline
        self._ring = ring
        self._set_for = float("inf")
        self._stopped = False

    def stop(self) -> None:
        """The core's life is over: nothing wakes it any more."""
        self._stopped = True

    def update(self) -> None:
        """To be called after whatever may have brought a deadline forward."""
        deadline = self._next_deadline()
        if deadline is not None and deadline < self._set_for:
            self._set_for = deadline
            self._clock.at(deadline, self._wake, deadline)

    def _wake(self, planned: float) -> None:
        if self._stopped or planned != self._set_for:
            return  # or an earlier one was set since
        self._set_for = float("inf")
        deadline = self._next_deadline()
        if deadline is not None and deadline <= self._clock.now:
            self._ring()
            following = self._next_deadline()
            assert following is None or following > self._clock.now, "a deadline in the past would spin"
        self.update()

"""Whether a request goes to a worker now, waits, or is not let in: what lies between admission and placement.

Pure: reads the view, asks the policy, keeps the queue and the breakers. Must not know messages, or how a request
proceeds once it is at its workers.

Who may take it: first those that failed no attempt of it and whose breaker lets it through, then the others. Within
such a set it waits for a worker that has room rather than go to one outside.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import msgspec

from baton.config import ClusterConfig
from baton.errors import OverloadedError
from router.admission import predict_prefill_s
from router.breaker import Breakers
from router.policy import Demand, Placement, PlacementPolicy
from router.queue import RequestQueue
from router.request import ClientRequest, RoutedRequest, State
from router.view import ClusterView, WorkerView

URGENT = 0
"""Requests of a lower priority are let in whatever their predicted time to the first token is."""
RETRY_AFTER_S = 1.0
"""What a refused client is told while nothing was measured that would tell more."""


class Dispatch:
    """The queue, the breakers, and the way past both."""

    def __init__(self, config: ClusterConfig, view: ClusterView, policy: PlacementPolicy):
        self.queue = RequestQueue()
        self.breakers = Breakers(config.router)
        self._view = view
        self._policy = policy
        self._max_requests = config.router.max_requests
        self._max_queue = config.router.max_queue
        self._slo_s = None if config.router.slo_ttft_ms is None else config.router.slo_ttft_ms / 1e3

    # --- where to -----------------------------------------------------------------------------------

    def find(self, request: RoutedRequest, now: float) -> Placement | None:
        """Where its current attempt goes; None: those who could take it have no room for now.

        Raises OverloadedError if nobody could take it, whatever room there were.
        """
        view, place = self._view, self._policy.place
        for avoid in self._preferred(request, now):
            try:
                return place(request.demand, view, now, avoid, view.full)
            except OverloadedError as e:
                nobody = e
            if view.full:
                try:
                    place(request.demand, view, now, avoid)
                    return None
                except OverloadedError as e:
                    nobody = e
        raise nobody

    def _preferred(self, request: RoutedRequest, now: float) -> Iterator[Collection[str]]:
        """Ids of workers to avoid: worse ones are left over each time, the last time only those that are out."""
        out = request.failed_last if now < request.suspected_until else frozenset[str]()
        shut = self.breakers.shut(now)
        for breakers in (shut, frozenset[str]()) if shut else (shut,):
            if request.avoid:
                yield request.avoid | breakers
                yield request.failed_last | breakers
            yield out | breakers

    def find_decode(self, request: RoutedRequest, prefill: WorkerView, now: float) -> Placement | None:
        """Another decode worker for an attempt that is at `prefill` and was refused by `request.refused`.

        One that has room, if there is one: it cannot wait where it is. None if nobody is left.
        """
        view, place = self._view, self._policy.place_decode
        busy = {*view.full, *self.breakers.shut(now)}
        if busy:
            placement = place(request.demand, prefill, view, now, request.refused | busy)
            if placement is not None:
                return placement
        return place(request.demand, prefill, view, now, request.refused)

    def has_room(self) -> bool:
        """Whether some worker could decode one more, whatever its size."""
        view = self._view
        return not view.full or any(w.can_decode and w.worker_id not in view.full for w in view.placeable())

    def holds_all(self, now: float) -> bool:
        """Whether somebody could take whoever is in the queue, whatever room there is."""
        demands = [request.demand for request in self.queue]
        if not demands:
            return True
        largest = msgspec.structs.replace(
            demands[0], context=max(d.context for d in demands), total=max(d.total for d in demands)
        )
        try:
            self._policy.place(largest, self._view, now)
        except OverloadedError:
            return False
        return True

    # --- who is let in --------------------------------------------------------------------------------

    def enter(self, owner: ClientRequest, num_open: int, now: float) -> tuple[Placement | None, list[ClientRequest]]:
        """Let a new request in, beside `num_open` samples: where it goes, or None if it waits in the queue.

        And the less important ones that must leave the queue for it. Raises OverloadedError, with nothing changed.
        """
        request, n = owner.samples[0], len(owner.samples)
        placement = None
        if self.queue.goes_first(owner) or self.has_room():
            placement = self.find(request, now)
        num_before = self.queue.num_before(owner)
        if self._slo_s is not None and owner.priority >= URGENT:
            self._check_slo(request.demand, placement, num_before, now)
        excess = num_open + n - self._max_requests
        if placement is None and self._max_queue is not None:
            excess = max(excess, len(self.queue) + n - self._max_queue)
        displaced: list[ClientRequest] = []
        if excess > 0:
            displaced = self._displaced(owner, excess)
            if not displaced:
                raise OverloadedError(
                    self._full(num_open, n), retry_after_s=self.retry_after_s(len(self.queue) + n - 1, now)
                )
        return placement, displaced

    def _full(self, num_open: int, n: int) -> str:
        if num_open + n > self._max_requests:
            return (
                f"{num_open} requests are in the system, router.max_requests is {self._max_requests}; "
                f"retry when some have ended"
            )
        return (
            f"all workers have as many requests under way as they may, and {len(self.queue)} more wait, "
            f"router.max_queue is {self._max_queue}; retry when some have been served"
        )

    def _displaced(self, owner: ClientRequest, excess: int) -> list[ClientRequest]:
        """Less important requests in the queue, the least important first, that make room for it; empty: not enough."""
        displaced: list[ClientRequest] = []
        for other in self.queue.less_important(owner.priority):
            displaced.append(other)
            excess -= other.num_open
            if excess <= 0:
                return displaced
        return []

    def retry_after_s(self, num_before: int, now: float) -> float:
        """For who is refused: until all that wait now, and it, would have been placed, `(num_before + 1) / rate`."""
        wait_s = self.queue.wait_s(num_before, now)
        return RETRY_AFTER_S if wait_s is None else wait_s

    def _check_slo(self, demand: Demand, placement: Placement | None, num_before: int, now: float) -> None:
        """Raises OverloadedError if its first token would come too late; who cannot tell lets it in."""
        assert self._slo_s is not None
        if placement is not None:
            seconds = predict_prefill_s(demand, [self._view.workers[placement.prefill]])
        else:
            workers = [w for w in self._view.placeable() if w.can_prefill]
            wait_s = self.queue.wait_s(num_before, now)
            # With nobody measured the queue is still known, and the other way round.
            seconds = None if wait_s is None else wait_s + (predict_prefill_s(demand, workers) or 0.0)
        if seconds is not None and seconds > self._slo_s:
            raise OverloadedError(
                f"the first token would come after {seconds * 1e3:.0f} ms, router.slo_ttft_ms is "
                f"{self._slo_s * 1e3:g}; retry when there is less to do",
                retry_after_s=seconds - self._slo_s,
            )

    # --- for tests --------------------------------------------------------------------------------------

    def check_integrity(self, open_requests: Collection[RoutedRequest]) -> None:
        """Assert that the queue holds who is QUEUED, in order, and that the first one does not wait for nothing."""
        queued = list(self.queue)
        assert {r.id for r in queued} == {r.id for r in open_requests if r.state is State.QUEUED}
        places = [(r.owner.priority, r.owner.order, r.sample) for r in queued]
        assert places == sorted(set(places)), "the queue is out of order"
        if queued:
            first = queued[0]
            avoid = {*first.avoid, *self.breakers.tripped}
            try:
                placement = self._policy.place(first.demand, self._view, 0.0, avoid, self._view.full)
            except OverloadedError:
                return
            raise AssertionError(f"{first} waits, though there is {placement}")

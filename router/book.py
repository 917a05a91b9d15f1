"""The router's open requests, sample by sample: found by id, by client and label, by when they are due, by their cost.

Pure bookkeeping that keeps these indexes in step. Must not know messages, and decides nothing.
"""

from __future__ import annotations

import heapq
import math

from router.actions import ClientId
from router.request import ClientRequest, RoutedRequest, SampleId, State
from router.view import ClusterView, WorkerView

MAX_STALE = 64
"""Ended requests whose time is still watched, beyond as many as are open."""


class RequestBook:
    """Every open request is in it exactly once; `remove` undoes all that `add`, `charge` and `set_timer` did."""

    def __init__(self, view: ClusterView):
        self.by_id: dict[SampleId, RoutedRequest] = {}
        self.first: dict[str, RoutedRequest] = {}
        """Those of sample 0, by request id: of most requests the only one, and found faster."""
        self.timers: dict[SampleId, float] = {}
        """At most one per sample: parked, settling, or running with a gap in its tokens."""
        self.wake_at = math.inf
        """Not later than any timer. It may be earlier than all of them, `due` makes it exact again."""
        self.freed = False
        """A hand-over on its way to a worker ended since this was last made False: there may be room for another."""
        self._ends: list[tuple[float, SampleId]] = []
        """A heap: when the time of requests is over, also of some that have ended."""
        self._view = view
        self._by_client: dict[ClientId, dict[str, ClientRequest]] = {}

    def __len__(self) -> int:
        """Open samples."""
        return len(self.by_id)

    def add(self, owner: ClientRequest) -> None:
        for request in owner.samples:
            assert request.id not in self.by_id, "request ids are minted once"
            self.by_id[request.id] = request
            if request.sample == 0:
                self.first[owner.request_id] = request
            if request.ends_at is not None:
                heapq.heappush(self._ends, (request.ends_at, request.id))
        self._by_client.setdefault(owner.client, {})[owner.label] = owner

    def remove(self, request: RoutedRequest) -> None:
        """The sample has ended; its client's request leaves with its last one."""
        del self.by_id[request.id]
        if request.sample == 0:
            del self.first[request.id[0]]
        self.timers.pop(request.id, None)
        if len(self._ends) > 2 * len(self.by_id) + MAX_STALE:
            self._ends = [end for end in self._ends if end[1] in self.by_id]
            heapq.heapify(self._ends)
        self.release(request)
        request.state = State.ENDED
        owner = request.owner
        owner.num_open -= 1
        if not owner.num_open:
            labels = self._by_client[owner.client]
            del labels[owner.label]
            if not labels:
                del self._by_client[owner.client]

    def find(self, client: ClientId, label: str) -> ClientRequest | None:
        labels = self._by_client.get(client)
        return None if labels is None else labels.get(label)

    def of_client(self, client: ClientId) -> list[ClientRequest]:
        return list(self._by_client.get(client, {}).values())

    def owners(self) -> list[ClientRequest]:
        """Every client's open requests."""
        return [owner for labels in self._by_client.values() for owner in labels.values()]

    def clients(self) -> dict[ClientId, str]:
        """Clients with open requests, each with the label of its oldest one."""
        return {client: next(iter(labels)) for client, labels in self._by_client.items()}

    def on_worker(self, worker: WorkerView) -> list[RoutedRequest]:
        """Requests whose current attempt takes part in this life of a worker, oldest first."""
        return [r for r in self.by_id.values() if r.prefill is worker or r.decode is worker]

    def parked(self) -> list[RoutedRequest]:
        """By (priority, arrival)."""
        parked = [r for r in self.by_id.values() if r.state is State.PARKED]
        return sorted(parked, key=lambda r: (r.owner.priority, r.owner.order, r.sample))

    # --- what a request costs its workers ---------------------------------------------------------

    def charge(self, request: RoutedRequest, prefill: WorkerView, decode: WorkerView) -> None:
        """A new attempt at these workers."""
        assert not request.prefill_charge and not request.decode_charge, "charged once"
        self._view.stamp()
        context, hashes = request.demand.context, request.owner.hashes
        if hashes is not None:
            # The last token is computed in any case.
            request.prefill_cached = min(self._view.expect_prompt(prefill, hashes), context - 1)
        request.prefill, request.prefill_charge = prefill, context - request.prefill_cached
        self._view.charge_prefill(prefill, request.prefill_charge, request.prefill_cached)
        self._charge_decode(request, decode)

    def move_decode(self, request: RoutedRequest, decode: WorkerView) -> None:
        """The attempt stays at its prefill worker and gets another one for decode."""
        self._view.stamp()
        self._release_decode(request)
        self._charge_decode(request, decode)

    def release_prefill(self, request: RoutedRequest) -> None:
        if request.prefill_charge and request.prefill is not None:
            self._view.release_prefill(request.prefill, request.prefill_charge, request.prefill_cached)
            request.prefill_charge = request.prefill_cached = 0
            if request.owner.hashes is not None:
                self._view.unexpect_prompt(request.prefill, request.owner.hashes)

    def release(self, request: RoutedRequest) -> None:
        """The attempt is over; calling it again changes nothing."""
        self.release_prefill(request)
        self._release_decode(request)

    def arrived(self, request: RoutedRequest) -> None:
        """It decodes: its hand-over is under way no more. Calling it again changes nothing."""
        if request.arriving:
            assert request.decode is not None
            request.arriving = False
            self.freed = True
            self._view.end_handoff(request.decode)

    def _charge_decode(self, request: RoutedRequest, decode: WorkerView) -> None:
        request.decode, request.decode_charge = decode, request.demand.total
        request.arriving = True
        self._view.charge_decode(decode, request.decode_charge)
        if request.owner.hashes is not None:
            self._view.expect_prompt(decode, request.owner.hashes)

    def _release_decode(self, request: RoutedRequest) -> None:
        self.arrived(request)
        if request.decode_charge and request.decode is not None:
            self._view.release_decode(request.decode, request.decode_charge)
            request.decode_charge = 0
            if request.owner.hashes is not None:
                self._view.unexpect_prompt(request.decode, request.owner.hashes)

    # --- timers -----------------------------------------------------------------------------------

    @property
    def ends_at(self) -> float:
        """When the time of a request is over; not later than the first one's."""
        return self._ends[0][0] if self._ends else math.inf

    def late(self, now: float) -> list[RoutedRequest]:
        """Open requests whose time is over; each is told once."""
        late = []
        while self._ends and self._ends[0][0] <= now:
            request = self.by_id.get(heapq.heappop(self._ends)[1])
            if request is not None:
                late.append(request)
        return late

    def set_timer(self, request: RoutedRequest, at: float) -> None:
        self.timers[request.id] = at
        self.wake_at = min(self.wake_at, at)

    def clear_timer(self, request: RoutedRequest) -> None:
        self.timers.pop(request.id, None)

    def due(self, now: float) -> list[RoutedRequest]:
        """Requests whose timer has run out; their timers are gone."""
        if now < self.wake_at:
            return []
        due = [self.by_id[sample] for sample, at in self.timers.items() if at <= now]
        for request in due:
            del self.timers[request.id]
        self.wake_at = min(self.timers.values(), default=math.inf)
        return due

    # --- for tests --------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Assert that all indexes agree and that every worker is charged exactly for what is open on it."""
        listed = [request for owner in self.owners() for request in owner.open_samples()]
        assert len(listed) == len(self.by_id) and all(self.by_id[r.id] is r for r in listed)
        assert self.first == {r.id[0]: r for r in listed if r.sample == 0}
        assert all(owner.num_open == len(owner.open_samples()) > 0 for owner in self.owners()), "ends with its samples"
        assert all(self._by_client.values()), "a client without open requests is forgotten"
        assert set(self.timers) <= set(self.by_id), "timers of ended requests"
        assert all(self.wake_at <= at for at in self.timers.values()), "a timer that nobody wakes for"
        assert {r.id for r in listed if r.ends_at is not None} == {i for _, i in self._ends if i in self.by_id}
        for worker in self._view.workers.values():
            prefill = [r.prefill_charge for r in listed if r.prefill is worker and r.prefill_charge]
            decode = [r.decode_charge for r in listed if r.decode is worker and r.decode_charge]
            assert (worker.prefill_requests, worker.prefill_tokens) == (len(prefill), sum(prefill)), worker
            assert (worker.decode_requests, worker.decode_tokens) == (len(decode), sum(decode)), worker
            assert worker.prefill_cached == sum(r.prefill_cached for r in listed if r.prefill is worker), worker
            assert worker.handoffs == sum(r.arriving for r in listed if r.decode is worker), worker
            assert (worker.handoffs >= worker.max_handoffs) == (worker.worker_id in self._view.full), worker
        self._view.prefixes.check_integrity([w.prefixes for w in self._view.workers.values()])
        for request in listed:
            self._check_request(request)

    def _check_request(self, request: RoutedRequest) -> None:
        timed = request.id in self.timers
        assert not request.fresh, f"undelivered tokens between events: {request}"
        assert len(request.tokens) <= request.sampling.max_tokens, request
        assert all(index > len(request.tokens) for index in request.held), f"held back for nothing: {request}"
        if request.state in (State.PARKED, State.QUEUED):
            assert timed == (request.state is State.PARKED), f"a timer too many, or none: {request}"
            assert request.prefill is None and request.decode is None and not request.finish, request
            assert request.waits_since is not None and not request.arriving, request
        elif request.state is State.SETTLING:
            assert timed and request.finish is not None and not request.decode_charge, request
            assert not request.arriving, request
        else:
            assert request.prefill is not None and request.decode is not None and request.finish is None, request
            assert timed == bool(request.held), f"a gap without a timer, or the reverse: {request}"
            assert request.arriving != request.decode_spoke, f"counted as a hand-over, or not: {request}"
            assert request.decode.ready and (request.prefill.ready or not request.needs_prefill), request

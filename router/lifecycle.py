"""What is done to a request: start an attempt, retry it elsewhere, end it; and who is told.

Pure. Carries out decisions; `router.core` reads the events and takes them. Must not know the clock
or the messages that workers send. Every method appends its actions to `out`, in the order to do them.
"""

from __future__ import annotations

import math

from baton.config import ClusterConfig
from baton.errors import OverloadedError
from baton.protocol import Abort, Peers, Replace, RequestKey, ToWorker, Usage
from baton.timeline import Mark
from router.actions import (
    NewTokens,
    RequestDone,
    RequestFailed,
    RouterAction,
    SampleDone,
    SendWorker,
)
from router.book import RequestBook
from router.policy import Placement, PlacementPolicy
from router.records import Records
from router.request import ClientRequest, RoutedRequest, State
from router.view import ClusterView, WorkerView

SETTLE_S = 0.25
"""How long a finished request waits for prefill's account of the hand-over (bytes, marks)."""
MAX_REMEMBERED_ABORTS = 4096

Actions = list[RouterAction]


class Lifecycle:
    """The open requests and what happens to them."""

    def __init__(self, config: ClusterConfig, view: ClusterView, policy: PlacementPolicy):
        self.book = RequestBook(view)
        self.records = Records()
        self._view = view
        self._policy = policy
        self._max_attempts = config.router.max_attempts
        self._worker_wait_s = config.router.worker_wait_s
        self._timeout_s = config.liveness.timeout_s
        self._aborted: dict[tuple[str, RequestKey], None] = {}
        """Incarnations and attempts that were told to end, so that each stale attempt is told once."""

    # --- attempts ---------------------------------------------------------------------------------

    def start(self, request: RoutedRequest, placement: Placement, now: float, out: Actions) -> None:
        """Send the current attempt to where `placement` says."""
        request.state = State.RUNNING
        request.give_up_at = None
        request.avoid.clear()
        request.placements.append(placement)
        request.timeline.mark(Mark.PLACED, now)
        prefill = self._view.workers[placement.prefill]
        self.book.charge(request, prefill, self._view.workers[placement.decode])
        self.send(prefill, request.submit(now), out)

    def retry(
        self,
        request: RoutedRequest,
        reason: str,
        now: float,
        out: Actions,
        *,
        reporter: WorkerView | None = None,
        suspect: WorkerView | None = None,
    ) -> None:
        """The current attempt is over (`reporter` knows); place the next one, away from both workers if possible.

        `suspect`: its peer says that it is gone. We may not have noticed yet, so rather wait until we
        do than waste the attempts on it within milliseconds.
        """
        self.abort_attempt(request, out, reporter=reporter)
        self.book.release(request)
        self.book.clear_timer(request)
        if request.attempt + 1 >= self._max_attempts:
            text = f"attempt {request.attempt + 1} of {self._max_attempts} (router.max_attempts) failed too: {reason}"
            self.fail(request, "request_failed", text, out)
            return
        request.begin_attempt()
        request.reason = reason
        request.avoid = {w.worker_id for w in (reporter, suspect) if w is not None}
        placement = self._find(request, now)
        if placement is None and suspect is None:
            request.avoid.clear()
            placement = self._find(request, now)
        self._start_or_park(request, placement, now, out)

    def place_parked(self, now: float, out: Actions) -> None:
        """A worker came: whoever waits for one may go on."""
        for request in self.book.parked():
            self._start_or_park(request, self._find(request, now), now, out)

    def unpark(self, request: RoutedRequest, now: float, out: Actions) -> None:
        """A parked request's wait is over: it may use the workers it avoided, or gives up if there are none."""
        request.avoid.clear()
        if request.give_up_at is not None and now >= request.give_up_at:
            waited = f"no worker joined in time (router.worker_wait_s is {self._worker_wait_s:g})"
            text = f"{waited} after attempt {request.attempt} ended: {request.reason}"
            self.fail(request, "request_failed", text, out)
        else:
            self._start_or_park(request, self._find(request, now), now, out)

    def replace(self, request: RoutedRequest, placement: Placement, out: Actions) -> None:
        """The attempt's hand-over was declined: offer it to `placement.decode` instead, or keep it at prefill."""
        prefill, decode = request.prefill, self._view.workers[placement.decode]
        assert prefill is not None
        request.placements.append(placement)
        self.book.move_decode(request, decode)
        self.send(prefill, Replace(request.key, None if decode is prefill else decode.worker_id), out)

    def move_from(self, worker: WorkerView, reason: str, now: float, out: Actions) -> None:
        """`worker`'s life is over, or counts as over: a new attempt for all that cannot do without it."""
        for request in self.book.on_worker(worker):
            if request.state is State.ENDED:
                continue  # with another sample of its request, a moment ago
            if request.finish is not None:
                self.end(request, out)
            elif worker is request.decode or request.needs_prefill:
                self.retry(request, reason, now, out)

    def _find(self, request: RoutedRequest, now: float) -> Placement | None:
        try:
            return self._policy.place(request.demand, self._view, now, request.avoid)
        except OverloadedError:
            return None

    def _start_or_park(self, request: RoutedRequest, placement: Placement | None, now: float, out: Actions) -> None:
        if placement is not None:
            self.book.clear_timer(request)
            self.start(request, placement, now, out)
            return
        if request.give_up_at is None:
            request.give_up_at = min(now + self._worker_wait_s, request.ends_at or math.inf)
        wait = self._timeout_s if request.avoid else self._worker_wait_s
        self.book.set_timer(request, min(request.give_up_at, now + wait))

    # --- tokens and endings -----------------------------------------------------------------------

    def deliver(self, request: RoutedRequest, out: Actions) -> None:
        """Pass on what came into order."""
        owner = request.owner
        out.append(
            NewTokens(
                owner.client,
                owner.label,
                owner.request_id,
                tuple(request.fresh),
                request.sample,
                tuple(request.fresh_logprobs),
                request.fresh_prompt,
            )
        )
        request.fresh.clear()
        request.fresh_logprobs.clear()
        request.fresh_prompt = None

    def finish(self, request: RoutedRequest, now: float, out: Actions) -> None:
        """All tokens are delivered. Wait for the hand-over's account, or see to it that nobody keeps anything."""
        self.book.release(request)
        self.book.clear_timer(request)
        if request.cut:
            assert request.prefill is not None and request.decode is not None, request
            self.abort(request.decode, request.key, out)
            if not request.decode_spoke:
                self.abort(request.prefill, request.key, out)
        if request.prefill is request.decode or request.handed:
            self.end(request, out)
        elif request.decode_spoke and request.prefill is not None and request.prefill.ready:
            request.state = State.SETTLING
            self.book.set_timer(request, now + SETTLE_S)
        else:
            # A first token that was the last one ends at prefill, and decode may still hold a reservation.
            # A request that could only have one token was never offered.
            other = request.prefill if request.decode_spoke else request.decode
            if other is not None and request.sampling.max_tokens - request.first > 1:
                self.abort(other, request.key, out)
            self.end(request, out)

    def settled(self, request: RoutedRequest, out: Actions) -> None:
        """Prefill's account did not come in time: its transfer may still hold blocks."""
        if request.prefill is not None:
            self.abort(request.prefill, request.key, out)
        self.end(request, out)

    def cancel(self, request: RoutedRequest, out: Actions) -> None:
        self.abort_attempt(request, out)
        self.end(request, out)

    def end(self, request: RoutedRequest, out: Actions) -> None:
        """Done, with the reason that its last token named, or else `abort`. The last sample ends the request."""
        request.finish = request.finish or "abort"
        self.book.remove(request)
        owner = request.owner
        if len(owner.samples) > 1:
            out.append(SampleDone(owner.client, owner.label, owner.request_id, request.sample, request.finish))
        if owner.num_open:
            return
        first = owner.samples[0]
        done = RequestDone(
            client=owner.client,
            label=owner.label,
            request_id=owner.request_id,
            finish_reason=first.finish or "abort",
            usage=Usage(
                len(owner.prompt),
                sum(len(sample.tokens) for sample in owner.samples),
                sum(sample.cached_tokens for sample in owner.samples),
            ),
            marks=dict(first.timeline.marks),
            prefill_worker=first.placements[-1].prefill,
            decode_worker=first.placements[-1].decode,
            attempts=max(sample.attempt for sample in owner.samples) + 1,
            kv_bytes=sum(sample.kv_bytes for sample in owner.samples),
        )
        self.records.add(owner, done.finish_reason, "")
        out.append(done)

    def fail(self, request: RoutedRequest, code: str, text: str, out: Actions) -> None:
        """This sample cannot be had, so the request fails: its other samples end too."""
        for other in request.owner.open_samples():
            if other is not request:
                self.abort_attempt(other, out)
        self.fail_request(request.owner, code, text, out)

    def fail_request(self, owner: ClientRequest, code: str, text: str, out: Actions) -> None:
        """End all of it as failed; no worker is told."""
        for request in owner.open_samples():
            self.book.remove(request)
        self.records.add(owner, "error", text)
        out.append(RequestFailed(owner.client, owner.label, owner.request_id, code, text, n=len(owner.samples)))

    # --- who is told ------------------------------------------------------------------------------

    def abort_attempt(self, request: RoutedRequest, out: Actions, *, reporter: WorkerView | None = None) -> None:
        """Tell the current attempt's workers to end it, save `reporter`, which has."""
        for worker in (request.prefill, request.decode if request.decode is not request.prefill else None):
            if worker is not None and worker is not reporter:
                self.abort(worker, request.key, out)

    def abort(self, worker: WorkerView, key: RequestKey, out: Actions) -> None:
        """Once per life and attempt. A worker that counts as lost gets it too, as it may only be silent.

        What was sent to a lost worker may not arrive, so it is not remembered: stale tokens cause it again.
        """
        current = self._view.find(worker.info.incarnation)
        if current is None:
            return
        told = (current.info.incarnation, key)
        if told in self._aborted:
            return
        if current.ready:
            if len(self._aborted) >= MAX_REMEMBERED_ABORTS:
                del self._aborted[next(iter(self._aborted))]
            self._aborted[told] = None
        self.send(current, Abort(key), out)

    def broadcast_peers(self, out: Actions) -> None:
        """All prefill-capable workers learn who can decode now; who is missing is lost."""
        peers = Peers(self._view.peers())
        for worker in self._view.ready():
            if worker.can_prefill:
                self.send(worker, peers, out)

    def send(self, worker: WorkerView, message: ToWorker, out: Actions) -> None:
        out.append(SendWorker(worker.worker_id, worker.info.incarnation, message))

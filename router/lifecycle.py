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
from router.dispatch import Dispatch
from router.policy import Placement, PlacementPolicy
from router.records import Records
from router.request import ClientRequest, RoutedRequest, State
from router.view import ClusterView, WorkerView

SETTLE_S = 0.25
"""How long a finished request waits for prefill's account of the hand-over (bytes, marks)."""
MAX_REMEMBERED_ABORTS = 4096
LOOK_AHEAD = 16
"""Requests at the head of the queue that are tried when there is room: not all of them may fit where it is."""

Actions = list[RouterAction]


class Lifecycle:
    """The open requests and what happens to them."""

    def __init__(self, config: ClusterConfig, view: ClusterView, policy: PlacementPolicy):
        self.book = RequestBook(view)
        self.records = Records()
        self.dispatch = Dispatch(config, view, policy)
        self.num_retries = 0
        self.num_displaced = 0
        self._view = view
        self._max_attempts = config.router.max_attempts
        self._backoff_s, self._backoff_max_s = config.router.retry_backoff_s, config.router.retry_backoff_max_s
        self._worker_wait_s = config.router.worker_wait_s
        self._timeout_s = config.liveness.timeout_s
        self._aborted: dict[tuple[str, RequestKey], None] = {}
        """Incarnations and attempts that were told to end, so that each stale attempt is told once."""

    # --- attempts ---------------------------------------------------------------------------------

    def enter(self, owner: ClientRequest, now: float, out: Actions) -> None:
        """A new request: it goes to its workers, or waits. Raises OverloadedError, with nothing changed."""
        placement, displaced = self.dispatch.enter(owner, len(self.book), now)
        for other in displaced:
            self.num_displaced += 1
            retry_after_s = self.dispatch.retry_after_s(len(self.dispatch.queue), now)
            text = "a more important request took its place in the queue; retry when some have been served"
            self.fail_request(other, "overloaded", text, now, out, retry_after_s=retry_after_s)
        self.book.add(owner)
        for request in owner.samples:
            if placement is not None:
                self.start(request, placement, now, out)  # all at one pair: they share the prompt's KV
            else:
                self._wait(request, State.QUEUED, now)

    def start(self, request: RoutedRequest, placement: Placement, now: float, out: Actions) -> None:
        """Send the current attempt to where `placement` says."""
        if request.waits_since is not None:
            request.queued_s += now - request.waits_since
            request.waits_since = None
        request.state = State.RUNNING
        request.give_up_at = None
        request.placements.append(placement)
        self.dispatch.breakers.on_placed(placement.prefill, now)
        if not placement.colocated:
            self.dispatch.breakers.on_placed(placement.decode, now)
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
        do than waste the attempts on it within milliseconds. The first failure of a request is nothing to wait for,
        further ones are: each for twice as long.
        """
        self.abort_attempt(request, out, reporter=reporter)
        self.book.release(request)
        self.book.clear_timer(request)
        if request.attempt + 1 >= self._max_attempts:
            text = f"attempt {request.attempt + 1} of {self._max_attempts} (router.max_attempts) failed too: {reason}"
            self.fail(request, "request_failed", text, now, out)
            return
        self.num_retries += 1
        request.begin_attempt()
        request.reason = reason
        failed = {w.worker_id for w in (reporter, suspect) if w is not None}
        request.avoid |= failed
        request.failed_last = failed
        request.suspected_until = 0.0 if suspect is None else now + self._timeout_s
        if request.attempt > 1:
            wait = self._backoff_s * 2.0 ** min(request.attempt - 2, 60)
            request.not_before = now + min(wait, self._backoff_max_s)
        self._go_on(request, now, out)

    def place_parked(self, now: float, out: Actions) -> None:
        """A worker came: whoever waits for one may go on."""
        for request in self.book.parked():
            self._go_on(request, now, out)

    def unpark(self, request: RoutedRequest, now: float, out: Actions) -> None:
        """A parked request's wait is over: it may use the workers it suspected, or gives up if there are none."""
        if request.give_up_at is not None and now >= request.give_up_at:
            waited = f"no worker joined in time (router.worker_wait_s is {self._worker_wait_s:g})"
            why = f" after attempt {request.attempt} ended: {request.reason}" if request.attempt else ""
            self.fail(request, "request_failed", f"{waited}{why}", now, out)
        else:
            self._go_on(request, now, out)

    def place_queued(self, now: float, out: Actions) -> None:
        """There may be room for those that wait for it."""
        self.book.freed = False
        queue = self.dispatch.queue
        left = True
        while left and queue:
            left = False
            for request in queue.first(LOOK_AHEAD):
                if not self.dispatch.has_room():
                    return
                if request.state is State.QUEUED:  # else it went with another sample of its request, a moment ago
                    left = self._leave_queue(request, now, out) or left

    def review_queue(self, now: float, out: Actions) -> None:
        """Workers went: who waited for one of them to have room now waits for one to come."""
        queue = self.dispatch.queue
        if not self.dispatch.holds_all(now):
            for request in list(queue):
                if request.state is State.QUEUED:
                    self._leave_queue(request, now, out)
        self.place_queued(now, out)

    def _leave_queue(self, request: RoutedRequest, now: float, out: Actions) -> bool:
        """Whether the request could leave: for its workers, or because there are none any more."""
        queue = self.dispatch.queue
        try:
            placement = self.dispatch.find(request, now)
        except OverloadedError:
            queue.remove(request, now)
            self._wait(request, State.PARKED, now)
            return True
        if placement is None:
            return False
        # Samples that begin go together, those that begin again each by itself.
        group = [request] if request.attempt else [s for s in request.owner.open_samples() if s.state is State.QUEUED]
        for sample in group:
            if sample.attempt == request.attempt:
                queue.leave(sample, now)
                self.start(sample, placement, now, out)
        return True

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
                self.end(request, now, out)
            elif worker is request.decode or request.needs_prefill:
                self.retry(request, reason, now, out)

    def _go_on(self, request: RoutedRequest, now: float, out: Actions) -> None:
        """Start the attempt that begins, if it may and somebody takes it; else it waits."""
        if now < request.not_before:
            self._wait(request, State.PARKED, now)
            return
        try:
            placement = self.dispatch.find(request, now)
        except OverloadedError:
            self._wait(request, State.PARKED, now)
            return
        self.book.clear_timer(request)
        if placement is not None and self.dispatch.queue.goes_first(request.owner):
            self.start(request, placement, now, out)
        else:
            self._wait(request, State.QUEUED, now)
            self.book.freed = True

    def _wait(self, request: RoutedRequest, state: State, now: float) -> None:
        """PARKED or QUEUED: it is at no worker for now."""
        request.state = state
        if request.waits_since is None:
            request.waits_since = now
        if state is State.QUEUED:
            request.give_up_at = None
            self.dispatch.queue.add(request, now)
            return
        if now < request.not_before:
            self.book.set_timer(request, request.not_before)
            return
        if request.give_up_at is None:
            request.give_up_at = now + self._worker_wait_s
        suspects = now < request.suspected_until
        self.book.set_timer(request, min(request.give_up_at, request.suspected_until if suspects else math.inf))

    # --- tokens and endings -----------------------------------------------------------------------

    def deliver(self, request: RoutedRequest, out: Actions) -> None:
        """Pass on what came into order."""
        owner = request.owner
        tokens = tuple(request.fresh)
        request.fresh.clear()
        if request.sampling.logprobs is None and request.fresh_prompt is None:
            out.append(NewTokens(owner.client, owner.label, owner.request_id, tokens, request.sample))
            return
        logprobs, about_prompt = tuple(request.fresh_logprobs), request.fresh_prompt
        request.fresh_logprobs.clear()
        request.fresh_prompt = None
        out.append(
            NewTokens(owner.client, owner.label, owner.request_id, tokens, request.sample, logprobs, about_prompt)
        )

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
            self.end(request, now, out)
        elif request.decode_spoke and request.prefill is not None and request.prefill.ready:
            request.state = State.SETTLING
            self.book.set_timer(request, now + SETTLE_S)
        else:
            # A first token that was the last one ends at prefill, and decode may still hold a reservation.
            # A request that could only have one token was never offered.
            other = request.prefill if request.decode_spoke else request.decode
            if other is not None and request.sampling.max_tokens - request.first > 1:
                self.abort(other, request.key, out)
            self.end(request, now, out)

    def settled(self, request: RoutedRequest, now: float, out: Actions) -> None:
        """Prefill's account did not come in time: its transfer may still hold blocks."""
        if request.prefill is not None:
            self.abort(request.prefill, request.key, out)
        self.end(request, now, out)

    def cancel(self, request: RoutedRequest, now: float, out: Actions) -> None:
        self.abort_attempt(request, out)
        self.end(request, now, out)

    def end(self, request: RoutedRequest, now: float, out: Actions) -> None:
        """Done, with the reason that its last token named, or else `abort`. The last sample ends the request."""
        request.finish = request.finish or "abort"
        self._remove(request, now)
        owner = request.owner
        if len(owner.samples) > 1:
            out.append(SampleDone(owner.client, owner.label, owner.request_id, request.sample, request.finish))
        if owner.num_open:
            return
        first = owner.samples[0]
        last = first.placements[-1] if first.placements else None
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
            prefill_worker="" if last is None else last.prefill,
            decode_worker="" if last is None else last.decode,
            attempts=max(sample.attempt for sample in owner.samples) + 1,
            kv_bytes=sum(sample.kv_bytes for sample in owner.samples),
            n=len(owner.samples),
        )
        self.records.add(owner, done.finish_reason, "")
        out.append(done)

    def fail(self, request: RoutedRequest, code: str, text: str, now: float, out: Actions) -> None:
        """This sample cannot be had, so the request fails: its other samples end too."""
        for other in request.owner.open_samples():
            if other is not request:
                self.abort_attempt(other, out)
        self.fail_request(request.owner, code, text, now, out)

    def fail_request(
        self,
        owner: ClientRequest,
        code: str,
        text: str,
        now: float,
        out: Actions,
        *,
        retry_after_s: float | None = None,
    ) -> None:
        """End all of it as failed; no worker is told."""
        for request in owner.open_samples():
            self._remove(request, now)
        self.records.add(owner, "error", text)
        out.append(
            RequestFailed(
                owner.client,
                owner.label,
                owner.request_id,
                code,
                text,
                n=len(owner.samples),
                retry_after_s=retry_after_s,
            )
        )

    def _remove(self, request: RoutedRequest, now: float) -> None:
        if request.state is State.QUEUED:
            self.dispatch.queue.remove(request, now)
        if request.waits_since is not None:
            request.queued_s += now - request.waits_since
            request.waits_since = None
        self.book.remove(request)

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

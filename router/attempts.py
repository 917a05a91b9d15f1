"""What workers tell of the attempts that they run: tokens, ends, hand-overs; and attempts whose time is over.

Reads such events and has `router.lifecycle` do what follows. Pure. Must not know clients, joins, or which workers live.
Every method appends its actions to `out`, in the order to do them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from baton.config import ClusterConfig
from baton.protocol import AttemptFailed, HandoffDone, HandoffRefused, RequestKey, Tokens
from router.actions import NewTokens
from router.lifecycle import Actions, Lifecycle
from router.request import NOTHING, RoutedRequest, State
from router.view import WorkerView

HANDOFF_CODES = frozenset(("transfer", "peer_lost"))
"""Of attempts that failed on the way from prefill to decode."""


class AttemptEvents:
    """Of all open requests. Events of former attempts, or of workers that take no part in one, change nothing."""

    def __init__(self, config: ClusterConfig, life: Lifecycle):
        self.handoffs: Counter[str] = Counter(done=0, refused=0, failed=0)
        """Hand-overs by what became of them; one that was refused may have gone to another worker."""
        self.num_handoff_blocks = 0
        self.num_timeouts = 0
        """Requests whose time was over before they ended."""
        self._life = life
        self._book = life.book
        self._timeout_s = config.liveness.timeout_s
        self._request_timeout_s = config.router.request_timeout_s

    def on_tokens(self, worker: WorkerView, message: Tokens, now: float, out: Actions) -> None:
        requests, first, life = self._book.by_id, self._book.first, self._life
        for request_id, attempt, sample, marks, cached_tokens in message.marks:
            request = requests.get((request_id, sample))
            if request is not None and request.attempt == attempt:
                request.timeline.merge(marks)
                if worker is request.prefill:
                    request.cached_tokens = cached_tokens
        logprobs = {entry[:4]: entry for entry in message.logprobs} if message.logprobs else {}
        touched: list[RoutedRequest] = []
        for row in message.tokens:
            sample, index = row.sample, row.index
            request = requests.get((row.request_id, sample)) if sample else first.get(row.request_id)
            if (
                request is not None
                and index == request.plain_next
                and request.attempt == row.attempt
                and worker is request.streams_from
                and row.finish is None
            ):  # nearly every token there is; what follows would do the same
                token = row.token
                request.tokens.append(token)
                request.plain_next = index + 1 if index + 1 < request.plain_end else NOTHING
                owner = request.owner
                out.append(NewTokens(owner.client, owner.label, owner.request_id, (token,), sample))
                continue
            request_id, attempt = row.request_id, row.attempt
            if request is None or request.attempt != attempt:
                life.abort(worker, RequestKey(request_id, attempt, sample), out)
                continue
            if worker is request.decode:
                if not request.decode_spoke:
                    request.decode_spoke = True
                    self._book.arrived(request)
                    life.dispatch.breakers.on_success(worker.worker_id, now)
            elif worker is not request.prefill:
                life.abort(worker, request.key, out)
                continue
            if request.prefill_charge and worker is request.prefill and index == request.first:
                self._book.release_prefill(request)
                if worker is not request.decode:
                    life.dispatch.breakers.on_success(worker.worker_id, now)
            if not request.touched:
                request.touched = True
                request.plain_next = NOTHING
                touched.append(request)
            about = logprobs.get((request_id, attempt, sample, index)) if logprobs else None
            request.take(index, row.token, row.finish, about)
        for request in touched:
            request.touched = False
            if request.state is State.ENDED:
                continue  # with another sample of its request, a moment ago
            request.expect(worker)
            if request.fresh:
                life.deliver(request, out)
            if request.finish is not None:
                if request.state is State.RUNNING:
                    life.finish(request, now, out)
            elif request.failed:
                life.dispatch.breakers.on_failure(worker.worker_id, now)
                life.retry(request, f"{worker.worker_id} gave it up", now, out)
            elif request.held:
                if request.id not in self._book.timers:
                    self._book.set_timer(request, now + self._timeout_s)
            elif self._book.timers:
                self._book.clear_timer(request)

    def plain_requests(
        self, worker: WorkerView, keys: Sequence[RequestKey], first: Sequence[int]
    ) -> list[RoutedRequest] | None:
        """Those of these attempts, if their tokens from `first` on are only to be kept and passed on; else None."""
        requests, of_first_sample = self._book.by_id, self._book.first
        found: list[RoutedRequest] = []
        for (request_id, attempt, sample), index in zip(keys, first, strict=True):
            request = requests.get((request_id, sample)) if sample else of_first_sample.get(request_id)
            if (
                request is None
                or index != request.plain_next
                or request.attempt != attempt
                or worker is not request.streams_from
            ):
                return None
            found.append(request)
        return found

    def keep_plain(self, requests: Sequence[RoutedRequest], token: int, count: int) -> None:
        """Each of `plain_requests` got `token` so many times, and not yet its last one."""
        if count == 1:
            for request in requests:
                request.tokens.append(token)
        else:
            tokens = [token] * count
            for request in requests:
                request.tokens += tokens
        for request in requests:
            following = request.plain_next + count
            request.plain_next = following if following < request.plain_end else NOTHING

    def on_attempt_failed(self, worker: WorkerView, message: AttemptFailed, now: float, out: Actions) -> None:
        request = self._current(worker, message.key)
        if request is None or request.finish is not None:
            return
        if worker is not request.decode and not request.needs_prefill:
            return  # decode has all it needs: what prefill lost is only the acknowledgement
        reason = f"{worker.worker_id}: {message.message} ({message.code})"
        if message.code == "refused":
            self._life.abort_attempt(request, out, reporter=worker)
            self._life.fail(request, "request_failed", f"the request cannot run on {reason}", now, out)
            return
        if message.code == "timeout":  # its clock may be a moment ahead of ours
            self.time_is_over(request, now, out, reporter=worker)
            return
        if message.code in HANDOFF_CODES:
            self.handoffs["failed"] += 1
        peer = request.decode if worker is request.prefill else request.prefill
        suspect = peer if message.code == "peer_lost" and peer is not worker else None
        breakers = self._life.dispatch.breakers
        if suspect is None:
            breakers.on_failure(worker.worker_id, now)
        if message.code in HANDOFF_CODES and peer is not None and peer is not worker:
            breakers.on_failure(peer.worker_id, now)
        self._life.retry(request, reason, now, out, reporter=worker, suspect=suspect)

    def on_handoff_refused(self, worker: WorkerView, message: HandoffRefused, now: float, out: Actions) -> None:
        request = self._current(worker, message.key)
        if request is None or worker is not request.prefill or request.decode is None or request.finish is not None:
            return
        if message.decode != request.decode.worker_id or request.decode is worker or request.decode_spoke:
            return  # about an offer that was replaced already
        self.handoffs["refused"] += 1
        request.refused.add(message.decode)
        placement = self._life.dispatch.find_decode(request, worker, now)
        if placement is not None:
            self._life.replace(request, placement, out)
            return
        self._life.abort_attempt(request, out)
        refused = ", ".join(sorted(request.refused))
        text = f"no decode worker takes the request; {refused} refused it, the last because: {message.reason}"
        self._life.fail(request, "overloaded", text, now, out)

    def on_handoff_done(self, worker: WorkerView, message: HandoffDone, now: float, out: Actions) -> None:
        request = self._current(worker, message.key)
        if request is None or worker is not request.prefill or request.handed:
            return
        request.handed = True
        self.handoffs["done"] += 1
        self.num_handoff_blocks += message.blocks
        request.kv_bytes += message.bytes
        request.timeline.merge(message.marks)
        if request.state is State.SETTLING:
            self._life.end(request, now, out)

    def _current(self, worker: WorkerView, key: RequestKey) -> RoutedRequest | None:
        """The request whose current attempt `key` is, if `worker` takes part in it."""
        request = self._book.by_id.get((key.request_id, key.sample))
        if request is None or request.attempt != key.attempt:
            return None
        return request if worker is request.prefill or worker is request.decode else None

    def time_is_over(
        self, request: RoutedRequest, now: float, out: Actions, *, reporter: WorkerView | None = None
    ) -> None:
        self.num_timeouts += 1
        own, limit = request.owner.timeout_s, self._request_timeout_s
        name = "its timeout_s" if own is not None and own != limit else "router.request_timeout_s"
        at = "in the router's queue"
        if request.prefill is not None and request.decode is not None:
            at = f"at {request.prefill.worker_id}, to be decoded at {request.decode.worker_id}"
        self._life.abort_attempt(request, out, reporter=reporter)
        text = f"the request took too long: not complete within {own or limit or 0:g} s ({name}), it was {at}"
        self._life.fail(request, "request_failed", text, now, out)

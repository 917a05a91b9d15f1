"""A request's life across workers, as events: what came in, what that means, what is to be done.

Pure: events and `now` in, actions out (`router.actions`), `next_deadline()` says when to wake it. No
clock, randomness or sockets; ids and seeds are arguments. Must not know text. The states of a
request are drawn in `router.request`, those of a worker in `router.view`; `router.lifecycle` does
what is decided here.

What holds, whatever comes (`check_integrity` and the property tests watch it):

* A request that was accepted ends exactly once, when its last sample leaves the book or one of them fails.
* Each token index reaches the client once and in order; a retry continues from what was delivered.
* Work charged to a worker in the view is released when the part of the request that caused it ends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from baton.config import ClusterConfig
from baton.errors import BatonError, InvalidRequestError, JoinRefusedError
from baton.ledger import LedgerReport, LedgerRequest
from baton.protocol import (
    MAX_WORKERS,
    AttemptFailed,
    HandoffDone,
    HandoffRefused,
    Heartbeat,
    Join,
    Joined,
    JoinRefused,
    Leaving,
    Peers,
    RequestKey,
    Status,
    Tokens,
    ToRouterFromWorker,
)
from baton.sampling_params import SamplingParams
from baton.timeline import Mark
from router.actions import ClientId, RequestFailed, SendWorker
from router.admission import admit, check_prompt_logprobs, check_sampling
from router.ledger import LedgerQuestions
from router.lifecycle import Actions, Lifecycle
from router.membership import Membership
from router.policy import PlacementPolicy
from router.records import MAX_RECORDS, RequestRecord
from router.request import ClientRequest, RoutedRequest, State, TokenWatch
from router.view import ClusterView, WorkerView


class RouterCore:
    """All requests of one router. Every `on_*` returns the actions it causes, in the order to do them."""

    def __init__(
        self, config: ClusterConfig, *, router_incarnation: str, fingerprint: str | None = None, clock: str = ""
    ):
        self.view = ClusterView()
        self.num_dropped = 0
        """Messages of former or unknown lives, or that contradict themselves."""
        self._config = config
        self.incarnation = router_incarnation
        self.url = ""
        """Where HTTP is served; for `status`."""
        self._policy = PlacementPolicy(config)
        self._clock = clock
        self._membership = Membership(fingerprint)
        self._life = Lifecycle(config, self.view, self._policy)
        self._book = self._life.book
        self._timeout_s = config.liveness.timeout_s
        self._questions = LedgerQuestions(config.name, self.view, self._book, self._timeout_s)
        self._beat_at = math.inf
        self._check_at = math.inf
        """Not later than when the first live worker's silence becomes too long."""

    @property
    def num_requests(self) -> int:
        """Open requests; each sample counts as one."""
        return len(self._book)

    def clients(self) -> dict[ClientId, str]:
        """Clients with open requests, each with the label of one of them."""
        return self._book.clients()

    def explain(self, request_id: str) -> RequestRecord:
        """Where a request that ended went, and why; by id or the start of one. InvalidRequestError if there is none."""
        record = self._life.records.find(request_id)
        if record is None:
            raise InvalidRequestError(
                f"no ended request of this router has an id that alone begins with {request_id!r}; it remembers the "
                f"last {MAX_RECORDS}",
                field="request_id",
            )
        return record

    def on_drain(self, worker_id: str, undo: bool) -> None:
        """Place nothing more on this worker, or again. Raises InvalidRequestError if there is none of this id."""
        if worker_id not in self.view.workers:
            known = ", ".join(sorted(self.view.workers)) or "none"
            raise InvalidRequestError(f"there is no worker {worker_id}; known: {known}", field="worker_id")
        if undo:
            self.view.draining.discard(worker_id)
        else:
            self.view.draining.add(worker_id)

    def status(self, label: str, now: float) -> Status:
        """The cluster as of now. `max_model_len`: prompt plus output that the known workers can hold; 0: none known."""
        capacity = self._policy.capacity(self.view)
        return Status(
            label=label,
            name=self._config.name,
            router_incarnation=self.incarnation,
            num_requests=len(self._book),
            workers=self.view.statuses(now),
            model=self._config.model.source,
            max_model_len=0 if capacity is None else min(capacity.tokens, capacity.max_model_len),
            url=self.url,
        )

    # --- events: clients --------------------------------------------------------------------------

    def on_generate(
        self,
        client: ClientId,
        label: str,
        request_id: str,
        seed: int,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        now: float,
        *,
        received_at: float | None = None,
        n: int = 1,
        priority: int = 0,
        watches: Sequence[TokenWatch] = (),
    ) -> Actions:
        """A new request of `n` samples. `seed` is used where `sampling` has none.

        `received_at`: when its bytes came (default `now`). `watches`: one per sample, or none. A refusal is the
        only action then, a RequestFailed.
        """
        assert not watches or len(watches) == n
        try:
            if self._book.find(client, label) is not None:
                raise InvalidRequestError(f"label {label!r} belongs to an open request of this client", field="label")
            check_sampling(sampling)
            admit(
                len(prompt),
                sampling.max_tokens,
                view=self.view,
                policy=self._policy,
                num_open=len(self._book),
                max_requests=self._config.router.max_requests,
                n=n,
            )
            check_prompt_logprobs(len(prompt), sampling)
            if sampling.seed is None:
                sampling = msgspec.structs.replace(sampling, seed=seed)
            owner = ClientRequest(client, label, request_id, prompt, sampling, n=n, priority=priority, watches=watches)
            placement = self._policy.place(owner.samples[0].demand, self.view, now)
        except BatonError as e:
            return [RequestFailed(client, label, request_id, e.code, str(e), getattr(e, "field", None), n)]
        self._book.add(owner)
        out: Actions = []
        for request in owner.samples:
            if self._config.router.request_timeout_s is not None:
                request.ends_at = now + self._config.router.request_timeout_s
            request.timeline.mark(Mark.RECEIVED, now if received_at is None else received_at)
            self._life.start(request, placement, now, out)  # all at one pair: they share the prompt's KV
        return out

    def on_cancel(self, client: ClientId, label: str, now: float, sample: int | None = None) -> Actions:
        """End it, or only this sample of it, with finish reason `abort`.

        Unknown labels and samples are a no-op (it may just have ended).
        """
        out: Actions = []
        owner = self._book.find(client, label)
        for request in () if owner is None else owner.open_samples():
            if sample is None or request.sample == sample:
                self._life.cancel(request, out)
        return out

    def on_client_gone(self, client: ClientId, now: float) -> Actions:
        """The client cannot be reached any more: end all that it has open."""
        out: Actions = []
        for owner in self._book.of_client(client):
            for request in owner.open_samples():
                self._life.cancel(request, out)
        return out

    def on_shutdown(self, now: float) -> Actions:
        """Fail whatever is open. Workers are told nothing: who stops the router stops them too."""
        out: Actions = []
        for owner in self._book.owners():
            self._life.fail_request(owner, "request_failed", "the router was stopped before the request ended", out)
        return out

    def on_ledger(self, client: ClientId, message: LedgerRequest, now: float) -> Actions:
        """Ask the workers who holds their blocks. Raises InvalidRequestError for an unknown worker."""
        out: Actions = []
        self._questions.ask(client, message, now, out)
        return out

    # --- events: workers --------------------------------------------------------------------------

    def on_join(self, join: Join, now: float) -> Actions:
        """A worker's first message. Each Join is a new life: what ran under its id before is placed anew."""
        info = join.worker
        try:
            self._membership.admit(join)
            if not self.view.make_room(info.worker_id):
                raise JoinRefusedError(f"{info.worker_id} would be one of more than {MAX_WORKERS} workers")
        except JoinRefusedError as e:
            return [SendWorker(info.worker_id, info.incarnation, JoinRefused(str(e)))]
        out: Actions = []
        former = self.view.get(info.worker_id)
        worker = self.view.join(info, now)
        self._expect(worker, now)
        self._life.send(worker, Joined(self.incarnation, join.sent_at, now, now, self._clock), out)
        if worker.can_decode or (former is not None and former.can_decode):
            self._life.broadcast_peers(out)
        if worker.can_prefill and not worker.can_decode:
            self._life.send(worker, Peers(self.view.peers()), out)
        if former is not None:
            self._life.move_from(former, f"{info.worker_id} was restarted", now, out)
        self._life.place_parked(now, out)
        return out

    def on_worker_lost(self, incarnation: str, reason: str, now: float) -> Actions:
        """The driver cannot reach the worker, or knows that it died. No-op for former lives and lost workers."""
        worker = self.view.find(incarnation)
        out: Actions = []
        if worker is not None and worker.ready:
            self._lose(worker, f"{worker.worker_id}: {reason}", now, out)
        return out

    def on_worker_message(self, incarnation: str, message: ToRouterFromWorker, now: float) -> Actions:
        """Any message from the connection that joined as `incarnation`."""
        if type(message) is Join:
            return self.on_join(message, now)
        out: Actions = []
        worker = self.view.find(incarnation)
        if worker is None or not _speaks_for_itself(worker, message):
            self.num_dropped += 1
            return out
        worker.seen = now
        if not worker.ready:
            # It was only silent. Its attempts were moved and it was told to end them, so it starts afresh.
            worker.state = "ready"
            self._expect(worker, now)
            self._life.broadcast_peers(out)
            self._life.place_parked(now, out)
        if type(message) is Tokens:
            self._on_tokens(worker, message, now, out)
        elif type(message) is Heartbeat:
            if message.load is not None:
                worker.load = message.load
        elif type(message) is AttemptFailed:
            self._on_attempt_failed(worker, message, now, out)
        elif type(message) is HandoffRefused:
            self._on_handoff_refused(worker, message, now, out)
        elif type(message) is HandoffDone:
            self._on_handoff_done(worker, message, out)
        elif type(message) is LedgerReport:
            self._questions.on_report(worker, message, now, out)
        elif type(message) is Leaving:
            worker.leaving = True
            self._life.send(worker, message, out)
        return out

    def _on_tokens(self, worker: WorkerView, message: Tokens, now: float, out: Actions) -> None:
        if message.load is not None:
            worker.load = message.load
        requests, life = self._book.by_id, self._life
        for request_id, attempt, sample, marks, cached_tokens in message.marks:
            request = requests.get((request_id, sample))
            if request is not None and request.attempt == attempt:
                request.timeline.merge(marks)
                if worker is request.prefill:
                    request.cached_tokens = cached_tokens
        logprobs = {entry[:4]: entry for entry in message.logprobs} if message.logprobs else {}
        touched: list[RoutedRequest] = []
        for request_id, attempt, sample, index, token, finish in message.tokens:
            request = requests.get((request_id, sample))
            if request is None or request.attempt != attempt:
                life.abort(worker, RequestKey(request_id, attempt, sample), out)
                continue
            if worker is request.decode:
                request.decode_spoke = True
            elif worker is not request.prefill:
                life.abort(worker, request.key, out)
                continue
            if request.prefill_charge and worker is request.prefill and index == request.first:
                self._book.release_prefill(request)
            if not request.touched:
                request.touched = True
                touched.append(request)
            if logprobs:
                request.take(index, token, finish, logprobs.get((request_id, attempt, sample, index)))
            else:
                request.take(index, token, finish)
        for request in touched:
            request.touched = False
            if request.state is State.ENDED:
                continue  # with another sample of its request, a moment ago
            if request.fresh:
                life.deliver(request, out)
            if request.finish is not None:
                if request.state is State.RUNNING:
                    life.finish(request, now, out)
            elif request.failed:
                life.retry(request, f"{worker.worker_id} gave it up", now, out)
            elif request.held:
                if request.id not in self._book.timers:
                    self._book.set_timer(request, now + self._timeout_s)
            elif self._book.timers:
                self._book.clear_timer(request)

    def _on_attempt_failed(self, worker: WorkerView, message: AttemptFailed, now: float, out: Actions) -> None:
        request = self._current(worker, message.key)
        if request is None or request.finish is not None:
            return
        if worker is not request.decode and not request.needs_prefill:
            return  # decode has all it needs: what prefill lost is only the acknowledgement
        reason = f"{worker.worker_id}: {message.message} ({message.code})"
        if message.code == "refused":
            self._life.abort_attempt(request, out, reporter=worker)
            self._life.fail(request, "request_failed", f"the request cannot run on {reason}", out)
            return
        if message.code == "timeout":
            self._life.abort_attempt(request, out, reporter=worker)
            limit = f"router.request_timeout_s is {self._config.router.request_timeout_s:g}"
            self._life.fail(request, "request_failed", f"{reason}; {limit}", out)
            return
        peer = request.decode if worker is request.prefill else request.prefill
        suspect = peer if message.code == "peer_lost" and peer is not worker else None
        self._life.retry(request, reason, now, out, reporter=worker, suspect=suspect)

    def _on_handoff_refused(self, worker: WorkerView, message: HandoffRefused, now: float, out: Actions) -> None:
        request = self._current(worker, message.key)
        if request is None or worker is not request.prefill or request.decode is None or request.finish is not None:
            return
        if message.decode != request.decode.worker_id or request.decode is worker or request.decode_spoke:
            return  # about an offer that was replaced already
        request.refused.add(message.decode)
        placement = self._policy.place_decode(request.demand, worker, self.view, now, request.refused)
        if placement is not None:
            self._life.replace(request, placement, out)
            return
        self._life.abort_attempt(request, out)
        refused = ", ".join(sorted(request.refused))
        text = f"no decode worker takes the request; {refused} refused it, the last because: {message.reason}"
        self._life.fail(request, "overloaded", text, out)

    def _on_handoff_done(self, worker: WorkerView, message: HandoffDone, out: Actions) -> None:
        request = self._current(worker, message.key)
        if request is None or worker is not request.prefill or request.handed:
            return
        request.handed = True
        request.kv_bytes += message.bytes
        request.timeline.merge(message.marks)
        if request.state is State.SETTLING:
            self._life.end(request, out)

    def _current(self, worker: WorkerView, key: RequestKey) -> RoutedRequest | None:
        """The request whose current attempt `key` is, if `worker` takes part in it."""
        request = self._book.by_id.get((key.request_id, key.sample))
        if request is None or request.attempt != key.attempt:
            return None
        return request if worker is request.prefill or worker is request.decode else None

    # --- events: time -----------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """When `on_deadline` must be called at the latest; None: only after another event."""
        at = min(self._beat_at, self._check_at, self._book.wake_at, self._questions.wake_at)
        return None if at == math.inf else at

    def on_deadline(self, now: float) -> Actions:
        """Do what is due: heartbeats, silent workers, waits that are over. Early calls are harmless."""
        out: Actions = []
        if now >= self._check_at:
            for worker in [w for w in self.view.ready() if now >= w.seen + self._timeout_s]:
                silence = f"silent for {now - worker.seen:.1f} s, liveness.timeout_s is {self._timeout_s:g}"
                self._lose(worker, f"{worker.worker_id}: {silence}", now, out)
            self._check_at = min((w.seen for w in self.view.ready()), default=math.inf) + self._timeout_s
        if now >= self._beat_at:
            beat, self._beat_at = Heartbeat(self.incarnation), math.inf
            for worker in self.view.ready():
                self._life.send(worker, beat, out)
                self._beat_at = now + self._config.liveness.heartbeat_s
        if now >= self._questions.wake_at:
            self._questions.on_deadline(now, out)
        for request in self._book.due(now):
            if request.state is State.ENDED:
                continue  # with another sample of its request, a moment ago
            if request.state is State.SETTLING:
                self._life.settled(request, out)
            elif request.state is State.PARKED:
                self._life.unpark(request, now, out)
            else:
                gap = f"token {len(request.tokens)} did not come within {self._timeout_s:g} s after its successors"
                self._life.retry(request, gap, now, out)
        return out

    def _expect(self, worker: WorkerView, now: float) -> None:
        """From now on `worker` gets heartbeats, and its own are missed."""
        self._check_at = min(self._check_at, worker.seen + self._timeout_s)
        self._beat_at = min(self._beat_at, now + self._config.liveness.heartbeat_s)

    def _lose(self, worker: WorkerView, reason: str, now: float, out: Actions) -> None:
        worker.state = "lost"
        if worker.can_decode:
            self._life.broadcast_peers(out)
        self._life.move_from(worker, reason, now, out)
        self._questions.on_lost(now, out)

    # --- for tests --------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Assert that nothing is left over, charged twice, or waiting without a wake-up."""
        self._book.check_integrity()
        ready = list(self.view.ready())
        assert not ready or self._beat_at < math.inf, "live workers get no heartbeat"
        assert all(self._check_at <= w.seen + self._timeout_s for w in ready), "a silence that nobody would notice"


def _speaks_for_itself(worker: WorkerView, message: ToRouterFromWorker) -> bool:
    """Whether the message names the worker whose connection it came over."""
    if isinstance(message, Tokens | Heartbeat | Leaving):
        return message.incarnation == worker.info.incarnation
    assert type(message) is not Join
    return message.worker_id == worker.worker_id  # type: ignore[union-attr]

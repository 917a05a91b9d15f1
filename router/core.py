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
from baton.errors import BatonError, InvalidRequestError, JoinRefusedError, OverloadedError
from baton.ledger import LedgerReport, LedgerRequest
from baton.plain_steps import PlainSteps
from baton.protocol import (
    MAX_WORKERS,
    AskPrefixes,
    AttemptFailed,
    HandoffDone,
    HandoffRefused,
    Heartbeat,
    Join,
    Joined,
    JoinRefused,
    Leaving,
    Peers,
    PrefixNews,
    Status,
    Tokens,
    ToRouterFromWorker,
    WorkerStatus,
)
from baton.sampling_params import SamplingParams
from baton.timeline import Mark
from router.actions import ClientId, RequestFailed, SendWorker, StreamedSteps
from router.admission import check_prompt_logprobs, check_request, check_sampling
from router.attempts import AttemptEvents
from router.ledger import LedgerQuestions
from router.lifecycle import Actions, Lifecycle
from router.membership import Membership
from router.policy import PlacementPolicy
from router.prefix_index import PromptHashes
from router.records import MAX_RECORDS, RequestRecord, record_of
from router.request import ClientRequest, RoutedRequest, State, TokenWatch
from router.roles import Roles
from router.view import ClusterView, WorkerView


class RouterCore:
    """All requests of one router. Every `on_*` returns the actions it causes, in the order to do them."""

    def __init__(
        self,
        config: ClusterConfig,
        *,
        router_incarnation: str,
        fingerprint: str | None = None,
        clock: str = "",
    ):
        self.view = ClusterView(config.router.max_handoffs)
        self.num_dropped = 0
        """Messages of former or unknown lives, or that contradict themselves."""
        self._config = config
        self.incarnation = router_incarnation
        self.url = ""
        """Where HTTP is served; for `status`."""
        self.stopping = False
        """Its driver is about to end: whoever asks is told to go elsewhere (`on_stopping`)."""
        self.num_refused = 0
        """Requests that were not let in, those displaced from the queue included."""
        self.arrived_tokens = 0
        """Of the prompts of all requests that were let in."""
        self._num_arrived = 0
        self._policy = PlacementPolicy(config)
        self._clock = clock
        self._membership = Membership(fingerprint)
        self._life = Lifecycle(config, self.view, self._policy)
        self._book = self._life.book
        self.attempts = AttemptEvents(config, self._life)
        """What workers told of attempts, and what was counted of it."""
        self.roles = Roles(config, self.view, self._life.dispatch.queue) if config.planner.enabled else None
        """Who should change between prefill and decode; None: nobody does."""
        self._timeout_s = config.liveness.timeout_s
        self._questions = LedgerQuestions(config.name, self.view, self._book, self._timeout_s)
        self._beat_at = math.inf
        self._check_at = math.inf
        """Not later than when the first live worker's silence becomes too long."""

    @property
    def num_requests(self) -> int:
        """Open requests; each sample counts as one."""
        return len(self._book)

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt plus output that the known workers can hold; 0: none known."""
        capacity = self._policy.capacity(self.view)
        return 0 if capacity is None else min(capacity.tokens, capacity.max_model_len)

    @property
    def num_queued(self) -> int:
        """Of the open requests' samples, those that wait for a worker to have room."""
        return len(self._life.dispatch.queue)

    @property
    def num_parked(self) -> int:
        """Those that wait for a worker to come, or to be tried again."""
        return len(self._book.parked())

    @property
    def num_retries(self) -> int:
        """Attempts so far that followed another."""
        return self._life.num_retries

    @property
    def num_displaced(self) -> int:
        """Requests that left the queue for more important ones."""
        return self._life.num_displaced

    @property
    def num_breakers_opened(self) -> int:
        return self._life.dispatch.breakers.num_opened

    def worker_statuses(self, now: float) -> tuple[WorkerStatus, ...]:
        """All workers, in the order in which their ids first joined."""
        return self.view.statuses(now, self._life.dispatch.breakers.states(now))

    def request(self, request_id: str, sample: int = 0) -> RoutedRequest | None:
        """A sample of an open request, to look at; None where it has ended, or never was."""
        return self._book.by_id.get((request_id, sample))

    def record(self, request_id: str) -> RequestRecord | None:
        """What became of a request that ended; by its whole id. None where it was refused, or is forgotten."""
        return self._life.records.get(request_id)

    def recent(self, limit: int) -> list[RequestRecord]:
        """The last requests that ended, the latest first, at most `limit`."""
        return self._life.records.recent(limit)

    def clients(self) -> dict[ClientId, str]:
        """Clients with open requests, each with the label of one of them."""
        return self._book.clients()

    def explain(self, request_id: str, now: float) -> RequestRecord:
        """Where a request went so far, or where it ended, and why; by id or the start of one.

        InvalidRequestError if no request alone has such an id.
        """
        records = self._life.records.find(request_id)
        if request_id:
            owners = {r.owner.request_id: r.owner for r in self._book.by_id.values()}
            records += [record_of(owner, now=now) for key, owner in owners.items() if key.startswith(request_id)]
        exact = [record for record in records if record.request_id == request_id]
        if len(exact or records) != 1:
            raise InvalidRequestError(
                f"no request of this router has an id that alone begins with {request_id!r}; it knows those that are "
                f"open and the last {MAX_RECORDS} that ended",
                field="request_id",
            )
        return (exact or records)[0]

    def on_drain(self, worker_id: str, undo: bool, now: float) -> Actions:
        """Place nothing more on this worker, or again. Raises InvalidRequestError if there is none of this id."""
        if worker_id not in self.view.workers:
            known = ", ".join(sorted(self.view.workers)) or "none"
            raise InvalidRequestError(f"there is no worker {worker_id}; known: {known}", field="worker_id")
        if self.roles is not None:
            self.roles.on_drain(worker_id, now)
        if undo:
            self.view.draining.discard(worker_id)
        else:
            self.view.draining.add(worker_id)
        out: Actions = []
        stays = self.roles is not None and self.roles.look_after(now)
        if undo or stays:
            self._life.place_parked(now, out)
        self._life.review_queue(now, out)
        return out

    def on_stopping(self, now: float) -> Actions:
        """Let nothing more in. What is open goes on."""
        self.stopping = True
        return []

    def status(self, label: str, now: float) -> Status:
        """The cluster as of now."""
        return Status(
            label=label,
            name=self._config.name,
            router_incarnation=self.incarnation,
            num_requests=len(self._book),
            num_queued=self.num_queued,
            workers=self.worker_statuses(now),
            model=self._config.model.source,
            max_model_len=self.max_model_len,
            url=self.url,
            planner="" if self.roles is None else self.roles.words(),
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
        timeout_s: float | None = None,
        watches: Sequence[TokenWatch] = (),
        session: str = "",
    ) -> Actions:
        """A new request of `n` samples. `seed` is used where `sampling` has none.

        `received_at`: when its bytes came (default `now`). `timeout_s`: it fails after so long, or after
        `router.request_timeout_s` if that is shorter. `watches`: one per sample, or none. `session`: requests of
        the same one go to the same workers, where a policy heeds it. A refusal is the only action then, a
        RequestFailed.
        """
        assert not watches or len(watches) == n
        out: Actions = []
        try:
            if self.stopping:
                raise OverloadedError(
                    "the router is stopping; send the request to another, or to the one that follows at its address",
                    retry_after_s=self._config.router.shutdown_grace_s + 1.0,
                )
            if self._book.find(client, label) is not None:
                raise InvalidRequestError(f"label {label!r} belongs to an open request of this client", field="label")
            check_sampling(sampling)
            check_request(
                len(prompt),
                sampling.max_tokens,
                view=self.view,
                policy=self._policy,
                max_requests=self._config.router.max_requests,
                n=n,
            )
            check_prompt_logprobs(len(prompt), sampling)
            if sampling.seed is None:
                sampling = msgspec.structs.replace(sampling, seed=seed)
            self._num_arrived += 1
            owner = ClientRequest(
                client,
                label,
                request_id,
                prompt,
                sampling,
                n=n,
                priority=priority,
                order=self._num_arrived,
                watches=watches,
                session=session,
                hashes=PromptHashes(prompt) if self._policy.uses_prefixes else None,
            )
            limits = [s for s in (timeout_s, self._config.router.request_timeout_s) if s is not None]
            owner.timeout_s = min(limits, default=None)
            for request in owner.samples:
                request.ends_at = None if owner.timeout_s is None else now + owner.timeout_s
                request.timeline.mark(Mark.RECEIVED, now if received_at is None else received_at)
            self._life.enter(owner, now, out)
            self.arrived_tokens += len(prompt)
        except BatonError as e:
            self.num_refused += 1
            field, retry_after_s = getattr(e, "field", None), getattr(e, "retry_after_s", None)
            return [RequestFailed(client, label, request_id, e.code, str(e), field, n, retry_after_s)]
        return self._after(out, now)

    def _after(self, out: Actions, now: float) -> Actions:
        """What an event leads to beside its own actions: where there is room now, others follow."""
        if self._book.freed:
            self._life.place_queued(now, out)
        return out

    def on_cancel(self, client: ClientId, label: str, now: float, sample: int | None = None) -> Actions:
        """End it, or only this sample of it, with finish reason `abort`.

        Unknown labels and samples are a no-op (it may just have ended).
        """
        out: Actions = []
        owner = self._book.find(client, label)
        for request in () if owner is None else owner.open_samples():
            if sample is None or request.sample == sample:
                self._life.cancel(request, now, out)
        return self._after(out, now)

    def on_client_gone(self, client: ClientId, now: float) -> Actions:
        """The client cannot be reached any more: end all that it has open."""
        out: Actions = []
        for owner in self._book.of_client(client):
            for request in owner.open_samples():
                self._life.cancel(request, now, out)
        return self._after(out, now)

    def on_shutdown(self, now: float) -> Actions:
        """Fail whatever is open. Workers are told nothing: who stops the router stops them too."""
        out: Actions = []
        for owner in self._book.owners():
            text = "the router was stopped before the request ended"
            self._life.fail_request(owner, "request_failed", text, now, out)
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
        if self.roles is not None:
            self.roles.on_join(worker, now)
        self._life.dispatch.breakers.on_restart(info.worker_id, now)
        self._life.dispatch.breakers.forget(self.view.workers)
        self._expect(worker, now)
        self._life.send(worker, Joined(self.incarnation, join.sent_at, now, now, self._clock), out)
        self._ask_prefixes(worker, out)
        if worker.can_decode or (former is not None and former.can_decode):
            self._life.broadcast_peers(out)
        if worker.can_prefill and not worker.can_decode:
            self._life.send(worker, Peers(self.view.peers()), out)
        if former is not None:
            self._life.move_from(former, f"{info.worker_id} was restarted", now, out)
        self._life.place_parked(now, out)
        self._life.review_queue(now, out)
        return out

    def on_worker_lost(self, incarnation: str, reason: str, now: float) -> Actions:
        """The driver cannot reach the worker, or knows that it died. No-op for former lives and lost workers."""
        worker = self.view.find(incarnation)
        out: Actions = []
        if worker is not None and worker.ready:
            self._lose(worker, f"{worker.worker_id}: {reason}", now, out)
        return self._after(out, now)

    def on_worker_message(self, incarnation: str, message: ToRouterFromWorker | PlainSteps, now: float) -> Actions:
        """Any message from the connection that joined as `incarnation`."""
        if type(message) is Join:
            return self.on_join(message, now)
        if isinstance(message, PlainSteps):
            return self._on_plain_step(incarnation, message, now)
        out: Actions = []
        worker = self.view.find(incarnation)
        if worker is None or not _speaks_for_itself(worker, message):
            self.num_dropped += 1
            return out
        worker.seen = now
        if not worker.ready:
            # It was only silent. Its attempts were moved and it was told to end them, so it starts afresh.
            worker.state = "ready"
            self._ask_prefixes(worker, out)
            self._expect(worker, now)
            self._life.broadcast_peers(out)
            self._life.place_parked(now, out)
            self._book.freed = True
        if type(message) is Tokens or type(message) is Heartbeat:
            if message.load is not None:
                worker.load = message.load
            if message.prefixes is not None:
                self._on_prefixes(worker, message.prefixes, out)
        if type(message) is Tokens:
            self.attempts.on_tokens(worker, message, now, out)
        elif type(message) is AttemptFailed:
            self.attempts.on_attempt_failed(worker, message, now, out)
        elif type(message) is HandoffRefused:
            self.attempts.on_handoff_refused(worker, message, now, out)
        elif type(message) is HandoffDone:
            self.attempts.on_handoff_done(worker, message, now, out)
        elif type(message) is LedgerReport:
            self._questions.on_report(worker, message, now, out)
        elif type(message) is Leaving:
            worker.leaving = True
            self._life.send(worker, message, out)
            self._life.review_queue(now, out)
        return self._after(out, now)

    def takes_plainly(self, incarnation: str, steps: PlainSteps) -> bool:
        """Whether tokens of `steps` are only to be kept and passed on.

        That holds for further steps as long as nothing else happens.
        """
        worker = self.view.find(incarnation)
        if worker is None or not worker.ready:
            return False
        steps.requests = self.attempts.plain_requests(worker, steps.keys, steps.first)
        return steps.requests is not None

    def on_plain_steps(self, incarnation: str, steps: PlainSteps) -> Actions:
        """What these steps would say one by one, where `takes_plainly`."""
        worker, now = self.view.find(incarnation), steps.arrivals[-1]
        assert worker is not None
        worker.seen = now
        if steps.rest is None:
            worker.take_loads(steps.loads)
        self.attempts.keep_plain(steps.requests, steps.token, len(steps.arrivals))
        return self._after([StreamedSteps(steps.requests, steps.token, steps.arrivals)], now)

    def _on_plain_step(self, incarnation: str, step: PlainSteps, now: float) -> Actions:
        if not self.takes_plainly(incarnation, step):
            worker = self.view.find(incarnation)
            return [] if worker is None else self.on_worker_message(incarnation, step.in_full(worker.info), now)
        out = self.on_plain_steps(incarnation, step)
        if step.rest is not None:
            out += self.on_worker_message(incarnation, step.rest, now)
        return out

    def _on_prefixes(self, worker: WorkerView, news: PrefixNews, out: Actions) -> None:
        if self._policy.uses_prefixes and not self.view.prefixes.take(worker.prefixes, news):
            self._ask_prefixes(worker, out)

    def _ask_prefixes(self, worker: WorkerView, out: Actions) -> None:
        """Have it tell what it has cached, where that matters."""
        if self._policy.uses_prefixes:
            self._life.send(worker, AskPrefixes(), out)

    # --- events: time -----------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """When `on_deadline` must be called at the latest; None: only after another event."""
        at = min(self._beat_at, self._check_at, self._book.wake_at, self._book.ends_at, self._questions.wake_at)
        if self.roles is not None:
            at = min(at, self.roles.wake_at)
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
        if self.roles is not None and now >= self.roles.wake_at and self.roles.on_deadline(now, self.arrived_tokens):
            self._life.place_parked(now, out)
            self._life.review_queue(now, out)
        for request in self._book.due(now):
            if request.state is State.ENDED:
                continue  # with another sample of its request, a moment ago
            if request.state is State.SETTLING:
                self._life.settled(request, now, out)
            elif request.state is State.PARKED:
                self._life.unpark(request, now, out)
            else:
                gap = f"token {len(request.tokens)} did not come within {self._timeout_s:g} s after its successors"
                self._life.retry(request, gap, now, out)
        for request in self._book.late(now):
            if request.finish is None and request.state is not State.ENDED:
                self.attempts.time_is_over(request, now, out)
        return self._after(out, now)

    def _expect(self, worker: WorkerView, now: float) -> None:
        """From now on `worker` gets heartbeats, and its own are missed."""
        self._check_at = min(self._check_at, worker.seen + self._timeout_s)
        self._beat_at = min(self._beat_at, now + self._config.liveness.heartbeat_s)

    def _lose(self, worker: WorkerView, reason: str, now: float, out: Actions) -> None:
        worker.state = "lost"
        self.view.prefixes.clear(worker.prefixes)
        if worker.can_decode:
            self._life.broadcast_peers(out)
        stays = self.roles is not None and self.roles.look_after(now)
        self._life.move_from(worker, reason, now, out)
        if stays:
            self._life.place_parked(now, out)
        self._questions.on_lost(now, out)

    # --- for tests --------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Assert that nothing is left over, charged twice, or waiting without a wake-up."""
        self._book.check_integrity()
        assert not (self._book.freed and self.num_queued), "room for those that wait, and nobody looked"
        self._life.dispatch.check_integrity(self._book.by_id.values())
        ready = list(self.view.ready())
        assert not ready or self._beat_at < math.inf, "live workers get no heartbeat"
        assert all(self._check_at <= w.seen + self._timeout_s for w in ready), "a silence that nobody would notice"


def _speaks_for_itself(worker: WorkerView, message: ToRouterFromWorker) -> bool:
    """Whether the message names the worker whose connection it came over."""
    if isinstance(message, (Tokens, Heartbeat, Leaving)):  # a union would be made anew for each message
        return message.incarnation == worker.info.incarnation
    assert type(message) is not Join
    return message.worker_id == worker.worker_id  # type: ignore[union-attr]

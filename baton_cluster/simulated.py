"""SimulatedCluster: a whole cluster under a virtual clock, over the same cores as a real one.

The third launcher: it runs RouterCore and one WorkerCore per worker, and has no scheduler, router or
hand-off logic of its own, so it cannot drift from what it simulates (I8). It owns the clock, carries the
messages, and plays the clients. Seconds and tokens come from the models and the function it is given.

    clients ──submit, cancel──► RouterCore ─Submit, Abort─► SimulatedWorker(WorkerCore) ═blocks═► another
            ◄─tokens, the end──            ◄─Tokens, ...──

Deterministic: the same calls give the same run. Clients, tokenizer and detokenizer take no time but
the trips of their messages. What differs from a real cluster is listed in docs/architecture.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from baton.config import ClusterConfig
from baton.engine.memory import DEFAULT_KV_MIB
from baton.errors import ClusterError, ConfigError
from baton.layout import KVLayout
from baton.protocol import PROTOCOL_VERSION, FinishReason, Heartbeat, Join, Joined, JoinRefused, WorkerInfo
from baton.sampling_params import SamplingParams
from baton.step_log import StepRecord
from baton.timeline import RequestTimeline
from baton_cluster.assemble import worker_core
from baton_cluster.history import LifeEvent, LifeHistory
from baton_cluster.latency import LatencyModel, LinkModel
from baton_cluster.network import Network
from baton_cluster.role_changes import SimulatedRoles
from baton_cluster.run_ahead import RunAhead
from baton_cluster.simulated_worker import IsDamaged, NextToken, SimulatedWorker
from baton_cluster.specs import WorkerSpec, worker_specs
from baton_cluster.virtual_clock import Alarm, VirtualClock
from kv_transfer.wire_format import wire_encoding
from router.actions import NewTokens, RequestDone, RequestFailed, RouterAction, SendWorker, StreamedSteps
from router.core import RouterCore

LABEL = "its request"
"""Each client has one."""
JOINED_AT = -1.0
"""Workers join a second before time 0, so that the first request finds them all acquainted."""
Arrival = tuple[float, Sequence[int], SamplingParams]
"""When a client sends a request (seconds of the virtual clock), its prompt, and what it asks for."""
STUCK_S = 3600.0
"""Open requests of which no client heard for so long will not end any more: that is a bug, and is said."""


class SimulatedRequest:
    """One request as its client sees it. Times are seconds of the virtual clock."""

    __slots__ = (
        "attempts",
        "decode_worker",
        "ended_at",
        "error",
        "finish_reason",
        "kv_bytes",
        "leave_after",
        "number",
        "on_end",
        "prefill_worker",
        "prompt",
        "request_id",
        "sampling",
        "submitted_at",
        "timeline",
        "token_times",
        "tokens",
    )

    def __init__(self, number: int, at_s: float, prompt: tuple[int, ...], sampling: SamplingParams, leave: int | None):
        self.number = number
        self.request_id = f"{number:032x}"
        self.submitted_at = at_s
        self.prompt = prompt
        self.sampling = sampling
        self.leave_after = leave
        self.tokens: list[int] = []
        self.token_times: list[float] = []
        """When the client got each token."""
        self.ended_at: float | None = None
        """When the client learned of the end; None: it has not ended."""
        self.finish_reason: FinishReason | None = None
        self.error: tuple[str, str] | None = None
        """`(code, message)`, where the finish reason is `error`."""
        self.timeline = RequestTimeline()
        self.prefill_worker = ""
        self.decode_worker = ""
        self.attempts = 0
        self.kv_bytes = 0
        self.on_end: OnEnd | None = None
        """Who is told of its end, of what is played."""

    @property
    def ttft_s(self) -> float | None:
        return self.token_times[0] - self.submitted_at if self.token_times else None

    @property
    def latency_s(self) -> float | None:
        return None if self.ended_at is None else self.ended_at - self.submitted_at

    def __repr__(self) -> str:
        state = self.finish_reason or "open"
        return f"<request {self.number} {state} prompt={len(self.prompt)} tokens={len(self.tokens)}>"


OnEnd = Callable[[SimulatedRequest], None]


class SimulatedCluster:
    """Workers have joined when the constructor returns; then `submit`, plan faults, and `run`; or `play` a trace.

    `latency`: of an engine step, for all workers or by pool. `layout`: what a KV block is (its size decides
    what a transfer takes, and how many fit `kv_memory_mib`); a pool's own `block_size`
    replaces the layout's. `is_damaged` corrupts blocks on their way.
    `history` records every request's life history (costs about as much as the simulation itself). `on_step` is told
    each engine step as it ends (not one whose worker dies); `StepRecord.start_s` is on the virtual clock.
    `start_s`: what a worker that changes its role takes to start anew (`planner.enabled`).
    """

    def __init__(
        self,
        config: ClusterConfig,
        latency: LatencyModel | Mapping[str, LatencyModel],
        link: LinkModel,
        *,
        layout: KVLayout,
        max_model_len: int,
        next_token: NextToken,
        eos_token_ids: Sequence[int] = (),
        is_damaged: IsDamaged | None = None,
        history: bool = False,
        on_step: Callable[[StepRecord], None] | None = None,
        start_s: float = 5.0,
    ):
        if layout.block_size != config.engine.block_size:
            raise ConfigError("engine.block_size", "differs from the layout's", value=config.engine.block_size)
        self.config = config
        self.clock = VirtualClock(JOINED_AT)
        self.router = RouterCore(config, router_incarnation="router#1")
        self.history = LifeHistory() if history else None
        self.workers: dict[str, SimulatedWorker] = {}
        """The present life of each worker, by id."""
        self.requests: list[SimulatedRequest] = []
        """Those that were submitted one by one. What is played is forgotten at its end."""
        self._latency = latency
        self._link = link
        nic = link.nic_bytes_per_s
        self._network = None if nic is None else Network(self.clock, nic, link.bytes_per_s)
        self._layout = layout
        self._max_model_len = max_model_len
        self._next_token = next_token
        self._eos = tuple(eos_token_ids)
        self._is_damaged = is_damaged
        self._on_step = on_step
        self._fabric: dict[str, SimulatedWorker] = {}
        self._by_id: dict[str, SimulatedRequest] = {}
        """Requests that have been submitted and not ended."""
        self._num_requests = self._num_open = self._num_coming = 0
        self._news_at = 0.0
        """When a client last heard something, or a request was submitted."""
        self._ahead = RunAhead(self.clock, self.router, link.latency_s, self._act)
        self._alarm = Alarm(self.clock, self.router.next_deadline, self._on_alarm)
        self._roles: SimulatedRoles | None = None
        if self.router.roles is not None:
            self._roles = SimulatedRoles(
                *(self.router.roles, self.workers, self.clock),
                start_s=start_s,
                leave=lambda worker_id: self._kill(worker_id, False),
                start=lambda spec: self._restart(spec.worker_id, spec.pool),
            )
        if self.history is not None:
            self.history.watch_router(self.router)
        for spec in worker_specs(config):
            self._start_worker(spec, 1)
        self.run(until=0.0)

    # --- what is to happen --------------------------------------------------------------------------

    def submit(
        self, at_s: float, prompt: Sequence[int], sampling: SamplingParams, *, leave_after: int | None = None
    ) -> SimulatedRequest:
        """A client sends this request at `at_s`. It cancels once it has got `leave_after` tokens, if given."""
        request = self._new_request(at_s, prompt, sampling, leave_after)
        self._ahead.num_leaving += leave_after is not None
        self.requests.append(request)
        self.clock.at(at_s + self._link.latency_s, self._generate, request)
        return request

    def play(self, requests: Iterable[Arrival], on_end: OnEnd) -> None:
        """Submit each request when its time comes, and go on until all have ended, as `run` does.

        They are taken one ahead of the clock, so their times must not fall, nor lie before `clock.now`: else a
        ClusterError. `on_end` gets each request once, in the order of their ends, and nothing here remembers it then:
        memory grows with the requests that are open at once, not with their number. It may be called again, with times
        that go on from `clock.now`.
        """
        self._await_next(iter(requests), on_end, self.clock.now)
        self.run()

    def cancel(self, request: SimulatedRequest, at_s: float) -> None:
        """The client takes `request` back at `at_s`; a no-op if it has ended by then."""
        self.clock.at(at_s + self._link.latency_s, self._cancel, request)

    def kill(self, worker_id: str, at_s: float, *, silently: bool = False) -> None:
        """The worker's process ends at `at_s`; `silently`: its machine does, so that no connection is closed."""
        self.clock.at(at_s, self._kill, worker_id, silently)

    def restart(self, worker_id: str, at_s: float) -> None:
        """A new life of this worker joins at `at_s` (the old one is killed if it still lives)."""
        self.clock.at(at_s, self._restart, worker_id)

    def run(self, until: float | None = None) -> list[SimulatedRequest]:
        """Go on until `until` (seconds), or until all requests have ended and no worker holds a block.

        Returns the requests that have ended, in the order of `submit`. ClusterError if some never end. At the end every
        worker is audited: AssertionError if a block is held that nobody accounts for.
        """
        clock = self.clock
        if until is not None:
            clock.limit = until
            while (at := clock.next_at()) is not None and at <= until:
                clock.step()
            clock.limit = float("inf")
            clock.now = max(clock.now, until)
        else:
            step = clock.step
            while self._num_coming or self._num_open:
                step()
            self._settle()
        return [request for request in self.requests if request.finish_reason is not None]

    # --- what came out ------------------------------------------------------------------------------

    def life(self, request: SimulatedRequest) -> list[LifeEvent]:
        """All that happened to it, everywhere, in order; needs `history=True`."""
        assert self.history is not None, "SimulatedCluster(history=True) records it"
        return self.history.events.get(request.request_id, [])

    def num_held_blocks(self) -> int:
        return sum(worker.num_held_blocks() for worker in self.workers.values())

    def check_ledger(self) -> None:
        """Assert that every pool and the router's book add up, and that nothing is held once all has ended."""
        self.router.check_integrity()
        for worker_id, worker in self.workers.items():
            if worker.alive:
                worker.core.engine.check_integrity()
                assert self._num_open or not worker.core.num_held_blocks(), (
                    f"{worker_id} holds blocks of ended requests: {worker.core.engine.holders()}"
                )
        assert self.router.num_requests == self._num_open, "the router's book and the clients disagree"

    # --- clients ------------------------------------------------------------------------------------

    def _new_request(
        self, at_s: float, prompt: Sequence[int], sampling: SamplingParams, leave_after: int | None = None
    ) -> SimulatedRequest:
        request = SimulatedRequest(self._num_requests, at_s, tuple(prompt), sampling, leave_after)
        self._num_requests += 1
        self._num_coming += 1
        return request

    def _await_next(self, requests: Iterator[Arrival], on_end: OnEnd, not_before: float) -> None:
        """Of what is played, the next request."""
        arrival = next(requests, None)
        if arrival is None:
            return
        at_s, prompt, sampling = arrival
        if not at_s >= not_before:
            raise ClusterError(
                f"request {self._num_requests} arrives at {at_s} s, and the one before it, or the clock, is at "
                f"{not_before} s already; give requests in the order of arrival, from `clock.now` on"
            )
        request = self._new_request(at_s, prompt, sampling)
        request.on_end = on_end
        self.clock.at(at_s + self._link.latency_s, self._arrive, request, requests, on_end)

    def _arrive(self, request: SimulatedRequest, others: Iterator[Arrival], on_end: OnEnd) -> None:
        self._await_next(others, on_end, request.submitted_at)
        self._generate(request)

    def _generate(self, request: SimulatedRequest) -> None:
        now = self.clock.now
        self._by_id[request.request_id] = request
        self._num_coming -= 1
        self._num_open += 1
        self._news_at = now
        self._act(
            self.router.on_generate(
                request, LABEL, request.request_id, request.number, request.prompt, request.sampling, now
            )
        )

    def _cancel(self, request: SimulatedRequest) -> None:
        self._act(self.router.on_cancel(request, LABEL, self.clock.now))

    def _leave(self, request: SimulatedRequest, at: float) -> None:
        """Its client goes, if it has got as much as it wants."""
        if request.leave_after is not None and len(request.tokens) >= request.leave_after:
            request.leave_after = None
            self._ahead.num_leaving -= 1
            self.cancel(request, at)

    def _end(self, action: RequestDone | RequestFailed) -> None:
        request = self._by_id.pop(action.request_id)
        self._num_open -= 1
        request.ended_at = self._news_at = self.clock.now + self._link.latency_s
        if request.leave_after is not None:
            self._ahead.num_leaving -= 1
        if isinstance(action, RequestFailed):
            request.finish_reason, request.error = "error", (action.code, action.message)
        else:
            request.finish_reason = action.finish_reason
            request.timeline = RequestTimeline(marks=action.marks)
            request.prefill_worker, request.decode_worker = action.prefill_worker, action.decode_worker
            request.attempts, request.kv_bytes = action.attempts, action.kv_bytes
        if request.on_end is not None:
            request.on_end(request)

    # --- the router ---------------------------------------------------------------------------------

    def _send_router(self, incarnation: str, message: Any) -> None:
        self.clock.after(self._link.latency_s, self._on_worker_message, incarnation, message)

    def _on_worker_message(self, incarnation: str, message: Any) -> None:
        self._act(self.router.on_worker_message(incarnation, message, self.clock.now))

    def _on_alarm(self) -> None:
        if self._num_open and self.clock.now > self._news_at + STUCK_S:
            self._give_up()
        self._act(self.router.on_deadline(self.clock.now))
        if self._roles is not None:
            self._roles.look()

    def _act(self, actions: list[RouterAction]) -> None:
        """Do what the router says, in order. What a failed send leads to comes after: the list grows."""
        at = self.clock.now + self._link.latency_s
        for action in actions:
            if type(action) is StreamedSteps:
                self._stream(action)
            elif type(action) is NewTokens:
                self._news_at = at
                client: Any = action.client
                client.tokens += action.tokens
                client.token_times += [at] * len(action.tokens)
                self._leave(client, at)
            elif type(action) is SendWorker:
                actions += self._send_worker(action)
            else:
                assert isinstance(action, RequestDone | RequestFailed), action
                self._end(action)
        self._alarm.update()

    def _stream(self, steps: StreamedSteps) -> None:
        latency_s, token = self._link.latency_s, steps.token
        times = [arrival + latency_s for arrival in steps.arrivals]
        at = self._news_at = times[-1]
        if len(times) > 1:
            tokens = [token] * len(times)
            for routed in steps.requests:
                client: SimulatedRequest = routed.owner.client
                client.tokens += tokens
                client.token_times += times
            return
        for routed in steps.requests:
            client = routed.owner.client
            client.tokens.append(token)
            client.token_times.append(at)
            if client.leave_after is not None:
                self._leave(client, at)

    def _send_worker(self, action: SendWorker) -> list[RouterAction]:
        worker, message = self._fabric[action.incarnation], action.message
        if not worker.reachable:
            return self.router.on_worker_lost(action.incarnation, "its connection is closed", self.clock.now)
        if isinstance(message, JoinRefused):
            raise ClusterError(f"{action.worker_id} was refused: {message.reason}")
        if not isinstance(message, Joined | Heartbeat):  # those are between the drivers
            self.clock.after(self._link.latency_s, worker.on_router_message, message)
        return []

    # --- workers ------------------------------------------------------------------------------------

    def _start_worker(self, spec: WorkerSpec, life: int) -> None:
        pool = self.config.pools[spec.pool]
        layout = msgspec.structs.replace(self._layout, block_size=self.config.block_size_of(pool))
        num_blocks = pool.kv_blocks or ((pool.kv_memory_mib or DEFAULT_KV_MIB) << 20) // layout.block_bytes
        limit = self.config.model.max_model_len or self._max_model_len
        info = WorkerInfo(
            worker_id=spec.worker_id,
            incarnation=f"{spec.worker_id}#{life}",
            pool=spec.pool,
            role=self.config.role_of(spec.pool),
            fingerprint="simulated",
            layout=layout,
            num_blocks=num_blocks,
            max_model_len=min(limit, num_blocks * layout.block_size),
            max_batch_requests=self.config.engine.max_batch_requests,
            control_address=f"simulated://{spec.worker_id}",
            data_address=f"simulated://{spec.worker_id}",
        )
        core = worker_core(self.config, info, eos_token_ids=self._eos)
        if self.history is not None:
            self.history.watch_worker(core)
        worker = self.workers[spec.worker_id] = self._fabric[info.incarnation] = SimulatedWorker(
            core,
            clock=self.clock,
            link=self._link,
            latency=self._latency[spec.pool] if isinstance(self._latency, Mapping) else self._latency,
            next_token=self._next_token,
            is_damaged=self._is_damaged,
            fabric=self._fabric,
            to_router=self._send_router,
            heartbeat_s=self.config.liveness.heartbeat_s,
            lease_s=self.config.transfer.lease_s,
            encoding=wire_encoding(self.config.transfer),
            on_step=self._on_step,
            network=self._network,
            ahead=self._ahead if self.history is None else None,
        )
        self._send_router(info.incarnation, Join(PROTOCOL_VERSION, info, self.clock.now))
        self.clock.after(self.config.liveness.heartbeat_s, worker.beat)

    def _kill(self, worker_id: str, silently: bool) -> None:
        worker = self.workers[worker_id]
        if worker.alive:
            worker.kill()
            if not silently:
                self.clock.after(self._link.latency_s, self._disconnect, worker)

    def _disconnect(self, worker: SimulatedWorker) -> None:
        worker.reachable = False
        for other in list(self.workers.values()):
            other.on_disconnected(worker.info.incarnation)

    def _restart(self, worker_id: str, pool: str | None = None) -> None:
        """`pool`: that its next life belongs to; None: as before."""
        self._kill(worker_id, False)
        former = self.workers[worker_id].info
        _, _, life = former.incarnation.rpartition("#")
        self._start_worker(WorkerSpec(worker_id, pool or former.pool), int(life) + 1)

    # --- the end ------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """All requests have ended: what transfers still hold is given back within a lease or two."""
        give_up = self.clock.now + 3 * self.config.transfer.lease_s + self.config.liveness.timeout_s
        while self.num_held_blocks() and (at := self.clock.next_at()) is not None and at <= give_up:
            self.clock.step()
        for worker_id, worker in self.workers.items():
            findings = worker.core.audit(self.clock.now).findings if worker.alive else []
            assert not findings, f"{worker_id}: {'; '.join(map(str, findings))}"

    def _give_up(self) -> None:
        stuck = list(self._by_id.values())[:3]
        raise ClusterError(f"{self._num_open} requests have not heard anything for {STUCK_S:g} s, such as {stuck}")

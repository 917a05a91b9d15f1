"""What the router knows of its workers.

Knows who joined, what they last reported and what this router has placed on each of them that has
not ended. Must not know policies, requests' contents, sockets or clocks: times are arguments.

    join ──► ready ──silent for liveness.timeout_s, unreachable──► lost ──it speaks again──► ready
               └────────────── a new incarnation under the same id replaces it ◄──────────────┘

The ledger of outstanding work is the router's own: a load report is as old as its trip, and all
requests placed since it was written would otherwise be invisible and pile up on one worker.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal

from baton.protocol import MAX_WORKERS, BreakerState, LoadReport, WorkerInfo, WorkerStatus
from router.candidates import Sides, sides_of
from router.prefix_index import PrefixIndex, PromptHashes, WorkerPrefixes

WorkerState = Literal["ready", "lost"]
ShownState = Literal["ready", "draining", "lost"]

HANDOFFS_PER_SLOT = 2
"""Requests on their way to a worker for each that it runs at once, where the configuration says nothing: enough that
none of its slots waits for the next prompt to be computed and sent."""


class Typical:
    """What a time is for the workers of a pool on the whole, in milliseconds.

    Equal workers measure slightly different times, and whoever seems a little faster would get everything. So what
    is about typical counts as typical, and what is typical changes in steps only.
    """

    __slots__ = ("_average", "_fallback", "_ms")

    def __init__(self, fallback: Typical | float):
        """`fallback`: what to expect as long as no worker of the pool has measured anything."""
        self._fallback = fallback
        self._average = self._ms = 0.0

    def observe(self, ms: float) -> bool:
        """A worker has measured this. Whether another time is typical now, here or where nobody has measured any."""
        typical: Typical | float = self
        changed = False
        while isinstance(typical, Typical):
            average = typical._average
            typical._average = average = average + FORGET * (ms - average) if average else ms
            if abs(average - typical._ms) > STEP * typical._ms:
                typical._ms = average
                changed = True
            typical = typical._fallback
        return changed

    def judge(self, ms: float) -> float:
        """What to expect of a worker that has measured this; 0: nothing yet."""
        typical = self._ms
        if not typical:
            return self._fallback.judge(ms) if isinstance(self._fallback, Typical) else self._fallback
        return ms if ms and abs(ms - typical) > NOISE * typical else typical


DEFAULT_TOKEN_MS, DEFAULT_STEP_MS = 1.0, 10.0
"""Of a prompt token and of a decode step, as long as no worker at all has measured one."""
FORGET, STEP, NOISE = 0.1, 0.1, 0.25
"""Weight of a new time in the average; what the average must change by to count; what is about the same."""


class _Shared:
    """What the workers of a view have in common."""

    __slots__ = ("_any_step", "_any_token", "_pools", "sides", "workers")

    def __init__(self, workers: Mapping[str, WorkerView]) -> None:
        self.workers = workers
        self._any_token, self._any_step = Typical(DEFAULT_TOKEN_MS), Typical(DEFAULT_STEP_MS)
        self._pools: dict[str, tuple[Typical, Typical]] = {}
        self.sides: Sides | None = None
        """Of all workers that may get new work, draining ones included; None: somebody came, went or changed."""

    def typical(self, pool: str) -> tuple[Typical, Typical]:
        """Of this pool's workers: of a prompt token, and of a step with one decode."""
        if pool not in self._pools:
            if len(self._pools) >= MAX_WORKERS:
                self._pools.clear()  # workers choose these names
            self._pools[pool] = Typical(self._any_token), Typical(self._any_step)
        return self._pools[pool]


class WorkerView:
    """One life of one worker. A restarted worker gets a new object, so identity compares lives.

    What policies look at for every worker and request lies here in plain numbers, which `refresh` keeps.
    """

    __slots__ = (
        "_leaving",
        "_load",
        "_measured_step_ms",
        "_measured_token_ms",
        "_shared",
        "_slope_ms",
        "_state",
        "_step_ms",
        "_typical",
        "batch_share",
        "beside_ms",
        "block_size",
        "can_decode",
        "can_prefill",
        "capacity",
        "decode_requests",
        "decode_tokens",
        "fingerprint",
        "handoffs",
        "held_tokens",
        "info",
        "last_decode",
        "last_prefill",
        "load_ms",
        "max_handoffs",
        "max_model_len",
        "max_requests",
        "prefill_cached",
        "prefill_requests",
        "prefill_tokens",
        "prefixes",
        "queue_ms",
        "queued_tokens",
        "role",
        "rows",
        "seen",
        "tbt_ms",
        "token_bytes",
        "token_ms",
        "worker_id",
    )

    def __init__(
        self,
        info: WorkerInfo,
        now: float,
        max_handoffs: int | None = None,
        prefixes: WorkerPrefixes | None = None,
        shared: _Shared | None = None,
    ):
        self._shared = shared = shared or _Shared({})
        self._typical = shared.typical(info.pool)
        self.info = info
        self.worker_id = info.worker_id
        self.can_prefill = info.role in ("prefill", "both")
        self.can_decode = info.role in ("decode", "both")
        self.role = info.role
        self.token_bytes = info.layout.token_bytes
        self.block_size = info.layout.block_size
        self.fingerprint = info.fingerprint
        self.capacity = max(1, info.num_blocks * info.layout.block_size)
        """Tokens whose KV its pool holds."""
        self.max_model_len = info.max_model_len
        self.max_requests = max(1, info.max_batch_requests)
        self.prefixes = prefixes or WorkerPrefixes(-1, 0)
        """What of prompts' beginnings is cached there; see `ClusterView.prefixes`."""
        self._state: WorkerState = "ready"
        self._leaving = False
        self.seen = now
        """When it was last heard of, seconds on the router's clock."""
        self.prefill_requests = 0
        """Requests placed here whose first token of the attempt has not come yet."""
        self.prefill_tokens = 0
        """Their prompt (and prior) tokens, as far as they have to be computed."""
        self.prefill_cached = 0
        """Their other tokens, whose KV was expected to be there."""
        self.decode_requests = 0
        """Requests placed here for decoding that have not ended."""
        self.decode_tokens = 0
        """Tokens they may grow to: prompt plus max_tokens."""
        self.handoffs = 0
        """Requests placed here for decoding that do not decode here yet."""
        self.max_handoffs = max_handoffs or HANDOFFS_PER_SLOT * max(1, info.max_batch_requests)
        """With so many it gets no other (`ClusterView.full`). The samples of a request go together, if one may."""
        self.last_prefill = 0
        """The view's placement count when it last got a prefill; 0: never."""
        self.last_decode = 0
        # What follows from load report and charges; of both the larger counts.
        self.queued_tokens = 0
        """Prompt tokens that wait to be computed."""
        self.queue_ms = 0.0
        """How long that will take, less what is expected to be cached."""
        self.token_ms = DEFAULT_TOKEN_MS
        """Of a prompt token."""
        self.tbt_ms = 0.0
        """Between two tokens, with one request more than there are."""
        self.held_tokens = 0
        """Tokens whose KV is held there, or may have to be."""
        self.batch_share = 0.0
        """Of the requests that may run at once, those that want to."""
        self.beside_ms = 0.0
        """What a step costs without a prompt's chunk; 0 where nothing decodes."""
        self.load_ms = 0.0
        """What a token of one request more costs: the time between tokens, more so where pool or batch are full."""
        self.rows: list[tuple[dict[str, list[float]], int]] = []
        """Where `Candidates` keep this worker: columns by attribute, and its place in them."""
        self.load = LoadReport(blocks_free=info.num_blocks, blocks_total=info.num_blocks)

    def refresh(self) -> None:
        """The load report, or what is placed here, has changed."""
        load = self._load
        pending, placed = load.num_pending_tokens, self.prefill_tokens
        self.queued_tokens = placed if placed > pending else pending
        # The worker counts whole prompts, with what it will find in its cache.
        pending -= self.prefill_cached
        self.queue_ms = (placed if placed > pending else pending) * self.token_ms
        held, placed = (load.blocks_total - load.blocks_free) * self.block_size, self.decode_tokens
        self.held_tokens = placed if placed > held else held
        running, requests = load.num_running, self.decode_requests
        reported = running + load.num_waiting
        self.batch_share = (requests if requests > reported else reported) / self.max_requests
        tbt_ms = self.tbt_ms = self._step_ms + self._slope_ms * (requests if requests > running else running)
        self.beside_ms = tbt_ms if running or requests > self.handoffs else 0.0
        # Who finds the batch full waits about as long as others take for their tokens.
        share, batch = self.held_tokens / self.capacity, self.batch_share
        self.load_ms = tbt_ms * (1 + share + batch if batch >= 1 else 1 + share)
        for columns, place in self.rows:
            for name, column in columns.items():
                column[place] = getattr(self, name)

    @property
    def load(self) -> LoadReport:
        """Its last report."""
        return self._load

    @load.setter
    def load(self, load: LoadReport) -> None:
        self.take_loads((load,))

    def take_loads(self, loads: Sequence[LoadReport]) -> None:
        """Its reports since the last ones, in order."""
        changed = False
        for load in loads:
            changed = self._measure(load) or changed
        self._load = loads[-1]
        if changed:
            for worker in self._shared.workers.values():
                worker._judge()
        self._judge()

    def _measure(self, load: LoadReport) -> bool:
        """Note what it costs there. Whether something else is typical for the pool now."""
        self._measured_token_ms = load.prefill_token_s * 1e3
        self._slope_ms = load.decode_slope_s * 1e3
        # It was measured with as many requests as run; the others' part is added again in `refresh`.
        others = load.num_running - 1
        step_ms = load.decode_step_s * 1e3 - self._slope_ms * others if others > 0 else load.decode_step_s * 1e3
        self._measured_step_ms = step_ms
        token, step = self._typical
        changed = self._measured_token_ms > 0 and token.observe(self._measured_token_ms)
        return (step_ms > 0 and step.observe(step_ms)) or changed

    def _judge(self) -> None:
        """What was measured here, or what is typical, has changed."""
        token, step = self._typical
        self.token_ms = token.judge(self._measured_token_ms)
        self._step_ms = step.judge(self._measured_step_ms)
        self.refresh()

    @property
    def state(self) -> WorkerState:
        return self._state

    @state.setter
    def state(self, state: WorkerState) -> None:
        self._state = state
        self._shared.sides = None

    @property
    def leaving(self) -> bool:
        """It said that it goes: nothing new for this life."""
        return self._leaving

    @leaving.setter
    def leaving(self, leaving: bool) -> None:
        self._leaving = leaving
        self._shared.sides = None

    @property
    def ready(self) -> bool:
        return self._state == "ready"

    @property
    def num_outstanding(self) -> int:
        """Parts of requests (prefills and decodes) placed here that have not ended."""
        return self.prefill_requests + self.decode_requests

    def __repr__(self) -> str:
        return (
            f"<{self.worker_id} {self.state} prefill={self.prefill_requests}/{self.prefill_tokens} "
            f"decode={self.decode_requests}/{self.decode_tokens}>"
        )


class ClusterView:
    """All workers by id, the lost ones included until a new life replaces them."""

    def __init__(self, max_handoffs: int | None = None) -> None:
        """`max_handoffs`: of each worker; see `RouterConfig`."""
        self.workers: dict[str, WorkerView] = {}
        self.num_placed = 0
        """Placements so far; orders workers by how recently they got work."""
        self.draining: set[str] = set()
        """Ids of workers that get nothing new; a restarted one too. What they have they finish."""
        self.full: set[str] = set()
        """Ids of workers that may not decode anything more for now: `max_handoffs` are on their way there."""
        self.prefixes = PrefixIndex()
        """Of all workers' lives: what beginnings of prompts are cached where."""
        self._shared = _Shared(self.workers)
        self._max_handoffs = max_handoffs
        self._by_incarnation: dict[str, WorkerView] = {}

    def join(self, info: WorkerInfo, now: float) -> WorkerView:
        """Start a new life of `info.worker_id`; forgets the former one (whose requests must be moved first)."""
        former = self.workers.get(info.worker_id)
        if former is not None:
            former.state = "lost"
            self._by_incarnation.pop(former.info.incarnation, None)
            self.prefixes.close(former.prefixes)
        worker = WorkerView(info, now, self._max_handoffs, self.prefixes.open(info.num_blocks), self._shared)
        self._shared.sides = None
        self.full.discard(info.worker_id)
        self.workers[info.worker_id] = worker
        self._by_incarnation[info.incarnation] = worker
        return worker

    def make_room(self, worker_id: str) -> bool:
        """Whether a worker of this id can be known too; a lost one that owes nothing is forgotten for it."""
        if worker_id in self.workers or len(self.workers) < MAX_WORKERS:
            return True
        idle = [w for w in self.workers.values() if w.state == "lost" and not w.num_outstanding]
        if not idle:
            return False
        oldest = min(idle, key=lambda w: w.seen)
        del self.workers[oldest.worker_id]
        self._shared.sides = None
        self._by_incarnation.pop(oldest.info.incarnation, None)
        self.prefixes.close(oldest.prefixes)
        self.draining.discard(oldest.worker_id)
        return True

    def find(self, incarnation: str) -> WorkerView | None:
        """The worker whose current life this is; None for unknown and former lives."""
        return self._by_incarnation.get(incarnation)

    def get(self, worker_id: str) -> WorkerView | None:
        return self.workers.get(worker_id)

    def ready(self) -> Iterator[WorkerView]:
        return (w for w in self.workers.values() if w.state == "ready")

    def placeable(self) -> Iterator[WorkerView]:
        """Where new work may go."""
        return (w for w in self.ready() if not w.leaving and w.worker_id not in self.draining)

    def sides(self, avoid: Collection[str] = ()) -> Sides:
        """The same by what they may do, none of `avoid` (worker ids)."""
        sides = self._shared.sides
        if sides is None:
            for worker in self.workers.values():
                worker.rows = []
            sides = self._shared.sides = sides_of([w for w in self.ready() if not w.leaving])
            sides.watch()
        return sides.without({*avoid, *self.draining}) if avoid or self.draining else sides

    def peers(self) -> tuple[WorkerInfo, ...]:
        """The decode-capable workers that live: what prefill workers may hand over to."""
        return tuple(w.info for w in self.workers.values() if w.state == "ready" and w.can_decode)

    def stamp(self) -> int:
        """A new placement's number."""
        self.num_placed += 1
        return self.num_placed

    def charge_prefill(self, worker: WorkerView, tokens: int, cached: int = 0) -> None:
        """`tokens`: to be computed there; `cached`: further ones, whose KV is expected to be there."""
        worker.prefill_requests += 1
        worker.prefill_tokens += tokens
        worker.prefill_cached += cached
        worker.last_prefill = self.num_placed
        worker.refresh()

    def charge_decode(self, worker: WorkerView, tokens: int) -> None:
        worker.decode_requests += 1
        worker.decode_tokens += tokens
        worker.last_decode = self.num_placed
        worker.handoffs += 1
        worker.refresh()
        if worker.handoffs >= worker.max_handoffs:
            self.full.add(worker.worker_id)

    def release_prefill(self, worker: WorkerView, tokens: int, cached: int = 0) -> None:
        worker.prefill_requests -= 1
        worker.prefill_tokens -= tokens
        worker.prefill_cached -= cached
        worker.refresh()

    def release_decode(self, worker: WorkerView, tokens: int) -> None:
        worker.decode_requests -= 1
        worker.decode_tokens -= tokens
        worker.refresh()

    def expect_prompt(self, worker: WorkerView, prompt: PromptHashes) -> int:
        """A request with this prompt was placed there: its KV will be found there. How many tokens of it are now."""
        depth = self.prefixes.expect(worker.prefixes, prompt.of(worker.fingerprint, worker.block_size))
        return depth * worker.block_size

    def unexpect_prompt(self, worker: WorkerView, prompt: PromptHashes) -> None:
        """It is there, and was told of; or it will not be."""
        self.prefixes.unexpect(worker.prefixes, prompt.of(worker.fingerprint, worker.block_size))

    def end_handoff(self, worker: WorkerView) -> None:
        """One of those on their way there decodes now, or will not any more."""
        worker.handoffs -= 1
        worker.refresh()
        if worker.handoffs < worker.max_handoffs and self.workers.get(worker.worker_id) is worker:
            self.full.discard(worker.worker_id)

    def state_of(self, worker: WorkerView) -> ShownState:
        """As people are shown it."""
        drains = worker.ready and (worker.leaving or worker.worker_id in self.draining)
        return "draining" if drains else worker.state

    def statuses(self, now: float, breakers: Mapping[str, BreakerState] = {}) -> tuple[WorkerStatus, ...]:
        """All workers for `baton status`, in the order in which their ids first joined.

        `breakers`: by worker id, of those whose breaker is not closed.
        """
        return tuple(
            WorkerStatus(
                info=w.info,
                load=w.load,
                state=self.state_of(w),
                seen_s_ago=max(0.0, now - w.seen),
                num_outstanding=w.num_outstanding,
                breaker=breakers.get(w.worker_id, "closed"),
            )
            for w in self.workers.values()
        )

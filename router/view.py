"""What the router knows of its workers.

Knows who joined, what they last reported and what this router has placed on each of them that has
not ended. Must not know policies, requests' contents, sockets or clocks: times are arguments.

    join ──► ready ──silent for liveness.timeout_s, unreachable──► lost ──it speaks again──► ready
               └────────────── a new incarnation under the same id replaces it ◄──────────────┘

The ledger of outstanding work is the router's own: a load report is as old as its trip, and all
requests placed since it was written would otherwise be invisible and pile up on one worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from baton.protocol import MAX_WORKERS, LoadReport, WorkerInfo, WorkerStatus

WorkerState = Literal["ready", "lost"]
ShownState = Literal["ready", "draining", "lost"]


class WorkerView:
    """One life of one worker. A restarted worker gets a new object, so identity compares lives."""

    __slots__ = (
        "can_decode",
        "can_prefill",
        "decode_requests",
        "decode_tokens",
        "info",
        "last_decode",
        "last_prefill",
        "leaving",
        "load",
        "prefill_requests",
        "prefill_tokens",
        "seen",
        "state",
        "worker_id",
    )

    def __init__(self, info: WorkerInfo, now: float):
        self.info = info
        self.worker_id = info.worker_id
        self.can_prefill = info.role in ("prefill", "both")
        self.can_decode = info.role in ("decode", "both")
        self.load = LoadReport(blocks_free=info.num_blocks, blocks_total=info.num_blocks)
        self.state: WorkerState = "ready"
        self.leaving = False
        """It said that it goes: nothing new for this life."""
        self.seen = now
        """When it was last heard of, seconds on the router's clock."""
        self.prefill_requests = 0
        """Requests placed here whose first token of the attempt has not come yet."""
        self.prefill_tokens = 0
        """Their prompt (and prior) tokens."""
        self.decode_requests = 0
        """Requests placed here for decoding that have not ended."""
        self.decode_tokens = 0
        """Tokens they may grow to: prompt plus max_tokens."""
        self.last_prefill = 0
        """The view's placement count when it last got a prefill; 0: never."""
        self.last_decode = 0

    @property
    def ready(self) -> bool:
        return self.state == "ready"

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

    def __init__(self) -> None:
        self.workers: dict[str, WorkerView] = {}
        self.num_placed = 0
        """Placements so far; orders workers by how recently they got work."""
        self.draining: set[str] = set()
        """Ids of workers that get nothing new; a restarted one too. What they have they finish."""
        self._by_incarnation: dict[str, WorkerView] = {}

    def join(self, info: WorkerInfo, now: float) -> WorkerView:
        """Start a new life of `info.worker_id`; forgets the former one (whose requests must be moved first)."""
        former = self.workers.get(info.worker_id)
        if former is not None:
            former.state = "lost"
            self._by_incarnation.pop(former.info.incarnation, None)
        worker = WorkerView(info, now)
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
        self._by_incarnation.pop(oldest.info.incarnation, None)
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

    def peers(self) -> tuple[WorkerInfo, ...]:
        """The decode-capable workers that live: what prefill workers may hand over to."""
        return tuple(w.info for w in self.workers.values() if w.state == "ready" and w.can_decode)

    def stamp(self) -> int:
        """A new placement's number."""
        self.num_placed += 1
        return self.num_placed

    def charge_prefill(self, worker: WorkerView, tokens: int) -> None:
        worker.prefill_requests += 1
        worker.prefill_tokens += tokens
        worker.last_prefill = self.num_placed

    def charge_decode(self, worker: WorkerView, tokens: int) -> None:
        worker.decode_requests += 1
        worker.decode_tokens += tokens
        worker.last_decode = self.num_placed

    def release_prefill(self, worker: WorkerView, tokens: int) -> None:
        worker.prefill_requests -= 1
        worker.prefill_tokens -= tokens

    def release_decode(self, worker: WorkerView, tokens: int) -> None:
        worker.decode_requests -= 1
        worker.decode_tokens -= tokens

    def state_of(self, worker: WorkerView) -> ShownState:
        """As people are shown it."""
        drains = worker.ready and (worker.leaving or worker.worker_id in self.draining)
        return "draining" if drains else worker.state

    def statuses(self, now: float) -> tuple[WorkerStatus, ...]:
        """All workers for `baton status`, in the order in which their ids first joined."""
        return tuple(
            WorkerStatus(
                info=w.info,
                load=w.load,
                state=self.state_of(w),
                seen_s_ago=max(0.0, now - w.seen),
                num_outstanding=w.num_outstanding,
            )
            for w in self.workers.values()
        )

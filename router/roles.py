"""The role planner within the router: has the loads measured, drains who shall change, knows when it may be replaced.

Pure. Must not know who starts workers: a launcher asks for the `order`, lets that worker go and starts it anew in the
other pool, under the same id; its `Join` is the end of the change.

    planned ──► draining ──nothing left there──► drained ──launcher: leave, start──► joined in the other role: done
                    └─ an operator drains or undrains it, it takes too long, or its phase lost others ─► abandoned ┘
"""

from __future__ import annotations

from typing import Any

import msgspec

from baton.config import ClusterConfig
from router.phase_load import Loads, PhaseMeter
from router.queue import RequestQueue
from router.role_planner import PlannedWorker, RoleChange, RolePlanner
from router.view import ClusterView, WorkerView


class RoleOrder(msgspec.Struct, frozen=True):
    """To a launcher: this life of a worker may end, the next one belongs to `pool`."""

    worker_id: str
    incarnation: str
    pool: str
    words: str


class Roles:
    """Of one router, with `planner.enabled`."""

    def __init__(self, config: ClusterConfig, view: ClusterView, queue: RequestQueue):
        self.planner = RolePlanner(config.planner)
        self.wake_at = 0.0
        """When `on_deadline` is due."""
        self.loads: Loads | None = None
        """As it last saw them."""
        self._view = view
        self._queue = queue
        self._meter = PhaseMeter(config)
        self._interval_s = config.planner.interval_s
        self._pools = {config.role_of(name): name for name, pool in config.pools.items()}

    def on_deadline(self, now: float, arrived_tokens: int) -> bool:
        """Look, and act on it. Whether another set of workers takes requests now.

        `arrived_tokens`: of all prompts that came so far.
        """
        self.wake_at = now + self._interval_s
        queued = list(self._queue)
        self.loads = self._meter.observe(
            now,
            self._view,
            arrived_tokens=arrived_tokens,
            num_queued=len(queued),
            queued_tokens=sum(len(request.owner.prompt) for request in queued),
        )
        before = self.planner.change
        self.look_after(now)
        begun = self.planner.observe(now, self.loads, [*map(self._planned, self._changeable())])
        if begun is not None:
            self._view.draining.add(begun.worker_id)
        elif before is not None and self.planner.change is None:
            self._view.draining.discard(before.worker_id)  # it took too long
        self._look_whether_drained()
        return begun is not None or before is not self.planner.change

    def on_join(self, worker: WorkerView, now: float) -> None:
        """It may be the one that changes, in its new life."""
        change = self.planner.change
        if change is None or change.worker_id != worker.worker_id:
            return
        if worker.role == change.to_role:
            self.planner.done(now)
            self._view.draining.discard(worker.worker_id)
        else:
            self.planner.restarted(worker.info.incarnation)

    def on_drain(self, worker_id: str, now: float) -> None:
        """An operator has decided about this worker, and that holds."""
        change = self.planner.change
        if change is not None and change.worker_id == worker_id:
            self.planner.abandon(now, "an operator decided about this worker")

    def look_after(self, now: float) -> bool:
        """A worker was lost, or is drained. Whether a change is given up for that, and its worker takes requests again.

        Else its phase might have nobody left, although a worker of it lives.
        """
        change = self.planner.change
        worker = None if change is None else self._view.find(change.incarnation)
        if change is None or worker is None or not worker.ready or worker.leaving:
            return False
        others, least = (
            sum(w.role == change.from_role for w in self._view.placeable()),
            self.planner.least(change.from_role),
        )
        if others >= least:
            return False
        phase = change.from_role
        self.planner.abandon(now, f"{phase} would have {others} workers left, planner.min_{phase} is {least}")
        self._view.draining.discard(change.worker_id)
        return True

    def order(self) -> RoleOrder | None:
        """What a launcher is to do now."""
        change = self.planner.change
        if change is None or change.state != "drained":
            return None
        return RoleOrder(change.worker_id, change.incarnation, self._pools[change.to_role], change.reason)

    def data(self, now: float) -> dict[str, Any]:
        """As the overview has it."""
        planner, loads = self.planner, self.loads
        return {
            "loads": None if loads is None else {"prefill": loads.prefill.share, "decode": loads.decode.share},
            "words": "" if loads is None else str(loads),
            "refusal": None if planner.refusal is None else planner.refusal.words,
            "changes": [_change_data(change, now) for change in reversed(planner.history)],
        }

    def words(self) -> str:
        """What it does now, in a line."""
        planner = self.planner
        if planner.change is not None:
            return f"changes {planner.change} ({planner.change.state})"
        loads = self.loads
        text = "nothing measured yet"
        if loads is not None:
            text = f"load of prefill {loads.prefill.share:.2f}, of decode {loads.decode.share:.2f}"
        return text if planner.refusal is None else f"{text}; no change: {planner.refusal.words}"

    def _changeable(self) -> list[WorkerView]:
        return [worker for worker in self._view.workers.values() if worker.role != "both"]

    def _planned(self, worker: WorkerView) -> PlannedWorker:
        assert worker.role != "both"
        return PlannedWorker(
            worker.worker_id,
            worker.info.incarnation,
            worker.role,
            self._view.state_of(worker),
            worker.num_outstanding,
            worker.seen,
        )

    def _look_whether_drained(self) -> None:
        change = self.planner.change
        worker = None if change is None else self._view.find(change.incarnation)
        if worker is not None and worker.ready and not worker.num_outstanding:
            self.planner.drained()


def _change_data(change: RoleChange, now: float) -> dict[str, Any]:
    return {
        "worker_id": change.worker_id,
        "from": change.from_role,
        "to": change.to_role,
        "state": change.state,
        "reason": change.reason,
        "outcome": change.outcome,
        "began_s_ago": now - change.began_at,
        "took_s": None if change.ended_at is None else change.ended_at - change.began_at,
    }

"""SimulatedRoles: what a launcher does about role changes, under a virtual clock.

Pure. Like the real launchers it asks the router for its order, waits until the worker is idle, lets it go, and starts
it anew in the other pool `start_s` later. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from baton_cluster.simulated_worker import SimulatedWorker
from baton_cluster.specs import WorkerSpec
from baton_cluster.virtual_clock import VirtualClock
from router.roles import RoleOrder, Roles

IDLE_EVERY_S = 0.1
"""How often it looks whether a worker's last transfers have ended."""


class SimulatedRoles:
    """`leave(worker_id)` ends a worker's life in order, `start(spec)` begins the next one."""

    def __init__(
        self,
        roles: Roles,
        workers: Mapping[str, SimulatedWorker],
        clock: VirtualClock,
        *,
        start_s: float,
        leave: Callable[[str], None],
        start: Callable[[WorkerSpec], None],
    ):
        self._roles = roles
        self._workers = workers
        self._clock = clock
        self._start_s = start_s
        self._leave = leave
        self._start = start
        self._taken = ""
        """The incarnation of the last order that is being carried out."""

    def look(self) -> None:
        """To be called when the router may have an order."""
        order = self._roles.order()
        if order is not None and order.incarnation != self._taken:
            self._taken = order.incarnation
            self._carry_out(order)

    def _carry_out(self, order: RoleOrder) -> None:
        worker = self._workers[order.worker_id]
        if self._roles.order() != order or worker.info.incarnation != order.incarnation or not worker.alive:
            self._taken = ""  # it was given up meanwhile, or the worker died: an order that follows counts
        elif worker.core.is_idle:
            self._leave(order.worker_id)
            self._clock.after(self._start_s, self._start, WorkerSpec(order.worker_id, order.pool))
        else:
            self._clock.after(IDLE_EVERY_S, self._carry_out, order)

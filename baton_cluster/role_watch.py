"""RoleWatch: asks the router now and then whether a worker is to change its role, and has its launcher do it.

Knows neither how a router is asked nor how a worker is replaced. One thread, which sleeps between its questions.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from baton_cluster.cluster import Progress
from router.roles import RoleOrder

log = logging.getLogger(__name__)


class RoleWatch:
    """`carry_out(order)` lets a drained worker go and starts it anew in the other pool, or sees to it that it is.

    It returns False where that life of the worker is not the present one yet, and is called again. Orders are carried
    out one after the other, each once. What `ask` or `carry_out` raises is logged: the router gives up what does not
    happen.
    """

    def __init__(
        self,
        ask: Callable[[], RoleOrder | None],
        carry_out: Callable[[RoleOrder], bool],
        every_s: float,
        progress: Progress,
    ):
        self._ask = ask
        self._carry_out = carry_out
        self._every_s = every_s
        self._progress = progress
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="baton-roles", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Carry out nothing more. Returns when what is under way has ended. Idempotent."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        told = taken = ""
        answers = True
        while not self._stopping.wait(self._every_s):
            try:
                order = self._ask()
                answers = True
            except Exception as e:  # noqa: BLE001  (the router may be on its way back, or Ray shut down under us)
                if answers:
                    log.warning("the router does not tell of role changes: %s: %s", type(e).__name__, e)
                answers = False
                continue
            if order is None or order.incarnation == taken:
                continue
            if order.incarnation != told:
                told = order.incarnation
                self._progress(f"{order.worker_id} moves to pool {order.pool}: {order.words}")
            try:
                if self._carry_out(order):
                    taken = order.incarnation
            except Exception:
                log.exception("%s could not be moved to pool %s", order.worker_id, order.pool)
                taken = order.incarnation

"""RunAhead: how far a simulated worker may go while nothing can come in between, and telling of it at once.

Most steps of a busy decode worker end with one more token for everybody, and nobody who hears of that does anything.
As long as no other event of the virtual clock is due, it takes such steps one after the other without the clock, and
router and clients are told of all of them together. What comes out is the same, to the last digit.
"""

from __future__ import annotations

from collections.abc import Callable

from baton.plain_steps import PlainSteps
from baton_cluster.virtual_clock import VirtualClock
from router.actions import RouterAction
from router.core import RouterCore


class RunAhead:
    """Of one simulated cluster. `latency_s`: of a message. `act`: does what the router answers."""

    def __init__(
        self, clock: VirtualClock, router: RouterCore, latency_s: float, act: Callable[[list[RouterAction]], None]
    ):
        self.latency_s = latency_s
        self.num_leaving = 0
        """Open requests whose clients will go when they have got some token; then nobody may run ahead."""
        self._clock = clock
        self._router = router
        self._act = act

    def horizon(self) -> float:
        """Before this time nothing happens but what the caller does."""
        return self._clock.horizon() if not self.num_leaving else 0.0

    def takes(self, incarnation: str, steps: PlainSteps) -> bool:
        """Whether the router would do nothing about these steps but pass tokens on."""
        return self._router.takes_plainly(incarnation, steps)

    def tell(self, incarnation: str, steps: PlainSteps) -> None:
        """The router hears of steps that it `takes`, and the clients of their tokens."""
        self._act(self._router.on_plain_steps(incarnation, steps))

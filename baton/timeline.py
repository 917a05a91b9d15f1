"""Where each millisecond of a request went.

A `Mark` is an instant somebody saw; a `Stage` is the time between two marks. Marks are seconds on
the router's monotonic clock: a worker adds the clock offset it measured when it joined, so marks of
different machines compare. Pure arithmetic; must not read a clock.

    RECEIVED ──router queue── PLACED ──placement── SUBMITTED ──prefill queue── PREFILL_START
      ──prefill── FIRST_TOKEN ──hand-off wait── COMMITTED ──wire── ADOPTED ──decode queue──
      DECODE_START ──first decode step── SECOND_TOKEN ──decode steps── FINISHED
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum, StrEnum

import msgspec


class Mark(IntEnum):
    """An instant in a request's life. The order is the order in which they happen."""

    RECEIVED = 0
    """The router read the request from the client's socket."""
    PLACED = 1
    """`place()` answered."""
    SUBMITTED = 2
    """The prefill worker has the request: the stage PLACEMENT is the placed request's way there."""
    PREFILL_START = 3
    """The step with the prompt's first chunk began (for a split request credit was granted before)."""
    FIRST_TOKEN = 4
    """The prefill worker sampled the first token."""
    COMMITTED = 5
    """The prefill worker sent the commit: all blocks were given to the transport."""
    ADOPTED = 6
    """The decode worker verified the blocks and took the request over."""
    DECODE_START = 7
    """The first decode step began."""
    SECOND_TOKEN = 8
    """The first decode step ended."""
    FINISHED = 9
    """The last token was sampled."""


class Stage(StrEnum):
    """The time between two marks, in the order in which a request passes them."""

    ROUTER_QUEUE = "router_queue"
    PLACEMENT = "placement"
    PREFILL_QUEUE = "prefill_queue"
    PREFILL = "prefill"
    HANDOFF_WAIT = "handoff_wait"
    WIRE = "wire"
    DECODE_QUEUE = "decode_queue"
    FIRST_DECODE_STEP = "first_decode_step"
    DECODE_STEPS = "decode_steps"


_ENDS: tuple[tuple[Stage, Mark], ...] = (
    (Stage.ROUTER_QUEUE, Mark.PLACED),
    (Stage.PLACEMENT, Mark.SUBMITTED),
    (Stage.PREFILL_QUEUE, Mark.PREFILL_START),
    (Stage.PREFILL, Mark.FIRST_TOKEN),
    (Stage.HANDOFF_WAIT, Mark.COMMITTED),
    (Stage.WIRE, Mark.ADOPTED),
    (Stage.DECODE_QUEUE, Mark.DECODE_START),
    (Stage.FIRST_DECODE_STEP, Mark.SECOND_TOKEN),
    (Stage.DECODE_STEPS, Mark.FINISHED),
)


class RequestTimeline(msgspec.Struct, array_like=True):
    """The marks of one request, by `Mark`, in seconds on the router's clock.

    A mark that did not happen is absent (a colocated request has no COMMITTED): its stage is absent too
    and its time belongs to the next stage that ended, so that the stages always add up to the whole.
    """

    marks: dict[int, float] = {}

    def mark(self, mark: Mark, at: float) -> None:
        """Keep the first sighting of `mark`; later ones (of a retried attempt) do not move it."""
        self.marks.setdefault(int(mark), at)

    def merge(self, marks: Mapping[int, float]) -> None:
        """Take over marks seen elsewhere."""
        for mark, at in marks.items():
            self.marks.setdefault(mark, at)

    def stages(self) -> dict[Stage, float]:
        """Seconds per stage. They sum to `total()` exactly."""
        previous = self.marks.get(Mark.RECEIVED)
        if previous is None:
            return {}
        spans: dict[Stage, float] = {}
        for stage, end in _ENDS:
            at = self.marks.get(end)
            if at is not None:
                spans[stage] = at - previous
                previous = at
        return spans

    def ttft(self) -> float | None:
        """Seconds from arrival at the router to the first token's sampling."""
        return self._between(Mark.RECEIVED, Mark.FIRST_TOKEN)

    def total(self) -> float | None:
        """Seconds from arrival at the router to the last token's sampling."""
        return self._between(Mark.RECEIVED, Mark.FINISHED)

    def residual(self, client_seconds: float) -> float | None:
        """What the client waited beyond the stages: its own work, two message trips, clock error.

        `client_seconds`: from the call to the last token, on the client's clock.
        """
        total = self.total()
        return None if total is None else client_seconds - total

    def _between(self, start: Mark, end: Mark) -> float | None:
        if start in self.marks and end in self.marks:
            return self.marks[end] - self.marks[start]
        return None

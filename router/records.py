"""What the router remembers of requests that have ended, for `baton explain`. Bounded; pure data."""

from __future__ import annotations

import msgspec

from router.policy import Placement
from router.request import ClientRequest

MAX_RECORDS = 1024


class RequestRecord(msgspec.Struct, frozen=True):
    """One ended request: where it went and why, and when it passed what (`baton.timeline.Mark` -> seconds).

    Of several samples: reason and marks are those of sample 0, the placements all of them, sample by sample.
    """

    request_id: str
    label: str
    finish_reason: str
    error: str
    """Empty unless `finish_reason` is `error`."""
    retried: str
    """Why the last attempt before the final one ended; empty if there was one attempt."""
    prompt_tokens: int
    completion_tokens: int
    placements: tuple[Placement, ...]
    """In order: of each attempt, and after each refused hand-over."""
    marks: dict[int, float]


class Records:
    """The last `limit` ended requests."""

    def __init__(self, limit: int = MAX_RECORDS):
        self._limit = limit
        self._records: dict[str, RequestRecord] = {}

    def add(self, request: ClientRequest, finish_reason: str, error: str) -> None:
        if len(self._records) >= self._limit:
            del self._records[next(iter(self._records))]
        self._records[request.request_id] = RequestRecord(
            request_id=request.request_id,
            label=request.label,
            finish_reason=finish_reason,
            error=error,
            retried=next((sample.reason for sample in request.samples if sample.reason), ""),
            prompt_tokens=len(request.prompt),
            completion_tokens=sum(len(sample.tokens) for sample in request.samples),
            placements=tuple(placement for sample in request.samples for placement in sample.placements),
            marks=dict(request.samples[0].timeline.marks),
        )

    def find(self, request_id: str) -> RequestRecord | None:
        """By id, or by the start of one, as a person would type it; None if unknown or ambiguous."""
        exact = self._records.get(request_id)
        if exact is not None or not request_id:
            return exact
        found = [r for key, r in self._records.items() if key.startswith(request_id)]
        return found[0] if len(found) == 1 else None

    def __len__(self) -> int:
        return len(self._records)

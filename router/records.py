"""What is told of a request, while it is open and after its end, and the ends that the router remembers.

For `baton explain`. Bounded; pure data.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Any

import msgspec

from router.policy import Placement
from router.request import ClientRequest

MAX_RECORDS = 1024
MAX_RANKED = 128
"""Records, the latest, that also say what each candidate cost: most of a record where there are many workers."""


class RequestRecord(msgspec.Struct, frozen=True):
    """One request: where it went and why, and when it passed what (`baton.timeline.Mark` -> seconds).

    Of several samples: reason and marks are those of sample 0, the placements all of them, sample by sample.
    """

    request_id: str
    label: str
    finish_reason: str
    """Empty while it is open."""
    error: str
    """Empty unless `finish_reason` is `error`."""
    retried: str
    """Why the last attempt before the final one ended; empty if there was one attempt."""
    prompt_tokens: int
    completion_tokens: int
    placements: tuple[Placement, ...]
    """In order: of each attempt, and after each refused hand-over."""
    marks: dict[int, float]
    cached_tokens: int = 0
    """Tokens of the prompt that prefill had in its cache, the sum over all samples."""
    attempts: int = 1
    """The largest number that a sample needed."""
    state: str = "ended"
    """`router.request.State` of sample 0, or of another while that one has ended."""
    queued_s: float = 0.0
    """How long sample 0 was at no worker: in the router's queue, or until there was one to take it."""


def record_of(
    request: ClientRequest, *, finish_reason: str = "", error: str = "", now: float | None = None
) -> RequestRecord:
    """What there is to tell. `now`: of one that is open."""
    first = request.samples[0]
    waits_s = 0.0 if now is None or first.waits_since is None else now - first.waits_since
    still_open = [] if finish_reason else request.open_samples()
    return RequestRecord(
        request_id=request.request_id,
        label=request.label,
        finish_reason=finish_reason,
        error=error,
        retried=next((sample.reason for sample in request.samples if sample.reason), ""),
        prompt_tokens=len(request.prompt),
        completion_tokens=sum(len(sample.tokens) for sample in request.samples),
        placements=tuple(placement for sample in request.samples for placement in sample.placements),
        marks=dict(first.timeline.marks),
        cached_tokens=sum(sample.cached_tokens for sample in request.samples),
        attempts=max(sample.attempt for sample in request.samples) + 1,
        state=str(still_open[0].state.value) if still_open else "ended",
        queued_s=first.queued_s + waits_s,
    )


def without_rankings(record: RequestRecord) -> RequestRecord:
    """The same without what its candidates cost, which is most of it where there are many workers."""
    placements = tuple(Placement(placement.prefill, placement.decode) for placement in record.placements)
    return msgspec.structs.replace(record, placements=placements)


def record_dict(record: RequestRecord) -> dict[str, Any]:
    """As JSON has it, with the score of every candidate of each placement."""
    plain: dict[str, Any] = msgspec.to_builtins(record, str_keys=True)
    plain["placements"] = [
        {"prefill": p.prefill, "decode": p.decode, "scores": msgspec.to_builtins(p.scores)} for p in record.placements
    ]
    return plain


class Records:
    """The last `limit` ended requests."""

    def __init__(self, limit: int = MAX_RECORDS):
        self._limit = limit
        self._records: dict[str, RequestRecord] = {}
        self._ranked: deque[str] = deque()

    def add(self, request: ClientRequest, finish_reason: str, error: str) -> None:
        if len(self._records) >= self._limit:
            del self._records[next(iter(self._records))]
        self._records[request.request_id] = record_of(request, finish_reason=finish_reason, error=error)
        self._ranked.append(request.request_id)
        if len(self._ranked) > MAX_RANKED and (old := self._records.get(self._ranked.popleft())) is not None:
            self._records[old.request_id] = without_rankings(old)

    def get(self, request_id: str) -> RequestRecord | None:
        return self._records.get(request_id)

    def find(self, prefix: str) -> list[RequestRecord]:
        """Those whose ids begin so."""
        exact = self._records.get(prefix)
        if exact is not None or not prefix:
            return [] if exact is None else [exact]
        return [r for key, r in self._records.items() if key.startswith(prefix)]

    def recent(self, limit: int) -> list[RequestRecord]:
        """The latest first, at most `limit`."""
        return list(islice(reversed(self._records.values()), limit))

    def __len__(self) -> int:
        return len(self._records)

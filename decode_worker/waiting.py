"""Offers that wait for blocks at a decode worker: in which order, and how many of whom.

Pure. Knows order and counts; must not know when an offer is accepted, or why not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from baton.engine.request import EngineRequest
from baton.protocol import TransferId
from kv_transfer.session import RecvSession

Offered = tuple[RecvSession, EngineRequest]


class WaitingOffers:
    """Iterates most important priority first, within one first come first served.

    What comes or goes meanwhile does not disturb that. Adding, discarding and counting take the same time however many
    wait.
    """

    def __init__(self) -> None:
        self._queues: dict[int, dict[TransferId, Offered]] = {}
        """By priority, none of them empty; each in the order of arrival."""
        self._num_offers: Counter[str] = Counter()
        self._num_tokens: Counter[str] = Counter()
        """By prefill worker, of those that wait."""

    def add(self, session: RecvSession, request: EngineRequest) -> None:
        self._queues.setdefault(request.priority, {})[session.transfer] = session, request
        self._num_offers[session.transfer.source] += 1
        self._num_tokens[session.transfer.source] += request.num_context

    def discard(self, session: RecvSession) -> None:
        """One that does not wait is no matter."""
        priority, source = session.offer.priority, session.transfer.source
        queue = self._queues.get(priority, {})
        found = queue.pop(session.transfer, None)
        if found is None:
            return
        if not queue:
            del self._queues[priority]
        self._num_offers[source] -= 1
        self._num_tokens[source] -= found[1].num_context
        if not self._num_offers[source]:
            del self._num_offers[source], self._num_tokens[source]

    def load_of(self, source: str) -> tuple[int, int]:
        """How many offers of this prefill worker (its incarnation) wait, and tokens of context in them."""
        return self._num_offers[source], self._num_tokens[source]

    def __iter__(self) -> Iterator[Offered]:
        for priority in sorted(self._queues):
            yield from list(self._queues.get(priority, {}).values())

    def __bool__(self) -> bool:
        return bool(self._queues)

    def __len__(self) -> int:
        return self._num_offers.total()

    def check(self) -> None:
        """The counts are those of what waits."""
        offers: Counter[str] = Counter()
        tokens: Counter[str] = Counter()
        for session, request in self:
            offers[session.transfer.source] += 1
            tokens[session.transfer.source] += request.num_context
            assert session.offer.priority == request.priority, session
        assert (self._num_offers, self._num_tokens) == (offers, tokens), (self._num_offers, self._num_tokens)
        assert all(self._queues.values()), self._queues

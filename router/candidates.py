"""Workers that a request may go to, all for the same part of it.

Kept from one request to the next, with columns of what policies look at, so that a decision is arithmetic on lists: a
worker that changes writes its row. Pure. Must not know policies.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from router.view import WorkerView


class Candidates:
    """`workers` never changes; neither do the facts below, which are found when they are first asked for."""

    def __init__(self, workers: list[WorkerView]):
        self.workers = workers
        self._columns: dict[str, list[float]] = {}
        self._heard_until = -1.0
        """None of them had been silent since then when that was last looked at: they are heard of ever later."""

    def __len__(self) -> int:
        return len(self.workers)

    def column(self, name: str) -> list[float]:
        """This attribute of all workers. Not to be changed; of candidates that are watched it changes later."""
        column = self._columns.get(name)
        if column is None:
            column = self._columns[name] = list(map(attrgetter(name), self.workers))
        return column

    def watch(self) -> None:
        """From now on the workers keep the columns up to date."""
        for place, worker in enumerate(self.workers):
            worker.rows.append((self._columns, place))

    @cached_property
    def ids(self) -> list[str]:
        return [w.worker_id for w in self.workers]

    @cached_property
    def keys(self) -> list[bytes]:
        """The ids, to be hashed."""
        return [worker_id.encode() for worker_id in self.ids]

    @cached_property
    def place_of(self) -> dict[int, int]:
        """By slot of the prefix index: which of the workers that is."""
        return {w.prefixes.slot: i for i, w in enumerate(self.workers)}

    @cached_property
    def kinds(self) -> list[tuple[str, int]]:
        """`(fingerprint, block size)` of their pools, each once."""
        return list({(w.fingerprint, w.block_size): None for w in self.workers})

    @cached_property
    def _smallest(self) -> tuple[int, int]:
        return min([w.capacity for w in self.workers]), min([w.max_model_len for w in self.workers])

    def fitting(self, held: int, total: int) -> Candidates:
        """Those whose pool can hold `held` tokens, and whose model reads `total`."""
        if not self.workers:
            return self
        capacity, max_model_len = self._smallest
        if held <= capacity and total <= max_model_len:
            return self
        return Candidates([w for w in self.workers if held <= w.capacity and total <= w.max_model_len])

    def without(self, worker_ids: Collection[str]) -> Candidates:
        """All but these."""
        return Candidates([w for w in self.workers if w.worker_id not in worker_ids]) if worker_ids else self

    def any_silent(self, since: float) -> bool:
        """Whether one of them was not heard of since then."""
        if since > self._heard_until:
            self._heard_until = min([w.seen for w in self.workers])
        return since > self._heard_until


class Sides(NamedTuple):
    """Who may do which part of a request."""

    prefill: Candidates
    decode: Candidates
    both: Candidates

    def watch(self) -> None:
        """See `Candidates`."""
        for candidates in {id(side): side for side in self}.values():
            candidates.watch()

    def without(self, worker_ids: Collection[str]) -> Sides:
        if not worker_ids:
            return self
        return sides_of([w for side in self for w in side.workers if w.worker_id not in worker_ids])


def sides_of(workers: Iterable[WorkerView]) -> Sides:
    """By role; `both` workers stand in for a side that has no dedicated worker."""
    by_role: dict[str, list[WorkerView]] = {"prefill": [], "decode": [], "both": []}
    for worker in dict.fromkeys(workers):
        by_role[worker.role].append(worker)
    prefill, decode, both = (Candidates(by_role[role]) for role in ("prefill", "decode", "both"))
    if both.workers and prefill.workers and not decode.workers:
        return Sides(prefill, both, both)
    if both.workers and decode.workers and not prefill.workers:
        return Sides(both, decode, both)
    return Sides(prefill, decode, both)

"""Which worker has the KV of which beginnings of prompts, as far as the router knows.

A worker tells (`PrefixNews`) which full blocks a request would find there. In between counts, too, what is *expected*
there: the prompts of requests that were placed on it and have not ended, so that equal prompts which come in a burst
find each other before any worker has told of the first.

    hash ──► the workers that have this block, as the bits of one number      matching: AND, block by block
    worker ──► hashes that it told of; hashes that are expected, how often     so all of a life goes at once

Bounded: of one worker at most as many blocks as its pool has, and `MAX_BLOCKS` in all; what does not fit is not
remembered, and its prompts count as not cached. Pure. Must not know requests, policies or messages' ways.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from baton.prefix_hash import prefix_hashes, unpack_hashes
from baton.protocol import PrefixNews

MAX_BLOCKS = 1 << 20
"""Of all workers together: some 200 MB."""


class PromptHashes:
    """The prefix hashes of one prompt, computed once for each kind of pool that asks. `salt`: the request's."""

    __slots__ = ("_by_kind", "_prompt", "_salt")

    def __init__(self, prompt: Sequence[int], salt: str = ""):
        self._prompt = prompt
        self._salt = salt
        self._by_kind: dict[tuple[str, int], tuple[int, ...]] = {}

    def of(self, fingerprint: str, block_size: int) -> tuple[int, ...]:
        """Of the prompt's full blocks, from the first on, in pools of this model and block size."""
        hashes = self._by_kind.get((fingerprint, block_size))
        if hashes is None:
            hashes = prefix_hashes(self._prompt, block_size, fingerprint, self._salt)
            self._by_kind[fingerprint, block_size] = hashes
        return hashes


class WorkerPrefixes:
    """What is known of one life of one worker; the index writes it."""

    __slots__ = ("expected", "known", "limit", "next_number", "slot")

    def __init__(self, slot: int, limit: int):
        self.slot = slot
        """Its bit in the index; -1: its life is over."""
        self.limit = limit
        """Blocks that it may tell of: those that its pool has."""
        self.known: set[int] = set()
        self.expected: dict[int, int] = {}
        """Hash -> requests there that have this block in their prompt."""
        self.next_number: int | None = None
        """Of its next news; None: only news that tell of everything are worth something."""


class PrefixIndex:
    """See the module. `max_blocks`: blocks that are known or expected, of all workers together."""

    def __init__(self, max_blocks: int = MAX_BLOCKS):
        self.num_blocks = 0
        """Of all workers, known or expected."""
        self._max_blocks = max_blocks
        self._workers_of: dict[int, int] = {}
        """Hash -> the workers that have the block, as bits."""
        self._free_slots: list[int] = []
        self._num_slots = 0

    # --- workers' lives -----------------------------------------------------------------------------

    def open(self, num_blocks: int) -> WorkerPrefixes:
        """For a new life of a worker with a pool of so many blocks."""
        if not self._free_slots:
            self._free_slots.append(self._num_slots)
            self._num_slots += 1
        return WorkerPrefixes(self._free_slots.pop(), num_blocks)

    def close(self, worker: WorkerPrefixes) -> None:
        """The life is over for good."""
        self.clear(worker)
        if worker.slot >= 0:
            self._free_slots.append(worker.slot)
            worker.slot = -1

    def clear(self, worker: WorkerPrefixes) -> None:
        """Nothing is known of it any more, and nothing expected."""
        self._forget_known(worker)
        expected, worker.expected = worker.expected, {}
        self._unset(worker, expected)
        worker.next_number = None

    # --- what it has --------------------------------------------------------------------------------

    def take(self, worker: WorkerPrefixes, news: PrefixNews) -> bool:
        """Take in what it tells. False: news were lost in between; nothing of it is known until it tells everything."""
        if worker.slot < 0:
            return True
        if news.reset:
            self._forget_known(worker)
        elif news.number != worker.next_number:
            was_known = worker.next_number is not None
            self._forget_known(worker)
            worker.next_number = None
            return not was_known  # it has been asked for everything already
        worker.next_number = news.number + 1
        known, expected = worker.known, worker.expected
        gone = known.intersection(unpack_hashes(news.removed))
        known -= gone
        self._unset(worker, [h for h in gone if h not in expected])
        for h in unpack_hashes(news.added):
            if h in known:
                continue
            if len(known) >= worker.limit or not (h in expected or self._set(worker, h)):
                break
            known.add(h)
        return True

    def expect(self, worker: WorkerPrefixes, hashes: Sequence[int]) -> int:
        """A request with these blocks in its prompt was placed there. How many, from the first on, it had already."""
        depth = 0
        if worker.slot < 0:
            return depth
        expected, known = worker.expected, worker.known
        for i, h in enumerate(hashes):
            count = expected.get(h, 0)
            if count or h in known:
                depth += depth == i
            elif not self._set(worker, h):
                break
            expected[h] = count + 1
        return depth

    def unexpect(self, worker: WorkerPrefixes, hashes: Sequence[int]) -> None:
        """The request has ended, or goes on elsewhere."""
        expected = worker.expected
        if not expected:
            return
        over = []
        for h in hashes:
            count = expected.get(h, 0)
            if count > 1:
                expected[h] = count - 1
            elif count:
                del expected[h]
                if h not in worker.known:
                    over.append(h)
        self._unset(worker, over)

    # --- who has it -----------------------------------------------------------------------------------

    def match(self, hashes: Sequence[int]) -> dict[int, int]:
        """By slot: how many of these blocks, from the first on, the worker has. Who has none is left out."""
        depths: dict[int, int] = {}
        workers_of, held = self._workers_of, -1
        for depth, h in enumerate(hashes):
            going_on = workers_of.get(h, 0) & held
            if going_on != held:
                if depth:
                    _note(depths, held ^ going_on, depth)
                if not going_on:
                    return depths
                held = going_on
        if hashes:
            _note(depths, held, len(hashes))
        return depths

    # --- inside ---------------------------------------------------------------------------------------

    def _forget_known(self, worker: WorkerPrefixes) -> None:
        known, worker.known = worker.known, set()
        self._unset(worker, [h for h in known if h not in worker.expected])

    def _set(self, worker: WorkerPrefixes, h: int) -> bool:
        if self.num_blocks >= self._max_blocks:
            return False
        self.num_blocks += 1
        self._workers_of[h] = self._workers_of.get(h, 0) | 1 << worker.slot
        return True

    def _unset(self, worker: WorkerPrefixes, hashes: Iterable[int]) -> None:
        workers_of, bit = self._workers_of, 1 << max(0, worker.slot)
        for h in hashes:
            left = workers_of[h] ^ bit
            if left:
                workers_of[h] = left
            else:
                del workers_of[h]
            self.num_blocks -= 1

    def check_integrity(self, workers: Iterable[WorkerPrefixes]) -> None:
        """Assert that bits and workers agree, and that nothing is left of lives that are over."""
        wanted: dict[int, int] = {}
        slots = [worker.slot for worker in workers]
        assert len(set(slots)) == len(slots) and set(slots).isdisjoint(self._free_slots), "a slot given out twice"
        for worker in workers:
            assert worker.slot >= 0 and all(count > 0 for count in worker.expected.values())
            for h in worker.known | worker.expected.keys():
                wanted[h] = wanted.get(h, 0) | 1 << worker.slot
        assert wanted == self._workers_of
        assert self.num_blocks == sum(bits.bit_count() for bits in wanted.values())


def _note(depths: dict[int, int], workers: int, depth: int) -> None:
    """`depth` for every worker whose bit is set."""
    while workers:
        low = workers & -workers
        depths[low.bit_length() - 1] = depth
        workers ^= low

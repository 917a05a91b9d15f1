"""What a placement policy is: one number for each worker, lower is better; and what it is told to find it.

Pure. A policy judges one half of a request, its prefill or its decode. Which workers it is asked about, and how two
halves make a placement, is `router.policy`'s business. Must not know messages, attempts or clocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from router.candidates import Candidates
from router.prefix_index import PromptHashes
from router.view import ClusterView, WorkerView

Part = Literal["prefill", "decode", "both", "local"]
"""What a worker is judged for. `both`: colocated on a worker of that role; `local`: all of it on a decode worker."""


class Demand(msgspec.Struct, frozen=True):
    """What a placement needs to know of a request, in tokens."""

    context: int
    """Prompt and tokens of earlier attempts: what prefill computes."""
    total: int
    """Prompt plus max_tokens: what decode may have to hold."""
    prompt: PromptHashes | None = None
    """What its prompt begins with; None: nobody asks."""
    session: str = ""
    priority: int = 0


Columns = Mapping[str, Sequence[float]]
"""What costs are made of, by name, one entry per worker; for people."""
Costs = tuple[list[float], Columns]
"""What a policy says of workers, one entry each, in their order; and what that is made of."""


class Query:
    """One request to be placed, and the cluster as it is."""

    __slots__ = ("_depths", "demand", "view")

    def __init__(self, demand: Demand, view: ClusterView):
        self.demand = demand
        self.view = view
        self._depths: dict[tuple[str, int], dict[int, int]] = {}

    def cached_tokens(self, worker: WorkerView) -> int:
        """Of the prompt, the tokens whose KV the worker is thought to have: whole blocks."""
        if self.demand.prompt is None:
            return 0
        return self._match(worker.fingerprint, worker.block_size).get(worker.prefixes.slot, 0) * worker.block_size

    def cached(self, candidates: Candidates) -> dict[int, int]:
        """The same of all of them, by place; who has nothing is left out."""
        found: dict[int, int] = {}
        if self.demand.prompt is None:
            return found
        place_of = candidates.place_of
        for fingerprint, block_size in candidates.kinds:
            for slot, depth in self._match(fingerprint, block_size).items():
                if slot in place_of:
                    found[place_of[slot]] = depth * block_size
        return found

    def _match(self, fingerprint: str, block_size: int) -> dict[int, int]:
        depths = self._depths.get((fingerprint, block_size))
        if depths is None:
            assert self.demand.prompt is not None
            hashes = self.demand.prompt.of(fingerprint, block_size)
            depths = self._depths[fingerprint, block_size] = self.view.prefixes.match(hashes)
        return depths


class Policy:
    """Base of all policies. All candidates are large enough for the request and may get it; there is at least one."""

    name: str
    uses_prefixes = False
    """Whether it wants to know what is cached where: workers tell only then."""

    def prefill(self, query: Query, candidates: Candidates, part: Part) -> Costs:
        """What it costs to compute the prompt there."""
        raise NotImplementedError

    def decode(self, query: Query, candidates: Candidates, part: Part) -> Costs:
        """What it costs to decode there. For `both` the KV is there already."""
        raise NotImplementedError


def mix(number: int) -> int:
    """A pseudo-random number of 64 bits for a counter: the finalizer of SplitMix64 (Steele et al. 2014)."""
    number = (number * 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


_MASK = (1 << 64) - 1

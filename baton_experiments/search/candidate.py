"""Candidates of a search: pools of equal workers, each of so many GPUs, and their names.

    colocated:4         four workers of one GPU that do both
    split:3+1           three prefill workers and one decode worker of one GPU
    split:2xtp4+4xtp2   two prefill workers over four GPUs each, four decode workers over two

Pure; must not know profiles or clusters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from baton.errors import ConfigError

_POOL = r"([1-9]\d*)(?:xtp([1-9]\d*))?"
_COLOCATED = re.compile(rf"colocated:{_POOL}")
_SPLIT = re.compile(rf"split:{_POOL}\+{_POOL}")


class Pool(NamedTuple):
    """Equal workers. `tp`: GPUs of each, its tensor parallel degree."""

    workers: int
    tp: int = 1

    @property
    def gpus(self) -> int:
        return self.workers * self.tp

    def __str__(self) -> str:
        return f"{self.workers}" if self.tp == 1 else f"{self.workers}xtp{self.tp}"


class Candidate(NamedTuple):
    """A prefill and a decode pool, or one pool that does both. With a prefill or decode pool only, a phase."""

    prefill: Pool | None = None
    decode: Pool | None = None
    both: Pool | None = None

    @property
    def pools(self) -> dict[str, Pool]:
        """By role."""
        return {role: pool for role, pool in self._asdict().items() if pool is not None}

    @property
    def gpus(self) -> int:
        return sum(pool.gpus for pool in self.pools.values())

    @property
    def is_split(self) -> bool:
        return self.both is None

    @property
    def name(self) -> str:
        if self.both is not None:
            return f"colocated:{self.both}"
        if self.prefill is not None and self.decode is not None:
            return f"split:{self.prefill}+{self.decode}"
        return " and ".join(f"{role} {pool}" for role, pool in self.pools.items())


def parse_candidate(name: str) -> Candidate:
    """Raises ConfigError for a name that is none."""
    if match := _COLOCATED.fullmatch(name):
        return Candidate(both=_pool(*match.groups()))
    if match := _SPLIT.fullmatch(name):
        workers, tp, others, other_tp = match.groups()
        return Candidate(_pool(workers, tp), _pool(others, other_tp))
    raise ConfigError(
        "--candidate", "is no placement", value=name, allowed="colocated:4, split:3+1, split:2xtp4+4xtp2, and so on"
    )


def _pool(workers: str, tp: str | None) -> Pool:
    return Pool(int(workers), int(tp or 1))


def all_candidates(tps: Iterable[int], max_gpus: int, *, decodes: bool = True) -> list[Candidate]:
    """Every split and colocated placement of at most so many GPUs, each pool of one degree of `tps`.

    `decodes`: whether there is anything to decode; else only colocated ones.
    """
    pools = [Pool(workers, tp) for tp in sorted(tps) for workers in range(1, max_gpus // tp + 1)]
    split = [Candidate(p, d) for p in pools for d in pools if decodes and p.gpus + d.gpus <= max_gpus]
    return split + [Candidate(both=pool) for pool in pools]


SOME = 4
"""Workers, in a pool that is to show what balancing between them yields."""


def sampled_counts(role: str, largest: int) -> list[int]:
    """The numbers of workers that are simulated of a pool of up to `largest`, before anything is known.

    Prefill costs little to simulate and gains most by balancing: one, some, and all. Decode: one and some; more than
    some serve at least as much each, since each some of them could be given their part of the work. Colocated: some;
    what promises most is simulated as a whole anyway.
    """
    some = min(SOME, largest)
    counts = {"prefill": {1, some, largest}, "decode": {1, some}, "both": {some}}[role]
    return sorted(counts)

"""Which CPU cores each worker of a node gets."""

from __future__ import annotations

from collections.abc import Sequence


def assign_cores(wanted: Sequence[int], available: Sequence[int]) -> tuple[list[tuple[int, ...]], str | None]:
    """Give worker `i` `wanted[i]` of the `available` cores of one node, in turn.

    Returns the core ids per worker, and a warning where workers must share cores (more are wanted
    than there are) or get fewer than they want; None where everyone has its own.
    """
    cores: list[tuple[int, ...]] = []
    next_core = 0
    for count in wanted:
        count = min(count, len(available))
        cores.append(tuple(sorted(available[(next_core + i) % len(available)] for i in range(count))))
        next_core += count
    total = sum(wanted)
    if total > len(available):
        return cores, (
            f"{len(wanted)} workers want {total} cores, the node has {len(available)}: they share, "
            f"so prefill and decode disturb each other"
        )
    return cores, None

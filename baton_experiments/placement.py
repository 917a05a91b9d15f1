"""Placements by name: `colocated:2`, `split:1+1`, `mixed:2+1+1`, and the pools they stand for."""

from __future__ import annotations

import re
from typing import Any

from baton.config import ClusterConfig, dump_config, parse_config
from baton.errors import ConfigError

ALLOWED = (
    "colocated:N, split:P+D or mixed:P+D+B (P workers prefill, D decode, B do both), "
    "such as colocated:2, split:1+1 or mixed:1+1+2"
)

_COUNT = "(?:0|[1-9][0-9]{0,3})"
"""One spelling a number: a placement is known by its name."""


def parse_placement(placement: str) -> dict[str, int]:
    """Workers by pool: `prefill`, `decode`, `both`. Raises ConfigError for a name that is not a placement."""
    kind, _, counts = placement.partition(":")
    numbers = [int(n) for n in counts.split("+")] if re.fullmatch(rf"{_COUNT}(\+{_COUNT})*", counts) else []
    match kind, numbers:
        case "colocated", [both] if both:
            return {"both": both}
        case "split", [prefill, decode] if prefill and decode:
            return {"prefill": prefill, "decode": decode}
        case "mixed", [prefill, decode, both] if both or (prefill and decode):
            pools = {"prefill": prefill, "decode": decode, "both": both}
            return {name: workers for name, workers in pools.items() if workers}
    raise ConfigError("placement", "is unknown", value=placement, allowed=ALLOWED)


def with_placement(config: ClusterConfig, placement: str, chunk_tokens: int | None = None) -> ClusterConfig:
    """`config` with its pools replaced by the placement's; workers keep the first pool's cores, GPUs and KV memory.

    Its ports are any free ones. `chunk_tokens`: `engine.max_batch_tokens`, None: as it is. Raises ConfigError for a
    name that is not a placement.
    """
    pools = parse_placement(placement)
    tree: dict[str, Any] = dump_config(config, with_secret=True)
    template = {**tree["pools"][next(iter(config.pools))], "role": None}
    tree["pools"] = {name: {**template, "workers": workers} for name, workers in pools.items()}
    tree["router"]["port"] = tree["http"]["port"] = 0  # placements that are compared are up at once
    tree["name"] = re.sub(r"[^A-Za-z0-9]+", "-", f"{config.name}-{placement}")
    if chunk_tokens is not None:
        tree["engine"]["max_batch_tokens"] = chunk_tokens
        tree["name"] += f"-{chunk_tokens}"
    return parse_config(tree)


def num_workers(placement: str) -> int:
    """Workers of a placement, to compare only placements of equal resources."""
    return sum(parse_placement(placement).values())

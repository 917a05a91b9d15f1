"""Placements by name: `colocated:2`, `split:1+1`, and the pools they stand for."""

from __future__ import annotations

import re
from typing import Any

from baton.config import ClusterConfig, dump_config, parse_config
from baton.errors import ConfigError

_ALLOWED = "colocated:N or split:P+D, such as colocated:2 or split:1+1"


def with_placement(config: ClusterConfig, placement: str) -> ClusterConfig:
    """`config` with its pools replaced by the placement's; workers keep the first pool's cores, GPUs and KV memory.

    Its ports are any free ones. Raises ConfigError for a name that is not a placement.
    """
    pools: dict[str, int]
    if match := re.fullmatch(r"colocated:([1-9]\d*)", placement):
        pools = {"both": int(match[1])}
    elif match := re.fullmatch(r"split:([1-9]\d*)\+([1-9]\d*)", placement):
        pools = {"prefill": int(match[1]), "decode": int(match[2])}
    else:
        raise ConfigError("placement", "is unknown", value=placement, allowed=_ALLOWED)
    tree: dict[str, Any] = dump_config(config, with_secret=True)
    template = {**tree["pools"][next(iter(config.pools))], "role": None}
    tree["pools"] = {name: {**template, "workers": workers} for name, workers in pools.items()}
    tree["router"]["port"] = tree["http"]["port"] = 0  # placements that are compared are up at once
    tree["name"] = re.sub(r"[^A-Za-z0-9]+", "-", f"{config.name}-{placement}")
    return parse_config(tree)


def num_workers(placement: str) -> int:
    """Workers of a placement, to compare only placements of equal resources."""
    return sum(int(n) for n in re.findall(r"\d+", placement.partition(":")[2]))

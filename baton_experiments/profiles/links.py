"""Link models from tables of transfer times: `latency + bytes / bandwidth`, by the least squares of relative errors.

    vidur    size (bytes), time_stats.send_recv.median (ms), devices_per_node: 2 within a node, 1 between nodes
    nccl     AIConfigurator's: op_name, nccl_dtype, num_gpus, message_size (elements), latency (ms); of an all-to-all of
             two GPUs half the elements cross the link

Must not know profiles or clusters.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from baton.errors import ConfigError
from baton_cluster.latency import LinkModel
from baton_experiments.profiles.tables import header_of, read_rows

LINK_GB_PER_S = (1e-9, 1e6)
"""From a byte per second to far beyond any wire: what lies outside is a slip, and no time that a clock can tell."""

VIDUR = ("size", "time_stats.send_recv.median", "collective", "devices_per_node", "num_workers")
NCCL = ("op_name", "nccl_dtype", "num_gpus", "message_size", "latency")
_BYTES = {"half": 2, "int8": 1}
_MS = 1e-3


def is_nccl(path: Path) -> bool:
    return header_of(path).issuperset(NCCL)


def is_vidur(path: Path) -> bool:
    return header_of(path).issuperset(VIDUR)


def read_link(path: Path | str, *, between_nodes: bool = False) -> LinkModel:
    """Between two GPUs, of one node unless `between_nodes`. Raises ConfigError that names file and line."""
    path = Path(path)
    if is_vidur(path):
        wanted = 1 if between_nodes else 2
        points = [
            (row.number("size"), row.number("time_stats.send_recv.median", scale=_MS))
            for row in read_rows(path, VIDUR)
            if row.text("collective") == "send_recv" and row.count("devices_per_node") == wanted
        ]
    elif is_nccl(path):
        if between_nodes:
            raise ConfigError(str(path), "holds times within a node only")
        points = [
            (row.count("message_size") * _BYTES[row.text("nccl_dtype")] / 2, row.number("latency", scale=_MS))
            for row in read_rows(path, NCCL)
            if (row.text("op_name"), row.count("num_gpus")) == ("alltoall", 2) and row.text("nccl_dtype") in _BYTES
        ]
    else:
        raise ConfigError(
            str(path), "is no table of transfer times", allowed=f"columns {', '.join(VIDUR)}; or {', '.join(NCCL)}"
        )
    return _fitted(path, points)


def _fitted(path: Path, points: list[tuple[float, float]]) -> LinkModel:
    measured = [(size, seconds) for size, seconds in points if seconds > 0]
    if len({size for size, _ in measured}) < 2:
        raise ConfigError(str(path), f"has {len(measured)} transfers between two GPUs, too few for a line")
    sizes, seconds = np.array(measured).T
    # Relative errors, or the small transfers would count for nothing.
    (latency, per_byte), *_ = np.linalg.lstsq(np.stack([1 / seconds, sizes / seconds], axis=1), np.ones(len(sizes)))
    if latency < 0 or per_byte <= 0:
        raise ConfigError(str(path), "has times that do not rise with the size of the transfer")
    return LinkModel(latency_s=float(latency), bytes_per_s=float(1 / per_byte))


def link_of_speed(gb_per_s: float) -> LinkModel:
    """What `--link-gb-per-s` asks for. Raises ConfigError for what is no link's."""
    low, high = LINK_GB_PER_S
    if not low <= gb_per_s <= high:
        raise ConfigError("--link-gb-per-s", "is no link's", value=gb_per_s, allowed=f"{low:g} to {high:,.0f}")
    return LinkModel(bytes_per_s=gb_per_s * 1e9)

"""EngineProfile: what one worker of some model on some hardware takes for its steps, and how much KV cache it holds.

Plain data around a `LatencyModel`. Must not know where it was read from, or clusters.
"""

from __future__ import annotations

from typing import Any

import msgspec

from baton_cluster.latency import LatencyModel, LinkModel


class EngineProfile(msgspec.Struct, frozen=True):
    """One worker."""

    name: str
    """For tables: model, hardware and whatever tells this profile from its neighbours."""
    model: str
    hardware: str
    latency: LatencyModel
    kv_bytes_per_token: int
    """Of all layers, on all GPUs of the worker together: what a hand-over moves."""
    kv_tokens: int | None
    """That its KV cache holds; None: not known, the user says it."""
    gpus: int = 1
    """That the worker takes: tensor times pipeline parallel degree. 0: CPU cores."""
    link: LinkModel | None = None
    """Between two such workers, where it was measured."""
    source: str = ""
    """Whose measurements, which version."""
    notes: tuple[str, ...] = ()
    """What was assumed in reading it: the range that was measured, what is extrapolated."""
    config: dict[str, Any] = {}
    """Settings of `cluster.yaml` that the engine ran with, or that its authors' conventions ask for, by dotted key."""
    extra_output_tokens: int = 0
    """By those conventions a request generates so many tokens more than its output is long."""

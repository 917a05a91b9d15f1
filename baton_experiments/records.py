"""What an experiment keeps: one record per request, as its client saw it, and the SLO that it is judged by.

Plain data; must not know clusters, files or statistics.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from baton.errors import ConfigError


class Slo(msgspec.Struct, frozen=True):
    """What a user is promised. Milliseconds."""

    ttft_ms: float
    tbt_ms: float
    """Of the time between tokens; the definition of goodput says which of a request's gaps must keep it."""
    e2el_ms: float | None = None
    """Until the last token: asked for by the definition `vllm` only, where it is given."""

    def __post_init__(self) -> None:
        for name, value in (("ttft_ms", self.ttft_ms), ("tbt_ms", self.tbt_ms), ("e2el_ms", self.e2el_ms)):
            if value is not None and not value > 0:
                raise ConfigError(name, "must be positive", value=value, allowed="milliseconds, > 0")


class RequestRecord(msgspec.Struct):
    """What one request experienced, as its client saw it. Times in milliseconds."""

    placement: str
    rate: float
    """Requests per second, of the whole cluster."""
    seed: int
    index: int
    """Within its point, in order of arrival."""
    at_s: float
    """Planned arrival since the start of the point."""
    prompt_tokens: int
    output_tokens: int
    ttft_ms: float | None
    latency_ms: float | None
    tbt_ms: list[float]
    """Gaps between consecutive tokens."""
    stages_ms: dict[str, float]
    """Time in each stage (`baton.timeline.Stage`); they sum to the router's view of the latency."""
    residual_ms: float | None
    prefill_worker: str
    decode_worker: str
    kv_bytes: int
    error: str | None = None
    chunk_tokens: int | None = None
    """`engine.max_batch_tokens` of the cluster, where the experiment varies it."""
    received_s: float | None = None
    """When the router received it, on its clock, which is also that of `StepRecord.start_s`."""
    warmup: bool = False
    """Of the ramp before or after the measured part: kept, and left out of every statistic."""
    attempts: int = 1
    engine: str = ""
    """Whose step times: the profile's name, where an experiment compares more than one. Part of the setting."""

    @property
    def run(self) -> Run:
        return Run(self.placement, self.chunk_tokens, self.rate, self.seed, self.engine)


class Run(NamedTuple):
    """What was played in one go: the requests of one setting, rate and seed. Its steps are kept under this key."""

    placement: str
    chunk_tokens: int | None
    rate: float
    seed: int
    engine: str = ""

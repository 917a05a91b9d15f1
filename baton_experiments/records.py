"""What an experiment keeps: records of requests and steps, the setting they are of, and the SLO they are judged by.

Plain data; must not know clusters, files or statistics.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from baton.errors import ConfigError
from baton.step_log import StepRecord


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


class Setting(NamedTuple):
    """A placement, and what each of its workers computes at most in a step."""

    placement: str
    chunk_tokens: int | None = None
    """`engine.max_batch_tokens`; None: as configured."""
    engine: str = ""
    """The profile's name, where more than one is compared."""

    def __str__(self) -> str:
        chunks = "" if self.chunk_tokens is None else f" in chunks of {self.chunk_tokens}"
        return f"{self.placement}{chunks}" + (f" on {self.engine}" if self.engine else "")

    @property
    def file_name(self) -> str:
        parts = [self.placement, f"chunk{self.chunk_tokens}" if self.chunk_tokens is not None else "", self.engine]
        return "_".join(re.sub(r"[^A-Za-z0-9+.]+", "-", part) for part in parts if part)


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

    @property
    def setting(self) -> Setting:
        return Setting(self.placement, self.chunk_tokens, self.engine)


Steps = Mapping[Run, Sequence[StepRecord]]
"""The steps of each run. Clocks of runs that were simulated all begin at 0, so a step alone does not tell its run."""

"""What an experiment needs of whatever plays its points: real clusters or simulated ones.

with engine.up(settings) as stage:          # these clusters run now
    stage.alone(setting, requests, ...)     # one request after the other
    stage.play(setting, requests, ...)      # each as its time comes
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from baton.step_log import StepRecord
from baton_experiments.plan import EngineName
from baton_experiments.records import RequestRecord, Setting
from baton_experiments.workloads import PlannedRequest

OnRecord = Callable[[RequestRecord], None]
Say = Callable[[str], None]
"""Told one line of text at each stage."""


class Label(NamedTuple):
    """What all records of a point share. Requests in [first, end) are measured."""

    setting: Setting
    rate: float
    seed: int
    first: int
    end: int

    def record(self, index: int, request: PlannedRequest) -> RequestRecord:
        """Of a request that has not answered yet."""
        return RequestRecord(
            placement=self.setting.placement,
            chunk_tokens=self.setting.chunk_tokens,
            engine=self.setting.engine,
            rate=self.rate,
            seed=self.seed,
            index=index,
            at_s=request.at_s,
            prompt_tokens=len(request.prompt),
            output_tokens=0,
            ttft_ms=None,
            latency_ms=None,
            tbt_ms=[],
            stages_ms={},
            residual_ms=None,
            prefill_worker="",
            decode_worker="",
            kv_bytes=0,
            warmup=not self.first <= index < self.end,
        )


class Stage(Protocol):
    """Clusters that are up."""

    @property
    def max_model_len(self) -> int:
        """Prompt and output together, in tokens, that each of them takes."""
        ...

    @property
    def details(self) -> dict[str, Any]:
        """What is computing, for the result: model, workers and their devices, notes."""
        ...

    def alone(self, setting: Setting, requests: Sequence[PlannedRequest], label: Label) -> list[RequestRecord]:
        """Each request once the one before has ended."""
        ...

    def play(
        self, setting: Setting, requests: Sequence[PlannedRequest], label: Label, on_record: OnRecord
    ) -> tuple[list[RequestRecord], list[StepRecord]]:
        """Each request when it is due, until all have ended. Steps: of all workers, none where nobody tells them."""
        ...


class Engine(Protocol):
    """Who can bring settings up."""

    name: EngineName
    vocab_size: int

    def groups(self, settings: Sequence[Setting]) -> list[tuple[Setting, ...]]:
        """Parts of `settings` that can be up together."""
        ...

    def up(self, settings: Sequence[Setting], say: Say) -> AbstractContextManager[Stage]: ...

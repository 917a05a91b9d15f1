"""How long things take in a simulated cluster: an engine step, a message, KV blocks on a link.

Pure arithmetic in seconds. A model is anything with `step_s`; the ones here are simple enough to be
predicted by hand. Must not know what a step is for, nor decide anything.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from baton.engine.request import StepPlan


class LatencyModel(Protocol):
    """What the engine of one worker takes for its steps."""

    def step_s(self, plan: StepPlan) -> float:
        """Seconds that this step takes. Called once a step, when it starts; must depend on the plan only."""
        ...


class ConstantLatency(msgspec.Struct, frozen=True):
    """Every step takes the same time."""

    seconds: float

    def step_s(self, plan: StepPlan) -> float:
        return self.seconds


class LinearLatency(msgspec.Struct, frozen=True):
    """`base_s + per_token_s * tokens computed + per_context_token_s * tokens attended to`, summed over the step.

    Per token is what the matrix products cost, per context token what reading the KV cache does; a
    token computed at position p attends to p + 1 tokens, of which a chunk reads each once per request.
    """

    base_s: float
    per_token_s: float = 0.0
    per_context_token_s: float = 0.0

    def step_s(self, plan: StepPlan) -> float:
        seconds = self.base_s + self.per_token_s * plan.total_tokens
        if self.per_context_token_s:
            seconds += self.per_context_token_s * sum([item.start + item.num_tokens for item in plan.items])
        return seconds


class LinkModel(msgspec.Struct, frozen=True):
    """Every link of the cluster: a message takes `latency_s`, blocks also `bytes / bytes_per_s`, one after another."""

    latency_s: float = 50e-6
    bytes_per_s: float = 1e9
    """Of each direction of each pair of workers."""
    nic_bytes_per_s: float | None = None
    """Of each direction of a worker's network interface, which all its transfers of that direction share
    (`baton_cluster.network`); messages are too small to count. None: pairs do not slow one another down."""


class StepFailed(Exception):
    """Raised by a made-up token function: the step fails, as where a real runner raises."""

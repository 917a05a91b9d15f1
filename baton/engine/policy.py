"""Batch policies: in which order a step serves decodes, running prompts and new requests.

A policy only orders; budgets, blocks and preemption are the step's (`baton.engine.step`).
"""

from __future__ import annotations

from typing import Protocol


class StepOrder(Protocol):
    """What a policy may ask of the step under construction. Each call fills it as far as the budget goes."""

    def decode(self) -> None:
        """One token for each running request whose prompt is done."""
        ...

    def prompts(self) -> None:
        """Chunks of running requests whose prompt is not done, and waiting requests taken in, both in the order of the
        queue (`baton.engine.fair_queue`)."""
        ...

    def has_chunk(self) -> bool:
        """Whether the step computes more than one token for some request."""
        ...


class BatchPolicy(Protocol):
    def plan(self, step: StepOrder) -> None: ...


class PrefillFirst:
    """Prompts alone as long as there are any: best TTFT, and running decodes stall meanwhile."""

    def plan(self, step: StepOrder) -> None:
        step.prompts()
        if not step.has_chunk():
            step.decode()


class Mixed:
    """Decodes in every step, prompt chunks in what is left of the budget (Sarathi-Serve, OSDI 2024)."""

    def plan(self, step: StepOrder) -> None:
        step.decode()
        step.prompts()


POLICIES: dict[str, type[PrefillFirst] | type[Mixed]] = {"prefill_first": PrefillFirst, "mixed": Mixed}

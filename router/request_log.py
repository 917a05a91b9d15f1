"""A line in the log for each request that ends: its id and figures, and never what it asked or was answered.

Pure, but for the log. Must not know who reads it.
"""

from __future__ import annotations

import logging
from typing import Any

from baton.timeline import RequestTimeline
from router.actions import RequestDone, RequestFailed, RouterAction
from router.core import RouterCore
from router.records import RequestRecord

log = logging.getLogger("baton.router.requests")


class RequestLog:
    """Observes one core's requests; worth attaching only where `log` tells of INFO."""

    def __init__(self, core: RouterCore):
        self._core = core

    def on_action(self, action: RouterAction, now: float) -> None:
        kind = type(action)
        if kind is RequestDone or kind is RequestFailed:
            record = self._core.record(action.request_id)  # type: ignore[union-attr]
            if record is not None:
                figures = request_figures(record)
                words = " ".join(f"{name}={value}" for name, value in figures.items() if name != "request_id")
                log.info("request %s ended: %s", record.request_id, words, extra={"fields": figures})
            elif kind is RequestFailed:
                refused = {"request_id": action.request_id, "refused": action.code}  # type: ignore[union-attr]
                log.info("request %(request_id)s was refused: %(refused)s", refused, extra={"fields": refused})


def request_figures(record: RequestRecord) -> dict[str, Any]:
    """What is told of it. Times in milliseconds, as far as there are any."""
    timeline = RequestTimeline(marks=record.marks)
    times = {"ttft_ms": timeline.ttft(), "total_ms": timeline.total()}
    figures: dict[str, Any] = {
        "request_id": record.request_id,
        "finish_reason": record.finish_reason,
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "cached_tokens": record.cached_tokens,
        **{name: round(seconds * 1e3, 2) for name, seconds in times.items() if seconds is not None},
        "attempts": record.attempts,
    }
    if record.placements:
        figures["prefill"], figures["decode"] = record.placements[-1].prefill, record.placements[-1].decode
    if record.error:
        figures["error"] = record.error
    return figures

"""Where the log lines of a cluster's processes go: standard error, with time, process and level; as text or as JSON.

A warning or error that is written again and again is held back after the first times; the next one of its kind says
how many were. What is only told at level `info` or `debug` was asked for, so nothing of it is held back.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

from baton.config import ClusterConfig

_FORMAT = "%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"
MAX_LINES = 10
INTERVAL_S = 10.0


class RateLimit(logging.Filter):
    """Of warnings and errors lets the first `max_lines` of each place in the code pass, every `interval_s` anew."""

    def __init__(self, max_lines: int = MAX_LINES, interval_s: float = INTERVAL_S):
        super().__init__()
        self._max_lines = max_lines
        self._interval_s = interval_s
        self._seen: dict[tuple[str, int], tuple[float, int]] = {}
        """By place in the code: when its interval began, and its lines since."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        place = (record.pathname, record.lineno)
        since, count = self._seen.get(place, (record.created, 0))
        suppressed = 0
        if record.created - since >= self._interval_s:
            suppressed = max(0, count - self._max_lines)
            since, count = record.created, 0
        self._seen[place] = (since, count + 1)
        if suppressed:
            record.msg = f"{record.getMessage()} (and {suppressed} more like it since, which were left out)"
            record.args = ()
            record.suppressed = suppressed
        return count < self._max_lines


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, process, message, the line's `fields`, and an exception."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if hasattr(record, "suppressed"):
            line["suppressed"] = record.suppressed
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def configure_logging(config: ClusterConfig) -> None:
    """For a process of the cluster's own: Baton's lines from `log_level` on, and steps where they are wanted."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if config.log_format == "json" else logging.Formatter(_FORMAT))
    handler.addFilter(RateLimit())
    logging.basicConfig(handlers=[handler])
    level = config.log_level.upper()
    for name in ("baton", "baton_cluster", "kv_transfer", "router"):
        logging.getLogger(name).setLevel(level)
    if config.engine.log_steps:
        logging.getLogger("baton.worker").setLevel(min(logging.INFO, logging.getLevelName(level)))

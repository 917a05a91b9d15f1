"""Where the log lines of a cluster's processes go: standard error, with time, process and level."""

from __future__ import annotations

import logging

from baton.config import ClusterConfig

_FORMAT = "%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"


def configure_logging(config: ClusterConfig) -> None:
    """For a process of the cluster's own: Baton's lines from `log_level` on, and steps where they are wanted."""
    logging.basicConfig(format=_FORMAT)
    level = config.log_level.upper()
    for name in ("baton", "baton_cluster", "kv_transfer", "router"):
        logging.getLogger(name).setLevel(level)
    if config.engine.log_steps:
        logging.getLogger("baton.worker").setLevel(min(logging.INFO, logging.getLevelName(level)))

"""A cluster's own processes write what the configuration asks for."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import logging, sys
from baton.config import parse_config
from baton_cluster.logs import configure_logging
configure_logging(parse_config({"log_level": sys.argv[1], "engine": {"log_steps": sys.argv[2] == "steps"}}))
logging.getLogger("baton.worker").info("a step")
logging.getLogger("baton.engine.build").info("a fact")
logging.getLogger("kv_transfer.links").warning("a problem")
logging.getLogger("elsewhere").info("noise")
"""


@pytest.mark.parametrize(
    ("level", "steps", "expected"),
    [
        ("warning", "", ["a problem"]),
        ("info", "", ["a step", "a fact", "a problem"]),
        ("error", "steps", ["a step"]),
        ("warning", "steps", ["a step", "a problem"]),
    ],
)
def test_what_is_written(level: str, steps: str, expected: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, level, steps], capture_output=True, text=True, check=True)
    assert [line.split(": ", 1)[1] for line in done.stderr.splitlines()] == expected

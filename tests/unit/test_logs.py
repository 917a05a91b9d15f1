"""A cluster's own processes write what the configuration asks for."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys

import pytest

from baton_cluster.logs import JsonFormatter, RateLimit

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


# --- what is held back ------------------------------------------------------------------------------


class Lines(logging.Handler):
    """Keeps what is written."""

    def __init__(self, formatter: logging.Formatter):
        super().__init__()
        self.setFormatter(formatter)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


def written(records: list[logging.LogRecord], **limits: float) -> list[str]:
    lines = Lines(logging.Formatter("%(message)s"))
    lines.addFilter(RateLimit(**limits))  # type: ignore[arg-type]
    for record in records:
        lines.handle(record)
    return lines.lines


def record(
    at: float, message: str = "it broke", line: int = 7, level: int = logging.WARNING, **extra: object
) -> logging.LogRecord:
    made = logging.LogRecord("router", level, "somewhere.py", line, message, (), None)
    made.created = at
    made.__dict__.update(extra)
    return made


def test_what_is_said_again_and_again_is_held_back_and_counted() -> None:
    lines = written([record(100.0 + i, f"broke {i}") for i in range(8)], max_lines=3, interval_s=10.0)
    assert lines == ["broke 0", "broke 1", "broke 2"]
    later = [*(record(100.0 + i, f"broke {i}") for i in range(8)), record(111.0, "again"), record(112.0, "and again")]
    assert written(later, max_lines=3, interval_s=10.0)[3:] == [
        "again (and 5 more like it since, which were left out)",
        "and again",
    ]


def test_each_place_in_the_code_has_its_own_limit() -> None:
    lines = written([record(100.0, line=i % 3) for i in range(30)], max_lines=2, interval_s=10.0)
    assert len(lines) == 6


def test_what_was_asked_for_is_never_held_back() -> None:
    lines = written([record(100.0, level=logging.INFO) for _ in range(50)], max_lines=2, interval_s=10.0)
    assert len(lines) == 50


def test_arguments_with_percent_signs_survive_the_count() -> None:
    records = [record(100.0) for _ in range(3)]
    last = logging.LogRecord("router", logging.ERROR, "somewhere.py", 7, "%s broke", ("100 %s",), None)
    last.created = 120.0
    assert written([*records, last], max_lines=1, interval_s=10.0)[-1].startswith("100 %s broke (and 2 more")


# --- JSON -------------------------------------------------------------------------------------------


def test_a_line_of_json_has_the_fields_and_the_exception() -> None:
    formatter = JsonFormatter()
    line = json.loads(
        formatter.format(record(1700000000.25, 'says "hi"\nü', fields={"request_id": "ab", "ttft_ms": 1.5}))
    )
    assert line == {
        "time": "2023-11-14T22:13:20.250+00:00",
        "level": "warning",
        "logger": "router",
        "process": os.getpid(),
        "message": 'says "hi"\nü',
        "request_id": "ab",
        "ttft_ms": 1.5,
    }
    try:
        raise ValueError("no")
    except ValueError:
        failed = logging.LogRecord("router", logging.ERROR, "x.py", 1, "it %s", ("failed",), sys.exc_info())
    told = json.loads(formatter.format(failed))
    assert told["message"] == "it failed"
    assert told["exception"].endswith("ValueError: no")


# --- requests ---------------------------------------------------------------------------------------

REQUESTS = """
from baton.config import parse_config
from baton_cluster.logs import configure_logging
from tests.stub_cluster import StubCluster
configure_logging(parse_config({"log_level": "debug", "log_format": "json"}))
with StubCluster({"prefill": {}, "decode": {}}) as cluster, cluster.client() as client:
    done = client.generate("a secret question", max_tokens=4)
    try:
        client.generate("another secret" * 100, max_tokens=4)
    except Exception:
        pass
print(done.request_id)
"""


def test_a_line_for_each_request_with_its_figures_and_never_a_prompt() -> None:
    done = subprocess.run([sys.executable, "-c", REQUESTS], capture_output=True, text=True, check=True, timeout=200)
    assert "secret" not in done.stderr, "prompts are not logged, at whatever level"
    told = [json.loads(line) for line in done.stderr.splitlines()]
    ended = next(line for line in told if line.get("request_id") == done.stdout.strip())
    assert (ended["level"], ended["logger"], ended["finish_reason"]) == ("info", "baton.router.requests", "length")
    assert (ended["prompt_tokens"], ended["completion_tokens"], ended["attempts"]) == (17, 4, 1)
    assert (ended["prefill"], ended["decode"]) == ("prefill-0", "decode-0")
    assert 0 < ended["ttft_ms"] <= ended["total_ms"]
    assert "finish_reason=length prompt_tokens=17 completion_tokens=4" in ended["message"]
    assert [line["refused"] for line in told if "refused" in line] == ["request_too_large"]

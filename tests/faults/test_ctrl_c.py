"""Ctrl-C at any moment of `baton up`: it ends by itself, and nothing is left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml

pytestmark = pytest.mark.ray


@pytest.mark.timeout(200)
@pytest.mark.parametrize("moment", ["starting Ray", "placing", "loading the model"])
def test_ctrl_c_while_it_starts_leaves_nothing(moment: str, tiny_model: Path, tmp_path: Path) -> None:
    pools = {"prefill": {"kv_memory_mib": 8}, "decode": {"kv_memory_mib": 8}}
    tree = {"name": "interrupted", "model": {"source": str(tiny_model), "dtype": "float32"}, "pools": pools}
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, "-m", "baton_cli.main", "up"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        cwd=tmp_path,
        env={**os.environ, "BATON_RUNTIME": str(tmp_path / "run"), "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    try:
        seen: list[str] = []
        for line in process.stdout:
            seen.append(line)
            if line.startswith(moment):
                break
        else:
            raise AssertionError("up ended: " + "".join(seen))
        children = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the whole foreground gets it
        rest = process.stdout.read()
        assert process.wait(60) == 130, rest
        assert "Traceback" not in rest
        _, alive = psutil.wait_procs(children, timeout=15)
        assert alive == [], "processes left running"
        assert list((tmp_path / "run").glob("*.json")) == []
    finally:
        process.stdout.close()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

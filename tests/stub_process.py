"""Stub workers in processes of their own, which a test can kill, stop and start again.

Run as a module it is such a process: `python -m tests.stub_process`, its orders come on stdin.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import zmq

from baton.config import dump_config, parse_config
from baton_cluster.specs import WorkerSpec
from kv_transfer import nixl_agent
from tests.stub_cluster import StubCluster, stub_worker, wait_until

TRANSPORT = "zmq+tcp://127.0.0.1"
TRANSPORTS = [TRANSPORT, "shm://"]
"""Between processes."""
GROUPS = "gloo://127.0.0.1"
"""Between processes too; slower to start, so for those failures only that its threads and groups are a matter of."""
NIXL = pytest.param(
    "nixl://127.0.0.1", marks=pytest.mark.skipif(not nixl_agent.is_installed(), reason="NIXL is not installed")
)
ALL_TRANSPORTS = ["inproc", TRANSPORT, "zmq+ipc://", "shm://", GROUPS, NIXL]
"""All that move blocks between pools on CPUs."""
ROOT = Path(__file__).resolve().parent.parent


class ProcessCluster(StubCluster):
    """A StubCluster; the workers `apart` (worker ids) are processes, whose steps take `apart_step_s`."""

    def __init__(
        self,
        pools: dict[str, Any],
        *,
        apart: Collection[str],
        apart_step_s: float = 0.0,
        transport: str = TRANSPORT,
        **options: Any,
    ):
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._apart = apart
        self._apart_step_s = apart_step_s
        self._transport = transport
        super().__init__(pools, transport=transport, **options)
        try:
            for worker_id in apart:
                self.wait_state(worker_id, "ready")
        except BaseException:
            self.stop()
            raise

    def _add(self, spec: Any, *rest: Any) -> None:
        if spec.worker_id in self._apart:
            self.launch(spec.worker_id, spec.pool)
        else:
            super()._add(spec, *rest)

    def launch(self, worker_id: str, pool: str) -> None:
        """Start the worker's process, for the first time or again; `wait_state` tells when it has joined."""
        process = subprocess.Popen([sys.executable, "-m", "tests.stub_process"], stdin=subprocess.PIPE, cwd=ROOT)
        orders = {
            "config": dump_config(self.config),
            "worker_id": worker_id,
            "pool": pool,
            "router": self.back,
            "step_s": self._apart_step_s,
            "transport": self._transport,
        }
        assert process.stdin is not None
        process.stdin.write(json.dumps(orders).encode() + b"\n")
        process.stdin.flush()
        self.processes[worker_id] = process

    def state(self, worker_id: str) -> str:
        """As the router sees it: `ready`, `lost`, or empty if it never joined."""
        return next((w.state for w in self.router.status().workers if w.info.worker_id == worker_id), "")

    def wait_state(self, worker_id: str, state: str) -> None:
        wait_until(lambda: self.state(worker_id) == state, f"{worker_id} is {state}")

    def kill(self, worker_id: str) -> None:
        """SIGKILL, in the middle of whatever it does."""
        process = self.processes[worker_id]
        process.kill()
        process.wait()

    def stop(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
        super().stop()


def main() -> None:
    """Serve until killed, or until whoever started this process has gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    orders = json.loads(sys.stdin.readline())
    worker, *_ = stub_worker(
        parse_config(orders["config"]),
        WorkerSpec(orders["worker_id"], orders["pool"]),
        router_address=orders["router"],
        context=zmq.Context(),
        transport=orders["transport"],
        step_s=lambda plan: float(orders["step_s"]),
    )
    worker.start()
    # Waited for by hand: a handler runs when the main thread next runs Python, and a signal that comes just before it
    # goes to read stdin would be seen no earlier than stdin's end. The byte in the pipe is there in any case.
    told, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.set_wakeup_fd(tell)
    signal.signal(signal.SIGTERM, lambda signum, frame: None)
    readable, _, _ = select.select([told, sys.stdin], [], [])
    if told in readable:
        raise SystemExit(0 if worker.leave() else 1)


if __name__ == "__main__":
    main()

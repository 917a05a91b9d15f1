"""Role changes of real workers: threads of a LocalCluster, processes on Ray. A tiny random model.

Loads are far below those of a cluster that is worth a planner, and so are the thresholds.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from baton.config import ClusterConfig, parse_config
from baton_cluster.cluster import Cluster
from baton_cluster.local import LocalCluster
from baton_cluster.ray_cluster import RayCluster
from router.client import RouterClient
from tests.golden.tiny_models import VOCAB
from tests.stub_cluster import wait_until

CHANGE_S = 90.0
TOKENS = 60


def config(model: Path, launcher: str) -> ClusterConfig:
    tree: dict[str, Any] = {
        "name": f"baton-roles-{launcher}",
        "launcher": launcher,
        "model": {"source": str(model), "dtype": "float32"},
        "pools": {"prefill": {"kv_memory_mib": 16}, "decode": {"workers": 2, "kv_memory_mib": 16}},
        "planner": {
            "enabled": True,
            "interval_s": 0.2,
            "smoothing_s": 0.5,
            "horizon_s": 0.5,
            "high": 0.1,
            "low": 0.09,
            "dwell_s": 0.0,
            "cooldown_s": 1.0,
            "max_changes_per_minute": 10,
        },
    }
    return parse_config(tree)


def prompt(number: int, length: int = 20) -> list[int]:
    return [(number * 37 + i * 11) % VOCAB for i in range(length)]


@contextmanager
def clients(cluster: Cluster, num: int, length: int, max_tokens: int) -> Iterator[list[Future[int]]]:
    """So many ask all the time until the block is left, and each answer is as it was the first time, at one attempt."""
    stopping = threading.Event()

    def ask(client: RouterClient, number: int) -> int:
        first: tuple[int, ...] | None = None
        answers = 0
        while not stopping.is_set():
            done = client.generate(prompt(number, length), max_tokens=max_tokens, ignore_eos=True, seed=0)
            first = first or done.token_ids
            assert (done.token_ids, done.attempts, len(done.token_ids)) == (first, 1, max_tokens)
            answers += 1
        return answers

    with cluster.client() as client, ThreadPoolExecutor(num) as pool:
        asking = [pool.submit(ask, client, number) for number in range(num)]
        try:
            yield asking
        finally:
            stopping.set()
    assert min(one.result() for one in asking) > 0


def roles(cluster: Cluster) -> dict[str, tuple[str, str]]:
    return {w.info.worker_id: (w.info.role, w.state) for w in cluster.status().workers}


def sizes(cluster: Cluster) -> tuple[int, int]:
    """Workers of each role that take requests."""
    states = list(roles(cluster).values())
    return states.count(("prefill", "ready")), states.count(("decode", "ready"))


def there(cluster: Cluster) -> None:
    """Prompts come, and so does a decode worker to prefill."""
    assert sizes(cluster) == (1, 2)
    with clients(cluster, 2, 20, TOKENS), clients(cluster, 6, 400, 1):
        wait_until(lambda: sizes(cluster) == (2, 1), "a decode worker changes", within_s=CHANGE_S)
    assert {role for role, _ in roles(cluster).values()} == {"prefill", "decode"}


def there_and_back(cluster: Cluster) -> None:
    """Then answers are wanted, and one of prefill goes."""
    with cluster.client() as client:
        pids = {w.info.worker_id: w.info.incarnation for w in cluster.status().workers}
        there(cluster)
        with clients(cluster, 10, 20, TOKENS):
            wait_until(lambda: sizes(cluster) == (1, 2), "a prefill worker changes", within_s=CHANGE_S)
        after = {w.info.worker_id: w.info.incarnation for w in cluster.status().workers}
        assert set(after) == set(pids), "workers keep their ids"
        assert after != pids
        changes = client.overview()["planner"]["changes"]
        assert {change["state"] for change in changes} <= {"done", "draining", "drained"}
        assert {(change["from"], change["to"]) for change in changes if change["state"] == "done"} == {
            ("decode", "prefill"),
            ("prefill", "decode"),
        }
        assert client.generate(prompt(3), max_tokens=5, ignore_eos=True).finish_reason == "length"


def test_threads_of_one_process_change_their_roles(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines: list[str] = []
    with LocalCluster(config(tiny_model, "local"), progress=lines.append) as cluster:
        there_and_back(cluster)
        wait_until(lambda: sum(w.num_held_blocks() for w in cluster.workers.values()) == 0, "no block held")
        assert [line for line in lines if " moves to pool prefill: prefill is full: " in line]
        assert [line for line in lines if " moves to pool decode: decode is full: " in line]
    for words in ("from decode to prefill: prefill is full", "from prefill to decode: decode is full"):
        assert [line for line in caplog.messages if line.startswith("role planner: changes ") and words in line]


@pytest.mark.ray
def test_processes_on_ray_change_their_roles(tiny_model: Path) -> None:
    """In their places and on their cores, under their ids; the supervisor goes on watching them."""
    with RayCluster(config(tiny_model, "ray")) as cluster:
        cores = {w.info.worker_id: w.info.cores for w in cluster.status().workers}
        there(cluster)
        wait_until(lambda: set(cluster.num_held_blocks().values()) == {0}, "no block held")
        assert {w.info.worker_id: w.info.cores for w in cluster.status().workers} == cores

"""The real thing: workers in processes of their own on Ray, and the command line from other shells."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from baton.config import parse_config
from baton.errors import BatonError, ClusterError
from baton_cluster.ray_cluster import RayCluster
from baton_cluster.ray_session import RaySession
from baton_experiments.placement import with_placement
from tests.stub_cluster import wait_until

pytestmark = pytest.mark.ray

CASES = json.loads((Path(__file__).parents[1] / "golden" / "demo_tokens.json").read_text(encoding="utf-8"))["cases"]
START_S = 120.0


def config_tree(model: Path, **changes: Any) -> dict[str, Any]:
    return {
        "name": "baton-test",
        "model": {"source": str(model), "dtype": "float32"},
        "pools": {"prefill": {"kv_memory_mib": 128}, "decode": {"kv_memory_mib": 128}},
        "engine": {"max_batch_tokens": 64, "record_steps": True},
        "liveness": {"heartbeat_s": 1.0, "timeout_s": 30.0},
        "start_timeout_s": START_S,
        **changes,
    }


@pytest.fixture(scope="module")
def session() -> Iterator[RaySession]:
    config = parse_config({"ray": {"num_gpus": 2}})
    with RaySession(config.ray, num_cpus=4, namespace="baton-test") as session:
        yield session


@pytest.fixture(scope="module")
def split(session: RaySession, demo_model: Path) -> Iterator[RayCluster]:
    with RayCluster(parse_config(config_tree(demo_model)), session=session) as cluster:
        yield cluster


def test_split_between_processes_gives_the_tokens_of_hugging_face(split: RayCluster) -> None:
    cases = CASES[:8]
    with split.client() as client, ThreadPoolExecutor(len(cases)) as pool:
        done = list(pool.map(lambda c: client.generate(c["prompt"], max_tokens=12, ignore_eos=True), cases))
    for case, completion in zip(cases, done, strict=True):
        assert list(completion.token_ids) == case["output"], case["name"]
        assert (completion.prefill_worker, completion.decode_worker) == ("prefill-0", "decode-0")
        assert completion.kv_bytes > 0
        assert completion.residual_s is not None
        assert min(completion.timeline.stages().values()) >= 0
    wait_until(lambda: not any(split.num_held_blocks().values()), "no block held on any worker")


def test_workers_are_processes_pinned_to_cores_of_their_own(split: RayCluster) -> None:
    workers = {w.info.worker_id: w.info for w in split.status().workers}
    assert set(workers) == {"prefill-0", "decode-0"}
    assert len({w.pid for w in workers.values()} | {os.getpid()}) == 3
    for info in workers.values():
        threads = [psutil.Process(t.id) for t in psutil.Process(info.pid).threads()]
        pinned = [t for t in threads if tuple(t.cpu_affinity()) == info.cores]
        assert len(pinned) >= 2, "engine and I/O thread"
    if (os.cpu_count() or 1) >= 2:
        assert workers["prefill-0"].cores != workers["decode-0"].cores
        assert split.warnings == []
    assert all(health["healthy"] for health in split.health().values())


def test_steps_of_all_workers_are_taken_in_order(split: RayCluster) -> None:
    split.take_steps()
    with split.client() as client:
        client.generate(list(range(100, 170)), max_tokens=4, ignore_eos=True)
    steps = split.take_steps()
    assert [(step.worker, step.shape.chunk_tokens, step.shape.decode_context) for step in steps] == [
        ("prefill-0", 64, 0),
        ("prefill-0", 6, 0),
        *(("decode-0", 0, context) for context in (71, 72, 73)),
    ]
    assert all(one.start_s + one.seconds <= two.start_s for one, two in pairwise(steps))
    assert split.take_steps() == []


def test_colocated_beside_it_gives_the_same_tokens(session: RaySession, split: RayCluster, demo_model: Path) -> None:
    config = with_placement(parse_config(config_tree(demo_model)), "colocated:1")
    with RayCluster(config, session=session) as colocated, colocated.client() as client:
        for case in CASES[2:5]:
            done = client.generate(case["prompt"], max_tokens=12, ignore_eos=True)
            assert list(done.token_ids) == case["output"]
            assert done.prefill_worker == done.decode_worker == "both-0"
        assert set(colocated.num_held_blocks().values()) == {0}
    with split.client() as client:
        assert client.generate([5, 6, 7], max_tokens=2).finish_reason == "length", "ending one leaves the other up"


def test_what_cannot_be_placed_is_one_sentence_and_leaves_nothing(session: RaySession, demo_model: Path) -> None:
    pools = {"prefill": {"gpus": 1, "device": "cpu", "workers": 3}, "decode": {}}
    with pytest.raises(ClusterError, match="want 3 GPU in all, the Ray cluster has 2"):
        RayCluster(parse_config(config_tree(demo_model, pools=pools)), session=session)
    with pytest.raises(BatonError, match="no-such-model"):
        RayCluster(parse_config(config_tree(Path("./no-such-model/x"))), session=session)
    available = session.ray.available_resources()
    assert available["GPU"] == 2


# --- the command line, from other shells ------------------------------------------------------------


@pytest.fixture
def shell(tmp_path: Path, demo_model: Path) -> dict[str, Any]:
    environment = {**os.environ, "BATON_RUNTIME": str(tmp_path / "run"), "COLUMNS": "120"}
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(config_tree(demo_model)), encoding="utf-8")
    return {"cwd": tmp_path, "env": environment}


BATON = [sys.executable, "-m", "baton_cli.main"]


def baton(shell: dict[str, Any], *arguments: str, fails: bool = False) -> str:
    ended = subprocess.run([*BATON, *arguments], capture_output=True, text=True, timeout=120, **shell)
    assert (ended.returncode != 0) == fails, ended.stdout + ended.stderr
    return ended.stderr if fails else ended.stdout


def start_up(shell: dict[str, Any]) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [*BATON, "up"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, **shell
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "is ready" in line:
            return process
    raise AssertionError("up ended: " + "".join(lines))


def children_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def end(process: subprocess.Popen[str], children: list[psutil.Process]) -> None:
    assert process.stdout is not None
    assert "has ended" in process.stdout.read()
    process.stdout.close()
    assert process.wait(30) == 0
    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == [], "processes left running"


@pytest.mark.timeout(400)
def test_up_submit_status_down_and_up_again_from_other_shells(shell: dict[str, Any], session: RaySession) -> None:
    """`session` is another Ray cluster on the same machine: it must survive."""
    assert "baton up" in baton(shell, "status", fails=True)
    process = start_up(shell)
    children = children_of(process)
    try:
        answer = json.loads(baton(shell, "submit", "What is the capital of France?", "--temperature", "0", "--json"))
        assert "Paris" in answer["text"]
        assert answer["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == len(answer["token_ids"])
        assert {"prefill", "wire", "decode_steps"} <= set(answer["timeline"]["stages_ms"])
        status = json.loads(baton(shell, "status", "--json"))
        for worker in status["workers"]:
            assert worker["state"] == "ready"
            assert worker["blocks_free"] == worker["blocks_total"] > 0
            assert worker["cores"]
            assert {"pool", "node", "device", "incarnation"} <= set(worker)
        assert "is up already" in baton(shell, "up", fails=True)
        os.killpg(process.pid, signal.SIGINT)  # Ctrl-C reaches everything in the terminal's foreground
        end(process, children)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert "is ready" in baton(shell, "up", "--detach")
    (record,) = Path(shell["env"]["BATON_RUNTIME"]).glob("*.json")
    owner = psutil.Process(json.loads(record.read_text())["pid"])
    detached = [owner, *owner.children(recursive=True)]
    try:
        assert "Paris" in baton(shell, "submit", "What is the capital of France?")
        assert "has ended" in baton(shell, "down")
        _, alive = psutil.wait_procs(detached, timeout=10)
        assert alive == [], "processes left running"
    finally:
        for process_left in detached:
            if process_left.is_running():
                process_left.kill()
    assert "baton up" in baton(shell, "down", fails=True)
    assert session.ray.is_initialized()
    assert session.ray.cluster_resources()["CPU"] >= 4

"""Where Ray puts workers: two raylets with two made-up GPUs each, on loopback addresses of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from baton.config import parse_config
from baton.errors import ClusterError
from baton.protocol import WorkerInfo
from baton_cluster.ray_cluster import RayCluster
from baton_cluster.ray_session import RaySession
from tests.stub_cluster import wait_until

pytestmark = pytest.mark.ray

NODES = ("127.0.0.2", "127.0.0.3")


@pytest.fixture(scope="module")
def session() -> Iterator[RaySession]:
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    from ray.cluster_utils import Cluster

    head = {"node_ip_address": NODES[0], "num_cpus": 8, "num_gpus": 2, "include_dashboard": False}
    raylets = Cluster(initialize_head=True, head_node_args=head)
    try:
        raylets.add_node(node_ip_address=NODES[1], num_cpus=8, num_gpus=2, resources={"fast": 1})
        config = parse_config({"ray": {"address": raylets.address}})
        with RaySession(config.ray, num_cpus=0, namespace="baton-placement") as session:
            yield session
    finally:
        raylets.shutdown()


def start(session: RaySession, model: Path, pools: dict[str, Any], strategy: str) -> RayCluster:
    tree = {
        "name": "baton-placement",
        "model": {"source": str(model), "dtype": "float32"},
        "pools": pools,
        "ray": {"address": session.address, "strategy": strategy},
        "liveness": {"heartbeat_s": 1.0, "timeout_s": 30.0},
    }
    return RayCluster(parse_config(tree), session=session)


def wait_for_gpus() -> None:
    """Until those of an earlier cluster are free again: Ray hears of it late, and would place around them."""
    import ray

    wait_until(lambda: ray.available_resources().get("GPU") == 4, "4 GPUs are free")


def infos(cluster: RayCluster) -> dict[str, WorkerInfo]:
    return {w.info.worker_id: w.info for w in cluster.status().workers}


def node_of(info: WorkerInfo) -> str:
    """The node whose address the worker advertises: for control and, over TCP, for data the same one."""
    control, data = urlsplit(info.control_address).hostname, urlsplit(info.data_address)
    assert control == data.hostname or data.scheme == "shm"
    assert control in NODES
    return control


def test_four_workers_get_four_gpus_and_more_cores_than_there_are_is_a_warning(
    session: RaySession, tiny_model: Path
) -> None:
    """Pools of different kinds: the second prefill pool has its own sizes, and three cores each are too many."""
    gpu = {"gpus": 1, "device": "cpu", "kv_memory_mib": 8, "cores": 3}
    pools = {"prefill": gpu, "big": {**gpu, "role": "prefill", "kv_blocks": 99}, "decode": {**gpu, "workers": 2}}
    with start(session, tiny_model, pools, "PACK") as cluster:
        workers = infos(cluster)
        assert len({(node_of(w), w.gpu_ids) for w in workers.values()}) == 4, "one GPU each"
        assert all(len(w.gpu_ids) == 1 for w in workers.values())
        assert {urlsplit(w.data_address).scheme for w in workers.values()} == {"zmq+tcp"}
        assert workers["big-0"].num_blocks == 99
        if (os.cpu_count() or 1) < 6:
            assert any("share" in warning for warning in cluster.warnings)
        with cluster.client() as client:
            done = client.generate([1, 2, 3, 4, 5], max_tokens=8, ignore_eos=True)
        assert done.kv_bytes > 0
        with pytest.raises(ClusterError, match=r"cannot place|want"):
            start(session, tiny_model, {**pools, "decode": {**gpu, "workers": 3}}, "PACK")


def test_workers_spread_or_follow_a_custom_resource(session: RaySession, tiny_model: Path) -> None:
    small = {"gpus": 1, "device": "cpu", "kv_memory_mib": 8}
    wait_for_gpus()
    with start(session, tiny_model, {"prefill": small, "decode": {**small, "resources": {"fast": 1}}}, "SPREAD") as c:
        workers = infos(c)
        assert node_of(workers["decode-0"]) == NODES[1]
        assert node_of(workers["prefill-0"]) == NODES[0]
        with c.client() as client:
            assert client.generate([1, 2, 3], max_tokens=4, ignore_eos=True).kv_bytes > 0
    wait_for_gpus()
    with start(session, tiny_model, {"prefill": small, "decode": small}, "STRICT_PACK") as c:
        assert len({node_of(w) for w in infos(c).values()}) == 1
        assert {urlsplit(w.data_address).scheme for w in infos(c).values()} == {"shm"}
        with c.client() as client:
            assert client.generate([1, 2, 3], max_tokens=4, ignore_eos=True).kv_bytes > 0

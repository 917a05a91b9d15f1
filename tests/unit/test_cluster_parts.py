"""The small parts of the launchers: cores, records of running clusters, workers of a configuration."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from baton.config import RayConfig, Secret, parse_config
from baton.errors import ClusterError, ConfigError
from baton_cli.up import last_error
from baton_cluster import record
from baton_cluster.cores import assign_cores
from baton_cluster.ray_cluster import RayCluster, _Slot
from baton_cluster.ray_session import RaySession
from baton_cluster.specs import worker_specs


def test_cores_are_disjoint_while_they_last_and_shared_with_a_warning_after() -> None:
    assert assign_cores([1, 1], [0, 1]) == ([(0,), (1,)], None)
    assert assign_cores([2, 1], [3, 5, 7]) == ([(3, 5), (7,)], None)
    cores, warning = assign_cores([1, 1, 1], [0, 1])
    assert cores == [(0,), (1,), (0,)]
    assert warning is not None
    assert "share" in warning
    assert assign_cores([4], [0, 1])[0] == [(0, 1)]


def test_workers_are_named_by_pool_and_listed_prefill_first() -> None:
    config = parse_config({"pools": {"decode": {"workers": 2}, "fast": {"role": "prefill"}, "both": {"workers": 1}}})
    assert [spec.worker_id for spec in worker_specs(config)] == ["fast-0", "decode-0", "decode-1", "both-0"]


def test_a_taken_http_port_is_told_before_anything_is_started() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = parse_config({"model": {"source": "/no/such/model"}, "http": {"port": port}})
        with pytest.raises(ClusterError, match=rf"http\.port.*{port}"):
            RayCluster(config)


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATON_RUNTIME", str(tmp_path))
    return tmp_path


@pytest.fixture
def other_process(runtime: Path) -> subprocess.Popen[bytes]:
    """A living process that owns a cluster named `other`."""
    code = (
        "import signal; from baton_cluster.record import write_record; "
        "write_record('other', 'tcp://x', None); print(flush=True); signal.pause()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=dict(os.environ))
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_record_is_found_by_name_or_as_the_only_one(runtime: Path) -> None:
    with pytest.raises(ClusterError, match="baton up"):
        record.find_record()
    record.write_record("mine", "tcp://127.0.0.1:1", None)
    assert record.find_record().address == record.find_record("mine").address == "tcp://127.0.0.1:1"
    with pytest.raises(ClusterError, match="no cluster named yours"):
        record.find_record("yours")
    record.remove_record("mine")
    assert list(runtime.iterdir()) == []


def test_a_name_in_use_is_refused_and_several_clusters_must_be_told_apart(
    runtime: Path, other_process: subprocess.Popen[bytes]
) -> None:
    with pytest.raises(ClusterError, match=f"process {other_process.pid}"):
        record.claim_name("other")
    record.write_record("mine", "tcp://x", None)
    with pytest.raises(ClusterError, match="mine, other"):
        record.find_record()
    record.remove_record("other")
    assert record.find_record("other").pid == other_process.pid, "only the owner removes a record"


def test_ending_a_cluster_ends_its_process_and_forgets_it(
    runtime: Path, other_process: subprocess.Popen[bytes]
) -> None:
    record.end_owner(record.find_record("other"), timeout_s=10)
    assert not psutil.pid_exists(other_process.pid) or other_process.wait(5) is not None
    with pytest.raises(ClusterError):
        record.find_record("other")


def test_an_owner_has_the_grace_of_its_cluster_before_it_is_killed(runtime: Path) -> None:
    code = (
        "import signal, sys, time; from baton_cluster.record import write_record; "
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), print('in order', flush=True), sys.exit())); "
        "write_record('slow', 'tcp://x', None, shutdown_grace_s=20.0); print(flush=True); signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=dict(os.environ)) as process:
        assert process.stdout is not None
        process.stdout.readline()
        record.end_owner(record.find_record("slow"), timeout_s=0.0)
        assert process.stdout.read() == b"in order\n"


def test_a_record_with_a_secret_that_others_can_read_is_refused(runtime: Path) -> None:
    record.write_record("mine", "tcp://x", None, secret=Secret("a secret of enough length"))
    assert record.find_record("mine").secret is not None
    (runtime / "mine.json").chmod(0o644)
    with pytest.raises(ClusterError, match=r"others may read it \(mode 644\): `chmod 600`"):
        record.find_record("mine")


def test_the_last_error_of_a_log_is_told_whole() -> None:
    log = "warning: first\nerror: an older one\nready\nerror: needs a package: `pip install\n  it` (or not)\n"
    assert last_error(log) == "needs a package: `pip install it` (or not)"
    assert last_error("Traceback\nValueError: no\n") == "ValueError: no"
    assert last_error("") == ""


def test_the_record_of_a_dead_process_counts_as_absent(runtime: Path, other_process: subprocess.Popen[bytes]) -> None:
    other_process.kill()
    other_process.wait()
    with pytest.raises(ClusterError):
        record.find_record("other")
    record.claim_name("other")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "no-such-host.invalid:6379"])
def test_an_unreachable_ray_address_is_one_sentence_at_once(address: str) -> None:
    with pytest.raises(ClusterError, match="nobody answers there"):
        RaySession(RayConfig(address=address), num_cpus=1, namespace="test")


def transports(places: list[tuple[str, str]], name: str = "auto", **pool: Any) -> set[str]:
    """What a Ray cluster opens for workers at these places: (node, what of the machine's memory they reach)."""
    cluster = RayCluster.__new__(RayCluster)
    pools = {"prefill": pool, "decode": {"workers": len(places) - 1}}
    cluster.config = parse_config({"pools": pools, "transfer": {"transport": name}})
    slots = [_Slot(spec, i, host=f"10.0.0.{i}") for i, spec in enumerate(worker_specs(cluster.config))]
    where = [{"node_id": n, "memory": m, "hostname": "h", "node_ip": f"10.0.0.{i}"} for i, (n, m) in enumerate(places)]
    cluster._choose_transport(slots, where)
    return {slot.transport for slot in slots}


def test_auto_takes_shared_memory_on_one_nodes_cpus_and_tcp_else() -> None:
    one, two = [("n1", "A"), ("n1", "A"), ("n1", "A")], [("n1", "A"), ("n2", "B")]
    tcp = {"zmq+tcp://10.0.0.0", "zmq+tcp://10.0.0.1"}
    assert transports(one) == {"shm://"}
    assert transports(one, gpus=1, device="cpu") == {"shm://"}
    assert transports(two) == tcp
    assert transports([("n1", "A"), ("n1", "B")]) == tcp, "one node, but containers apart"
    assert transports([("n1", "A"), ("n2", "A")]) == tcp
    assert transports([("n1", ""), ("n1", "")]) == tcp, "no Linux"
    assert transports(one[:2], gpus=1) == tcp
    assert transports(one[:2], name="zmq+tcp") == tcp


def test_shared_memory_that_cannot_be_is_refused_at_the_start() -> None:
    assert transports([("n1", "A"), ("n2", "A")], name="shm") == {"shm://"}, "two nodes of Ray on one machine"
    with pytest.raises(ConfigError, match=r"transfer\.transport: workers cannot map .*10\.0\.0\.0, A\) and on .*, B\)"):
        transports([("n1", "A"), ("n2", "B")], name="shm")
    with pytest.raises(ConfigError, match=r"pools\.prefill\.device: cannot be cuda"):
        transports([("n1", "A"), ("n1", "A")], name="shm", device="cuda")

"""Connections between workers that are cut, frozen, or dropped for being idle: rows 11 and 12 of docs/scenarios.md.

A TCP proxy lies between P and D, on the control connection, on the data connection, or on both. Whatever it does, the
request ends in its first attempt, with the right tokens, and by the KV that P sent.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from baton.config import LivenessConfig
from kv_transfer import nixl_agent
from router.client import RouterClient
from tests.fakes_links import TcpProxy
from tests.faults.test_scenarios import ENGINE, SPLIT, ended_well, prompt_of, receive_counters, send_counters
from tests.stub_cluster import StubCluster, expected_tokens, wait_until
from tests.stub_process import TRANSPORT, ProcessCluster

WAYS = [(TRANSPORT, "data"), (TRANSPORT, "control"), (TRANSPORT, "data and control"), ("shm://", "control")]
if nixl_agent.is_installed():
    WAYS.append(("nixl://127.0.0.1", "data"))
OVER = pytest.mark.parametrize(("transport", "which"), WAYS)
STEP_S = 0.05
"""Of prefill, which takes most of the time to a first token."""
COLD_FACTOR = 20
"""Of a warm request's time to its first token: that of one whose connections have just been cut."""


class ProxiedCluster(StubCluster):
    """A StubCluster whose decode worker is reached through proxies."""

    def __init__(self, transport: str, which: str, idle_s: float | None = None, **options: Any):
        self.proxies: dict[str, TcpProxy] = {}
        self._stack = ExitStack()

        def wrap_links(worker_id: str, links: Any) -> Any:
            for kind in which.split(" and ") if worker_id.startswith("decode") else ():
                address = getattr(links, f"{kind}_address")
                if kind in self.proxies:
                    self.proxies[kind].target = address
                else:
                    self.proxies[kind] = self._stack.enter_context(TcpProxy(address, idle_s=idle_s))
                setattr(links, f"{kind}_address", self.proxies[kind].address)
            return links

        try:
            super().__init__(SPLIT, transport=transport, engine=ENGINE, wrap_links=wrap_links, **options)
        except BaseException:
            self._stack.close()
            raise

    def stop(self) -> None:
        super().stop()
        self._stack.close()

    def cut(self) -> None:
        for proxy in self.proxies.values():
            proxy.cut()


@contextmanager
def proxied(transport: str, which: str, **options: Any) -> Iterator[tuple[ProxiedCluster, RouterClient]]:
    """At the end all must have been adopted: nothing expired, nothing was computed a second time."""
    slow = lambda worker_id, plan: STEP_S if worker_id == "prefill-0" else 0.0
    with ProxiedCluster(transport, which, **{"step_s": slow, **options}) as cluster, cluster.client() as client:
        yield cluster, client
        ended_well(cluster)
        counters = receive_counters(cluster)
        assert counters["done"] == counters["offered"] == send_counters(cluster)["offered"]


def ttft_of(client: RouterClient, salt: int) -> float:
    prompt = prompt_of(40, salt)
    done = client.generate(prompt, max_tokens=4, seed=0)
    assert (list(done.token_ids), done.attempts) == (expected_tokens(prompt, 4), 1)
    assert done.ttft_s is not None
    return done.ttft_s


@OVER
def test_the_first_request_after_a_start_and_after_a_cut(transport: str, which: str) -> None:
    """Row 12: each is served in its first attempt, and not much later than a warm one."""
    with proxied(transport, which) as (cluster, client):
        fresh = ttft_of(client, 0)
        warm = min(ttft_of(client, salt) for salt in (1, 2))
        for salt in (3, 4):
            cluster.cut()
            assert ttft_of(client, salt) < COLD_FACTOR * warm
        assert fresh < COLD_FACTOR * warm
        assert all(proxy.num_reset >= 1 for proxy in cluster.proxies.values())


@OVER
def test_connections_that_a_middlebox_drops_for_being_idle(transport: str, which: str) -> None:
    """Row 12: after ten minutes of silence, which last 0.2 s here."""
    with proxied(transport, which, idle_s=0.2) as (cluster, client):
        warm = ttft_of(client, 0)
        wait_until(lambda: all(proxy.num_reset >= 1 for proxy in cluster.proxies.values()), "all were idle")
        assert ttft_of(client, 1) < COLD_FACTOR * max(warm, STEP_S)


@OVER
@pytest.mark.parametrize("fault", ["cut", "freeze"])
def test_a_fault_of_the_wire_in_the_middle_of_a_transfer(transport: str, which: str, fault: str) -> None:
    """Row 12: what went with the connection is sent again, and the request does not start anew."""
    prompt = prompt_of(300)  # seven chunks
    with proxied(transport, which) as (cluster, client):
        ttft_of(client, 1)
        stats = cluster.transports["prefill-0"].stats  # type: ignore[attr-defined]
        with client.stream(prompt, max_tokens=4, seed=0) as stream:
            wait_until(lambda: stats.blocks_shipped >= 6, "the first of its blocks were shipped")
            for proxy in cluster.proxies.values():
                proxy.freeze()
            wait_until(lambda: stats.blocks_shipped >= 12, "more of them are on the wire")
            if fault == "cut":
                cluster.cut()  # they are lost
            for proxy in cluster.proxies.values():
                proxy.thaw()
            done = stream.result()
        assert (list(done.token_ids), done.attempts) == (expected_tokens(prompt, 4), 1)
        assert cluster.runners["decode-0"].num_steps <= 8, "decode computed no prompt"
        assert fault == "freeze" or all(proxy.num_reset >= 1 for proxy in cluster.proxies.values())


def test_a_worker_that_was_restarted_at_the_same_address_is_another_one() -> None:
    """Row 11: P's connections lead to the new life; it serves, and takes nothing for the former one's."""
    with proxied(TRANSPORT, "data and control") as (cluster, client):
        ttft_of(client, 0)
        former = cluster.workers["decode-0"]
        former.stop()
        cluster.cut()
        cluster.add("decode-0")
        present = cluster.workers["decode-0"]
        assert present.info.incarnation != former.info.incarnation
        assert (present.info.control_address, present.info.data_address) == (
            former.info.control_address,
            former.info.data_address,
        )
        ttft_of(client, 1)
        assert receive_counters(cluster)["done"] == 1
        send_counters(cluster)["offered"] -= 1  # to the former life


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_worker_is_noticed_within_two_seconds_by_default(death: signal.Signals) -> None:
    """Row 27: by the router, which then tells the others, if its process is gone, and if it only does nothing."""
    liveness = LivenessConfig()
    options = {"heartbeat_s": liveness.heartbeat_s, "timeout_s": liveness.timeout_s}
    with ProcessCluster({"prefill": {}, "decode": {}}, apart=["decode-0"], engine=ENGINE, liveness=options) as cluster:
        port: Any = cluster.workers["prefill-0"].core.send
        wait_until(lambda: len(port._peers) == 1, "prefill knows it")
        process = cluster.processes["decode-0"]
        process.send_signal(death)
        died = time.monotonic()
        cluster.wait_state("decode-0", "lost")
        wait_until(lambda: not port._peers, "prefill knows it no more")
        assert time.monotonic() - died < liveness.timeout_s + liveness.heartbeat_s + 2.0  # the machine's own delays

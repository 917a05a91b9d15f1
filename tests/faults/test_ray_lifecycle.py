"""Processes that die on a real Ray cluster: started again, and no stream loses or repeats a token.

A tiny random model, so that it is the processes that take the time.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Semaphore
from typing import Any

import psutil
import pytest

from baton.config import parse_config
from baton.errors import BatonError, RequestFailedError
from baton.protocol import Status
from baton_cluster.ray_cluster import RayCluster
from router.client import RouterClient
from tests.golden.tiny_models import VOCAB
from tests.stub_cluster import wait_until

pytestmark = pytest.mark.ray

STREAMS = 20
TOKENS = 240
RESTART_S = 90.0


@pytest.fixture(scope="module")
def cluster(tiny_model: Path) -> Iterator[RayCluster]:
    tree = {
        "name": "baton-lifecycle",
        "model": {"source": str(tiny_model), "dtype": "float32"},
        "pools": {"prefill": {"kv_memory_mib": 16}, "decode": {"kv_memory_mib": 16}},
        "router": {"worker_wait_s": RESTART_S},
    }
    with RayCluster(parse_config(tree)) as cluster:
        yield cluster


def prompt(number: int) -> list[int]:
    return [(number * 37 + i * 11) % VOCAB for i in range(20 + number)]


def undisturbed(client: RouterClient) -> list[tuple[int, ...]]:
    def one(number: int) -> tuple[int, ...]:
        return client.generate(prompt(number), max_tokens=TOKENS, ignore_eos=True).token_ids

    with ThreadPoolExecutor(STREAMS) as pool:
        return list(pool.map(one, range(STREAMS)))


def pids(status: Status) -> dict[str, int]:
    return {w.info.worker_id: w.info.pid for w in status.workers if w.state == "ready"}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("victims", [["decode-0"], ["prefill-0"], ["prefill-0", "decode-0"]], ids=" then ".join)
def test_sigkill_under_twenty_streams_loses_and_repeats_no_token(cluster: RayCluster, victims: list[str]) -> None:
    with cluster.client() as client:
        expected = undisturbed(client)
        before = pids(client.status())
        under_way = Semaphore(0)

        def one(number: int) -> list[int]:
            tokens: list[int] = []
            with client.stream(prompt(number), max_tokens=TOKENS, ignore_eos=True) as stream:
                for delta in stream:
                    if len(tokens) < 5 <= len(tokens) + len(delta.token_ids):
                        under_way.release()
                    tokens += delta.token_ids
                assert stream.result().finish_reason == "length"
            return tokens

        with ThreadPoolExecutor(STREAMS) as pool:
            streams = [pool.submit(one, number) for number in range(STREAMS)]
            assert all(under_way.acquire(timeout=60) for _ in range(3))
            assert not all(stream.done() for stream in streams), "nothing is left to be disturbed"
            for victim in victims:
                os.kill(before[victim], signal.SIGKILL)
            outputs = [stream.result(RESTART_S * 2) for stream in streams]
        for number, (output, wanted) in enumerate(zip(outputs, expected, strict=True)):
            assert output == list(wanted), f"stream {number}"
        after: dict[str, int] = {}

        def all_back() -> bool:
            after.update(pids(client.status()))
            return set(after) == set(before) and all(after[v] != before[v] for v in victims)

        wait_until(all_back, "the victims are back as new processes", within_s=RESTART_S)
    wait_until(lambda: set(cluster.num_held_blocks().values()) == {0}, "no block held")


@pytest.mark.timeout(300)
def test_sigterm_lets_a_worker_finish_and_then_it_is_replaced(cluster: RayCluster) -> None:
    """Row 13 on Ray: nothing is started anew, and a new process takes the place."""
    with cluster.client() as client:
        before = pids(client.status())
        streams = [client.stream(prompt(number), max_tokens=TOKENS, ignore_eos=True) for number in range(6)]
        next(iter(streams[0]))
        os.kill(before["decode-0"], signal.SIGTERM)
        assert [stream.result().attempts for stream in streams[1:]] == [1] * 5
        wait_until(
            lambda: pids(client.status()).get("decode-0") not in (None, before["decode-0"]),
            "a new process in its place",
            within_s=RESTART_S,
        )
        assert client.generate(prompt(1), max_tokens=5, ignore_eos=True).finish_reason == "length"


@pytest.mark.timeout(300)
def test_a_router_that_dies_comes_back_at_its_address_and_workers_drop_its_orphans(cluster: RayCluster) -> None:
    client = cluster.client()
    with client.stream(prompt(1), max_tokens=400, ignore_eos=True) as stream:
        deltas = iter(stream)
        next(deltas)
        psutil.Process(cluster.details()["router_pid"]).kill()
        with pytest.raises(RequestFailedError, match="lost"):
            for _ in deltas:
                pass
    client.close()

    def served() -> bool:
        try:
            with RouterClient(cluster.address) as new:
                return len(new.generate(prompt(1), max_tokens=3, ignore_eos=True).token_ids) == 3
        except BatonError:
            return False

    wait_until(served, "the same address serves again", within_s=RESTART_S)
    wait_until(lambda: set(cluster.num_held_blocks().values()) == {0}, "orphans freed")


@pytest.mark.timeout(200)
def test_a_worker_whose_engine_hangs_is_replaced(cluster: RayCluster) -> None:
    """Row 29: the process lives and its heart beats, but no step ends."""
    with cluster.client() as client:
        before = pids(client.status())
        os.kill(before["decode-0"], signal.SIGSTOP)
        answer: Any = client.generate(prompt(2), max_tokens=30, ignore_eos=True)
        assert len(answer.token_ids) == 30
        assert pids(client.status())["decode-0"] != before["decode-0"]

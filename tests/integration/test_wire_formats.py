"""Pools of different block sizes, over real threads and sockets, without a model: every position is checked."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from baton.errors import JoinRefusedError, OverloadedError
from baton_cluster.specs import WorkerSpec
from tests import stub_cluster
from tests.integration.test_workers import CorruptingTransport, prompt_of
from tests.stub_cluster import LAYOUT, WAIT_S, StubCluster, expected_tokens, stub_worker

ENGINE = {"max_batch_tokens": 48, "max_batch_requests": 8}
CASES = {
    "16 to 32": (16, 32, "zmq+tcp://127.0.0.1"),
    "32 to 16": (32, 16, "inproc"),
    "8 to 24": (8, 24, "zmq+tcp://127.0.0.1"),
}


def pools_of(there: int, here: int) -> dict[str, Any]:
    return {"prefill": {"block_size": there}, "decode": {"block_size": here, "kv_blocks": 200}}


def check_nothing_is_held(cluster: StubCluster) -> None:
    cluster.wait_ledger_zero()
    assert cluster.step_failures() == []
    for worker in cluster.workers.values():
        worker.core.engine.check_integrity()
        wire = worker._links._wire  # type: ignore[attr-defined]
        assert wire is None or wire.num_open == 0


@pytest.fixture(params=CASES.values(), ids=CASES, scope="module")
def sizes(request: pytest.FixtureRequest) -> tuple[int, int, str]:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def cluster(sizes: tuple[int, int, str]) -> Iterator[StubCluster]:
    there, here, transport = sizes
    with StubCluster(pools_of(there, here), transport=transport, engine=ENGINE) as cluster:
        yield cluster
        check_nothing_is_held(cluster)


def test_lengths_around_every_boundary(cluster: StubCluster, sizes: tuple[int, int, str]) -> None:
    there, here, _ = sizes
    lengths = sorted({k * b + d for b in (there, here) for k in (1, 2, 3) for d in (-1, 0, 1)} | {1, 150})
    with cluster.client() as client, ThreadPoolExecutor(len(lengths)) as pool:
        done = list(pool.map(lambda n: client.generate(prompt_of(n), max_tokens=30, seed=0), lengths))
    block_bytes = msgspec.structs.replace(LAYOUT, block_size=there).block_bytes
    for length, completion in zip(lengths, done, strict=True):
        assert list(completion.token_ids) == expected_tokens(prompt_of(length), 30), length
        assert (completion.attempts, completion.kv_bytes) == (1, -(-length // there) * block_bytes)


def test_prefixes_that_end_within_a_wire_block(cluster: StubCluster, sizes: tuple[int, int, str]) -> None:
    """What decode holds already is never written, and only whole wire blocks of it stay away."""
    there, here, _ = sizes
    family = prompt_of(100, salt=7)
    block_bytes = msgspec.structs.replace(LAYOUT, block_size=there).block_bytes
    with cluster.client() as client:
        client.generate(family, max_tokens=2, seed=0)
        for common in sorted({k * b + d for b in (there, here) for k in (1, 2) for d in (-1, 0, 1)}):
            prompt = [*family[:common], 999 - common, *prompt_of(37, salt=common)]
            done = client.generate(prompt, max_tokens=12, seed=0)
            assert list(done.token_ids) == expected_tokens(prompt, 12), common
            sent = -(-len(prompt) // there) - common // here * here // there
            assert done.kv_bytes == sent * block_bytes, common
        again = client.generate(family, max_tokens=30, seed=0)
    assert list(again.token_ids) == expected_tokens(family, 30)
    assert again.kv_bytes == 0, "a prompt that is all here moves nothing"


def test_samples(cluster: StubCluster) -> None:
    prompt = prompt_of(61, salt=3)
    with cluster.client() as client:
        done = client.generate(prompt, max_tokens=10, seed=5, n=3)
    for sample, choice in enumerate(done.choices):
        assert list(choice.token_ids) == expected_tokens(prompt, 10, seed=5, sample=sample)


def test_clients_that_leave_at_any_moment(cluster: StubCluster) -> None:
    draw = random.Random(1)

    def one(number: int) -> None:
        prompt = prompt_of(draw.randint(1, 150), number)
        with client.stream(prompt, max_tokens=20, seed=0) as stream:
            leave_after = draw.choice([None, 0, 0, 1, 5])
            seen: list[int] = []
            if leave_after == 0:
                return
            for delta in stream:
                seen += delta.token_ids
                if leave_after is not None and len(seen) >= leave_after:
                    break
            assert seen == expected_tokens(prompt, 20)[: len(seen)]

    with cluster.client() as client, ThreadPoolExecutor(12) as pool:
        list(pool.map(one, range(40)))
    check_nothing_is_held(cluster)


def test_damage_is_noticed_and_computed_again() -> None:
    made: list[CorruptingTransport] = []

    def wrap(worker_id: str, transport: Any) -> Any:
        made.append(CorruptingTransport(transport))
        return made[-1]

    with StubCluster(pools_of(8, 24), transport="zmq+tcp", engine=ENGINE, wrap=wrap) as cluster:
        with cluster.client() as client:
            for length in (1, 24, 61):
                tokens = client.generate(prompt_of(length), max_tokens=10, seed=0).token_ids
                assert list(tokens) == expected_tokens(prompt_of(length), 10)
        assert sum(transport.num_flipped for transport in made) == 3
        receive: Any = cluster.workers["decode-0"].core.receive
        assert receive.counters["corrupt"] == 3
        check_nothing_is_held(cluster)


def test_a_transport_that_cannot_carry_it_is_refused_at_once() -> None:
    """The launcher refuses this earlier; here the workers are started by hand."""
    with StubCluster(pools_of(16, 32), transport="shm://", engine=ENGINE) as cluster, cluster.client() as client:
        began = time.monotonic()
        with pytest.raises(OverloadedError, match=r"block_size.*prefill-0 has 16, decode-0 has 32.*zmq\+tcp"):
            client.generate(prompt_of(20), max_tokens=5)
        assert time.monotonic() - began < 5


def test_other_shards_of_the_heads_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 17: no engine shards heads, so a worker that has other heads is told when it joins, with both values."""
    with StubCluster({"prefill": {}, "decode": {"workers": 2}}, engine=ENGINE) as cluster:
        monkeypatch.setattr(stub_cluster, "LAYOUT", msgspec.structs.replace(LAYOUT, num_kv_heads=2))
        began = time.monotonic()
        worker, _, _ = stub_worker(
            cluster.config,
            WorkerSpec("decode-7", "decode"),
            router_address=cluster.back,
            context=cluster.context,
            transport="inproc",
            step_s=lambda plan: 0.0,
        )
        try:
            with pytest.raises(JoinRefusedError, match=r"num_kv_heads: (prefill|decode)-\d has 1, decode-7 has 2"):
                worker.start(WAIT_S)
        finally:
            worker.stop()
        assert time.monotonic() - began < 5

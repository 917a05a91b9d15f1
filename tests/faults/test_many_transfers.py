"""Many transfers while blocks and messages are lost, late, doubled and damaged, links are cut and clients give up.

Whatever happens to each: every request is answered, with the right tokens; no block stays held; nothing grows.

`BATON_TRANSFERS=10000 pytest -s tests/faults/test_many_transfers.py` runs so many over each transport between pools on
CPUs, and says how long they took and what they met, instead of the few hundred over three that a test run has time for.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import time
from collections import Counter
from collections.abc import Iterator, Sized
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.engine.step import Step
from baton.errors import BatonError
from kv_transfer.faulty_transport import FAULTS
from router.async_client import AsyncRouterClient
from tests.fakes_links import FaultyLinks, MessageFaults
from tests.stub_cluster import StubCluster, expected_tokens, wait_until
from tests.stub_process import ALL_TRANSPORTS, TRANSPORT

NUM_TRANSFERS = int(os.environ.get("BATON_TRANSFERS", "0"))
FEW = {"inproc": 300, TRANSPORT: 300, "shm://": 300}
NUM_CLIENTS = 24
POOL_BLOCKS = 24
"""Of each worker: a dozen requests of up to seven blocks do not fit at once."""
SPREAD = {"workers": 2, "kv_blocks": POOL_BLOCKS}
SECTIONS: dict[str, Any] = {
    "engine": {"max_batch_tokens": 48, "max_batch_requests": 8},
    "transfer": {"lease_s": 0.25, "expected_growth": 0},
    "router": {"max_attempts": 100},
    "liveness": {"heartbeat_s": 0.2, "timeout_s": 10.0},
}
BLOCK_FAULTS = (
    "drop=0.01&duplicate=0.03&delay=0.05&delay_s=0.02&reorder=0.05&corrupt=0.02&truncate=0.02&cut=0.02&seed=11"
)
MESSAGE_FAULTS = MessageFaults(drop=0.01, duplicate=0.03, delay=0.1, delay_s=0.02)
MAX_GROWTH = 48 << 20
"""Bytes of memory, from the first fifth of the requests on: what is bounded, as remembered answers, fills up."""
BOUNDED = {"_answers": 4096, "_shipped_checksums": POOL_BLOCKS, "counters": 40, "faults": 10, "counts": 10}
"""Tables that may be as long as this when nothing is going on. Others hold what is open, or one entry per peer."""


class Asked:
    """One request, made up from its number, and what must come of it."""

    def __init__(self, number: int):
        rng = random.Random(number)
        length = rng.randint(1, 80)
        shared = rng.choice([0, 0, 16, 32, 40])
        start = [rng.randrange(4)] * min(shared, length)  # the same in many requests
        self.prompt = start + [rng.randrange(1000) for _ in range(length - len(start))]
        self.max_tokens = rng.randint(1, 24)
        self.seed = rng.randrange(3)
        self.cancel_after = rng.randint(0, 6) if rng.random() < 0.1 else None
        """Tokens after which the client gives up; None: it does not."""
        self.leaves = rng.random() < 0.3
        """It does so without a word about it."""

    async def run(self, client: AsyncRouterClient) -> None:
        expected = expected_tokens(self.prompt, self.max_tokens, self.seed)
        tokens: list[int] = []
        async with client.stream(self.prompt, max_tokens=self.max_tokens, seed=self.seed, timeout=60) as stream:
            if self.cancel_after == 0:
                if self.leaves:
                    return
                stream.cancel()
            async for delta in stream:
                tokens += delta.token_ids
                if self.cancel_after is not None and len(tokens) >= self.cancel_after:
                    if self.leaves:
                        break
                    stream.cancel()
        assert tokens == expected[: len(tokens)]
        if self.cancel_after is None:
            assert len(tokens) == self.max_tokens


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def tables(cluster: StubCluster) -> Iterator[tuple[str, int]]:
    """Everything with a length in the ports, the links and the transports."""
    for name, worker in cluster.workers.items():
        links: Any = worker._links
        parts: list[Any] = [worker.core.send, worker.core.receive, links, links._inner]
        parts += [links._transport, links._transport.inner]
        for part in (part for part in parts if part is not None):
            for table, value in vars(part).items():
                if isinstance(value, Sized) and not isinstance(value, str | bytes | memoryview):
                    yield f"{name} {type(part).__name__}.{table}", len(value)


def grown(cluster: StubCluster) -> list[tuple[str, int]]:
    """Tables that are longer than they should be while nothing is going on."""
    return [(name, size) for name, size in tables(cluster) if size > BOUNDED.get(name.rpartition(".")[2], 8)]


def audit(cluster: StubCluster) -> None:
    for worker in cluster.workers.values():
        with worker._condition:
            found = worker.core.audit(worker._now(), block_ids=True)
            assert (found.findings, found.stranded, found.num_phantom) == ([], frozenset(), 0)
            worker.core.engine.check_integrity()


async def all_answered(address: str, numbers: range, cluster: StubCluster) -> list[int]:
    """Run these requests, `NUM_CLIENTS` at a time. Returns the resident bytes, as each fifth of them was done."""
    left = iter(numbers)
    done = count(1)
    sizes: list[int] = []

    async def one_after_another(client: AsyncRouterClient) -> None:
        for number in left:
            try:
                await Asked(number).run(client)
            except (AssertionError, BatonError) as e:
                raise AssertionError(f"request {number}: {e}") from e
            if next(done) % max(1, len(numbers) // 5) == 0:
                sizes.append(resident_bytes())
                audit(cluster)

    async with AsyncRouterClient(address) as client:
        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_CLIENTS):
                group.create_task(one_after_another(client))
        while (await client.status()).num_requests:
            await asyncio.sleep(0.01)
    return sizes


@pytest.mark.parametrize("url", ALL_TRANSPORTS if NUM_TRANSFERS else list(FEW))
def test_many_transfers_under_faults_end_with_nothing_lost_and_nothing_left(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows 1 to 5, 8 and 9, all at once and again and again."""
    links: list[FaultyLinks] = []
    events: Counter[str] = Counter()
    preempt = Step._preempt

    def wrap_links(worker_id: str, inner: Any) -> Any:
        links.append(FaultyLinks(inner, msgspec.structs.replace(MESSAGE_FAULTS, seed=len(links))))
        return links[-1]

    def counted(self: Step, victim: Any) -> None:
        events["preempted"] += 1
        preempt(self, victim)

    monkeypatch.setattr(Step, "_preempt", counted)
    number = NUM_TRANSFERS or FEW[url]
    pools = {"prefill": SPREAD, "decode": SPREAD}
    began = time.monotonic()
    with StubCluster(pools, transport=f"faulty+{url}?{BLOCK_FAULTS}", wrap_links=wrap_links, **SECTIONS) as cluster:
        sizes = asyncio.run(all_answered(cluster.address, range(number), cluster))
        took_s = time.monotonic() - began
        cluster.wait_ledger_zero()
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not grown(cluster), "tables are empty again")
        assert grown(cluster) == []
        audit(cluster)
        assert cluster.step_failures() == []
        for worker in cluster.workers.values():
            assert worker.core.engine.live() == []
            assert worker.health()["healthy"]
            events["cache hits"] += worker.core.load().cache_hit_tokens
            for port in (worker.core.send, worker.core.receive):
                events.update({} if port is None else port.counters)  # type: ignore[union-attr]
        for transport in cluster.transports.values():
            events.update({f"block {fault}": n for fault, n in transport.faults.items()})  # type: ignore[attr-defined]
        for link in links:
            events.update({f"message {fault}": n for fault, n in link.counts.items()})
        gc.collect()
        sizes.append(resident_bytes())
    mib = [size >> 20 for size in sizes]
    print(f"{url}: {number} requests in {took_s:.1f} s, {mib} MiB resident, {dict(sorted(events.items()))}")
    assert sizes[-1] - sizes[0] < MAX_GROWTH, mib
    happened = [*(f"block {fault}" for fault in FAULTS), *(f"message {f}" for f in ("drop", "duplicate", "delay"))]
    happened += ["preempted", "cache hits", "done", "failed", "aborted", "corrupt", "ignored", "links_cut"]
    assert not [what for what in happened if not events[what]], "the faults, and what they lead to"

"""`baton doctor` on clusters with everything real but the model: a hand-over held up, a leak, a lost worker."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from typer.testing import CliRunner

import baton_cli.doctor
from baton.errors import InvalidRequestError
from baton.ledger import ClusterLedger, HoldReason, LedgerEntry, WorkerLedger
from baton_cli.main import app
from router.client import AsyncRouterClient, RouterClient
from tests.faults.test_scenarios import ENGINE, SPLIT, prompt_of, with_faults
from tests.stub_cluster import LAYOUT, StubCluster, wait_until

LEASE = 30.0
PROMPT = prompt_of(60)
NUM_BLOCKS = LAYOUT.num_blocks_for(len(PROMPT))


def doctor(cluster: StubCluster, *options: str) -> tuple[int, str]:
    """Exit status and what it printed."""
    result = CliRunner().invoke(app, ["doctor", "--address", cluster.address, *options], env={"COLUMNS": "160"})
    return result.exit_code, result.output


def doctor_json(cluster: StubCluster) -> tuple[int, dict[str, Any]]:
    status, text = doctor(cluster, "--json")
    return status, json.loads(text)


def part_of(ledger: ClusterLedger, worker_id: str) -> WorkerLedger:
    return next(w for w in ledger.workers if w.worker_id == worker_id)


def entry_of(ledger: ClusterLedger, worker_id: str) -> LedgerEntry:
    """The one entry of this worker, which must be all that it holds."""
    report = part_of(ledger, worker_id).report
    assert report is not None
    (entry,) = report.entries
    assert entry.blocks == report.blocks_total - report.blocks_free
    return entry


class ForgetsToRelease:
    """A prefill engine for its send port, that loses every release: the leak that the audit is for."""

    def __init__(self, engine: Any):
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def release(self, key: Any, now: float) -> None:
        pass


def test_a_hand_over_that_is_held_up_is_shown_on_both_sides() -> None:
    held, wrap = with_faults()
    sections: dict[str, Any] = {"engine": ENGINE, "transfer": {"lease_s": LEASE}}
    with StubCluster(SPLIT, wrap=wrap, **sections) as cluster, cluster.client() as client:
        held[0].hold()
        with client.stream(PROMPT, max_tokens=20, seed=0) as stream:
            deltas = iter(stream)
            next(deltas)

            def settled() -> bool:
                return entry_of(client.ledger(), "decode-0").reason is HoldReason.COMMITTED

            wait_until(settled, "decode has the Commit and misses blocks")
            ledger = client.ledger(block_ids=True)
            (request,) = ledger.requests
            assert request.state == "running"
            assert (request.prefill_worker, request.decode_worker) == ("prefill-0", "decode-0")
            p, d = entry_of(ledger, "prefill-0"), entry_of(ledger, "decode-0")
            assert p.request_id == d.request_id == request.request_id
            assert (p.reason, p.blocks, p.peer) == (HoldReason.SHIPPING, NUM_BLOCKS, "decode-0")
            assert (d.reason, d.peer) == (HoldReason.COMMITTED, "prefill-0")
            assert d.peer_incarnation == part_of(ledger, "prefill-0").incarnation
            assert d.blocks >= NUM_BLOCKS
            for entry in (p, d):
                assert entry.deadline_s is not None
                assert 0 < entry.deadline_s <= LEASE
                assert len(entry.block_ids) == entry.blocks
            assert all(w.unknown == () for w in ledger.workers)

            status, text = doctor(cluster)
            assert status == 0, text
            for word in (p.owner, "shipping", "committed", "prefill-0 (prefill, ready)", "running", "all is well"):
                assert word in text, text
            held[0].release()
            assert sum(len(delta.token_ids) for delta in deltas) == 19
        cluster.wait_ledger_zero()
        assert all(w.report is not None and w.report.entries == () for w in client.ledger().workers)
        assert doctor(cluster, "--worker", "decode-0")[0] == 0


def test_a_leak_is_found_when_the_worker_is_idle_and_the_doctor_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(baton_cli.doctor, "LOOK_AGAIN_S", 0.05)
    beats = {"heartbeat_s": 0.05, "timeout_s": 10}
    with StubCluster(SPLIT, engine=ENGINE, liveness=beats) as cluster, cluster.client() as client:
        port: Any = cluster.workers["prefill-0"].core.send
        port._engine = ForgetsToRelease(port._engine)
        assert doctor(cluster)[0] == 0
        with caplog.at_level(logging.ERROR, "baton.worker"):
            request_id = client.generate(PROMPT, max_tokens=5, seed=0).request_id

            def load() -> Any:
                return next(w.load for w in client.status().workers if w.info.worker_id == "prefill-0")

            wait_until(lambda: load().stranded_block_seconds > 0, "the audit of the idle worker has found them")
            first = load()
            wait_until(lambda: load().stranded_block_seconds > first.stranded_block_seconds, "and goes on counting")
        assert first.stranded_blocks == NUM_BLOCKS
        logged = [record.getMessage() for record in caplog.records if "stranded" in record.getMessage()]
        assert len(logged) == 1, logged
        assert request_id[:8] in logged[0]

        status, data = doctor_json(cluster)
        assert status == 1
        assert not data["healthy"]
        worker = next(w for w in data["workers"] if w["worker_id"] == "prefill-0")
        assert worker["report"]["stranded_blocks"] == NUM_BLOCKS
        assert [(e["request_id"], e["reason"]) for e in worker["report"]["entries"]] == [(request_id, "stranded")]
        assert worker["orphans"] == [0], "nobody at the router waits for it"
        assert any("no port has its transfer" in problem for problem in data["problems"])
        result = CliRunner().invoke(app, ["status", "--address", cluster.address], env={"COLUMNS": "160"})
        assert f"({NUM_BLOCKS} stranded)" in result.output
        result = CliRunner().invoke(app, ["drain", "prefill-0", "--address", cluster.address])
        assert result.exit_code == 0, "nobody waits for blocks that never come free"
        assert cluster.workers["prefill-0"].leave(10)


def test_a_worker_that_is_gone_is_a_problem() -> None:
    with StubCluster(SPLIT, engine=ENGINE, liveness={"heartbeat_s": 0.1, "timeout_s": 0.4}) as cluster:
        cluster.workers["decode-0"].stop()
        status, data = doctor_json(cluster)
        assert status == 1
        assert any("decode-0 does not answer" in p or "decode-0 is lost" in p for p in data["problems"])
        assert {w["worker_id"]: w["report"] is None for w in data["workers"]} == {"prefill-0": False, "decode-0": True}


def test_both_clients_ask_in_the_same_way() -> None:
    with StubCluster({"both": {}}, engine=ENGINE) as cluster:

        async def ask() -> ClusterLedger:
            async with AsyncRouterClient(cluster.address) as client:
                with pytest.raises(InvalidRequestError, match="no worker nobody"):
                    await client.ledger("nobody")
                return await client.ledger("both-0")

        with RouterClient(cluster.address) as client:
            with pytest.raises(InvalidRequestError, match="no worker nobody"):
                client.ledger("nobody")
            sync = client.ledger("both-0")
        for ledger in (asyncio.run(ask()), sync):
            assert [(w.worker_id, w.state) for w in ledger.workers] == [("both-0", "ready")]

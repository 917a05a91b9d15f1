"""The audit: who accounts for which block through a whole hand-over, and what it says where nobody does."""

from __future__ import annotations

from typing import Any

import pytest

import baton.worker_core
from baton.config import parse_config
from baton.ledger import AskLedger, HoldReason, LedgerEntry
from baton.ports import (
    Action,
    BlocksReceived,
    BlocksSent,
    FromDecode,
    FromPrefill,
    HashBlocks,
    Hashed,
    ReceiveBlocks,
    ShipBlocks,
    Shipped,
    ToPeer,
)
from baton.protocol import Abort, Peers, RequestKey, Submit, TransferId, WorkerInfo
from baton.sampling_params import SamplingParams
from baton.worker_core import WorkerCore
from baton_cluster.assemble import worker_core
from kv_transfer.messages import Commit, Offer
from tests.fakes_transfer import LAYOUT

LEASE = 30.0
KEY = RequestKey("ab" * 16, 0)
PROMPT = tuple(range(10))  # three blocks of four tokens


class Pair:
    """A prefill and a decode worker; what one says reaches the other at once, save for blocks and what `hold` names."""

    def __init__(self) -> None:
        tree: dict[str, Any] = {"pools": {"prefill": {}, "decode": {}}, "transfer": {"lease_s": LEASE}}
        config = parse_config({**tree, "engine": {"block_size": LAYOUT.block_size}})
        self.now = 100.0
        self.cores: dict[str, WorkerCore] = {}
        for incarnation, name in (("P1", "prefill"), ("D1", "decode")):
            info = WorkerInfo(
                f"{name}-0",
                incarnation,
                name,
                name,
                "f",
                LAYOUT,
                16,
                64,
                8,
                "control",
                "data",  # type: ignore[arg-type]
            )
            self.cores[incarnation] = worker_core(config, info)
        self.p, self.d = self.cores["P1"], self.cores["D1"]
        self.transfer = TransferId(*KEY, "P1", "D1")
        self.hold: tuple[type[Any], ...] = ()
        self.held: list[tuple[str, ToPeer]] = []
        self.shipped: list[ShipBlocks] = []
        self.do("P1", self.p.on_router_message(Peers((self.d.info,)), self.now))

    def do(self, who: str, actions: list[Action]) -> None:
        """Deliver what is said; keep what is to be shipped."""
        for action in actions:
            if isinstance(action, ToPeer) and isinstance(action.message, self.hold):
                self.held.append((who, action))
            elif isinstance(action, ToPeer):
                self.say(who, action)
            elif isinstance(action, ShipBlocks):
                self.shipped.append(action)
                done = Shipped(action.transfer, tuple(index for index, _ in action.blocks), ())
                self.do(who, self.cores[who].on_peer_event(done, self.now))
            elif isinstance(action, HashBlocks):
                hashed = Hashed(action.transfer, {index: 1 for index, _ in action.blocks})
                self.do(who, self.cores[who].on_peer_event(hashed, self.now))
            else:
                assert not isinstance(action, ReceiveBlocks) or who == "D1"

    def say(self, who: str, action: ToPeer) -> None:
        event = (FromPrefill if who == "P1" else FromDecode)(who, action.message)
        self.do(action.peer, self.cores[action.peer].on_peer_event(event, self.now))

    def let_go(self) -> None:
        held, self.held, self.hold = self.held, [], ()
        for who, action in held:
            self.say(who, action)

    def submit(self, **sampling: Any) -> None:
        params = SamplingParams(**{"max_tokens": 5, **sampling})
        self.do("P1", self.p.on_router_message(Submit(KEY, PROMPT, params, decode="decode-0"), self.now))

    def step(self, who: str) -> None:
        core = self.cores[who]
        plan = core.next_step(self.now)
        assert plan is not None
        tokens = [7 if item.samples else None for item in plan.items]
        self.do(who, core.finish_step(plan, tokens, self.now))

    def arrive(self, *indices: int) -> None:
        self.do("D1", self.d.on_peer_event(BlocksReceived(self.transfer, dict.fromkeys(indices, 1)), self.now))

    def left(self) -> None:
        self.do("P1", self.p.on_peer_event(BlocksSent(self.transfer, (0, 1, 2)), self.now))

    def of(self, core: WorkerCore) -> LedgerEntry:
        """The one entry of a worker whose blocks are all accounted for."""
        audit = core.audit(self.now)
        assert audit.findings == []
        (entry,) = audit.entries
        assert (entry.owner, entry.blocks) == (str(KEY), core.num_held_blocks())
        return entry

    def handed(self) -> None:
        """Prefill has computed the prompt; its blocks are on their way."""
        self.submit()
        self.step("P1")


def test_every_state_of_a_hand_over_has_its_reason_its_owner_and_its_deadline() -> None:
    pair = Pair()
    p, d = pair.p, pair.d
    pair.hold = (Offer, Commit)
    pair.submit()
    entry = pair.of(p)
    assert (entry.reason, entry.blocks, entry.peer) == (HoldReason.AWAITING_CREDIT, 0, "decode-0")

    pair.hold = (Commit,)
    held, pair.held = pair.held, []
    pair.say(*held[0])
    assert pair.of(p).reason is HoldReason.QUEUED
    pair.now += 2.0
    entry = pair.of(d)
    assert (entry.reason, entry.peer, entry.peer_incarnation) == (HoldReason.RESERVED, "prefill-0", "P1")
    assert (entry.since_s, entry.deadline_s) == (2.0, LEASE - 2.0)

    plan = p.next_step(pair.now)
    assert plan is not None
    entry = pair.of(p)
    assert (entry.reason, entry.blocks, entry.deadline_s) == (HoldReason.PREFILL, 3, None), (
        "it runs, nobody is waited for"
    )
    pair.do("P1", p.finish_step(plan, [7], pair.now))
    entry = pair.of(p)
    assert (entry.reason, entry.blocks, entry.peer, entry.deadline_s) == (HoldReason.SHIPPING, 3, "decode-0", LEASE)

    pair.arrive(0)
    assert pair.of(d).reason is HoldReason.RECEIVING
    pair.left()
    entry = pair.of(p)
    assert entry.reason is HoldReason.AWAITING_ACK
    assert entry.deadline_s == 2 * LEASE
    pair.let_go()
    assert pair.of(d).reason is HoldReason.COMMITTED

    pair.arrive(1, 2)
    assert pair.of(d).reason is HoldReason.ADOPTED
    assert p.ledger(pair.now) == []
    assert p.is_idle
    plan = d.next_step(pair.now)
    assert plan is not None
    assert pair.of(d).reason is HoldReason.DECODE
    pair.do("D1", d.on_router_message(Abort(KEY), pair.now))
    assert pair.of(d).reason is HoldReason.IN_STEP
    pair.do("D1", d.finish_step(plan, [7], pair.now))
    assert d.ledger(pair.now) == []
    assert d.is_idle


def test_blocks_of_an_aborted_request_are_the_transports_until_it_has_read_them() -> None:
    pair = Pair()
    pair.handed()
    pair.do("P1", pair.p.on_router_message(Abort(KEY), pair.now))
    assert pair.of(pair.p).reason is HoldReason.IN_TRANSPORT
    assert not pair.p.is_idle
    pair.left()
    assert pair.p.ledger(pair.now) == []


def test_a_timeout_is_the_deadline_of_a_request_that_runs() -> None:
    pair = Pair()
    message = Submit(KEY, PROMPT, SamplingParams(max_tokens=5), timeout_s=9.0)
    pair.p.on_router_message(message, pair.now)
    plan = pair.p.next_step(pair.now)
    assert plan is not None
    pair.now += 1
    assert (pair.of(pair.p).reason, pair.of(pair.p).deadline_s) == (HoldReason.PREFILL, 8.0)


def test_a_shared_prefix_is_counted_once_in_the_pool_and_shown_as_shared() -> None:
    pair = Pair()
    params = SamplingParams(max_tokens=5)
    pair.p.on_router_message(Submit(KEY, PROMPT, params), pair.now)
    pair.step("P1")
    pair.p.on_router_message(Submit(KEY._replace(sample=1), (*PROMPT, 50), params), pair.now)
    plan = pair.p.next_step(pair.now)
    assert plan is not None
    audit = pair.p.audit(pair.now, block_ids=True)
    assert audit.findings == []
    assert [entry.shared for entry in audit.entries] == [2, 2]
    ids = [set(entry.block_ids) for entry in audit.entries]
    assert len(ids[0] & ids[1]) == 2
    assert len(ids[0] | ids[1]) == pair.p.num_held_blocks()


def test_a_transfer_that_its_port_forgets_strands_blocks_and_that_is_told_once() -> None:
    pair = Pair()
    pair.handed()
    pair.p.send._sessions.clear()  # type: ignore[union-attr]
    core = pair.p
    assert core.is_idle
    core.audit_if_idle(pair.now)
    (finding,) = core.take_findings()
    assert (finding.kind, finding.blocks, finding.owner) == ("stranded", 3, str(KEY))
    assert "no port has its transfer" in finding.problem
    assert core.ledger(pair.now)[0].reason is HoldReason.STRANDED
    pair.now += 2.0
    core.audit_if_idle(pair.now)
    assert core.take_findings() == []
    load = core.load()
    assert (load.stranded_blocks, load.stranded_block_seconds) == (3, 6.0)
    assert core.num_held_blocks() == 3, "reported, not reclaimed"


def test_stranded_time_goes_on_while_the_worker_is_busy() -> None:
    pair = Pair()
    assert pair.p.engine.pool.allocate(2)
    pair.p.audit_if_idle(pair.now)
    pair.p.on_router_message(Submit(KEY, PROMPT, SamplingParams(max_tokens=5)), pair.now)
    pair.now += 3.0
    pair.p.audit_if_idle(pair.now)
    assert pair.p.load().stranded_block_seconds == 6.0
    assert pair.p.load().stranded_blocks == 2


def test_of_a_block_that_no_request_has_the_last_owner_is_named() -> None:
    pair = Pair()
    core = pair.p
    core.on_router_message(Submit(KEY, PROMPT, SamplingParams(max_tokens=5)), pair.now)
    pair.step("P1")
    request = core.engine.holders()[0]
    lost = request.blocks[-1]
    request.blocks = request.blocks[:-1]
    core.on_router_message(Abort(KEY), pair.now)
    core.audit_if_idle(pair.now)
    (finding,) = core.take_findings()
    assert (finding.blocks, finding.owner, finding.block_ids) == (1, str(KEY), (lost,))
    assert "got them last" in str(finding)


def test_one_reference_too_many_is_found_while_the_block_has_a_holder() -> None:
    pair = Pair()
    pair.handed()
    block = pair.p.engine.holders()[0].blocks[0]
    pair.p.engine.pool.refs[block] += 1
    audit = pair.p.audit(pair.now)
    assert audit.stranded == {block}
    assert [finding.kind for finding in audit.findings] == ["stranded"]


def test_a_request_that_no_queue_has_is_stranded() -> None:
    pair = Pair()
    pair.p.on_router_message(Submit(KEY, PROMPT, SamplingParams(max_tokens=5)), pair.now)
    pair.step("P1")
    pair.p.engine._running.clear()
    pair.p.audit_if_idle(pair.now)
    (finding,) = pair.p.take_findings()
    assert "nothing is going to run or end it" in finding.problem


def test_blocks_that_the_pool_gave_away_under_a_transfer_are_phantoms() -> None:
    pair = Pair()
    pair.submit()
    request = pair.d.engine.holders()[0]
    pair.d.engine.pool.free(request.blocks)
    audit = pair.d.audit(pair.now)
    assert audit.num_phantom == len(request.blocks)
    assert audit.stranded == frozenset()


@pytest.mark.parametrize("forgotten", [True, False])
def test_a_port_that_relies_on_blocks_that_are_not_the_requests_is_told(forgotten: bool) -> None:
    pair = Pair()
    pair.submit()
    engine = pair.d.engine
    request = engine.holders()[0]
    if forgotten:
        del engine._requests[KEY]
        engine.tables.free(request)
    else:
        request.blocks = [request.blocks[1], request.blocks[0], *request.blocks[2:]]
    audit = pair.d.audit(pair.now)
    assert [(f.kind, f.owner, f.blocks) for f in audit.findings] == [("phantom", str(KEY), 3 if forgotten else 2)]


def test_a_report_is_bounded_and_says_how_much_it_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baton.worker_core, "MAX_ENTRIES", 2)
    monkeypatch.setattr(baton.worker_core, "MAX_BLOCK_IDS", 4)
    pair = Pair()
    for sample in range(4):
        key, prompt = KEY._replace(sample=sample), tuple(range(20 * sample, 20 * sample + 10))
        pair.p.on_router_message(Submit(key, prompt, SamplingParams(max_tokens=5)), pair.now)
    pair.step("P1")
    report = pair.p.ledger_report(AskLedger(7, block_ids=True), pair.now, "slow")
    assert (report.number, report.worker_id, report.problem) == (7, "prefill-0", "slow")
    assert (len(report.entries), report.num_entries) == (2, 4)
    assert [len(entry.block_ids) for entry in report.entries] == [3, 1]
    assert report.blocks_total - report.blocks_free == 12

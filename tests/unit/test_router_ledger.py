"""The router's part of the block ledger: whom it asks, how long it waits, what it knows of what workers hold."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from baton.codec import MAX_MESSAGE_BYTES, Codec
from baton.errors import InvalidRequestError, OverloadedError
from baton.ledger import (
    MAX_BLOCK_IDS,
    MAX_ENTRIES,
    AskLedger,
    ClusterLedger,
    HoldReason,
    LedgerEntry,
    LedgerReport,
    LedgerRequest,
    WorkerLedger,
)
from baton.protocol import ToClient
from router.ledger import MAX_OPEN, within_limits
from tests.fakes_router import Script, out, worker


class Asking(Script):
    def ask(self, label: str = "l", worker_id: str | None = None, block_ids: bool = False) -> list[Any]:
        return self.done(self.core.on_ledger(b"c", LedgerRequest(label, worker_id, block_ids), self.now))

    def report(self, worker_id: str, number: int = 1, *entries: LedgerEntry) -> list[Any]:
        return self.send(worker_id, LedgerReport(worker_id, number, 64, 60, 0, entries, len(entries)))


def entry_of(script: Script, attempt: int = 0, label: str = "x") -> LedgerEntry:
    return LedgerEntry(script.id(label), attempt, 0, HoldReason.PREFILL, 2, 0.5)


def ledger_in(actions: list[Any]) -> ClusterLedger:
    ((kind, ledger),) = actions
    assert kind == "ledger"
    return ledger  # type: ignore[no-any-return]


def states(ledger: ClusterLedger) -> dict[str, str]:
    return {w.worker_id: w.state for w in ledger.workers}


def test_all_workers_are_asked_and_the_answer_waits_for_all_of_them() -> None:
    s = Asking("p0", "d0")
    assert s.ask() == [("p0", AskLedger(1)), ("d0", AskLedger(1))]
    assert s.report("d0") == []
    ledger = ledger_in(s.report("p0"))
    assert states(ledger) == {"p0": "ready", "d0": "ready"}
    assert all(w.report is not None and w.report.blocks_free == 60 for w in ledger.workers)


def test_one_worker_can_be_asked_alone_and_must_exist() -> None:
    s = Asking("p0", "d0")
    assert s.ask(worker_id="d0") == [("d0", AskLedger(1))]
    assert states(ledger_in(s.report("d0"))) == {"d0": "ready"}
    with pytest.raises(InvalidRequestError, match="no worker d7; known: d0, p0"):
        s.ask(worker_id="d7")


def test_a_worker_that_does_not_answer_is_silent_and_its_late_answer_is_dropped() -> None:
    s = Asking("p0", "d0")
    s.ask()
    s.report("p0")
    ledger = ledger_in(s.wait(2.0, beating=("p0", "d0")))
    assert states(ledger) == {"p0": "ready", "d0": "silent"}
    assert ledger.workers[1].report is None
    assert s.report("d0") == []
    assert s.wait(5.0, beating=("p0", "d0")) == []


def test_a_lost_worker_is_shown_and_nobody_waits_for_it() -> None:
    s = Asking("p0", "d0", "d1")
    s.lose("d1")
    s.core.on_drain("p0", undo=False, now=s.now)
    assert s.ask() == [("p0", AskLedger(1)), ("d0", AskLedger(1))]
    s.report("p0")
    (ledger,) = [action[1] for action in s.lose("d0") if action[0] == "ledger"]
    assert states(ledger) == {"p0": "draining", "d0": "lost", "d1": "lost"}


def test_without_workers_there_is_nothing_to_wait_for() -> None:
    assert ledger_in(Asking().ask()).workers == ()


def test_what_a_worker_holds_is_compared_with_the_open_attempts() -> None:
    s = Asking("p0", "d0", "p1")
    s.generate()
    s.tokens("p0", out(s.key(), 0))
    s.ask()
    mine, former, foreign = entry_of(s), entry_of(s, attempt=7), entry_of(s, label="y")
    s.report("p0", 1, mine, former, foreign)
    s.report("d0", 1, mine)
    ledger = ledger_in(s.report("p1", 1, mine))
    assert [w.unknown for w in ledger.workers] == [(1, 2), (), (0,)]
    (request,) = ledger.requests
    assert (request.request_id, request.attempt, request.sample) == (s.id("x"), 0, 0)
    assert (request.state, request.prefill_worker, request.decode_worker, request.tokens) == ("running", "p0", "d0", 1)
    assert ledger.num_requests == 1


def test_an_answer_of_a_worker_that_was_not_asked_changes_nothing() -> None:
    s = Asking("p0", "d0")
    s.ask(worker_id="p0")
    assert s.report("d0") == []
    assert states(ledger_in(s.report("p0"))) == {"p0": "ready"}


def test_a_worker_that_starts_anew_meanwhile_does_not_hold_up_the_answer() -> None:
    s = Asking("p0", "d0")
    s.ask()
    s.report("p0")
    s.join(worker("d0", life=2))
    assert states(ledger_in(s.wait(2.0, beating=("p0", "d0")))) == {"p0": "ready", "d0": "lost"}


def test_reports_share_the_room_of_one_message_and_what_is_left_out_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    s = Asking("p0", "d0", "d1")
    s.lose("d1")
    few, many = replace(entry_of(s), block_ids=(1, 2)), replace(entry_of(s), blocks=7, block_ids=(3, 4, 5, 6, 7, 8))

    def asked(block_ids: bool = True) -> ClusterLedger:
        number = s.ask(block_ids=block_ids)[0][1].number
        s.report("p0", number, few)
        return ledger_in(s.report("d0", number, many, few, few))

    def shown(ledger: ClusterLedger) -> list[list[int]]:
        return [[len(e.block_ids) for e in w.report.entries] for w in ledger.workers if w.report is not None]

    assert (shown(whole := asked()), whole.num_block_ids_left_out) == ([[2], [6, 2, 2]], 1), "its report had no room"
    assert asked(block_ids=False).num_block_ids_left_out == 0, "none were asked for"
    monkeypatch.setattr("router.ledger.MAX_CLUSTER_BLOCK_IDS", 11)
    assert (shown(cut := asked()), cut.num_block_ids_left_out) == ([[2], [3, 0, 0]], 8)
    monkeypatch.setattr("router.ledger.MAX_CLUSTER_ENTRIES", 3)
    assert (shown(cut := asked()), cut.workers[1].unknown) == ([[2], [6]], (0,))
    assert cut.workers[1].report is not None and cut.workers[1].report.num_entries == 3


def test_a_ledger_of_many_workers_fits_a_message() -> None:
    ids = tuple(range(1 << 40, (1 << 40) + MAX_BLOCK_IDS))
    entries = (LedgerEntry("ab" * 16, 1, 0, HoldReason.DECODE, MAX_BLOCK_IDS, 0.5, 1.5, 0, "decode-0", "i" * 16),)
    report = LedgerReport("w", 1, 64, 60, 0, (replace(entries[0], block_ids=ids), *(entries * (MAX_ENTRIES - 1))))
    workers = [WorkerLedger(f"w{i}", "both", "i", "ready", 0.5, report) for i in range(250)]
    ledger = ClusterLedger("l", "baton", within_limits(workers), (), 0)
    codec: Codec[Any] = Codec(ToClient)
    assert MAX_MESSAGE_BYTES / 4 < len(codec.encode(ledger)) < MAX_MESSAGE_BYTES


def test_questions_are_bounded() -> None:
    s = Asking("p0")
    for number in range(MAX_OPEN):
        s.ask(f"l{number}")
    with pytest.raises(OverloadedError, match="ask again"):
        s.ask("one more")
    s.wait(2.0, beating=("p0",))
    assert s.ask("later")

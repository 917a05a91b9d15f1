"""What `baton doctor` makes of a ledger: what is wrong, in words, and what only looks so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import pytest
from msgspec.structs import replace
from rich.table import Table

import baton_cli.doctor
from baton.ledger import ClusterLedger, Finding, HoldReason, LedgerEntry, LedgerReport, OpenRequest, WorkerLedger
from baton_cli.doctor import diagnose, doctor_data, doctor_view, run_doctor

ID = "ab" * 16


def entry(reason: HoldReason = HoldReason.DECODE, deadline_s: float | None = None, **other: Any) -> LedgerEntry:
    return LedgerEntry(ID, 1, 0, reason, 3, 0.5, deadline_s, **other)


def part(
    *entries: LedgerEntry,
    state: Literal["ready", "draining", "lost", "silent"] = "ready",
    unknown: tuple[int, ...] = (),
    **report: Any,
) -> WorkerLedger:
    answer = None
    if state in ("ready", "draining"):
        answer = LedgerReport("p0", 1, 64, 61, 1, entries, **{"num_entries": len(entries), **report})
    return WorkerLedger("p0", "prefill", "P1", state, 3.0, answer, unknown)


def ledger_of(*workers: WorkerLedger, requests: tuple[OpenRequest, ...] = ()) -> ClusterLedger:
    return ClusterLedger("l", "baton", workers, requests, len(requests))


class Client:
    """Answers with one ledger after the other; the last one again and again."""

    def __init__(self, *ledgers: ClusterLedger):
        self.ledgers: Sequence[ClusterLedger] = ledgers

    def ledger(self, worker_id: str | None, *, block_ids: bool) -> ClusterLedger:
        first, *rest = self.ledgers
        self.ledgers = rest or [first]
        return first


def is_well(monkeypatch: pytest.MonkeyPatch, *ledgers: ClusterLedger) -> bool:
    monkeypatch.setattr(baton_cli.doctor, "LOOK_AGAIN_S", 0.0)
    client: Any = Client(*ledgers)
    return run_doctor(client, None, block_ids=False, as_json=False)


def test_all_accounted_for_is_well(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert is_well(monkeypatch, ledger_of(part(entry(), state="draining")))
    assert "all is well: 1 worker, 3 of 64 KV blocks held, each accounted for" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("worker", "problem"),
    [
        (part(state="lost"), "p0 is lost: last heard of 3 s ago"),
        (part(state="silent"), "p0 does not answer"),
        (part(problem="a step has been running for 90 s"), "p0 is not healthy: a step has been running for 90 s"),
        (part(findings=(Finding("phantom", 1, "ab/1", "why", (4,)),)), "p0: 1 KV block phantom (4), ab/1: why"),
        (part(stranded_blocks=3), "p0: 3 of 64 blocks are lost to it until it is started anew"),
        (part(entry(HoldReason.RESERVED, -5.0)), "p0: abababab/1 (reserved) should have ended 5 s ago"),
    ],
)
def test_what_is_wrong_is_said(worker: WorkerLedger, problem: str) -> None:
    diagnosis = diagnose(ledger_of(part(), worker), frozenset())
    (said,) = diagnosis.problems
    assert said.startswith(problem)
    assert diagnosis.verdict == "not well: 1 problem, see above"


def test_an_orphan_is_who_is_unknown_twice(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = ledger_of(part(entry(), unknown=(0,)))
    assert is_well(monkeypatch, ledger, ledger_of(part())), "it was just ending"
    assert not is_well(monkeypatch, ledger)
    shown = capsys.readouterr().out
    assert "p0: abababab/1 (3 blocks, decode) is unknown to the router" in shown
    assert "orphan" in shown


def test_a_transfer_of_an_ended_request_has_until_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    for reason in (HoldReason.IN_TRANSPORT, HoldReason.AWAITING_ACK):
        assert is_well(monkeypatch, ledger_of(part(entry(reason, 20.0), unknown=(0,))))
        assert not is_well(monkeypatch, ledger_of(part(entry(reason, -1.0), unknown=(0,))))
    assert not is_well(monkeypatch, ledger_of(part(entry(HoldReason.RESERVED, 20.0), unknown=(0,))))


def test_a_cancelled_request_whose_step_still_runs_is_no_orphan(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_well(monkeypatch, ledger_of(part(entry(HoldReason.IN_STEP), unknown=(0,))))


def test_block_ids_that_were_left_out_are_said() -> None:
    ledger = replace(ledger_of(part(entry(block_ids=(1,))), part()), num_block_ids_left_out=2)
    said = [part for part in doctor_view(diagnose(ledger, frozenset())) if isinstance(part, str)]
    assert " abababab/1: blocks 1" in said
    assert "2 block ids were left out for want of room; `baton doctor --worker NAME --block-ids`" in said[-1]


def test_open_requests_without_an_entry_are_shown() -> None:
    parked = OpenRequest("cd" * 16, 2, 1, "parked", "", "", 4.0, 7)
    busy = OpenRequest(ID, 1, 0, "running", "p0", "p0", 4.0, 7)
    view = list(doctor_view(diagnose(ledger_of(part(entry()), requests=(parked, busy)), frozenset())))
    assert view[-2] == "open at the router, and in no worker's ledger"
    table = view[-1]
    assert isinstance(table, Table)
    assert [list(column.cells) for column in table.columns] == [
        ["cdcdcdcd/2.1"],
        ["parked"],
        ["-"],
        ["-"],
        ["4.0 s"],
        ["7"],
    ]
    assert (
        len(list(doctor_view(diagnose(ledger_of(part(entry()), requests=(parked,)), frozenset(), is_whole=False)))) == 2
    )


def test_json_has_names_and_marks_orphans() -> None:
    ledger = ledger_of(part(entry(), unknown=(0,)))
    data = doctor_data(diagnose(ledger, frozenset({("P1", ID, 1, 0)})))
    (worker,) = data["workers"]
    assert worker["orphans"] == [0]
    assert worker["report"]["entries"][0]["reason"] == "decode"
    assert (data["healthy"], len(data["problems"])) == (False, 1)


def test_what_a_report_left_out_is_said() -> None:
    _, table = doctor_view(diagnose(ledger_of(part(entry(), num_entries=5)), frozenset()))
    assert isinstance(table, Table)
    assert table.caption == "and 4 more"

"""`baton doctor`: who holds which KV blocks, why, and whether somebody is going to give them back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from enum import Enum
from typing import Any, NamedTuple

import msgspec
from rich import box
from rich.table import Table

from baton.ledger import ClusterLedger, HoldReason, LedgerEntry, WorkerLedger
from baton_cli.output import out, print_json
from router.client import RouterClient

LOOK_AGAIN_S = 1.0
"""What the router does not know may be ending just now, and its end on its way to the worker."""
OVERDUE_S = 2.0
"""A deadline that is so long over has been missed."""

Owner = tuple[str, str, int, int]
"""Incarnation of the worker, request id, attempt, sample."""


class Diagnosis(NamedTuple):
    ledger: ClusterLedger
    orphans: frozenset[Owner]
    """Held by a worker and unknown to the router, whenever one looks."""
    problems: list[str]
    verdict: str
    is_whole: bool
    """All workers were asked."""


def run_doctor(client: RouterClient, worker_id: str | None, *, block_ids: bool, as_json: bool) -> bool:
    """Print the ledger and a verdict; whether all is well. Raises InvalidRequestError for an unknown worker."""
    ledger = client.ledger(worker_id, block_ids=block_ids)
    orphans = _orphans(ledger)
    if orphans:
        time.sleep(LOOK_AGAIN_S)
        ledger = client.ledger(worker_id, block_ids=block_ids)
        orphans &= _orphans(ledger)
    diagnosis = diagnose(ledger, orphans, is_whole=worker_id is None)
    if as_json:
        print_json(doctor_data(diagnosis))
    else:
        for part in doctor_view(diagnosis):
            out.print(part, markup=False)
        for problem in diagnosis.problems:
            out.print(f"problem: {problem}", style="red", markup=False)
        out.print(diagnosis.verdict, style="red" if diagnosis.problems else "green", markup=False)
    return not diagnosis.problems


def diagnose(ledger: ClusterLedger, orphans: frozenset[Owner], *, is_whole: bool = True) -> Diagnosis:
    """What is wrong, in words. `orphans`: the entries that the router does not know for longer than a moment."""
    problems = [problem for worker in ledger.workers for problem in _problems(worker, orphans)]
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        return Diagnosis(ledger, orphans, problems, f"not well: {count}, see above", is_whole)
    reports = [w.report for w in ledger.workers if w.report is not None]
    total = sum(r.blocks_total for r in reports)
    held = total - sum(r.blocks_free for r in reports)
    workers = "1 worker" if len(reports) == 1 else f"{len(reports)} workers"
    verdict = f"all is well: {workers}, {held} of {total} KV blocks held, each accounted for"
    return Diagnosis(ledger, orphans, [], verdict, is_whole)


def doctor_view(diagnosis: Diagnosis) -> Iterator[str | Table]:
    """Per worker a line and a table, then what the router has open that no worker holds anything for."""
    ledger, orphans = diagnosis.ledger, diagnosis.orphans
    requests = {(r.request_id, r.attempt, r.sample): r for r in ledger.requests}
    seen: set[tuple[str, int, int]] = set()
    for worker in ledger.workers:
        yield _headline(worker)
        report = worker.report
        if report is None or not report.entries:
            continue
        table = _table("request", "why", "blocks", "since", "deadline", "other end", "router")
        for index, entry in enumerate(report.entries):
            key = (entry.request_id, entry.attempt, entry.sample)
            seen.add(key)
            is_orphan = _owner(worker, entry) in orphans
            request = requests.get(key)
            known = "open" if request is None else request.state
            if index in worker.unknown:
                known = "orphan" if is_orphan else "ended"
            blocks = f"{entry.blocks}" + (f" ({entry.shared} shared)" if entry.shared else "")
            why = entry.reason.replace("_", " ")
            since, deadline = f"{entry.since_s:.1f} s", _deadline(entry.deadline_s)
            style = "red" if entry.reason is HoldReason.STRANDED or is_orphan else None
            table.add_row(entry.owner, why, blocks, since, deadline, entry.peer or "-", known, style=style)
        if report.num_entries > len(report.entries):
            table.caption = f"and {report.num_entries - len(report.entries)} more"
        yield table
        for entry in report.entries:
            if entry.block_ids:
                yield f" {entry.owner}: blocks {', '.join(map(str, entry.block_ids))}"
    if ledger.num_block_ids_left_out:
        one = (
            ""
            if len(ledger.workers) == 1
            else "; `baton doctor --worker NAME --block-ids` has room for more of one worker"
        )
        yield f"{ledger.num_block_ids_left_out} block ids were left out for want of room{one}"
    rest = [request for key, request in requests.items() if key not in seen]
    if rest and diagnosis.is_whole:
        yield "open at the router, and in no worker's ledger"
        table = _table("request", "router", "prefill", "decode", "since", "tokens")
        for request in rest:
            where = request.prefill_worker or "-", request.decode_worker or "-"
            table.add_row(request.owner, request.state, *where, f"{request.since_s:.1f} s", str(request.tokens))
        yield table


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table


def doctor_data(diagnosis: Diagnosis) -> dict[str, Any]:
    """As `baton doctor --json` prints it: the ledger by field name, and what is made of it."""
    ledger = _plain(diagnosis.ledger)
    for worker, data in zip(diagnosis.ledger.workers, ledger["workers"], strict=True):
        entries = worker.report.entries if worker.report is not None else ()
        data["orphans"] = [i for i, entry in enumerate(entries) if _owner(worker, entry) in diagnosis.orphans]
    return {**ledger, "healthy": not diagnosis.problems, "problems": diagnosis.problems, "verdict": diagnosis.verdict}


def _orphans(ledger: ClusterLedger) -> frozenset[Owner]:
    """Entries that the router does not know now. A transfer that ends by its lease is no orphan until then."""
    found: set[Owner] = set()
    for worker in ledger.workers:
        entries = () if worker.report is None else worker.report.entries
        for entry in (entries[index] for index in worker.unknown):
            ends = entry.deadline_s is not None and entry.deadline_s > 0
            if entry.reason is HoldReason.IN_STEP:
                continue  # cancelled: its blocks go when the step ends; a step that does not end is told apart
            if not (ends and entry.reason in (HoldReason.AWAITING_ACK, HoldReason.IN_TRANSPORT)):
                found.add(_owner(worker, entry))
    return frozenset(found)


def _problems(worker: WorkerLedger, orphans: frozenset[Owner]) -> Iterator[str]:
    report, name = worker.report, worker.worker_id
    if report is None:
        if worker.state == "lost":
            ago = f"{worker.seen_s_ago:.0f} s ago"
            yield f"{name} is lost: last heard of {ago}. It is started again by itself; if it stays lost, see its log"
        else:
            yield f"{name} does not answer, although it was heard of {worker.seen_s_ago:.1f} s ago; see its log"
        return
    if report.problem is not None:
        yield f"{name} is not healthy: {report.problem}"
    for finding in report.findings:
        yield f"{name}: {finding}"
    if report.stranded_blocks:
        yield (
            f"{name}: {report.stranded_blocks} of {report.blocks_total} blocks are lost to it until it is started "
            f"anew; `baton drain {name}` takes it out. Please report this with its log"
        )
    for entry in report.entries:
        if _owner(worker, entry) in orphans and entry.reason is not HoldReason.STRANDED:
            yield f"{name}: {entry.owner} ({entry.blocks} blocks, {entry.reason}) is unknown to the router"
        if entry.deadline_s is not None and entry.deadline_s < -OVERDUE_S:
            yield f"{name}: {entry.owner} ({entry.reason}) should have ended {-entry.deadline_s:.0f} s ago"


def _headline(worker: WorkerLedger) -> str:
    head, report = f"{worker.worker_id} ({worker.role}, {worker.state})", worker.report
    if report is None:
        return f"{head}: no answer"
    held = report.blocks_total - report.blocks_free
    return (
        f"{head}: {report.blocks_total} blocks: {report.blocks_free} free ({report.blocks_cached} cached), "
        f"{held} held, {report.stranded_blocks} stranded"
    )


def _deadline(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"in {seconds:.1f} s" if seconds >= 0 else f"over {-seconds:.1f} s"


def _owner(worker: WorkerLedger, entry: LedgerEntry) -> Owner:
    return worker.incarnation, entry.request_id, entry.attempt, entry.sample


def _plain(value: Any) -> Any:
    """Messages by field name; as they travel they are arrays."""
    if isinstance(value, msgspec.Struct):
        return {name: _plain(field) for name, field in msgspec.structs.asdict(value).items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value.value if isinstance(value, Enum) else value

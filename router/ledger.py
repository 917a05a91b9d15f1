"""Clients' questions for the block ledger: asks the workers, waits, sets their answers beside the open requests.

Pure: events and `now` in, actions out. Knows workers' lives and the router's open requests; must not know what holds
blocks, or why: that is `baton.audit`'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from baton.errors import InvalidRequestError, OverloadedError
from baton.ledger import (
    MAX_CLUSTER_BLOCK_IDS,
    MAX_CLUSTER_ENTRIES,
    MAX_ENTRIES,
    AskLedger,
    ClusterLedger,
    LedgerEntry,
    LedgerReport,
    LedgerRequest,
    OpenRequest,
    WorkerLedger,
)
from baton.timeline import Mark
from router.actions import ClientId, LedgerDone, RouterAction, SendWorker
from router.book import RequestBook
from router.request import RoutedRequest
from router.view import ClusterView, WorkerView

MAX_OPEN = 64
"""Questions under way; each is over within `liveness.timeout_s`."""


class _Question:
    """One client's: whom it is about, and who has answered."""

    def __init__(self, client: ClientId, message: LedgerRequest, workers: list[WorkerView], ends_at: float):
        self.client = client
        self.label = message.label
        self.block_ids = message.block_ids
        self.workers = workers
        self.ends_at = ends_at
        self.answers: dict[str, WorkerLedger] = {}
        """By incarnation."""

    @property
    def complete(self) -> bool:
        return all(w.info.incarnation in self.answers or not w.ready for w in self.workers)


class LedgerQuestions:
    """All that are under way. `timeout_s`: how long a worker may take to answer."""

    def __init__(self, name: str, view: ClusterView, book: RequestBook, timeout_s: float):
        self.wake_at = math.inf
        """When `on_deadline` is due."""
        self._name = name
        self._view = view
        self._book = book
        self._timeout_s = timeout_s
        self._open: dict[int, _Question] = {}
        self._count = 0

    def ask(self, client: ClientId, message: LedgerRequest, now: float, out: list[RouterAction]) -> None:
        """Raises InvalidRequestError for an unknown worker, OverloadedError while too many ask."""
        workers = [w for w in self._view.workers.values() if message.worker_id in (None, w.worker_id)]
        if not workers and message.worker_id is not None:
            known = ", ".join(sorted(self._view.workers)) or "none"
            raise InvalidRequestError(f"there is no worker {message.worker_id}; known: {known}", field="worker_id")
        if len(self._open) >= MAX_OPEN:
            raise OverloadedError(f"{MAX_OPEN} questions for the ledger are under way; ask again in a moment")
        self._count += 1
        number = self._count
        self._open[number] = _Question(client, message, workers, now + self._timeout_s)
        self.wake_at = min(self.wake_at, now + self._timeout_s)
        question = AskLedger(number, message.block_ids)
        out += [SendWorker(w.worker_id, w.info.incarnation, question) for w in workers if w.ready]
        self._end_complete(now, out)

    def on_report(self, worker: WorkerView, report: LedgerReport, now: float, out: list[RouterAction]) -> None:
        """A worker's answer; one that comes too late is dropped."""
        question = self._open.get(report.number)
        if question is not None and worker in question.workers:
            question.answers[worker.info.incarnation] = self._answer(worker, report, now)
            self._end_complete(now, out)

    def on_lost(self, now: float, out: list[RouterAction]) -> None:
        """A worker counts as lost: nobody need wait for it."""
        self._end_complete(now, out)

    def on_deadline(self, now: float, out: list[RouterAction]) -> None:
        """Who has not answered by now is silent."""
        for number in [n for n, question in self._open.items() if question.ends_at <= now]:
            self._end(number, now, out)
        self.wake_at = min((question.ends_at for question in self._open.values()), default=math.inf)

    def _end_complete(self, now: float, out: list[RouterAction]) -> None:
        for number in [n for n, question in self._open.items() if question.complete]:
            self._end(number, now, out)

    def _end(self, number: int, now: float, out: list[RouterAction]) -> None:
        question = self._open.pop(number)
        answers = question.answers
        workers = within_limits(
            [answers.get(w.info.incarnation) or self._answer(w, None, now) for w in question.workers]
        )
        requests = sorted(self._book.by_id.values(), key=_since)[:MAX_ENTRIES]
        ledger = ClusterLedger(
            label=question.label,
            name=self._name,
            workers=workers,
            requests=tuple(_open_request(request, now) for request in requests),
            num_requests=len(self._book),
            num_block_ids_left_out=_num_unnamed(workers) if question.block_ids else 0,
        )
        out.append(LedgerDone(question.client, ledger))

    def _answer(self, worker: WorkerView, report: LedgerReport | None, now: float) -> WorkerLedger:
        state = self._view.state_of(worker)
        return WorkerLedger(
            worker_id=worker.worker_id,
            role=worker.info.role,
            incarnation=worker.info.incarnation,
            state="silent" if report is None and state != "lost" else state,
            seen_s_ago=max(0.0, now - worker.seen),
            report=report,
            unknown=() if report is None else self._unknown(worker, report),
        )

    def _unknown(self, worker: WorkerView, report: LedgerReport) -> tuple[int, ...]:
        found: list[int] = []
        for index, entry in enumerate(report.entries):
            request = self._book.by_id.get((entry.request_id, entry.sample))
            open_here = request is not None and (request.prefill is worker or request.decode is worker)
            if not open_here or request is None or request.attempt != entry.attempt:
                found.append(index)
        return tuple(found)


def within_limits(workers: Iterable[WorkerLedger]) -> tuple[WorkerLedger, ...]:
    """The same, with no more entries and block ids than one message may have: each report keeps its first ones."""
    workers = tuple(workers)
    entries = [entry for worker in workers for entry in _entries(worker)]
    if len(entries) > MAX_CLUSTER_ENTRIES:
        workers = tuple(_with_entries(worker, MAX_CLUSTER_ENTRIES // len(workers)) for worker in workers)
    if sum(len(entry.block_ids) for worker in workers for entry in _entries(worker)) > MAX_CLUSTER_BLOCK_IDS:
        workers = tuple(_with_block_ids(worker, MAX_CLUSTER_BLOCK_IDS // len(workers)) for worker in workers)
    return workers


def _entries(worker: WorkerLedger) -> tuple[LedgerEntry, ...]:
    return () if worker.report is None else worker.report.entries


def _with_entries(worker: WorkerLedger, room: int) -> WorkerLedger:
    if worker.report is None:
        return worker
    report = msgspec.structs.replace(worker.report, entries=worker.report.entries[:room])
    return msgspec.structs.replace(worker, report=report, unknown=tuple(i for i in worker.unknown if i < room))


def _with_block_ids(worker: WorkerLedger, room: int) -> WorkerLedger:
    if worker.report is None:
        return worker
    entries: list[LedgerEntry] = []
    for entry in worker.report.entries:
        entries.append(msgspec.structs.replace(entry, block_ids=entry.block_ids[:room]))
        room -= len(entries[-1].block_ids)
    return msgspec.structs.replace(worker, report=msgspec.structs.replace(worker.report, entries=tuple(entries)))


def _num_unnamed(workers: Iterable[WorkerLedger]) -> int:
    """Blocks of entries whose ids are not there."""
    return sum(max(0, entry.blocks - len(entry.block_ids)) for worker in workers for entry in _entries(worker))


def _since(request: RoutedRequest) -> float:
    return request.timeline.marks.get(Mark.RECEIVED, 0.0)


def _open_request(request: RoutedRequest, now: float) -> OpenRequest:
    return OpenRequest(
        request_id=request.id[0],
        attempt=request.attempt,
        sample=request.sample,
        state=request.state.value,
        prefill_worker="" if request.prefill is None else request.prefill.worker_id,
        decode_worker="" if request.decode is None else request.decode.worker_id,
        since_s=max(0.0, now - _since(request)),
        tokens=len(request.tokens),
    )

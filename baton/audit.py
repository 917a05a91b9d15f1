"""The audit: do the pool's references equal what the engine and both ports account for?

A request's blocks are accounted for by whoever is going to give them back: the engine while it is queued, runs or is
in a step, a port while a transfer reads or writes them. A block that is held and accounted for by nobody is *stranded*;
one that somebody relies on and the pool does not hold for it is a *phantom*. Either is a bug.

Stranded blocks are reported and stay held. They could be reused only if nothing can read or write them any more, and
whoever could have told has forgotten them: a transport may still be reading a zero-copy frame, a peer may still be
pulling. A pool that shrinks and says so is better than a KV cache that is silently wrong. Whoever wants them back
drains the worker and starts it anew.

Pure. Knows the engine's requests and what ports say (`Holding`); must not know sessions, messages' ways or clocks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from msgspec.structs import replace

from baton.engine.core import EngineCore
from baton.engine.request import EngineRequest, RequestState
from baton.ledger import Finding, HoldReason, LedgerEntry
from baton.protocol import RequestKey
from baton.timeline import Mark

SHOWN_BLOCK_IDS = 64
"""Block ids that a finding names."""


class Holding(NamedTuple):
    """One transfer, as a port sees it."""

    key: RequestKey
    reason: HoldReason
    since: float
    """Seconds, like `now`: when it came to that."""
    deadline: float | None
    """When its lease runs out; None: nobody waits for anything."""
    num_blocks: int
    """It relies on the request's first so many blocks."""
    peer: str
    peer_incarnation: str
    block_ids: tuple[int, ...] = ()
    """These blocks, where the port knows them by id."""


class Audit(NamedTuple):
    """All that holds blocks of one worker at one moment."""

    entries: list[LedgerEntry]
    findings: list[Finding]
    stranded: frozenset[int]
    """Block ids."""
    num_phantom: int


def take_stock(engine: EngineCore, holdings: Iterable[Holding], now: float, *, block_ids: bool = False) -> Audit:
    """Account for every block; `block_ids`: name them in the entries."""
    pool, scheduled = engine.pool, engine.scheduled()
    by_key = {holding.key: holding for holding in holdings}
    explained = [0] * pool.num_blocks
    stranded_of: dict[int, EngineRequest] = {}
    """Block id -> a request that holds it and that nobody is going to end."""
    entries: list[LedgerEntry] = []
    findings: list[Finding] = []
    for request in engine.requests():
        holding = by_key.pop(request.key, None)
        reason, since, deadline = _account(request, holding, request.key in scheduled)
        blocks = request.blocks if request.copy_source is None else [*request.blocks, request.copy_source]
        if reason is HoldReason.STRANDED:
            stranded_of.update(dict.fromkeys(blocks, request))
        else:
            for block in blocks:
                explained[block] += 1
        if holding is not None and (phantom := _phantom(request, holding)) is not None:
            findings.append(phantom)
        entry = _entry(request.key, reason, since, deadline, holding, now)
        shared = sum(pool.refs[block] > 1 for block in blocks)
        entries.append(replace(entry, blocks=len(blocks), shared=shared, block_ids=tuple(blocks) if block_ids else ()))
    for holding in by_key.values():
        if holding.num_blocks:
            problem = f"its transfer is {holding.reason}, and the engine does not know the request"
            findings.append(Finding("phantom", holding.num_blocks, str(holding.key), problem))
        else:
            entries.append(_entry(holding.key, holding.reason, holding.since, holding.deadline, holding, now))
    stranded: list[int] = []
    if explained != pool.refs:
        stranded = [b for b, refs in enumerate(pool.refs) if refs > explained[b]]
        findings += _stranded(engine, stranded, stranded_of)
        findings += _unheld([b for b, refs in enumerate(pool.refs) if refs < explained[b]])
    entries.sort(key=lambda e: (e.reason is not HoldReason.STRANDED, -e.blocks, -e.since_s))
    num_phantom = sum(finding.blocks for finding in findings if finding.kind == "phantom")
    return Audit(entries, findings, frozenset(stranded), num_phantom)


def _account(
    request: EngineRequest, holding: Holding | None, scheduled: bool
) -> tuple[HoldReason, float | None, float | None]:
    """Why it holds its blocks, since when (None: not known), and when that ends at the latest."""
    marks, state = request.marks, request.state
    if request.ended:
        if request.in_step:
            return HoldReason.IN_STEP, marks.get(Mark.FINISHED), None
        if holding is None or not request.transfer_holds:
            return HoldReason.STRANDED, marks.get(Mark.FINISHED), None
    elif state in (RequestState.WAITING, RequestState.RUNNING):
        if not scheduled:
            return HoldReason.STRANDED, None, None
        reason, mark = _progress(request)
        return reason, marks.get(mark, marks.get(Mark.SUBMITTED)), request.deadline
    if holding is None:
        return HoldReason.STRANDED, marks.get(Mark.FIRST_TOKEN), None
    return holding.reason, holding.since, holding.deadline


def _progress(request: EngineRequest) -> tuple[HoldReason, Mark]:
    """Of a request that the engine runs: what it does, and the mark that it passed last before."""
    if request.state is RequestState.RUNNING:
        if len(request.tokens) - request.num_computed == 1 and len(request.tokens) > request.num_context:
            return HoldReason.DECODE, Mark.DECODE_START
        return HoldReason.PREFILL, Mark.ADOPTED if Mark.ADOPTED in request.marks else Mark.PREFILL_START
    if not request.has_credit:
        return HoldReason.AWAITING_CREDIT, Mark.SUBMITTED
    return (HoldReason.ADOPTED if request.blocks else HoldReason.QUEUED), Mark.ADOPTED


def _phantom(request: EngineRequest, holding: Holding) -> Finding | None:
    """The port relies on blocks that are not the request's."""
    held = tuple(request.blocks[: holding.num_blocks])
    missing = holding.num_blocks - len(held)
    if holding.block_ids and missing == 0:
        missing = sum(ours != theirs for ours, theirs in zip(held, holding.block_ids, strict=True))
    if missing == 0:
        return None
    problem = f"its transfer is {holding.reason} with {holding.num_blocks} blocks, which the request does not hold all"
    return Finding("phantom", missing, str(request.key), problem)


def _stranded(engine: EngineCore, blocks: list[int], stranded_of: dict[int, EngineRequest]) -> list[Finding]:
    """By owner: the request that still has them, or else whoever got them last."""
    of: dict[tuple[str, str], list[int]] = defaultdict(list)
    for block in blocks:
        request = stranded_of.get(block)
        if request is not None:
            end = "has ended" if request.ended else f"is {request.state.value}"
            transfer = "no port has its transfer" if request.transfer_holds else "nothing is going to run or end it"
            of[str(request.key), f"the request {end}, and {transfer}"].append(block)
        else:
            last = engine.tables.last_owner[block]
            of["" if last is None else str(last), "no request has them; this one got them last"].append(block)
    return [
        Finding("stranded", len(ids), owner, problem, tuple(ids[:SHOWN_BLOCK_IDS]))
        for (owner, problem), ids in of.items()
    ]


def _unheld(blocks: list[int]) -> list[Finding]:
    if not blocks:
        return []
    problem = "requests have them, and the pool holds them for fewer than these"
    return [Finding("phantom", len(blocks), "", problem, tuple(blocks[:SHOWN_BLOCK_IDS]))]


def _entry(
    key: RequestKey,
    reason: HoldReason,
    since: float | None,
    deadline: float | None,
    holding: Holding | None,
    now: float,
) -> LedgerEntry:
    return LedgerEntry(
        request_id=key.request_id,
        attempt=key.attempt,
        sample=key.sample,
        reason=reason,
        blocks=0,
        since_s=0.0 if since is None else max(0.0, now - since),
        deadline_s=None if deadline is None else deadline - now,
        peer="" if holding is None else holding.peer,
        peer_incarnation="" if holding is None else holding.peer_incarnation,
    )


class StrandedBlocks:
    """What audits found so far: how many blocks are stranded, and for how long in sum."""

    def __init__(self) -> None:
        self.num_blocks = 0
        self.block_seconds = 0.0
        self._at = 0.0
        self._told: set[tuple[str, str, str]] = set()
        """Findings of the last audit: `observe` returned them then, or before."""

    def observe(self, audit: Audit | None, now: float) -> list[Finding]:
        """The findings that are new. `audit` None: no block is held."""
        self.advance(now)
        self.num_blocks = 0 if audit is None else len(audit.stranded)
        found = {(f.kind, f.owner, f.problem): f for f in (() if audit is None else audit.findings)}
        new = [finding for identity, finding in found.items() if identity not in self._told]
        self._told = set(found)
        return new

    def advance(self, now: float) -> None:
        """Time has passed, and nobody looked."""
        self.block_seconds += self.num_blocks * max(0.0, now - self._at)
        self._at = now

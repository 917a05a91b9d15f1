"""The block ledger as people and programs read it: who holds which KV blocks, why, since when and until when.

Plain data and the messages that carry it. `baton.audit` makes a worker's part, `router.ledger` puts the parts together.
Durations are seconds before or after the moment at which the report was written.

    client ──LedgerRequest──► router ──AskLedger──► each worker
           ◄─ClusterLedger───        ◄─LedgerReport─
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

import msgspec

from baton.wire import BlockSeconds, Count, Message, Name, Reason, RequestId, Seconds, Words

MAX_ENTRIES = 1000
"""Entries of one worker's report, and open requests of the router's: what a person can read is less."""
MAX_BLOCK_IDS = 20_000
"""Block ids of one report, over all of its entries."""
MAX_CLUSTER_ENTRIES, MAX_CLUSTER_BLOCK_IDS = 50_000, 1_000_000
"""Of all reports together: what is shared out evenly if there are more, so that a ClusterLedger fits a message."""
MAX_FINDINGS = 100

BlockIds = Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_BLOCK_IDS)]


class HoldReason(StrEnum):
    """Why a request is in the ledger: what its blocks wait for."""

    QUEUED = "queued"
    """It waits in the engine's queue, and holds nothing."""
    AWAITING_CREDIT = "awaiting_credit"
    """Prefill side: decode has not accepted the offer. Holds nothing."""
    AWAITING_BLOCKS = "awaiting_blocks"
    """Decode side: an offer that waits for blocks. Holds nothing."""
    PREFILL = "prefill"
    """Its context is being computed."""
    DECODE = "decode"
    """It computes a token a step."""
    ADOPTED = "adopted"
    """Decode side: the KV is verified, or to be computed here; it waits for its first step."""
    SHIPPING = "shipping"
    """Prefill side: the prompt is computed; blocks are to be sent, or the transport reads them."""
    AWAITING_ACK = "awaiting_ack"
    """Prefill side: all blocks have left; decode is to say that it needs them no more."""
    IN_TRANSPORT = "in_transport"
    """Prefill side: the transfer has ended, and the transport may still read blocks."""
    RESERVED = "reserved"
    """Decode side: blocks for an accepted offer, of which nothing has come."""
    RECEIVING = "receiving"
    """Decode side: some blocks have come."""
    COMMITTED = "committed"
    """Decode side: prefill has named all blocks; some have not come."""
    IN_STEP = "in_step"
    """The request has ended, and the step under way may still write its blocks."""
    STRANDED = "stranded"
    """Nobody is going to give them back: a bug."""


class LedgerEntry(Message, frozen=True):
    """One attempt at one sample of a request, as one worker sees it."""

    request_id: RequestId
    attempt: Count
    sample: Count
    reason: HoldReason
    blocks: Count
    """Blocks that it holds, shared ones included."""
    since_s: Seconds
    """Seconds for which the reason has been this one."""
    deadline_s: Seconds | None = None
    """Seconds until its worker ends it: the transfer by its lease, else the request by its timeout. None: neither."""
    shared: Count = 0
    """Of the blocks, those that others hold too: a common prefix."""
    peer: Words = ""
    """The worker at the other end of its transfer; empty: it has none."""
    peer_incarnation: Words = ""
    block_ids: BlockIds = ()
    """If they were asked for, and as far as the report has room."""

    @property
    def owner(self) -> str:
        return owner_name(self.request_id, self.attempt, self.sample)


def owner_name(request_id: str, attempt: int, sample: int) -> str:
    """As in logs: `0730374a/1`, with `.2` for another sample than 0."""
    return f"{request_id[:8]}/{attempt}" + (f".{sample}" if sample else "")


class Finding(Message, frozen=True):
    """What an audit found to be wrong."""

    kind: Literal["stranded", "phantom"]
    """`stranded`: held, and accounted for by nobody. `phantom`: somebody relies on it, and it is not held."""
    blocks: Count
    owner: Words
    """Who is concerned; of a block that nobody names, who got it last. Empty: not known."""
    problem: Reason
    block_ids: BlockIds = ()
    """The first of them."""

    def __str__(self) -> str:
        ids = ", ".join(map(str, self.block_ids[:8])) + ("..." if self.blocks > 8 else "")
        owner = self.owner or "of nobody known"
        blocks = "1 KV block" if self.blocks == 1 else f"{self.blocks} KV blocks"
        return f"{blocks} {self.kind}{f' ({ids})' if ids else ''}, {owner}: {self.problem}"


class AskLedger(Message, frozen=True, tag=28):
    """Router to worker; answered by a LedgerReport with the same number."""

    number: Count
    block_ids: bool = False


class LedgerReport(Message, frozen=True, tag=29):
    """Worker to router: all that holds its blocks, audited at the same moment."""

    worker_id: Name
    number: Count
    blocks_total: Count
    blocks_free: Count
    """Cached ones included."""
    blocks_cached: Count
    entries: Annotated[tuple[LedgerEntry, ...], msgspec.Meta(max_length=MAX_ENTRIES)] = ()
    """Stranded ones first, then by blocks, most first."""
    num_entries: Count = 0
    """How many there are, those left out included."""
    findings: Annotated[tuple[Finding, ...], msgspec.Meta(max_length=MAX_FINDINGS)] = ()
    stranded_blocks: Count = 0
    phantom_blocks: Count = 0
    stranded_block_seconds: BlockSeconds = 0.0
    problem: Reason | None = None
    """Why the worker is not healthy."""


# --- client and router ---------------------------------------------------------------------------


class LedgerRequest(Message, frozen=True, tag=44):
    """Client to router. Answered by ClusterLedger, once all workers have answered or are given up, or by Failed."""

    label: Name
    worker_id: Name | None = None
    """Only this worker's."""
    block_ids: bool = False


class WorkerLedger(Message, frozen=True, tag=45):
    worker_id: Name
    role: str
    incarnation: Name
    state: Literal["ready", "draining", "lost", "silent"]
    """`silent`: it did not answer within `liveness.timeout_s`."""
    seen_s_ago: float
    report: LedgerReport | None = None
    """None: it is lost or silent."""
    unknown: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_ENTRIES)] = ()
    """Indices of the report's entries whose attempt the router does not have open on this worker. For the time of a
    message's trip that is as it should be."""


class OpenRequest(Message, frozen=True, tag=46):
    """One sample of a request that the router has open."""

    request_id: RequestId
    attempt: Count
    sample: Count
    state: str
    """`running`, `parked` (no worker to run on) or `settling` (all tokens are delivered)."""
    prefill_worker: str
    """Empty: it is on no worker."""
    decode_worker: str
    since_s: float
    """Seconds since it came."""
    tokens: Count
    """Output tokens delivered so far."""

    @property
    def owner(self) -> str:
        return owner_name(self.request_id, self.attempt, self.sample)


class ClusterLedger(Message, frozen=True, tag=47):
    label: Name
    name: str
    workers: tuple[WorkerLedger, ...]
    requests: Annotated[tuple[OpenRequest, ...], msgspec.Meta(max_length=MAX_ENTRIES)]
    """Oldest first."""
    num_requests: Count
    """How many there are, those left out included."""
    num_block_ids_left_out: Count = 0
    """Of the entries shown: ids that were asked for, and for which neither a report nor this message had room."""

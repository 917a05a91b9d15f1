"""Messages between client, router and workers, and the identities they carry.

What may be asked of sampling is in `baton.sampling_params`, the block ledger in `baton.ledger`; worker to worker
messages are in `kv_transfer.messages`; bytes are `baton.codec`'s business.
Everything here is immutable plain data. Times are seconds on the router's monotonic clock.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from baton.layout import KVLayout
from baton.ledger import AskLedger, ClusterLedger, LedgerReport, LedgerRequest
from baton.sampling_params import PromptLogprobs, SamplingParams, TokenId, TokenIds, TokenLogprobs
from baton.wire import (
    BlockSeconds,
    Count,
    Duration,
    Marks,
    Message,
    Name,
    PrefixHashes,
    Reason,
    RequestId,
    Seconds,
    Timeout,
    Words,
)

PROTOCOL_VERSION = 4

MAX_TEXT = 4 << 20
"""Characters of a prompt, whatever its parts."""

Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]

StopString = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Priority = Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]
"""Lower is served earlier; 0 is usual."""
NumSamples = Annotated[int, msgspec.Meta(ge=1, le=64)]

FinishReason = Literal["stop", "length", "abort", "error"]
BreakerState = Literal["closed", "open", "half_open"]


Incarnation = Annotated[str, msgspec.Meta(max_length=200)]
MAX_WORKERS = 1024
"""Of one cluster. More names than these are refused, so that peers cannot make the router remember any number."""
MAX_STEP_TOKENS = 1 << 16
"""Tokens of one step, and so entries of one `Tokens` message."""


class RequestKey(NamedTuple):
    """One attempt at one sample of a request. `request_id`: 128 bits in hex, minted by the router."""

    request_id: RequestId
    attempt: Count
    sample: Count = 0
    """Which of the request's answers, from 0; each is a request of its own to the workers."""

    def __str__(self) -> str:
        return f"{self.request_id[:8]}/{self.attempt}" + (f".{self.sample}" if self.sample else "")


class TransferId(NamedTuple):
    """One hand-over: the attempt, the sample, and the lives of the two workers it joins.

    A message that names another incarnation than the receiver's current one, or than the peer's
    current one, is of a former life and is refused.
    """

    request_id: RequestId
    attempt: Count
    sample: Count
    source: Incarnation
    """Incarnation of the prefill worker."""
    target: Incarnation
    """Incarnation of the decode worker."""

    @property
    def key(self) -> RequestKey:
        return RequestKey(self.request_id, self.attempt, self.sample)

    def __str__(self) -> str:
        return f"{self.request_id[:8]}/{self.attempt}.{self.sample}"


# --- worker and router ---------------------------------------------------------------------------


class WorkerInfo(Message, frozen=True, tag=10):
    """What a worker is and where it listens; sent when it joins and handed on to its peers."""

    worker_id: Name
    """Stable name (`prefill-0`); the incarnation is new at each start."""
    incarnation: Name
    pool: Name
    role: Literal["prefill", "decode", "both"]
    fingerprint: Name
    """Identifies model, weights and dtype: equal fingerprints compute the same logits."""
    layout: KVLayout
    num_blocks: Count
    max_model_len: Count
    max_batch_requests: Count
    control_address: Name
    """ZeroMQ endpoint for session messages."""
    data_address: Name
    """Transport URL for KV blocks (`zmq+tcp://10.0.0.2:40123`)."""
    node: Words = ""
    device: Words = "cpu"
    cores: Annotated[tuple[Count, ...], msgspec.Meta(max_length=4096)] = ()
    """CPU cores that the worker is pinned to; empty: not pinned."""
    gpu_ids: Annotated[tuple[Count, ...], msgspec.Meta(max_length=256)] = ()
    """GPUs that Ray reserved for it on its node."""
    pid: Count = 0
    engine: Words = ""
    """What computes, and in which dtype, in words."""


class Join(Message, frozen=True, tag=11):
    """Worker to router, first message."""

    version: int
    worker: WorkerInfo
    sent_at: Seconds
    """Worker's own monotonic clock; echoed, for the clock offset."""
    clock: Words = ""
    """`baton.clock.clock_id()` of the worker."""


class Joined(Message, frozen=True, tag=12):
    """Router to worker. With another `clock`: `offset = ((received_at - echo) + (sent_at - now)) / 2` (NTP's)."""

    router_incarnation: Name
    echo: Seconds
    received_at: Seconds
    sent_at: Seconds
    clock: Words = ""


class JoinRefused(Message, frozen=True, tag=13):
    """Router to worker: it cannot work with this cluster; `reason` names both values."""

    reason: Reason


class Peers(Message, frozen=True, tag=14):
    """Router to worker: all decode-capable workers as of now. Who is missing is lost."""

    workers: Annotated[tuple[WorkerInfo, ...], msgspec.Meta(max_length=MAX_WORKERS)]


class LoadReport(Message, frozen=True, tag=15, gc=False):
    """How full a worker is. Rides on `Tokens` and `Heartbeat`."""

    num_waiting: Count = 0
    num_running: Count = 0
    num_pending_tokens: Count = 0
    """Prompt tokens accepted and not yet computed."""
    blocks_free: Count = 0
    """Blocks that no request holds, cached ones included."""
    blocks_total: Count = 0
    num_steps: Count = 0
    """Engine steps completed; with work waiting it must grow, or the worker is not healthy."""
    bytes_sent: Count = 0
    bytes_received: Count = 0
    blocks_cached: Count = 0
    """Of the free blocks, those that still hold KV which a request with the same beginning would find."""
    cache_queried_tokens: Count = 0
    """Context tokens of all requests so far that looked for their KV here."""
    cache_hit_tokens: Count = 0
    """Of those, the tokens whose KV was here: neither computed nor received."""
    stranded_blocks: Count = 0
    """Blocks that are held and that nobody accounts for, as the last audit found (`baton.audit`)."""
    stranded_block_seconds: BlockSeconds = 0.0
    """Their number, summed over the time since they were found."""
    decode_step_s: Duration = 0.0
    """What a decode step takes lately with as many requests as decode now, at least one; 0: none was measured yet."""
    decode_slope_s: Duration = 0.0
    """What each further request adds to that, at most its share of it."""
    prefill_token_s: Duration = 0.0
    """What a prompt token takes lately, beside the decodes of its step; 0: none was measured yet."""
    num_preemptions: Count = 0
    """Times a request gave its blocks up for another, to compute them again later."""
    num_uncredited: Count = 0
    """Of the waiting requests, those that wait for a decode worker to have blocks for them."""
    num_uncredited_tokens: Count = 0
    """Of the pending tokens, theirs."""


class PrefixNews(Message, frozen=True, tag=28):
    """Which KV blocks a worker has got, or has no more, that a request with the same beginning would find.

    Only full blocks count. Told once the router has asked for it (`AskPrefixes`); rides on `Tokens` and `Heartbeat`.
    """

    number: Count
    """Counts up by one. After a gap all that was told is worth nothing."""
    added: PrefixHashes = b""
    removed: PrefixHashes = b""
    reset: bool = False
    """What was told before is void: all blocks follow, from this message on."""


class Heartbeat(Message, frozen=True, tag=16):
    """Both ways, every `liveness.heartbeat_s`."""

    incarnation: Name
    load: LoadReport | None = None
    prefixes: PrefixNews | None = None
    """Of a worker's heartbeat."""


class Submit(Message, frozen=True, tag=20):
    """Router to the prefill worker: run this, and hand it to `decode` (None: keep it)."""

    key: RequestKey
    prompt: TokenIds
    sampling: SamplingParams
    prior: TokenIds = ()
    """Tokens earlier attempts already delivered: context, but not part of the prompt."""
    decode: Name | None = None
    """worker_id of the decode worker; None or the receiver itself: colocated."""
    timeout_s: Timeout | None = None
    """Seconds from now after which the worker ends the attempt by itself (code `timeout`)."""
    priority: Priority = 0


class Replace(Message, frozen=True, tag=21):
    """Router to the prefill worker: its hand-over was refused, offer it to this worker instead."""

    key: RequestKey
    decode: Name | None


class Abort(Message, frozen=True, tag=22):
    """Router to worker: end this attempt and free all that it holds. Unknown keys are a no-op."""

    key: RequestKey


class TokenOut(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One sampled token. `index` counts output tokens from 0 over all attempts."""

    request_id: RequestId
    attempt: Count
    sample: Count
    index: Count
    token: TokenId
    finish: FinishReason | None


class MarksOut(NamedTuple):
    """Timeline marks of one attempt (`baton.timeline.Mark` -> seconds)."""

    request_id: RequestId
    attempt: Count
    sample: Count
    marks: Marks
    cached_tokens: Count = 0
    """Tokens of the prompt whose KV the worker had cached when the attempt began, so that it did not compute them."""


class LogprobsOut(NamedTuple):
    """What was asked to be known about the token of the same key and index, and with the first one about the prompt."""

    request_id: RequestId
    attempt: Count
    sample: Count
    index: Count  # type: ignore[assignment]  # shadows tuple.index, which nobody calls here
    token: TokenLogprobs | None
    prompt: PromptLogprobs | None = None


class Tokens(Message, frozen=True, tag=23):
    """Worker to router, one a step: all tokens of the step, marks of requests that passed one, the load."""

    worker_id: Name
    incarnation: Name
    tokens: Annotated[tuple[TokenOut, ...], msgspec.Meta(max_length=MAX_STEP_TOKENS)]
    marks: Annotated[tuple[MarksOut, ...], msgspec.Meta(max_length=MAX_STEP_TOKENS)] = ()
    load: LoadReport | None = None
    logprobs: Annotated[tuple[LogprobsOut, ...], msgspec.Meta(max_length=MAX_STEP_TOKENS)] = ()
    """Of those tokens of the step whose requests want them."""
    prefixes: PrefixNews | None = None
    """To be read first: what a prompt of this step left behind is known when its first token comes."""


class AttemptFailed(Message, frozen=True, tag=24):
    """Worker to router: this attempt ended without a finish. The router may place it again."""

    worker_id: Name
    key: RequestKey
    code: Name
    """`refused`: the request can never run here; `transfer`, `peer_lost`, ...: may work elsewhere."""
    message: Reason


class HandoffRefused(Message, frozen=True, tag=25):
    """Prefill worker to router: `decode` will not take it; answer with Replace or Abort."""

    worker_id: Name
    key: RequestKey
    decode: Name
    reason: Reason


class HandoffDone(Message, frozen=True, tag=26):
    """Prefill worker to router: acknowledged by decode; what was sent."""

    worker_id: Name
    key: RequestKey
    blocks: Count
    bytes: Count
    marks: Marks = {}
    """Timeline marks that only the send port sees (COMMITTED)."""


class Leaving(Message, frozen=True, tag=27):
    """Worker to router: place nothing more here, I finish what I have and go. The router echoes it.

    No Submit follows the echo, so from then on a worker that has nothing left has nothing to come.
    """

    incarnation: Name


class AskPrefixes(Message, frozen=True, tag=29):
    """Router to worker: tell which prefixes you hold, all of them now, changes from then on (`PrefixNews`)."""


# --- client and router ---------------------------------------------------------------------------


class ToolCall(Message, frozen=True, tag=44):
    """What an assistant asked to be called, in an earlier turn of a conversation."""

    id: Name
    name: Name
    arguments: Text
    """JSON, as the model wrote it."""


class ChatMessage(Message, frozen=True, tag=30):
    """One turn of a conversation, for the model's chat template."""

    role: Name
    content: Text
    tool_calls: Annotated[tuple[ToolCall, ...], msgspec.Meta(max_length=128)] = ()
    """Of an assistant's turn."""
    tool_call_id: Name | None = None
    """Of a turn that answers a call."""
    name: Name | None = None


class Generate(Message, frozen=True, tag=31):
    """Client to router. Exactly one of `text`, `messages`, `token_ids` is set."""

    label: Name
    """The client's own id, unique among its open requests; never used as an identity."""
    sampling: SamplingParams
    text: Text | None = None
    messages: Annotated[tuple[ChatMessage, ...], msgspec.Meta(max_length=10_000)] | None = None
    token_ids: TokenIds | None = None
    stop: Annotated[tuple[StopString, ...], msgspec.Meta(max_length=64)] = ()
    """The text ends before the first of these; the router looks for them, workers see ids only."""
    include_stop_str_in_output: bool = False
    """The text ends after the stop string instead."""
    n: NumSamples = 1
    """Independent answers to the same prompt, numbered from 0."""
    priority: Priority = 0
    """Lower ones go first where requests wait, on every worker, and keep their KV blocks where one must give its up."""
    tools: Text = ""
    """JSON: the list of tools that the chat template shows to the model; empty: none. With `messages` only."""
    template_options: Text = ""
    """JSON: an object of further variables for the chat template; empty: none. With `messages` only."""
    continue_final: bool = False
    """The answer goes on where the last message ends, instead of being a turn of its own. With `messages` only."""
    skip_special_tokens: bool = True
    """Leave tokens that are no text, such as the end of a turn, out of the text."""
    session: Words = ""
    """Requests of one session go to the same workers, where a policy heeds it."""
    timeout_s: Timeout | None = None
    """Fail the request after so long, wherever it is by then; the router's own limit holds too."""


class Cancel(Message, frozen=True, tag=32):
    """Client to router. The request, or only this sample of it, then ends with finish reason `abort`."""

    label: Name
    sample: Count | None = None


class Delta(Message, frozen=True, tag=33):
    """Router to client: new tokens, in order. `text` may be empty while a character is incomplete."""

    label: Name
    token_ids: tuple[TokenId, ...]
    text: str
    sample: Count = 0
    finish_reason: FinishReason | None = None
    """Of a request with several samples: this one has ended. (With one sample Done says it.)"""
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    """One per token of `token_ids` if the request wants them, else empty."""
    prompt_logprobs: PromptLogprobs | None = None
    """With the first token of sample 0, if the request wants them."""


class Deltas(Message, frozen=True, tag=45):
    """Router to client: what several of its requests got at once."""

    deltas: tuple[Delta, ...]


class Usage(Message, frozen=True, tag=34):
    prompt_tokens: Count
    completion_tokens: Count
    """Of all samples."""
    cached_tokens: Count = 0
    """Tokens of the prompt that prefill found in its cache instead of computing them; the sum over all samples."""


class Done(Message, frozen=True, tag=35):
    """Router to client, last message of a request that was accepted and did not fail.

    Of several samples: `finish_reason`, `marks` and the workers are those of sample 0, `attempts` the
    largest, `kv_bytes` the sum.
    """

    label: Name
    request_id: Name
    finish_reason: FinishReason
    usage: Usage
    marks: dict[int, float]
    prefill_worker: str
    decode_worker: str
    attempts: int
    kv_bytes: Count = 0
    """Bytes handed over."""
    text: str = ""
    """Text held back until now (an incomplete character)."""


class Failed(Message, frozen=True, tag=36):
    """Router to client, last message of a request that was refused or lost. `code`: see `baton.errors`."""

    label: str
    code: Name
    message: str
    field: str | None = None
    request_id: str = ""
    retry_after_s: float | None = None
    """Of code `overloaded`: when the router expects to have room; None: it cannot tell."""


class StatusRequest(Message, frozen=True, tag=37):
    label: Name


class Drain(Message, frozen=True, tag=41):
    """Client to router: place nothing more on this worker (or again, with `undo`). Answered by Status or Failed."""

    label: Name
    worker_id: Name
    undo: bool = False


class Explain(Message, frozen=True, tag=42):
    """Client to router: what became of this request (its id, or the start of it)? Answered by Explained or Failed."""

    label: Name
    request_id: Name


class Explained(Message, frozen=True, tag=43):
    label: Name
    record: dict[str, Any]
    """`router.records.RequestRecord`, by field name."""


class OverviewRequest(Message, frozen=True, tag=50):
    """Client to router: the state of everything in short. Answered by Overview."""

    label: Name


class Overview(Message, frozen=True, tag=51):
    label: Name
    data: dict[str, Any]
    """See `router.overview.make_overview`."""


class RecordsRequest(Message, frozen=True, tag=52):
    """Client to router: what became of the last requests that ended? Answered by Records."""

    label: Name
    limit: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 50


class Records(Message, frozen=True, tag=53):
    label: Name
    records: tuple[dict[str, Any], ...]
    """`router.records.RequestRecord`, by field name, the latest first, without the rankings of their placements."""


class WorkerStatus(Message, frozen=True, tag=38):
    info: WorkerInfo
    load: LoadReport
    state: Literal["ready", "draining", "lost"]
    seen_s_ago: float
    num_outstanding: Count = 0
    """Parts of requests (prefills and decodes) placed there that have not ended."""
    breaker: BreakerState = "closed"
    """`open`: it failed too often and gets nothing for a while; `half_open`: it is tried again (`router.breaker`)."""


class Status(Message, frozen=True, tag=39):
    label: Name
    name: str
    router_incarnation: Name
    num_requests: Count
    workers: tuple[WorkerStatus, ...]
    model: str = ""
    max_model_len: Count = 0
    url: str = ""
    """Where the router serves HTTP; empty: nowhere."""
    num_queued: Count = 0
    """Of the open requests, those that wait in the router's queue."""
    planner: str = ""
    """What the role planner sees or does, in words; empty: there is none."""


class Alive(Message, frozen=True, tag=40):
    """Router to client, every `liveness.heartbeat_s` while the client has open requests.

    Tells a client that waits from a router that is gone, and the router that a client is gone.
    """


ToRouterFromWorker = Join | Heartbeat | Tokens | AttemptFailed | HandoffRefused | HandoffDone | Leaving | LedgerReport
ToWorker = Joined | JoinRefused | Peers | Heartbeat | Submit | Replace | Abort | Leaving | AskLedger | AskPrefixes
ToRouterFromClient = (
    Generate | Cancel | StatusRequest | Drain | Explain | LedgerRequest | OverviewRequest | RecordsRequest
)
ToClient = Delta | Deltas | Done | Failed | Status | Alive | Explained | ClusterLedger | Overview | Records

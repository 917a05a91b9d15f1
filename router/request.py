"""A client's request and its samples as the router sees them: tokens in order, the current attempt, where that runs.

Pure data. Must not know the view, policies, or who is told what. Each sample is a request of its own to the
workers and goes through these states by itself:

    on_generate ──► RUNNING ──last token in order──► (ended)
        │            │  ▲ │                             ▲
        │    attempt │  │ └─last token came from decode,│
        │     failed │  │ placed   hand-over not booked │
        │            ▼  │                 └──► SETTLING ┘ HandoffDone, prefill lost, SETTLE_S
        │         (nobody has room?  nobody is there, or it failed a moment ago?)
        │            │ ▲     ▲ │          │ ▲
        │            ▼ │     │ ▼          ▼ │
        └────────► QUEUED ◄──┴───────── PARKED ──nobody joined in time──► (ended: error)

QUEUED: workers could take it, and all have their limit of hand-overs under way; whoever is first by (priority, arrival)
goes as soon as one has room. PARKED: no worker can take it, or it failed more than once and waits a little.
Cancel, a client that is gone, its own time and too many attempts end it from every state. Tokens index from 0 over
all attempts; an attempt's first one (`first`) comes from prefill, the others from decode, over
different sockets: what comes early is held until the gap closes. An attempt that is over is told by
its number, so whatever arrives for it later is stale.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

import msgspec

from baton.protocol import FinishReason, LogprobsOut, RequestKey, Submit
from baton.sampling_params import SamplingParams, TokenLogprobs
from baton.timeline import RequestTimeline
from router.actions import ClientId
from router.policy import Demand, Placement
from router.prefix_index import PromptHashes
from router.view import WorkerView

WORKER_MARGIN_S = 1.0
"""So much later than the router a worker ends a request whose time is over: only if it was told nothing."""

SampleId = tuple[str, int]
"""Request id and sample."""


NOTHING = -1


class State(Enum):
    RUNNING = "running"
    """The current attempt is at its workers."""
    QUEUED = "queued"
    """The current attempt waits for one of its workers to have room."""
    PARKED = "parked"
    """The current attempt waits for a worker to come, or until it may be tried again."""
    SETTLING = "settling"
    """All tokens are delivered; the hand-over's account is still under way."""
    ENDED = "ended"
    """It has left the book."""


class TokenWatch(Protocol):
    """Sees a sample's tokens in order, once each, and may end it where the workers would not."""

    def watch(self, token: int, last: bool) -> bool:
        """Whether the sample ends with this token. `last`: it does anyway."""
        ...


def without_prompt_logprobs(sampling: SamplingParams) -> SamplingParams:
    """The same tokens, and nothing about the prompt."""
    if sampling.prompt_logprobs is None:
        return sampling
    return msgspec.structs.replace(sampling, prompt_logprobs=None)


class ClientRequest:
    """What a client asked for: it ends once, when all of its samples have."""

    __slots__ = (
        "client",
        "hashes",
        "label",
        "num_open",
        "order",
        "priority",
        "prompt",
        "request_id",
        "samples",
        "sampling",
        "session",
        "timeout_s",
    )

    def __init__(
        self,
        client: ClientId,
        label: str,
        request_id: str,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        *,
        n: int = 1,
        priority: int = 0,
        order: int = 0,
        watches: Sequence[TokenWatch] = (),
        session: str = "",
        hashes: PromptHashes | None = None,
    ):
        """`order`: its number among all that came; where requests wait, earlier ones of a priority go first.

        `hashes`: of the prompt, where policies want to know what of it is cached.
        """
        self.client = client
        self.label = label
        self.request_id = request_id
        self.prompt = prompt
        self.sampling = sampling
        self.priority = priority
        self.order = order
        self.session = session
        self.hashes = hashes
        self.samples = tuple(RoutedRequest(self, i, watches[i] if watches else None) for i in range(n))
        self.timeout_s: float | None = None
        """Its time in all, from its arrival."""
        self.num_open = n
        """Samples that have not ended."""

    def open_samples(self) -> list[RoutedRequest]:
        return [s for s in self.samples if s.state is not State.ENDED]


class RoutedRequest:
    """One sample of a client's request. `tokens` are those given to the client, in order, of all attempts."""

    __slots__ = (
        "arriving",
        "attempt",
        "avoid",
        "cached_tokens",
        "cut",
        "decode",
        "decode_charge",
        "decode_spoke",
        "ends_at",
        "failed",
        "failed_last",
        "finish",
        "first",
        "fresh",
        "fresh_logprobs",
        "fresh_prompt",
        "give_up_at",
        "handed",
        "held",
        "id",
        "kv_bytes",
        "not_before",
        "owner",
        "placements",
        "plain_end",
        "plain_next",
        "prefill",
        "prefill_cached",
        "prefill_charge",
        "prompt",
        "queued_s",
        "reason",
        "refused",
        "sample",
        "sampling",
        "state",
        "streams_from",
        "suspected_until",
        "timeline",
        "touched",
        "tokens",
        "waits_since",
        "watch",
    )

    def __init__(self, owner: ClientRequest, sample: int = 0, watch: TokenWatch | None = None):
        self.owner = owner
        self.sample = sample
        self.id: SampleId = (owner.request_id, sample)
        self.prompt = owner.prompt
        # The prompt is the same for all samples: one of them tells about it.
        self.sampling = without_prompt_logprobs(owner.sampling) if sample else owner.sampling
        self.watch = watch
        asks = self.sampling.logprobs is not None or self.sampling.prompt_logprobs is not None
        self.plain_end = 0 if watch is not None or asks else self.sampling.max_tokens - 1
        """Tokens below this index are only to be passed on, if they do not say that they end it."""
        self.streams_from: WorkerView | None = None
        """The current attempt decodes there, and all that was to be noted of that is."""
        self.plain_next = NOTHING
        """A token of this index from there that does not say that it is the last is only passed on."""
        self.state = State.PARKED
        self.attempt = 0
        self.tokens: list[int] = []
        self.first = 0
        """Index of the current attempt's first token."""
        self.fresh: list[int] = []
        """Tokens put in order while one message is read, not yet passed on."""
        self.fresh_logprobs: list[TokenLogprobs | None] = []
        """One for each of `fresh`, if the request wants them."""
        self.fresh_prompt: tuple[TokenLogprobs | None, ...] | None = None
        """What came about the prompt with the first token, not yet passed on."""
        self.touched = False
        """The message being read has tokens of it."""
        self.held: dict[int, tuple[int, FinishReason | None, LogprobsOut | None]] = {}
        """Tokens that came before an earlier one."""
        self.finish: FinishReason | None = None
        self.cut = False
        """The watch ended it: its workers do not know."""
        self.failed = False
        """The attempt's worker gave it up (a finish reason other than stop and length)."""
        self.prefill: WorkerView | None = None
        self.decode: WorkerView | None = None
        """The same object as `prefill`: colocated."""
        self.prefill_charge = 0
        """Tokens charged to `prefill` in the view; 0 once its first token came."""
        self.prefill_cached = 0
        """Tokens that were not, as their KV is expected to be there."""
        self.decode_charge = 0
        self.arriving = False
        """Counted among the hand-overs on their way to `decode`."""
        self.handed = False
        """Prefill has told that decode acknowledged the hand-over."""
        self.decode_spoke = False
        """Decode has sent a token of this attempt."""
        self.refused: set[str] = set()
        """Workers that declined this attempt's hand-over."""
        self.avoid: set[str] = set()
        """Workers on which attempts failed: others are preferred."""
        self.failed_last: set[str] = set()
        """Those on which the last one failed: even more so."""
        self.suspected_until = 0.0
        """One of `failed_last` may be gone: until then they are out of the question."""
        self.ends_at: float | None = None
        """When the request's time is over; its workers watch it, too, for when the router cannot tell them."""
        self.give_up_at: float | None = None
        """When a parked attempt has waited long enough for a worker."""
        self.not_before = 0.0
        """The parked attempt is not to be placed earlier."""
        self.waits_since: float | None = None
        """Since when it is at no worker; None: it is, or has ended."""
        self.queued_s = 0.0
        """How long it was at no worker until then."""
        self.reason = ""
        """Why the last attempt ended."""
        self.kv_bytes = 0
        self.cached_tokens = 0
        """Tokens of the prompt that the current attempt's prefill worker had cached."""
        self.timeline = RequestTimeline(marks={})
        self.placements: list[Placement] = []

    @property
    def key(self) -> RequestKey:
        return RequestKey(self.id[0], self.attempt, self.sample)

    @property
    def demand(self) -> Demand:
        owner, num_prompt = self.owner, len(self.prompt)
        return Demand(
            num_prompt + len(self.tokens),
            num_prompt + self.sampling.max_tokens,
            owner.hashes,
            owner.session,
            owner.priority,
        )

    @property
    def needs_prefill(self) -> bool:
        """Whether the attempt still depends on its prefill worker.

        Decode alone is enough once it has taken the KV over *and* the first token, which only prefill
        sends to the router, is here.
        """
        return self.prefill is self.decode or len(self.tokens) <= self.first or not (self.handed or self.decode_spoke)

    def begin_attempt(self) -> None:
        """Forget all that belonged to the former attempt; what was delivered stays."""
        self.attempt += 1
        self.first = len(self.tokens)
        self.held.clear()
        self.failed = False
        self.cached_tokens = 0
        self.prefill = self.decode = self.streams_from = None
        self.plain_next = NOTHING
        self.handed = self.decode_spoke = False
        self.refused.clear()
        self.state = State.PARKED

    def take(self, index: int, token: int, finish: FinishReason | None, logprobs: LogprobsOut | None = None) -> None:
        """One token of the current attempt. Appends to `fresh` what is now in order, sets `finish`.

        `logprobs`: what came with it. Duplicates, and tokens beyond max_tokens or after the end, change nothing.
        """
        if self.finish is not None:
            return
        known = len(self.tokens)
        if index != known or self.held:
            if index > known:
                if index < self.sampling.max_tokens:
                    self.held.setdefault(index, (token, finish, logprobs))
                return
            if index < known:
                return
        while self.finish is None and not self.failed:
            if finish is not None and finish != "stop" and finish != "length":
                self.failed = True
                return
            self.tokens.append(token)
            self.fresh.append(token)
            if self.sampling.logprobs is not None:
                self.fresh_logprobs.append(None if logprobs is None else logprobs.token)
            if known == 0 and logprobs is not None and self.sampling.prompt_logprobs is not None:
                self.fresh_prompt = logprobs.prompt
            known += 1
            if finish is None and known >= self.sampling.max_tokens:
                finish = "length"  # a worker that goes on past the limit must not reach the client
            if self.watch is not None and self.watch.watch(token, finish is not None):
                self.cut = finish is None
                finish = "stop"
            if finish is not None:
                self.finish = finish
                self.held.clear()
                return
            following = self.held.pop(known, None)
            if following is None:
                return
            token, finish, logprobs = following

    def expect(self, worker: WorkerView) -> None:
        """What came is passed on. `worker`: where the last of it was from."""
        known = len(self.tokens)
        ends = self.finish is not None or self.failed or known >= self.plain_end
        streams = worker is self.decode and (worker is not self.prefill or not self.prefill_charge)
        if ends or self.held or not streams:
            self.plain_next = NOTHING
        else:
            self.streams_from, self.plain_next = worker, known

    def submit(self, now: float) -> Submit:
        """The message that starts the current attempt at its prefill worker."""
        assert self.prefill is not None and self.decode is not None
        return Submit(
            key=self.key,
            prompt=self.prompt,
            # Of a prompt that was told about nothing is computed again.
            sampling=without_prompt_logprobs(self.sampling) if self.tokens else self.sampling,
            prior=tuple(self.tokens),
            decode=None if self.decode is self.prefill else self.decode.worker_id,
            timeout_s=None if self.ends_at is None else max(0.0, self.ends_at - now) + WORKER_MARGIN_S,
            priority=self.owner.priority,
        )

    def __repr__(self) -> str:
        return (
            f"<{self.key} {self.state.value} prompt={len(self.prompt)} tokens={len(self.tokens)} "
            f"held={sorted(self.held)} prefill={self.prefill} decode={self.decode}>"
        )

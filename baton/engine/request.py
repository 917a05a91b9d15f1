"""A request inside one worker's engine, what a step does for it, and what a step tells the outside.

Pure data: no torch, clock or sockets.

    submit ──► WAITING ──admit──► RUNNING ──last token──► ended
                 ▲  ▲                │  └──prompt done, hand-off──► HANDED ──released──► ended
                 │  └──preempted─────┘
    reserve ──► RESERVED ──adopt / recompute──► WAITING (blocks held)

`abort` ends a request in every state. Its blocks go back to the pool once nothing can touch them any
more: after the step it is in completes (`in_step`: that step still writes them) and after the
transfer that reads or writes them releases them (`transfer_holds`).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import partial

import msgspec

from baton.protocol import FinishReason, RequestKey, TokenOut
from baton.sampling_params import SamplingParams, TokenLogprobs

NEVER = 1 << 62
"""More tokens than any request has."""
NOBODY = slice(0, 0)


class RequestState(Enum):
    WAITING = "waiting"
    """Not in the running batch. Holds no blocks, unless it was adopted."""
    RUNNING = "running"
    RESERVED = "reserved"
    """Decode side: blocks are held for KV that another worker is sending."""
    HANDED = "handed"
    """Prefill side: prompt done; blocks are held until the transfer releases them."""


class EngineRequest:
    """One request. `tokens[:num_prompt]` is the prompt, then tokens of earlier attempts, then new ones."""

    __slots__ = (
        "key",
        "sampling",
        "tokens",
        "num_prompt",
        "num_context",
        "handoff",
        "has_credit",
        "blocks",
        "num_computed",
        "num_shipped_blocks",
        "state",
        "in_batch",
        "in_step",
        "transfer_holds",
        "ended",
        "deadline",
        "priority",
        "order",
        "marks",
        "stop_ids",
        "max_len",
        "plain",
        "plain_until",
        "told_little",
        "row",
        "prompt_logprobs",
        "cache_salt",
        "block_keys",
        "context_key",
        "announced_key",
        "awaited_key",
        "copy_source",
        "num_prefix_blocks",
        "num_cached_tokens",
        "num_registered_blocks",
        "register_at",
    )

    def __init__(
        self,
        key: RequestKey,
        prompt: tuple[int, ...] | list[int],
        sampling: SamplingParams,
        *,
        prior: tuple[int, ...] | list[int] = (),
        handoff: bool = False,
        deadline: float | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ):
        self.key = key
        self.sampling = sampling
        self.tokens: list[int] = [*prompt, *prior]
        self.num_prompt = len(prompt)
        self.num_context = len(self.tokens)
        """Prompt and prior tokens: what is there before this attempt samples its first token."""
        self.handoff = handoff
        """Decode happens on another worker."""
        self.has_credit = not handoff
        """A hand-off waits until decode has reserved blocks, before its first chunk."""
        self.blocks: list[int] = []
        self.num_computed = 0
        """Tokens whose KV is in `blocks`."""
        self.num_shipped_blocks = 0
        self.state = RequestState.WAITING
        self.in_step = False
        self.in_batch = False
        """A member of the `DecodeBatch`."""
        self.transfer_holds = False
        self.ended = False
        self.deadline = deadline
        self.priority = priority
        """Lower is served earlier, and preempted later."""
        self.order = (priority, 0, 0)
        """Its place in the queue, see `baton.engine.fair_queue`."""
        self.marks: dict[int, float] = {}
        self.stop_ids: frozenset[int] = frozenset(sampling.stop_token_ids)
        """The engine core adds the model's EOS ids unless `ignore_eos`."""
        self.max_len = self.num_prompt + sampling.max_tokens
        self.plain = is_plain(sampling)
        """Its tokens are the most probable ones, and nobody asks about others."""
        self.plain_until = 0
        """A token that leaves it with fewer tokens than this, and is no stop token, is only kept and told; 0: none."""
        asks = sampling.logprobs is not None or sampling.prompt_logprobs is not None
        self.told_little = not asks and sampling.structured is None
        """Of its tokens nothing but themselves is asked, and there always is one."""
        self.row = partial(TokenOut, *key)
        """`row(index, token, finish)`: what the router is told of a token."""
        self.prompt_logprobs: list[TokenLogprobs | None] = []
        """Of the prompt's tokens so far, if they are wanted; empty again once they went out with the first token."""
        # What the block tables and the prefix cache keep of it.
        self.cache_salt = cache_salt
        """Whatever beside model and tokens changes the KV: only requests of equal salt share blocks."""
        self.block_keys: list[bytes] = []
        """`prefix_cache` keys of its full blocks, as far as they were asked for."""
        self.context_key: bytes | None = None
        self.announced_key: bytes | None = None
        """The block that others may wait for, because this request computes or receives it."""
        self.awaited_key: bytes | None = None
        self.copy_source: int | None = None
        """Held until its content is copied into the block that `num_computed` is in, before the first step."""
        self.num_prefix_blocks = 0
        """Decode side: blocks of the context that need not be sent."""
        self.num_cached_tokens = 0
        """Tokens of the prompt that were in the cache when it was first admitted, and so were not computed."""
        self.num_registered_blocks = 0
        """Full blocks that the prefix cache was told of."""
        self.register_at = NEVER
        """The number of computed tokens from which on the prefix cache must be told again."""

    @property
    def sample(self) -> int:
        """Which of the client's samples this is: part of what its random numbers depend on."""
        return self.key.sample

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_outputs(self) -> int:
        """Output tokens so far, those of earlier attempts included."""
        return len(self.tokens) - self.num_prompt

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether its steps are to report on the prompt: once, so not after the first token, wherever that was."""
        return self.sampling.prompt_logprobs is not None and len(self.tokens) == self.num_prompt

    def keep_prompt_logprobs(self, start: int, new: list[TokenLogprobs]) -> None:
        """Take those of the prompt tokens from `start` + 1 on. What a preempted request computes again replaces."""
        known = self.prompt_logprobs or [None]
        assert len(known) > start, f"{self!r} has the log probabilities of {len(known)} prompt tokens before {start}"
        known[start + 1 :] = new
        self.prompt_logprobs = known

    @property
    def may_stop(self) -> bool:
        """Whether a stop id in the output ends the request; before `min_tokens` one is there only for want of others.

        With structured output it then means that the form is complete, and nothing can follow.
        """
        return self.num_outputs > self.sampling.min_tokens or self.sampling.structured is not None

    @property
    def forbidden(self) -> frozenset[int]:
        """Ids that the next token may not be: those that would end the request before `min_tokens`."""
        return self.stop_ids if self.num_outputs < self.sampling.min_tokens else frozenset()

    def __repr__(self) -> str:
        return (
            f"<{self.key} {self.state.value} prompt={self.num_prompt} tokens={len(self.tokens)} "
            f"computed={self.num_computed} blocks={len(self.blocks)}>"
        )


def is_plain(sampling: SamplingParams) -> bool:
    """Whether the most probable token is taken and nothing else is asked for."""
    s = sampling
    changes = s.presence_penalty or s.frequency_penalty or s.repetition_penalty != 1 or s.logit_bias
    limits = s.allowed_token_ids is not None or s.bad_token_ids or s.min_tokens or s.structured is not None
    reports = s.logprobs is not None or s.prompt_logprobs is not None
    return s.temperature == 0 and not changes and not limits and not reports


class StepItem:
    """What one step does for one request: compute `tokens[start : start + num_tokens]`, perhaps sample.

    The last three are the runner's to fill in, where the request asks for them or cannot go on.
    """

    __slots__ = ("request", "start", "num_tokens", "samples", "logprobs", "prompt_logprobs", "problem")

    def __init__(self, request: EngineRequest, num_tokens: int):
        self.request = request
        self.start = start = request.num_computed
        self.num_tokens = num_tokens
        self.samples = start + num_tokens == len(request.tokens)
        """The last known token is computed, so the step yields the next one."""
        self.logprobs: TokenLogprobs | None = None
        """Of the sampled token."""
        self.prompt_logprobs: list[TokenLogprobs] | None = None
        """Of the prompt's tokens from `start` + 1 on, as far as this chunk's logits reach."""
        self.problem: str | None = None
        """Why this request, and no other of the step, has to end with an error."""


class DecodeItem(StepItem):
    """Of a request that computes its last token, step by step: one object for all of these steps."""

    __slots__ = ()
    num_tokens = 1
    samples = True

    def __init__(self, request: EngineRequest):
        self.request = request
        self.logprobs = self.prompt_logprobs = self.problem = None

    @property
    def start(self) -> int:  # type: ignore[override]
        return self.request.num_computed


class StepPlan:
    """One engine step: which requests advance by how many tokens. No phases in it."""

    __slots__ = ("batch_context", "copies", "in_batch", "items", "skipped", "total_tokens")

    def __init__(
        self,
        items: list[StepItem],
        copies: Sequence[tuple[int, int]] = (),
        skipped: Sequence[tuple[EngineRequest, str]] = (),
        total_tokens: int | None = None,
        in_batch: slice = NOBODY,
        batch_context: int = 0,
    ):
        self.items = items
        self.skipped = skipped
        """Requests that do not advance, and why; see `Step.skipped`."""
        self.in_batch = in_batch
        """Which items are those of the `DecodeBatch`: each computes one token and samples."""
        self.batch_context = batch_context
        """Positions that they attend to, in all."""
        self.copies = copies
        """`(source, target)`: blocks to be copied before anything is computed."""
        self.total_tokens = sum(item.num_tokens for item in items) if total_tokens is None else total_tokens

    @property
    def num_tokens(self) -> dict[RequestKey, int]:
        return {item.request.key: item.num_tokens for item in self.items}

    def describe(self) -> str:
        """The plan and its reasons, in words; before the step runs."""
        decodes = [item for item in self.items if item.num_tokens == 1]
        parts = [f"{len(decodes)} decodes"] if decodes else []
        for item in self.items:
            if item.num_tokens > 1:
                end = item.start + item.num_tokens
                parts.append(f"{item.request.key}: tokens {item.start} to {end - 1} of {item.request.num_tokens}")
        parts += [f"block {source} copied to {target}" for source, target in self.copies]
        parts += [f"{request.key} not: {reason}" for request, reason in self.skipped]
        return f"{self.total_tokens} tokens: " + "; ".join(parts)


# --- effects: what the core asks its surroundings to do -------------------------------------------


class Emit(msgspec.Struct, frozen=True, gc=False):
    """A sampled token for the router. `finish` is set on the request's last token."""

    request: EngineRequest
    index: int
    token: int
    finish: FinishReason | None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """With the request's first token."""


class ChunkDone(msgspec.Struct, frozen=True):
    """Hand-off: these blocks of the prompt are final: `(index in the request, block id)` each."""

    request: EngineRequest
    blocks: tuple[tuple[int, int], ...]


class PromptDone(msgspec.Struct, frozen=True):
    """Hand-off: the first token is sampled and decode goes on elsewhere. The request is HANDED now."""

    request: EngineRequest
    first_token: int


class Ended(msgspec.Struct, frozen=True):
    """The request is gone from the engine. A hand-off that ends early must abort its transfer."""

    request: EngineRequest
    reason: FinishReason
    problem: str | None = None
    """What the runner said where it could not go on."""


Effect = Emit | ChunkDone | PromptDone | Ended

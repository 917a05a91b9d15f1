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

from enum import Enum

import msgspec

from baton.protocol import FinishReason, RequestKey, SamplingParams


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
        "in_step",
        "transfer_holds",
        "ended",
        "deadline",
        "marks",
        "stop_ids",
        "max_len",
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
        self.transfer_holds = False
        self.ended = False
        self.deadline = deadline
        self.marks: dict[int, float] = {}
        self.stop_ids: frozenset[int] = frozenset(sampling.stop_token_ids)
        """The engine core adds the model's EOS ids unless `ignore_eos`."""
        self.max_len = self.num_prompt + sampling.max_tokens

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
    def forbidden(self) -> frozenset[int]:
        """Ids that the next token may not be: those that would end the request before `min_tokens`."""
        return self.stop_ids if self.num_outputs < self.sampling.min_tokens else frozenset()

    def __repr__(self) -> str:
        return (
            f"<{self.key} {self.state.value} prompt={self.num_prompt} tokens={len(self.tokens)} "
            f"computed={self.num_computed} blocks={len(self.blocks)}>"
        )


class StepItem:
    """What one step does for one request: compute `tokens[start : start + num_tokens]`, perhaps sample."""

    __slots__ = ("request", "start", "num_tokens", "samples")

    def __init__(self, request: EngineRequest, num_tokens: int):
        self.request = request
        self.start = start = request.num_computed
        self.num_tokens = num_tokens
        self.samples = start + num_tokens == len(request.tokens)
        """The last known token is computed, so the step yields the next one."""


class StepPlan:
    """One engine step: which requests advance by how many tokens. No phases in it."""

    __slots__ = ("items", "total_tokens")

    def __init__(self, items: list[StepItem]):
        self.items = items
        self.total_tokens = sum(item.num_tokens for item in items)

    @property
    def num_tokens(self) -> dict[RequestKey, int]:
        return {item.request.key: item.num_tokens for item in self.items}


# --- effects: what the core asks its surroundings to do -------------------------------------------


class Emit(msgspec.Struct, frozen=True):
    """A sampled token for the router. `finish` is set on the request's last token."""

    request: EngineRequest
    index: int
    token: int
    finish: FinishReason | None


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


Effect = Emit | ChunkDone | PromptDone | Ended

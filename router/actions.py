"""What the router's core asks its driver to do.

Plain data. `client` is whatever the driver passed in; workers are addressed by incarnation, so that a
message for a former life is never delivered to the next one.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import msgspec

from baton.ledger import ClusterLedger
from baton.protocol import FinishReason, ToWorker, Usage
from baton.sampling_params import PromptLogprobs, TokenLogprobs

ClientId = Hashable


class SendWorker(msgspec.Struct, frozen=True):
    """Send to the worker with this incarnation; if it cannot be reached, call `RouterCore.on_worker_lost`."""

    worker_id: str
    incarnation: str
    message: ToWorker


class NewTokens(msgspec.Struct, frozen=True, gc=False):
    """A sample's next tokens, in order, each exactly once."""

    client: ClientId
    label: str
    request_id: str
    tokens: tuple[int, ...]
    sample: int = 0
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    """One per token if the request wants them, else empty."""
    prompt_logprobs: PromptLogprobs | None = None
    """With the first token of sample 0, if the request wants them."""


class StreamedSteps(msgspec.Struct, frozen=True, gc=False):
    """The same next tokens for each of several requests; only where plain steps are told (`RouterCore`).

    What `NewTokens` would say of each: its `owner` has client, label and request id.
    """

    requests: list[Any]
    """`router.request.RoutedRequest`, to be read."""
    token: int
    arrivals: list[float]
    """When each token came."""


class SampleDone(msgspec.Struct, frozen=True):
    """One of several samples ended; nothing follows for it. After the last one comes the RequestDone."""

    client: ClientId
    label: str
    request_id: str
    sample: int
    finish_reason: FinishReason


class RequestDone(msgspec.Struct, frozen=True):
    """All samples of the request ended; nothing follows for it. What is told of one sample is of sample 0."""

    client: ClientId
    label: str
    request_id: str
    finish_reason: FinishReason
    usage: Usage
    marks: dict[int, float]
    prefill_worker: str
    decode_worker: str
    """Both empty: it ended before it was placed."""
    attempts: int
    kv_bytes: int
    n: int = 1
    """Samples that the request had."""


class RequestFailed(msgspec.Struct, frozen=True):
    """The request was refused or lost; nothing follows for it. `code`: see `baton.errors`."""

    client: ClientId
    label: str
    request_id: str
    code: str
    message: str
    field: str | None = None
    n: int = 1
    """Samples that the request had."""
    retry_after_s: float | None = None
    """Of code `overloaded`: when there may be room; None: that cannot be told."""


class LedgerDone(msgspec.Struct, frozen=True):
    """The answer to a client's question for the block ledger."""

    client: ClientId
    message: ClusterLedger


RouterAction = SendWorker | NewTokens | StreamedSteps | SampleDone | RequestDone | RequestFailed | LedgerDone

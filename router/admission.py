"""Which requests are let in: what can never run gets its error now, before any worker hears of it.

Pure checks that raise typed errors. Must not know where a request goes or how it proceeds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from baton.errors import InvalidRequestError, RequestTooLargeError
from baton.protocol import MAX_TEXT, Generate
from baton.sampling_params import MAX_PROMPT_LOGPROBS, MAX_PROMPT_TOKENS, SamplingParams
from router.policy import Demand, PlacementPolicy
from router.view import ClusterView, WorkerView


def check_source(message: Generate) -> None:
    """Exactly one of text, messages and token_ids is set, and is not empty; else InvalidRequestError."""
    given = [name for name in ("text", "messages", "token_ids") if getattr(message, name) is not None]
    if len(given) != 1:
        found = " and ".join(given) if given else "none"
        raise InvalidRequestError(
            f"a request has exactly one of text, messages and token_ids; this one has {found}", field="prompt"
        )
    size = sum(len(part.role) + len(part.content) for part in message.messages or ())
    if size > MAX_TEXT:
        raise RequestTooLargeError(f"messages of {size} characters in all, at most {MAX_TEXT} travel", field="messages")
    if not getattr(message, given[0]):
        raise InvalidRequestError(f"{given[0]} is empty; give at least one token to start from", field=given[0])


def check_token_ids(token_ids: Sequence[int], vocab_size: int, field: str = "token_ids") -> None:
    """Every id is one of the model's `vocab_size`; else InvalidRequestError naming the first that is not."""
    if token_ids and (max(token_ids) >= vocab_size or min(token_ids) < 0):
        at, bad = next((i, t) for i, t in enumerate(token_ids) if not 0 <= t < vocab_size)
        raise InvalidRequestError(
            f"{field}[{at}] is {bad}, but the model's vocabulary has the ids 0 to {vocab_size - 1}", field=field
        )


def check_sampling_ids(sampling: SamplingParams, vocab_size: int) -> None:
    """The ids that parameters name are the model's; else InvalidRequestError.

    (Not `stop_token_ids`: one that the model does not have just never comes.)
    """
    check_token_ids(tuple(sampling.logit_bias), vocab_size, "logit_bias")
    check_token_ids(sampling.allowed_token_ids or (), vocab_size, "allowed_token_ids")
    for sequence in sampling.bad_token_ids:
        check_token_ids(sequence, vocab_size, "bad_token_ids")


def check_sampling(sampling: SamplingParams) -> None:
    """What the fields' own ranges do not say; else InvalidRequestError."""
    if sampling.min_tokens > sampling.max_tokens:
        raise InvalidRequestError(
            f"min_tokens {sampling.min_tokens} is more than max_tokens {sampling.max_tokens}", field="min_tokens"
        )
    if sampling.structured is not None and sampling.ignore_eos:
        raise InvalidRequestError(
            "structured output ends with an end-of-text token, so ignore_eos cannot be set with it", field="ignore_eos"
        )


def check_prompt_logprobs(num_prompt: int, sampling: SamplingParams) -> None:
    """That what is asked about a prompt of so many tokens fits one message; else RequestTooLargeError."""
    if sampling.prompt_logprobs is not None and num_prompt * (sampling.prompt_logprobs + 1) > MAX_PROMPT_LOGPROBS:
        raise RequestTooLargeError(
            f"prompt_logprobs {sampling.prompt_logprobs} of {num_prompt} prompt tokens are more than the "
            f"{MAX_PROMPT_LOGPROBS} log probabilities that travel; ask for fewer, or about a shorter prompt",
            field="prompt_logprobs",
        )


def check_request(
    num_prompt: int,
    max_tokens: int,
    *,
    view: ClusterView,
    policy: PlacementPolicy,
    max_requests: int,
    n: int = 1,
) -> None:
    """That `n` samples of a request of these sizes (tokens) could be served if nothing else were, or raise.

    InvalidRequestError: nothing to start from, or more samples than are ever let in. RequestTooLargeError: no
    worker known could ever hold it.
    """
    if num_prompt < 1:
        raise InvalidRequestError("the prompt has no tokens; give at least one to start from", field="prompt")
    if n > max_requests:
        raise InvalidRequestError(
            f"n is {n}, but router.max_requests, which counts samples, is {max_requests}", field="n"
        )
    check_size(num_prompt, max_tokens, view=view, policy=policy)


def predict_prefill_s(demand: Demand, workers: Iterable[WorkerView]) -> float | None:
    """Seconds from its placement to its first token, at the one of these workers that is the first to have it.

    `(tokens that wait there + its own) * prefill_token_s`, which the worker measures; what a cache will spare counts
    in full. None: none of them has measured yet.
    """
    return min(
        (
            (max(worker.prefill_tokens, worker.load.num_pending_tokens) + demand.context) * worker.load.prefill_token_s
            for worker in workers
            if worker.load.prefill_token_s
        ),
        default=None,
    )


def check_size(num_prompt: int, max_tokens: int, *, view: ClusterView, policy: PlacementPolicy) -> None:
    """Raise RequestTooLargeError if the known workers can never hold it; says which limit and by how much."""
    total = num_prompt + max_tokens
    if num_prompt > MAX_PROMPT_TOKENS:
        raise RequestTooLargeError(f"prompt of {num_prompt} tokens, at most {MAX_PROMPT_TOKENS} travel", field="prompt")
    if policy.fits_somewhere(Demand(num_prompt, total), view):
        return
    capacity = policy.capacity(view)
    if capacity is None:
        return
    field = "prompt" if num_prompt >= min(capacity.max_model_len, capacity.tokens) else "max_tokens"
    asked = f"prompt of {num_prompt} tokens + max_tokens {max_tokens} = {total} tokens"
    if total > capacity.max_model_len:
        raise RequestTooLargeError(
            f"{asked}, more than max_model_len {capacity.max_model_len}; shorten the prompt or lower max_tokens",
            field=field,
        )
    blocks = -(-total // capacity.block_size)
    if blocks <= capacity.blocks:
        raise RequestTooLargeError(
            f"prompt of {num_prompt} tokens fits no prefill worker's KV pool, though {capacity.blocks} blocks of "
            f"{capacity.block_size} tokens could decode it; shorten it, or raise kv_blocks of the prefill pool",
            field="prompt",
        )
    raise RequestTooLargeError(
        f"{asked} need {blocks} KV blocks of {capacity.block_size} tokens; the largest pool has {capacity.blocks}; "
        f"shorten the request, or raise kv_blocks of the pools",
        field=field,
    )

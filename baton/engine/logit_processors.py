"""What a request's parameters do to its logits before a token is chosen, in the order that `sampler.py` lists.

Pure functions of one row, the parameters and the request's tokens, so that a request that was preempted, retried or
handed over gets the same. Must not know requests, batches or random numbers.

A rule that would leave no token at all is passed over: ids that a client forbids may be all that an earlier rule has
left. What comes earlier is the stronger, the form of structured output first.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from baton.engine.sampler import Row
from baton.sampling_params import SamplingParams

LARGEST = np.finfo(np.float32).max


def process(
    logits: Row,
    params: SamplingParams,
    tokens: Sequence[int],
    num_prompt: int,
    *,
    forbidden: Collection[int] = (),
    form: npt.NDArray[np.bool_] | None = None,
) -> None:
    """Change the row, shape [vocab], in place.

    `tokens`: prompt, then the output so far, which begins at `num_prompt`. `forbidden`: ids that would end the request
    before `min_tokens`. `form`: shape [vocab], the tokens that structured output allows next.
    """
    if form is not None:
        _allow(logits, form)
    if params.allowed_token_ids is not None:
        allowed = np.zeros(len(logits), dtype=np.bool_)
        allowed[_known(params.allowed_token_ids, logits)] = True
        _allow(logits, allowed)
    if params.bad_token_ids:
        _forbid(logits, _completing(params.bad_token_ids, tokens, num_prompt))
    if forbidden:
        _forbid(logits, forbidden)
    for token, bias in params.logit_bias.items():
        if token < len(logits):
            logits[token] += np.float32(bias)
    if params.repetition_penalty != 1:
        _penalize_repetition(logits, params.repetition_penalty, tokens)
    if params.frequency_penalty or params.presence_penalty:
        ids, counts = np.unique(_known(tokens[num_prompt:], logits), return_counts=True)
        logits[ids] -= np.float32(params.frequency_penalty) * counts.astype(np.float32)
        logits[ids] -= np.float32(params.presence_penalty)


def _known(ids: Sequence[int], logits: Row) -> npt.NDArray[np.int64]:
    """Those that the vocabulary has: they come from clients."""
    array = np.asarray(ids, dtype=np.int64)
    return array[array < len(logits)]


def _allow(logits: Row, allowed: npt.NDArray[np.bool_]) -> None:
    if (logits[allowed] > -np.inf).any():
        logits[~allowed] = -np.inf


def _forbid(logits: Row, ids: Collection[int]) -> None:
    known = [i for i in ids if i < len(logits)]
    if known:
        before = logits[known]
        logits[known] = -np.inf
        if logits.max() == -np.inf:
            logits[known] = before


def _completing(sequences: Sequence[Sequence[int]], tokens: Sequence[int], num_prompt: int) -> list[int]:
    """The last ids of the sequences whose other ids are the last output tokens."""
    completing = []
    for *start, last in sequences:
        begin = len(tokens) - len(start)
        if begin >= num_prompt and list(tokens[begin:]) == start:
            completing.append(last)
    return completing


def _penalize_repetition(logits: Row, penalty: float, tokens: Sequence[int]) -> None:
    ids = np.unique(_known(tokens, logits))
    scores = logits[ids].astype(np.float64)
    allowed = scores > -np.inf
    with np.errstate(over="ignore"):
        scores = np.where(scores > 0, scores / penalty, scores * penalty)
    # An extreme penalty must not make one infinite: the difference of two such has no value.
    scores[allowed] = np.clip(scores[allowed], -LARGEST, LARGEST)
    logits[ids] = scores

"""From logits to tokens: the most probable token, or one drawn by a counter-based random stream.

Knows logits and sampling parameters. Must not know requests, batches or where a row was computed:
a token depends on its logits row, parameters, seed, sample and position, and on nothing else, so a
request gives the same tokens colocated, handed over, preempted or retried.

One uniform per position: Philox 4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
SC 2011) keyed by the seed, with the counter (position, sample). There is no state to carry around or to
hand over. The token is the inverse of the cumulative distribution, in token-id order, at that uniform.

What may be drawn is narrowed in vLLM's order, each step on what the one before has left: forbidden ids,
temperature, `min_p`, `top_k`, `top_p` (Holtzman et al., "The curious case of neural text degeneration",
ICLR 2020). With temperature 0 only the forbidden ids matter, as the others never remove the most probable token.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt
import torch

from baton.protocol import SamplingParams

Weights = npt.NDArray[np.float64]


def uniform(seed: int, sample: int, position: int) -> float:
    """The random number in [0, 1) for this seed, sample and position; a pure function of the three.

    Each must be at least 0 and less than 2^64.
    """
    bits = np.random.Philox(key=seed, counter=position | (sample << 64)).random_raw()
    return float(int(bits) >> 11) * 2.0**-53  # the upper 53 bits: as many as a float64 holds exactly


def draw(logits: Weights, temperature: float, u: float, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0) -> int:
    """Token id at quantile `u` in [0, 1) of what is left of softmax(logits / temperature), in token-id order.

    `logits`: shape [vocab]; `temperature` > 0. Never returns a token of probability 0.
    """
    with np.errstate(over="ignore", under="ignore"):
        weights = np.exp((logits - logits.max()) / temperature)
    if top_k or top_p < 1 or min_p:
        weights = narrow(weights, top_k, top_p, min_p)
    cumulative = np.cumsum(weights)
    total = cumulative[-1]
    token = int(np.searchsorted(cumulative, u * total, side="right"))
    if token == len(cumulative):  # u * total was rounded up to total: the last token that has weight
        token = int(np.searchsorted(cumulative, total, side="left"))
    return token


def narrow(weights: Weights, top_k: int, top_p: float, min_p: float) -> Weights:
    """The weights with 0 for what the three rule out; the most probable token always stays.

    weights: shape [vocab], probabilities up to a common factor. Tokens as probable as the k-th most
    probable one pass `top_k`; within the last ones that `top_p` takes, of equals the lower ids go first.
    """
    if min_p:
        weights = np.where(weights >= min_p * weights.max(), weights, 0.0)
    if 0 < top_k < len(weights):
        kth = np.partition(weights, len(weights) - top_k)[len(weights) - top_k]
        weights = np.where(weights >= kth, weights, 0.0)
    if top_p < 1:
        total = weights.sum()
        # All tokens below this weight together have less than 1 - top_p: they need no sorting.
        ids = np.flatnonzero(weights >= (1 - top_p) * total / len(weights))
        ids = ids[np.argsort(-weights[ids], kind="stable")]
        before = np.cumsum(weights[ids]) - weights[ids]
        kept = ids[before < top_p * total]
        narrowed = np.zeros_like(weights)
        narrowed[kept] = weights[kept]
        weights = narrowed
    return weights


def sample(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    samples: Sequence[int],
    positions: Sequence[int],
    forbidden: Sequence[Collection[int]] | None = None,
) -> list[int]:
    """One token per row. Ties of the most probable token go to the lowest id.

    logits: `[rows, vocab]` float32. `samples` and `positions`, one per row: which sample of its request
    the row is, and the index that the new token gets in the request's token sequence. `forbidden`: ids
    that each row may not take, unless that leaves none. The router mints missing seeds; a row that still
    has none uses seed 0.
    """
    if not len(logits) == len(params) == len(samples) == len(positions):
        raise ValueError(
            f"{len(logits)} rows, {len(params)} params, {len(samples)} samples, {len(positions)} positions"
        )
    if forbidden is not None and any(forbidden):
        logits = _without(logits, forbidden)
    tokens: list[int] = torch.argmax(logits, dim=-1).tolist()  # documented: the first of equal maxima
    for row, p in enumerate(params):
        if p.temperature > 0:
            u = uniform(p.seed or 0, samples[row], positions[row])
            scores = logits[row].cpu().numpy().astype(np.float64)
            tokens[row] = draw(scores, p.temperature, u, top_k=p.top_k, top_p=p.top_p, min_p=p.min_p)
    return tokens


def _without(logits: torch.Tensor, forbidden: Sequence[Collection[int]]) -> torch.Tensor:
    """A copy in which each row's forbidden ids have no probability."""
    logits = logits.clone()
    vocab_size = logits.shape[1]
    for row, ids in enumerate(forbidden):
        known = [i for i in ids if i < vocab_size]  # stop ids come from clients
        if len(known) < vocab_size:
            logits[row, known] = -torch.inf
    return logits

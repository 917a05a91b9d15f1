"""From logits to tokens: the most probable token, or one drawn by a counter-based random stream.

Knows logits and sampling parameters. Must not know requests, batches or where a row was computed:
a token depends on its logits row, parameters, seed, sample and position, and on nothing else, so a
request gives the same tokens colocated, handed over, preempted or retried.

One uniform per position: Philox 4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
SC 2011) keyed by the seed, with the counter (position, sample). There is no state to carry around or to
hand over. The token is the inverse of the cumulative distribution, in token-id order, at that uniform.

The order of all that changes a distribution is vLLM's, each step working on what the one before has left:

1. what may be taken at all: the form of structured output, `allowed_token_ids`, `bad_token_ids`, `min_tokens`;
2. `logit_bias`;
3. `repetition_penalty`, `frequency_penalty`, `presence_penalty`;
4. `temperature`, `min_p`, `top_k`, `top_p` (Holtzman et al., "The curious case of neural text degeneration", 2020).

1 to 3 are `baton.engine.logit_processors`, and count with temperature 0 too; 4 is here. Log probabilities
(`baton.engine.logprobs`) are of the model's distribution, before any of it.

Per row of numpy rather than in a batch: each row must give the same bits however many others there are, and
elementwise numpy does, whatever its threads or alignment. Weights are float32, their sums float64.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from baton.sampling_params import SamplingParams

Row = npt.NDArray[np.float32]
"""Logits of one place, shape [vocab]."""
Weights = npt.NDArray[np.float32]
"""Probabilities up to a common factor."""
Ids = npt.NDArray[np.intp]

MIN_TEMPERATURE = 1e-30
"""Below it 1 / temperature is no float32; the most probable tokens alone have weight long before."""
SPAN = 128
"""Weights are summed in spans of so many, and only the span that is hit is looked into."""


def uniform(seed: int, sample: int, position: int) -> float:
    """The random number in [0, 1) for this seed, sample and position; a pure function of the three.

    Each must be at least 0 and less than 2^64.
    """
    bits = np.random.Philox(key=seed, counter=position | (sample << 64)).random_raw()
    return float(int(bits) >> 11) * 2.0**-53  # the upper 53 bits: as many as a float64 holds exactly


def draw(logits: Row, temperature: float, u: float, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0) -> int:
    """Token id at quantile `u` in [0, 1) of what is left of softmax(logits / temperature), in token-id order.

    `logits`: shape [vocab], float32, not all -inf; `temperature` > 0. Never returns a token of probability 0.
    """
    best = logits.max()
    ids = _candidates(logits, best, temperature, top_k, min_p)
    scores = logits if ids is None else logits[ids]
    with np.errstate(over="ignore", under="ignore"):
        weights = np.subtract(scores, best)
        weights *= np.float32(1 / max(temperature, MIN_TEMPERATURE))
        np.exp(weights, out=weights)
    if min_p:
        ids, weights = _keep(ids, weights, np.flatnonzero(weights >= min_p))  # the largest weight is 1
    if top_p < 1:
        ids, weights = _keep(ids, weights, nucleus(weights, top_p))
    hit = quantile(weights, u)
    return hit if ids is None else int(ids[hit])


def _candidates(logits: Row, best: np.float32, temperature: float, top_k: int, min_p: float) -> Ids | None:
    """Ids, ascending, of the `top_k` and those as probable as the k-th; with `min_p` perhaps some too many. None: all.

    Both ask for the most probable ones, so it does not matter which comes first; and an exponential is dear.
    """
    least = -np.inf
    if 0 < top_k < len(logits):
        least = float(np.partition(logits, len(logits) - top_k)[len(logits) - top_k])
    if min_p:
        least = max(least, float(best) + temperature * (math.log(min_p) - 0.01))
    return None if least == -np.inf else np.flatnonzero(logits >= np.float32(least))


def _keep(ids: Ids | None, weights: Weights, kept: Ids) -> tuple[Ids, Weights]:
    return (kept if ids is None else ids[kept]), weights[kept]


def nucleus(weights: Weights, top_p: float) -> Ids:
    """Indices, ascending, of the fewest largest weights that together have `top_p` < 1 of all; of equals the first.

    Sorts only the weights at the border: all are counted by the upper bits of their float32, whose order is theirs.
    """
    bins = weights.view(np.int32) >> 18  # 32 bins for each power of two
    np.subtract(bins.max(), bins, out=bins)
    mass = np.cumsum(np.bincount(bins, weights=weights))
    goal = top_p * mass[-1]
    last = int(np.searchsorted(mass, goal, side="left"))
    kept = bins < last
    border = np.flatnonzero(bins == last)
    border = border[np.argsort(-weights[border], kind="stable")]
    sums = np.cumsum(weights[border], dtype=np.float64)
    before = (mass[last - 1] if last else 0.0) + sums - weights[border]
    kept[border[before < goal]] = True
    return np.flatnonzero(kept)


def quantile(weights: Weights, u: float) -> int:
    """The first index up to which the weights sum to more than the share `u` in [0, 1) of all; one that has weight."""
    spans = len(weights) // SPAN
    sums = weights[: spans * SPAN].reshape(spans, SPAN).sum(axis=1, dtype=np.float64)
    rest = weights[spans * SPAN :].sum(dtype=np.float64)
    cumulative = np.cumsum(np.append(sums, rest))
    goal = u * cumulative[-1]
    span = int(np.searchsorted(cumulative, goal, side="right"))
    if span == len(cumulative):  # u * total was rounded up to total: the last span that has weight
        span = int(np.searchsorted(cumulative, cumulative[-1], side="left"))
    start = span * SPAN
    inside = np.cumsum(weights[start : start + SPAN], dtype=np.float64)
    hit = int(np.searchsorted(inside, goal - (cumulative[span - 1] if span else 0.0), side="right"))
    if hit == len(inside):  # rounded likewise: the last one of the span that has weight
        hit = int(np.searchsorted(inside, inside[-1], side="left"))
    return start + hit


def choose(logits: Row, params: SamplingParams, sample: int, position: int) -> int:
    """The token for one row. A tie of the most probable ones goes to the lowest id.

    `sample`: which sample of its request the row is; `position`: the index that the new token gets in the
    request's token sequence. The router mints missing seeds; a row that still has none uses seed 0.
    """
    if params.temperature == 0:
        return int(logits.argmax())  # the first of equal maxima
    u = uniform(params.seed or 0, sample, position)
    return draw(logits, params.temperature, u, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)


def most_probable(logits: torch.Tensor) -> list[int]:
    """The most probable token of each row of `[rows, vocab]`; ties go to the lowest id."""
    if logits.device.type == "cpu":  # several times faster than torch's; both take the first of equal maxima
        tokens: list[int] = logits.numpy().argmax(axis=-1).tolist()
    else:
        tokens = torch.argmax(logits, dim=-1).tolist()
    return tokens

"""Log probabilities of tokens: log-softmax of the model's logits as they are, in float32.

Knows logits and token ids. Must not know sampling parameters: what is reported is what the model said, whatever
was drawn from it (vLLM's `raw_logprobs`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from baton.sampling_params import TokenLogprobs

ROWS_AT_ONCE = 64
"""Rows whose log probabilities are in memory together: a long prompt has thousands, of a whole vocabulary each."""


def token_logprobs(logits: torch.Tensor, tokens: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """One entry per row of `[rows, vocab]` float32: of the row's token, and of its `num_top` most probable ones."""
    found: list[TokenLogprobs] = []
    for start in range(0, len(tokens), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        found += _of_rows(logits[rows], tokens[rows], num_top[rows])
    return found


def _of_rows(logits: torch.Tensor, tokens: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])
    ranks = (logprobs >= chosen).sum(dim=-1).tolist()
    most = min(max(num_top), logits.shape[1])
    tops = _top(logprobs, most) if most else [([], [])] * len(tokens)
    return [
        TokenLogprobs(token, logprob, rank, tuple(ids[:n]), tuple(values[:n]))
        for token, logprob, rank, (ids, values), n in zip(
            tokens, chosen[:, 0].tolist(), ranks, tops, num_top, strict=True
        )
    ]


def _top(logprobs: torch.Tensor, most: int) -> list[tuple[list[int], list[float]]]:
    """Ids and values of each row's largest, of equals the lower id first, which `topk` alone leaves open."""
    values, ids = torch.topk(logprobs, most, dim=-1)
    least = values[:, -1:]
    at_least = (logprobs >= least).sum(dim=-1).tolist()
    tops = []
    for row, (row_values, row_ids, count) in enumerate(zip(values.tolist(), ids.tolist(), at_least, strict=True)):
        if count > most:  # equals of the last one were left out, and may have lower ids
            among = torch.nonzero(logprobs[row] >= least[row])[:, 0]
            row_ids, row_values = among.tolist(), logprobs[row][among].tolist()
        order = sorted(zip([-value for value in row_values], row_ids, strict=True))[:most]
        tops.append(([i for _, i in order], [-value for value, _ in order]))
    return tops

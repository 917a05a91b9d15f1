"""Log probabilities of tokens: values, ranks, ties, and independence of what is asked together."""

from __future__ import annotations

import math

import torch

from baton.engine.logprobs import ROWS_AT_ONCE, token_logprobs
from baton.sampling_params import TokenLogprobs


def random_logits(rows: int, vocab: int) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(3)) * 4


def test_they_are_log_softmax_with_rank_and_the_most_probable_ones() -> None:
    logits = random_logits(5, 300)
    expected = torch.log_softmax(logits.double(), dim=-1)
    found = token_logprobs(logits, [0, 5, 7, 299, 12], [3, 0, 20, 1, 5])
    for row, (entry, token, n) in enumerate(zip(found, [0, 5, 7, 299, 12], [3, 0, 20, 1, 5], strict=True)):
        assert entry.token == token
        assert math.isclose(entry.logprob, float(expected[row, token]), abs_tol=1e-5)
        assert entry.rank == 1 + int((expected[row] > expected[row, token]).sum())
        order = expected[row].argsort(descending=True)[:n].tolist()
        assert list(entry.top_ids) == order
        assert torch.allclose(torch.tensor(entry.top_logprobs).double(), expected[row, order], atol=1e-5)


def test_of_equals_the_lower_ids_come_first_and_the_rank_counts_all_of_them() -> None:
    logits = torch.tensor([[1.0, 2, 1, 2, 1, 1]])
    (entry,) = token_logprobs(logits, [3], [3])
    assert (entry.rank, entry.top_ids) == (2, (1, 3, 0))
    (entry,) = token_logprobs(torch.zeros(1, 5000), [4999], [20])
    assert (entry.rank, entry.top_ids) == (5000, tuple(range(20)))


def test_a_row_says_the_same_whatever_is_asked_beside_it() -> None:
    logits = random_logits(2 * ROWS_AT_ONCE + 3, 500)
    tokens = [i * 3 for i in range(len(logits))]
    together = token_logprobs(logits, tokens, [2] * len(logits))
    alone = [token_logprobs(logits[i : i + 1], [tokens[i]], [2])[0] for i in range(len(logits))]
    assert together == alone
    assert token_logprobs(logits[:2], tokens[:2], [2, 20])[0] == alone[0]


def test_no_rows_and_fewer_tokens_than_asked() -> None:
    assert token_logprobs(torch.empty(0, 9), [], []) == []
    (entry,) = token_logprobs(torch.zeros(1, 2), [0], [20])
    assert isinstance(entry, TokenLogprobs)
    assert entry.top_ids == (0, 1)

"""A token depends on its logits, seed, sample and position, and on nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.engine.sampler import draw, sample, uniform
from baton.protocol import SamplingParams

GREEDY = SamplingParams()
PINNED = (0.8201981478608876, 0.5155139833915998)


def hot(seed: int, temperature: float = 1.0) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=seed)


def test_greedy_takes_the_lowest_id_of_ties() -> None:
    logits = torch.full((3, 50), -1.0)
    logits[0, [7, 30]] = 2.0
    logits[1, [49, 48]] = 0.0
    assert sample(logits, [GREEDY] * 3, [0] * 3, [1] * 3) == [7, 48, 0]


def test_uniform_is_pure_and_in_range() -> None:
    values = [uniform(seed, s, p) for seed in (0, 1, 2**63 - 1) for s in (0, 1) for p in range(200)]
    assert values == [uniform(seed, s, p) for seed in (0, 1, 2**63 - 1) for s in (0, 1) for p in range(200)]
    assert all(0 <= u < 1 for u in values)
    assert len(set(values)) == len(values)
    assert abs(np.mean(values) - 0.5) < 0.03


def test_uniform_is_pinned() -> None:
    """The stream is part of what clients rely on: same seed, same tokens, in later versions too."""
    assert uniform(42, 0, 0) == PINNED[0]
    assert uniform(42, 1, 7) == PINNED[1]


def test_a_row_does_not_depend_on_its_batch() -> None:
    logits = torch.randn(8, 100, generator=torch.Generator().manual_seed(0))
    params = [hot(i, 0.7) if i % 2 else GREEDY for i in range(8)]
    samples, positions = [i % 3 for i in range(8)], [10 + i for i in range(8)]
    together = sample(logits, params, samples, positions)
    alone = [sample(logits[i : i + 1], [params[i]], [samples[i]], [positions[i]])[0] for i in range(8)]
    backwards = sample(logits.flip(0), params[::-1], samples[::-1], positions[::-1])[::-1]
    assert together == alone == backwards


def test_seed_sample_and_position_each_matter() -> None:
    logits = torch.zeros(1, 1000)
    base = sample(logits, [hot(1)], [0], [5])
    assert sample(logits, [hot(2)], [0], [5]) != base
    assert sample(logits, [hot(1)], [1], [5]) != base
    assert sample(logits, [hot(1)], [0], [6]) != base


def test_frequencies_follow_softmax() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -50.0]])
    counts = np.bincount([sample(logits, [hot(3, 0.5)], [0], [p])[0] for p in range(4000)], minlength=4)
    expected = torch.softmax(logits[0] / 0.5, 0).numpy()
    assert np.abs(counts / 4000 - expected).max() < 0.03


@pytest.mark.parametrize("u", [0.0, 0.5, 1.0 - 2.0**-53])
def test_draw_never_takes_what_has_no_weight(u: float) -> None:
    logits = np.array([-np.inf, 0.0, -np.inf, 0.0, -np.inf, -1e30])
    assert draw(logits, 1.0, u) in (1, 3)
    assert draw(logits, 1e-9, u) in (1, 3)


def test_draw_inverts_the_distribution_in_id_order() -> None:
    logits = np.log(np.array([0.25, 0.5, 0.25]))
    assert [draw(logits, 1.0, u) for u in (0.0, 0.24, 0.26, 0.74, 0.76, 0.99)] == [0, 0, 1, 1, 2, 2]


def test_a_small_temperature_is_greedy() -> None:
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(1))
    assert sample(logits, [hot(9, 1e-6)], [0], [3]) == sample(logits, [GREEDY], [0], [3])


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="2 rows"):
        sample(torch.zeros(2, 4), [GREEDY], [0], [0])

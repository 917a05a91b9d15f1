"""A token depends on its logits, seed, sample and position, and on nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.request import EngineRequest, StepItem
from baton.engine.sampler import SPAN, choose, draw, nucleus, quantile, uniform
from baton.engine.step_sampler import StepSampler
from baton.engine.structured import Grammars
from baton.protocol import RequestKey
from baton.sampling_params import SamplingParams

GREEDY = SamplingParams()
PINNED = (0.8201981478608876, 0.5155139833915998)


def hot(seed: int, temperature: float = 1.0) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=seed)


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], samples: Sequence[int], positions: Sequence[int]
) -> list[int]:
    """One token per row of `[rows, vocab]`, as a step has them, whose requests have `positions` tokens so far."""
    items = []
    for own, number, position in zip(params, samples, positions, strict=True):
        items.append(StepItem(EngineRequest(RequestKey("r", 0, number), [0] * position, own), position))
    return StepSampler(Grammars(None, logits.shape[1], ())).sample(items, logits)


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
    logits = np.array([-np.inf, 0.0, -np.inf, 0.0, -np.inf, -1e30], dtype=np.float32)
    assert draw(logits, 1.0, u) in (1, 3)
    assert draw(logits, 1e-9, u) in (1, 3)
    assert draw(logits, 1e-300, u) in (1, 3)
    assert draw(logits, 1.0, u, top_p=0.999) in (1, 3)
    assert draw(logits, 1.0, u, top_k=4, min_p=1e-9) in (1, 3)


def test_draw_inverts_the_distribution_in_id_order() -> None:
    logits = np.log(np.array([0.25, 0.5, 0.25], dtype=np.float32))
    assert [draw(logits, 1.0, u) for u in (0.0, 0.24, 0.26, 0.74, 0.76, 0.99)] == [0, 0, 1, 1, 2, 2]


def test_a_small_temperature_is_greedy() -> None:
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(1))
    assert sample(logits, [hot(9, 1e-6)], [0], [3]) == sample(logits, [GREEDY], [0], [3])


# --- narrowing: top_k, top_p, min_p ---------------------------------------------------------------


def brute_force(weights: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """Ids that may be drawn, straight from the definitions, in exact fractions."""
    left = {i: Fraction(w) for i, w in enumerate(weights) if w > 0}
    best = max(left.values())
    left = {i: w for i, w in left.items() if w >= Fraction(min_p) * best}
    if top_k:
        kth = sorted(left.values(), reverse=True)[: min(top_k, len(left))][-1]
        left = {i: w for i, w in left.items() if w >= kth}
    if top_p < 1:
        total, mass, kept = sum(left.values()), Fraction(0), set()
        for i in sorted(left, key=lambda i: (-left[i], i)):
            if mass >= Fraction(top_p) * total:
                break
            kept.add(i)
            mass += left[i]
        return kept
    return set(left)


def drawable(weights: list[float], top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> set[int]:
    """Ids that `draw` takes for some number."""
    with np.errstate(divide="ignore"):
        logits = np.log(np.array(weights)).astype(np.float32)
    numbers = np.linspace(0, 1, 40 * len(weights), endpoint=False)
    return {draw(logits, 1.0, float(u), top_k=top_k, top_p=top_p, min_p=min_p) for u in numbers}


EIGHTHS = st.sampled_from([n / 8 for n in range(1, 8)])


@given(st.lists(st.integers(0, 6).map(float), min_size=1, max_size=12).filter(any), EIGHTHS)
def test_the_nucleus_is_what_the_definition_says(weights: list[float], top_p: float) -> None:
    """Small whole weights: every sum and product is exact, so ties and borders are too."""
    assert set(nucleus(np.array(weights, dtype=np.float32), top_p)) == brute_force(weights, 0, top_p, 0)


@given(st.integers(0, 2**32 - 1), st.floats(0.01, 0.99), st.sampled_from([0.1, 1.0, 4.0]))
def test_the_nucleus_of_real_distributions(seed: int, top_p: float, spread: float) -> None:
    weights = np.exp(np.random.default_rng(seed).normal(size=300) * spread).astype(np.float32)
    kept = nucleus(weights, top_p)
    assert int(weights.argmax()) in kept
    assert kept.tolist() == sorted(kept)
    assert set(kept) == brute_force(weights.tolist(), 0, top_p, 0)


@given(
    st.lists(st.integers(0, 60).map(float), min_size=1, max_size=12).filter(any),
    st.integers(0, 14),
    st.sampled_from([0.07, 0.26, 0.52, 0.77]),
)
def test_narrowing_is_what_the_definitions_say(weights: list[float], top_k: int, min_p: float) -> None:
    allowed = brute_force(weights, top_k, 1.0, min_p)
    often = {i for i in allowed if weights[i] >= sum(weights) / 30}
    assert often <= drawable(weights, top_k, 1.0, min_p) <= allowed


def test_equals_of_the_kth_pass_top_k_and_lower_ids_go_first_in_top_p() -> None:
    weights = [1.0, 2, 1, 1, 2]
    assert drawable(weights, top_k=3) == {0, 1, 2, 3, 4}
    assert drawable(weights, top_k=2) == {1, 4}
    assert drawable(weights, top_p=0.7) == {0, 1, 4}
    assert drawable(weights, top_p=0.01) == {1}


@given(st.integers(1, 4 * SPAN), st.integers(0, 2**32 - 1), st.floats(0, 1, exclude_max=True))
def test_a_quantile_is_where_the_sum_exceeds_its_share(size: int, seed: int, u: float) -> None:
    """Whole weights, many of them 0: sums are exact, however they are grouped."""
    weights = np.random.default_rng(seed).integers(0, 3, size).astype(np.float32)
    weights[seed % size] = 1
    at = quantile(weights, u)
    assert weights[at] > 0
    assert float(weights[:at].sum()) <= u * float(weights.sum()) < float(weights[: at + 1].sum())


@pytest.mark.parametrize("size", [1, SPAN - 1, SPAN, SPAN + 1, 3 * SPAN])
def test_the_last_number_takes_the_last_weight(size: int) -> None:
    weights = np.zeros(size, dtype=np.float32)
    weights[size // 2] = 0.1
    for u in (0.0, 0.3, 1 - 2.0**-53):
        assert quantile(weights, u) == size // 2


def test_top_p_is_taken_of_what_top_k_left_and_top_k_of_what_min_p_left() -> None:
    weights = [8.0, 4, 2, 2]
    assert drawable(weights, 2, 0.7) == {0, 1}
    assert drawable(weights, 2, 0.6) == {0}
    assert drawable(weights, 0, 0.6) == {0, 1}
    assert drawable(weights, 0, 0.6, 0.51) == {0}


def test_temperature_comes_before_narrowing() -> None:
    logits = torch.log(torch.tensor([[0.6, 0.3, 0.1]]))

    def drawn(temperature: float) -> set[int]:
        p = SamplingParams(temperature=temperature, seed=1, top_p=0.75)
        return {sample(logits, [p], [0], [i])[0] for i in range(200)}

    assert drawn(0.5) == {0}  # 0.36 : 0.09 : 0.01
    assert drawn(1.0) == {0, 1}
    assert drawn(4.0) == {0, 1, 2}


def test_narrowed_draws_use_the_same_number_in_id_order() -> None:
    logits = np.log(np.array([0.1, 0.4, 0.1, 0.4], dtype=np.float32))
    assert [draw(logits, 1.0, u, top_k=2) for u in (0.0, 0.49, 0.51, 0.99)] == [1, 1, 3, 3]


def test_top_k_1_is_greedy() -> None:
    logits = torch.randn(20, 500, generator=torch.Generator().manual_seed(2))
    params = [SamplingParams(temperature=3.0, seed=i, top_k=1) for i in range(20)]
    assert sample(logits, params, [0] * 20, list(range(20))) == torch.argmax(logits, -1).tolist()


def test_narrowed_rows_do_not_depend_on_their_batch() -> None:
    logits = torch.randn(12, 300, generator=torch.Generator().manual_seed(0))
    params = [
        SamplingParams(temperature=0.5 + i % 3, seed=i, top_k=[0, 5, 50][i % 3], top_p=[1.0, 0.9][i % 2], min_p=i / 50)
        for i in range(12)
    ]
    rows = [0] * 12, list(range(12))
    together = sample(logits, params, *rows)
    alone = [sample(logits[i : i + 1], [params[i]], [0], [i])[0] for i in range(12)]
    assert together == alone == [choose(logits[i].numpy(), params[i], 0, i) for i in range(12)]

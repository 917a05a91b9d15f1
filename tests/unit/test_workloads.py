"""Workloads: arrivals, lengths, prompts and their prefixes, trace files, changes, presets, statistics."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import pickle
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.errors import ConfigError
from baton_experiments.workloads import (
    FORMATS,
    PRESETS,
    ArrivalProcess,
    Arrivals,
    Constant,
    Empirical,
    Fixed,
    Gamma,
    LengthDistribution,
    LogNormal,
    Phase,
    Phased,
    Poisson,
    Prompt,
    Quantiles,
    Recorded,
    RequestShape,
    SharedPrefixes,
    TokenLengths,
    TraceError,
    Uniform,
    Workload,
    describe,
    detect_format,
    generate,
    mean_tokens,
    plan,
    preset,
    read_trace,
)

SHARED = Path(__file__).resolve().parents[3] / "shared" / "workloads"


def shared(name: str) -> Path:
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"the public trace {name} is not on this machine")
    return path


def intervals(arrivals: Arrivals, count: int, seed: int = 0) -> np.ndarray[Any, Any]:
    times = np.fromiter(itertools.islice(arrivals.times(seed), count), dtype=np.float64)
    return np.diff(times, prepend=0.0)


def in_memory(shapes: list[RequestShape]) -> Workload:
    return Workload(lambda counts: iter(shapes), {"kind": "test"})


def shapes_at(*times: float) -> list[RequestShape]:
    return [RequestShape(at_s, 100, 10) for at_s in times]


# Arrivals.


@pytest.mark.parametrize("cv", [0.25, 0.5, 1.0, 2.0, 4.0])
def test_gamma_arrivals_have_the_rate_and_the_burstiness(cv: float) -> None:
    gaps = intervals(Gamma(5.0, cv), 60_000)
    assert (gaps >= 0).all()
    assert 1 / gaps.mean() == pytest.approx(5.0, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.04)


def test_poisson_arrivals_are_memoryless() -> None:
    gaps = intervals(Poisson(2.0), 50_000)
    assert 1 / gaps.mean() == pytest.approx(2.0, rel=0.02)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, rel=0.02)
    for longer in (0.25, 0.5, 1.0):
        assert (gaps > longer).mean() == pytest.approx(math.exp(-2.0 * longer), abs=0.01)
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.02


def test_constant_arrivals_are_evenly_spaced() -> None:
    assert intervals(Constant(4.0), 5).tolist() == [0.25] * 5


@pytest.mark.parametrize("process", [Poisson(1.0), Gamma(1.0, 3.0), Constant(1.0)])
def test_arrivals_at_another_rate_are_the_same_scaled_in_time(process: Poisson | Gamma | Constant) -> None:
    slow = list(itertools.islice(process.times(7), 1000))
    fast = list(itertools.islice(msgspec.structs.replace(process, rate=4.0).times(7), 1000))
    assert fast == [t / 4 for t in slow], "exactly: 4 is a power of two"
    assert list(itertools.islice(process.times(7), 1000)) == slow
    if not isinstance(process, Constant):
        assert list(itertools.islice(process.times(8), 1000)) != slow


def test_phases_change_the_rate_and_repeat() -> None:
    phased = Phased(Poisson(1.0), (Phase(100.0, 2.0), Phase(50.0, 20.0), Phase(25.0, 0.0)))
    counts = [0, 0, 0]
    rounds = 40
    for at_s in phased.times(3):
        if at_s >= rounds * 175:
            break
        within = at_s % 175
        counts[0 if within < 100 else 1 if within < 150 else 2] += 1
    assert counts[0] / (rounds * 100) == pytest.approx(2.0, rel=0.05)
    assert counts[1] / (rounds * 50) == pytest.approx(20.0, rel=0.05)
    assert counts[2] == 0


def test_a_phase_of_rate_one_is_the_process_itself() -> None:
    plain = list(itertools.islice(Poisson(3.0).times(1), 500))
    assert list(itertools.islice(Phased(Poisson(3.0), (Phase(7.0, 1.0),)).times(1), 500)) == pytest.approx(plain)


def test_constant_arrivals_go_through_a_phase_without_a_jump() -> None:
    phased = Phased(Constant(1.0), (Phase(2.5, 1.0), Phase(10.0, 2.0)))
    assert list(itertools.islice(phased.times(0), 4)) == [1.0, 2.0, 2.75, 3.25]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Poisson(0.0), "rate: must be positive"),
        (lambda: Poisson(math.nan), "rate: must be positive"),
        (lambda: Constant(-1.0), "rate: must be positive"),
        (lambda: Gamma(1.0, 0.0), "cv: must be positive"),
        (lambda: Gamma(math.inf, 1.0), "rate: must be positive"),
        (lambda: Phased(Poisson(1.0), ()), "must not all pause"),
        (lambda: Phased(Poisson(1.0), (Phase(1.0, 0.0),)), "must not all pause"),
        (lambda: Phased(Poisson(1.0), (Phase(0.0, 1.0),)), "must have a length"),
        (lambda: Uniform(0, 3), "low: must be at least one token"),
        (lambda: Uniform(4, 3), "low: is above the highest"),
        (lambda: Fixed(0), "must be at least one token"),
        (lambda: LogNormal(0.0, 1.0), "median: must be positive"),
        (lambda: LogNormal(1.0, -1.0), "sigma: must not be negative"),
        (lambda: LogNormal.from_mean_median(10, 20), "mean: must be at least the median"),
        (lambda: LogNormal.from_percentiles((50, 20), (90, 10)), "must rise"),
        (lambda: Quantiles((0.0, 50.0), (1, 2)), "from 0 to 100"),
        (lambda: Quantiles((0.0, 100.0), (3, 2)), "not falling"),
        (lambda: Empirical.of([]), "be one at least"),
        (lambda: Fixed(3).scaled(0.0), "factor: must be positive"),
        (lambda: SharedPrefixes(0, 5), "num: must be positive"),
        (lambda: list(plan([], vocab_size=100, seed=0)), "vocab_size: leaves no ids"),
        (lambda: generate(Poisson(1.0), TokenLengths(Fixed(1), Fixed(1)), seed=0, num_requests=0), "num_requests"),
    ],
)
def test_what_makes_no_sense_is_refused(make: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make()


def test_processes_and_distributions_are_plain_data() -> None:
    processes: list[Any] = [Poisson(1.0), Gamma(2.0, 3.0), Constant(1.0), Phased(Constant(1.0), (Phase(1.0, 2.0),))]
    assert msgspec.convert(msgspec.to_builtins(processes), list[ArrivalProcess]) == processes
    lengths = TokenLengths(LogNormal(10.0, 1.0, high=50), Empirical.of([3, 1, 3]))
    assert msgspec.convert(msgspec.to_builtins(lengths), TokenLengths) == lengths


# Lengths.


DISTRIBUTIONS: list[LengthDistribution] = [
    Fixed(7),
    Uniform(3, 9),
    LogNormal(100.0, 1.2, low=4, high=3000),
    Quantiles((0.0, 50.0, 90.0, 100.0), (20, 100, 400, 5000)),
    Empirical.of([5, 5, 5, 80, 3000]),
]


@given(st.sampled_from(DISTRIBUTIONS), st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True))
def test_lengths_rise_with_the_quantile_and_stay_in_bounds(
    distribution: LengthDistribution, a: float, b: float
) -> None:
    low, high = sorted((a, b))
    assert distribution.longest is not None
    assert 1 <= distribution.at(low) <= distribution.at(high) <= distribution.longest


@given(st.sampled_from(DISTRIBUTIONS), st.floats(0, 1, exclude_max=True), st.sampled_from([0.125, 0.5, 3.0]))
@example(Quantiles((0.0, 50.0, 90.0, 100.0), (20, 100, 400, 5000)), 0.2817530936236745, 0.125)
def test_scaled_lengths_are_the_lengths_scaled(
    distribution: LengthDistribution, quantile: float, factor: float
) -> None:
    scaled = distribution.scaled(factor)
    assert scaled.longest is not None
    assert 1 <= scaled.at(quantile) <= scaled.longest
    # One token for each of two roundings, and where lengths jump a step earlier or later.
    assert scaled.at(quantile) == pytest.approx(distribution.at(quantile) * factor, rel=0.02, abs=1 + factor)


def test_a_lognormal_distribution_has_the_statistics_it_was_made_from() -> None:
    by_median = LogNormal.from_mean_median(300.0, 200.0)
    assert mean_tokens(by_median) == pytest.approx(300, rel=0.01)
    assert by_median.at(0.5) == 200
    by_cv = LogNormal.from_mean_cv(1000.0, 0.7)
    lengths = np.array([by_cv.at((i + 0.5) / 20_000) for i in range(20_000)])
    assert lengths.mean() == pytest.approx(1000, rel=0.01)
    assert lengths.std() / lengths.mean() == pytest.approx(0.7, rel=0.02)
    by_percentiles = LogNormal.from_percentiles((90, 2734), (50, 1020))
    assert (by_percentiles.at(0.5), by_percentiles.at(0.9)) == (1020, 2734)


def test_uniform_and_empirical_lengths_come_as_often_as_they_should() -> None:
    uniform = [Uniform(2, 5).at((i + 0.5) / 4000) for i in range(4000)]
    assert {n: uniform.count(n) for n in uniform} == {2: 1000, 3: 1000, 4: 1000, 5: 1000}
    seen = [3, 1, 3, 900]
    drawn = [Empirical.of(seen).at((i + 0.5) / 4000) for i in range(4000)]
    assert {n: drawn.count(n) for n in drawn} == {1: 1000, 3: 2000, 900: 1000}
    assert mean_tokens(Empirical.of(seen)) == pytest.approx(np.mean(seen))


def test_percentiles_go_through_their_points() -> None:
    quantiles = Quantiles((0.0, 50.0, 90.0, 100.0), (2, 100, 400, 5000))
    assert [quantiles.at(q) for q in (0.0, 0.5, 0.9)] == [2, 100, 400]
    assert quantiles.at(0.7) == 200, "half way in the logarithm"


# Prompts.


def tokens_of(
    shape: RequestShape, *, index: int = 0, seed: int = 0, salt: str = "", vocab_size: int = 30_000
) -> Prompt:
    return next(plan([shape], vocab_size=vocab_size, seed=seed, salt=salt, first_index=index)).prompt


def common(a: Prompt, b: Prompt) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@settings(max_examples=60)
@given(
    shared_blocks=st.lists(st.integers(0, 2**63 - 1), max_size=4),
    own=st.tuples(st.lists(st.integers(0, 2**63 - 1), max_size=3), st.lists(st.integers(0, 2**63 - 1), max_size=3)),
    tails=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    seed=st.integers(0, 5),
)
def test_prompts_share_exactly_the_tokens_of_the_blocks_they_share(
    shared_blocks: list[int], own: tuple[list[int], list[int]], tails: tuple[int, int], seed: int
) -> None:
    size = 32
    blocks = [(*shared_blocks, *mine) for mine in own]
    shapes = [RequestShape(0, len(b) * size + tail, 1, b, size) for b, tail in zip(blocks, tails, strict=True)]
    a, b = (tokens_of(shape, index=i, seed=seed, vocab_size=2**31) for i, shape in enumerate(shapes))
    same = next((i for i, (x, y) in enumerate(zip(*blocks, strict=False)) if x != y), min(map(len, blocks)))
    # In a vocabulary of 2^31 a token beyond the shared ones is the same by chance never.
    assert common(a, b) == same * size


def test_a_cut_block_is_the_beginning_of_the_whole_one() -> None:
    whole, cut = RequestShape(0, 600, 1, (5, 6), 512), RequestShape(0, 530, 1, (5, 6), 512)
    assert tokens_of(whole)[:530] == tokens_of(cut, index=3)[:]
    assert len(tokens_of(cut)) == 530 == len(list(tokens_of(cut)))


def test_prompts_depend_on_seed_and_index_and_only_first_tokens_on_the_salt() -> None:
    shape = RequestShape(0, 50, 1)
    assert tokens_of(shape) == tokens_of(shape)
    assert hash(tokens_of(shape)) == hash(tokens_of(shape))
    assert tokens_of(shape, seed=1)[1:] != tokens_of(shape)[1:]
    assert tokens_of(shape, index=1)[1:] != tokens_of(shape)[1:]
    salted = tokens_of(shape, salt="2.0")
    assert salted[0] != tokens_of(shape)[0]
    assert salted[1:] == tokens_of(shape)[1:]
    together = [tokens_of(RequestShape(0, 60, 1, (9,), 40), index=i, salt="x") for i in range(2)]
    assert common(*together) == 40, "a salt changes prompts that share blocks alike"


def test_a_prompt_is_a_sequence() -> None:
    prompt = tokens_of(RequestShape(0, 20, 1))
    tokens = list(prompt)
    assert prompt.tokens().tolist() == tokens
    assert [prompt[i] for i in range(-3, 3)] == [tokens[i] for i in range(-3, 3)]
    assert prompt[2:5] == tuple(tokens[2:5])
    assert all(type(token) is int for token in tokens)
    with pytest.raises(IndexError):
        prompt[20]


def test_token_ids_fill_the_vocabulary_evenly_but_for_special_tokens() -> None:
    prompt = tokens_of(RequestShape(0, 100_000, 1), vocab_size=150)
    counts = np.bincount(prompt.tokens(), minlength=150)
    assert counts[:100].sum() == 0
    assert len(counts) == 150
    assert (abs(counts[100:] - 2000) < 5 * math.sqrt(2000)).all()


RECORDED_SHAPES = [
    (0.000388801, 680, 5, (0,)),
    (4.262821138, 335, 17, (0,)),
    (4.563272804, 310, 42, (0,)),
    (4.604398727, 68, 3, (2,)),
]
RECORDED_SUMS = [17009189, 8373702, 7612091, 1681927]
RECORDED_TOKENS = (36046, 7773, 37644, 5334, 5818)


def test_seeds_mean_the_same_work_on_every_machine() -> None:
    """Recorded once: a change here makes results of before incomparable."""
    lengths = TokenLengths(LogNormal(300.0, 1.0, high=4000), Quantiles((0.0, 50.0, 100.0), (1, 60, 700)))
    prefixes = SharedPrefixes(3, 64)
    workload = generate(Gamma(2.0, 2.0), lengths, seed=11, num_requests=4, prefixes=prefixes)
    planned = list(workload.plan(vocab_size=49_152, seed=11, salt="2.0"))
    assert [(round(r.at_s, 9), len(r.prompt), r.max_tokens, r.shape.blocks) for r in planned] == RECORDED_SHAPES
    assert [int(r.prompt.tokens().sum()) for r in planned] == RECORDED_SUMS
    assert planned[0].prompt[:5] == RECORDED_TOKENS


# Generated workloads.


def test_arrivals_lengths_and_prefixes_are_drawn_apart() -> None:
    def work(**changed: Any) -> list[RequestShape]:
        arguments: dict[str, Any] = {
            "arrivals": Poisson(1.0),
            "lengths": TokenLengths(Uniform(5, 500), Uniform(5, 500)),
            "seed": 3,
            "num_requests": 50,
            "prefixes": SharedPrefixes(4, 10),
        } | changed
        return list(generate(**arguments))

    base = work()
    assert base == work()
    assert base != work(seed=4)
    bursts = work(arrivals=Gamma(9.0, 2.0))
    assert [(s.prompt_tokens, s.output_tokens, s.blocks) for s in bursts] == [
        (s.prompt_tokens, s.output_tokens, s.blocks) for s in base
    ]
    other_outputs = work(lengths=TokenLengths(Uniform(5, 500), Fixed(1)))
    assert [(s.at_s, s.prompt_tokens, s.blocks) for s in other_outputs] == [
        (s.at_s, s.prompt_tokens, s.blocks) for s in base
    ]
    assert [s.prompt_tokens for s in work(prefixes=None)] == [s.prompt_tokens for s in base]


def test_shared_prefixes_are_shared() -> None:
    lengths = TokenLengths(Fixed(100), Fixed(5))
    workload = generate(Poisson(1.0), lengths, seed=0, num_requests=400, prefixes=SharedPrefixes(4, 64))
    assert describe(workload)["shared_prefix_share"] == pytest.approx(0.64 * (400 - 4) / 400)
    same = [r.prompt for r in workload.plan(vocab_size=50_000, seed=0) if r.shape.blocks == (2,)]
    assert len(same) > 50
    assert {common(same[0], other) for other in same[1:10]} == {64}


def test_a_trace_can_give_the_arrivals_alone() -> None:
    recorded = Recorded([0.0, 0.5, 3.0])
    workload = generate(recorded, TokenLengths(Fixed(10), Fixed(2)), seed=0)
    assert [s.at_s for s in workload] == [0.0, 0.5, 3.0]
    assert workload.description["source"]["arrivals"] == "recorded"
    assert describe(generate(Recorded([]), TokenLengths(Fixed(1), Fixed(1)), seed=0))["requests"] == 0


# Changes.


def test_a_change_of_time_keeps_the_pattern_and_is_stated() -> None:
    workload = in_memory(shapes_at(0.0, 1.0, 4.0, 10.0))
    assert workload.mean_rate() == pytest.approx(0.3)
    fast = workload.at_rate(3.0)
    assert [s.at_s for s in fast] == pytest.approx([0.0, 0.1, 0.4, 1.0])
    assert fast.mean_rate() == pytest.approx(3.0)
    (change,) = fast.description["changes"]
    assert change == {
        "change": "at_rate",
        "from_rate": pytest.approx(0.3),
        "to_rate": 3.0,
        "counts": {"requests": 4},
    }
    assert [s.at_s for s in workload.scale_time(0.5)] == [0.0, 0.5, 2.0, 5.0]
    assert [s.at_s for s in workload.window(1.0, 10.0)] == [0.0, 3.0]


def test_filters_say_how_many_requests_they_left() -> None:
    shapes = [RequestShape(float(i), 10 * (i + 1), i + 1) for i in range(10)]
    workload = in_memory(shapes).keep(max_prompt_tokens=80, max_total_tokens=80, min_output_tokens=2).first(4)
    assert [s.prompt_tokens for s in workload] == [20, 30, 40, 50]
    kept, first = workload.description["changes"]
    assert kept["max_prompt_tokens"] == 80
    assert first["counts"] == {"requests": 4}
    assert json.loads(json.dumps(workload.description))["source"]["kind"] == "test"
    assert workload.description == workload.description, "reading it reads no workload"
    assert in_memory(shapes).first(99).mean_rate() == 1.0


def test_a_sample_is_a_share_of_the_requests_by_seed() -> None:
    workload = in_memory([RequestShape(float(i), i + 1, 1) for i in range(20_000)])
    sample = list(workload.sample(0.3, seed=1))
    assert len(sample) / 20_000 == pytest.approx(0.3, abs=0.01)
    assert list(workload.sample(0.3, seed=1)) == sample != list(workload.sample(0.3, seed=2))


def test_other_arrivals_leave_lengths_in_their_order() -> None:
    workload = in_memory([RequestShape(0.0, n, n) for n in (5, 3, 9)]).with_arrivals(Constant(2.0), seed=0)
    assert [(s.at_s, s.prompt_tokens) for s in workload] == [(0.5, 5), (1.0, 3), (1.5, 9)]
    assert workload.description["changes"][0]["arrivals"] == {"type": "constant", "rate": 2.0}
    two = in_memory([RequestShape(0.0, n, n) for n in (5, 3, 9)]).with_arrivals(Recorded([1.0, 2.0]), seed=0)
    assert [s.prompt_tokens for s in two] == [5, 3]
    assert two.description["changes"][0]["counts"] == {"requests": 2}


@given(
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 30),
    st.sampled_from([0.1, 0.5, 1.0, 2.0, 3.3]),
    st.integers(1, 20),
)
def test_scaled_prompts_still_share_their_blocks(blocks: list[int], tail: int, factor: float, size: int) -> None:
    longer = RequestShape(0.0, len(blocks) * size + tail + 1, 10, tuple(blocks), size if blocks else 0)
    shorter = msgspec.structs.replace(longer, prompt_tokens=max(1, longer.prompt_tokens - tail - size // 2))
    a, b = in_memory([longer, shorter]).scale_lengths(prompt=factor, output=2.0)
    assert a.output_tokens == 20
    assert a.prompt_tokens == pytest.approx(longer.prompt_tokens * factor, abs=len(blocks) + 1 + size)
    if blocks:
        expected = min(len(blocks) * a.block_size, b.prompt_tokens)
        assert tokens_of(a, index=0)[:expected] == tokens_of(b, index=1)[:expected]


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(2, 4000))
def test_clipped_requests_fit_and_lose_no_more_than_needed(prompt: int, output: int, limit: int) -> None:
    workload = in_memory([RequestShape(0.0, prompt, output)]).clip(limit)
    (shape,) = workload
    assert shape.prompt_tokens >= 1 <= shape.output_tokens
    assert shape.prompt_tokens + shape.output_tokens == min(prompt + output, limit)
    counts = workload.description["changes"][0]["counts"]
    assert counts["clipped"] == (prompt + output > limit)
    assert counts["prompt_tokens_cut"] == prompt - shape.prompt_tokens
    assert counts["output_tokens_cut"] == output - shape.output_tokens
    if shape.output_tokens < output:
        assert shape.output_tokens >= limit // 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda w: w.first(0), "first: must be positive"),
        (lambda w: w.window(3.0, 3.0), "window: must begin"),
        (lambda w: w.sample(0.0, seed=0), "sample: must be a share"),
        (lambda w: w.scale_time(-1.0), "factor: must be positive"),
        (lambda w: w.scale_lengths(prompt=0.0), "factor: must be positive"),
        (lambda w: w.at_rate(0.0), "rate: must be positive"),
        (lambda w: w.clip(1), "max_model_len"),
        (lambda w: w.first(1).at_rate(1.0), "no two requests at different times"),
    ],
)
def test_a_change_that_makes_no_sense_is_refused(change: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        change(in_memory(shapes_at(0.0, 1.0)))


# Statistics.


def test_statistics_of_a_small_workload() -> None:
    shapes = [
        RequestShape(1.0, 10, 1, (1, 2, 3), 4),
        RequestShape(2.0, 12, 2, (1, 2, 9), 4),  # 8 shared
        RequestShape(5.0, 6, 3, (1, 2), 4),  # 6 shared
        RequestShape(5.0, 12, 4, (7, 2, 3), 4),  # none: the first block is new
        RequestShape(9.0, 12, 5, (1, 2, 3), 4),  # 12, the last block known whole since the fourth request
    ]
    stats = describe(iter(shapes))
    gaps = np.array([1.0, 3.0, 0.0, 4.0])
    assert stats["requests"] == 5
    assert stats["span_s"] == 8.0
    assert stats["rate"] == 0.5
    assert stats["interval_cv"] == pytest.approx(gaps.std() / gaps.mean())
    assert stats["prompt_tokens"]["mean"] == pytest.approx(52 / 5)
    assert stats["prompt_tokens"]["p50"] == 12
    assert stats["output_tokens"] == {"mean": 3.0, "p50": 3.0, "p90": 4.6, "p99": pytest.approx(4.96), "max": 5.0}
    assert stats["shared_prefix_share"] == (8 + 6 + 12) / 52
    assert describe(plan(shapes, vocab_size=1000, seed=0)) == stats


def test_statistics_of_no_and_one_request() -> None:
    assert describe([]) == {
        "requests": 0,
        "span_s": 0.0,
        "rate": None,
        "interval_cv": None,
        "prompt_tokens": None,
        "output_tokens": None,
        "shared_prefix_share": 0.0,
    }
    one = describe([RequestShape(3.0, 7, 2)])
    assert (one["requests"], one["rate"], one["interval_cv"]) == (1, None, None)
    assert json.loads(json.dumps(one))["prompt_tokens"]["p99"] == 7.0


def test_the_shared_share_is_that_of_the_tokens_themselves() -> None:
    """Counted from token ids by a set of all prefixes seen, without blocks."""
    lengths = TokenLengths(Uniform(5, 40), Fixed(1))
    workload = generate(Poisson(1.0), lengths, seed=1, num_requests=60, prefixes=SharedPrefixes(3, 24))
    seen: set[tuple[int, ...]] = set()
    shared_tokens = total = 0
    for request in workload.plan(vocab_size=2**30, seed=1):
        prompt = tuple(request.prompt)
        total += len(prompt)
        shared_tokens += max((n for n in range(len(prompt) + 1) if n == 0 or prompt[:n] in seen), default=0)
        seen |= {prompt[:n] for n in range(1, len(prompt) + 1)}
    assert describe(workload)["shared_prefix_share"] == shared_tokens / total > 0.3


# Readers.


AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109"
)
AZURE_2024 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 23:59:59.9+00:00,10,1\n2024-05-11T02:00:00.1+02:00,20,2\n"
)
BURSTGPT = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,,2.5,ChatGPT,472,18,490,Conversation log\n45,,0,GPT-4,1087,0,1087,API log\n118.5,7,1,GPT-4,417,276,693,API log\n"
)
SPLITWISE = (
    "request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size\n"
    "0,2,0,0.25,1,2048,28\n1,2,0,1e0,1,15,600\n"
)
VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,374,44\n4.314579,396,109\n"
MOONCAKE = (
    '{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}\n'
    '{"timestamp": 1500, "input_length": 1536, "output_length": 6, "hash_ids": [0, 1, 7]}\n'
)
LLMSERVINGSIM = (
    '{"input_toks": 11, "output_toks": 32, "arrival_time_ns": 1000, "input_tok_ids": [1, 2]}\n'
    '{"input_toks": 12, "output_toks": 48, "arrival_time_ns": 50001001}\n'
)
MEASURED = (
    '{"request_id": "a", "input_toks": 5, "output_toks": 6, "arrival_time": 1777142838.25}\n'
    '{"request_id": "b", "input_toks": 7, "output_toks": 8, "arrival_time": 1777142838.75}\n'
)
DISTSERVE = (
    '[{"start_time": 0.5, "prompt_len": 374, "output_len": 44},\n'
    ' {"start_time": 1.25, "prompt_len": 3, "output_len": 4}]'
)
SHAREGPT = json.dumps(
    [
        {"id": "a", "conversations": [{"from": "human", "value": "one two three"}, {"from": "gpt", "value": "four"}]},
        {"id": "b", "conversations": [{"from": "human", "value": "alone"}]},
        {
            "id": "c",
            "conversations": [
                {"from": "human", "value": "ünï çødé 漢字"},
                {"from": "gpt", "value": "a b c d"},
                {"from": "human", "value": "later messages do not count"},
            ],
        },
    ],
    indent=1,
)
SAMPLES: dict[str, tuple[str, str, list[tuple[float, int, int]]]] = {
    "azure": ("azure", AZURE, [(0.0, 374, 44), (4.314579, 396, 109)]),
    "azure 2024": ("azure", AZURE_2024, [(0.0, 10, 1), (0.2, 20, 2)]),
    "burstgpt": ("burstgpt", BURSTGPT, [(0.0, 472, 18), (113.5, 417, 276)]),
    "splitwise": ("splitwise", SPLITWISE, [(0.0, 2048, 28), (0.75, 15, 600)]),
    "vidur": ("vidur", VIDUR, [(0.0, 374, 44), (4.314579, 396, 109)]),
    "mooncake": ("mooncake", MOONCAKE, [(0.0, 1100, 5), (1.5, 1536, 6)]),
    "llmservingsim": ("llmservingsim", LLMSERVINGSIM, [(0.0, 11, 32), (0.050000001, 12, 48)]),
    "llmservingsim measured": ("llmservingsim", MEASURED, [(0.0, 5, 6), (0.5, 7, 8)]),
    "distserve": ("distserve", DISTSERVE, [(0.0, 374, 44), (0.75, 3, 4)]),
    "sharegpt": ("sharegpt", SHAREGPT, [(0.0, 4, 2), (0.0, 4, 6)]),
}


def rows(workload: Workload) -> list[tuple[float, int, int]]:
    return [(s.at_s, s.prompt_tokens, s.output_tokens) for s in workload]


def written(tmp_path: Path, content: str | bytes, name: str = "trace") -> Path:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


DRESSES: dict[str, Any] = {
    "plain": lambda text: text.encode(),
    "byte order mark": lambda text: b"\xef\xbb\xbf" + text.encode(),
    "CRLF": lambda text: text.replace("\n", "\r\n").encode(),
    "no last line end": lambda text: text.rstrip("\n").encode(),
    "blank lines at the end": lambda text: text.encode() + b"\n\n",
    "gzip": lambda text: gzip.compress(text.encode()),
    "all": lambda text: gzip.compress(b"\xef\xbb\xbf" + text.rstrip("\n").replace("\n", "\r\n").encode()),
}


@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("dress", DRESSES)
def test_each_format_is_recognised_and_read(sample: str, dress: str, tmp_path: Path) -> None:
    name, text, expected = SAMPLES[sample]
    path = written(tmp_path, DRESSES[dress](text))
    assert detect_format(path) == name
    workload = read_trace(path)
    assert rows(workload) == expected
    assert rows(workload) == expected, "as often as one likes"
    assert rows(read_trace(path, format=name)) == expected
    assert workload.description["source"]["format"] == name
    assert workload.description["source"]["counts"]["requests"] == len(expected)
    assert workload.has_times == (name != "sharegpt")


def test_every_format_has_a_sample() -> None:
    assert {name for name, _, _ in SAMPLES.values()} == set(FORMATS)


def test_a_date_keeps_its_hundred_nanoseconds(tmp_path: Path) -> None:
    """In a float of seconds since 1970 the last digit would be lost."""
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [f"2023-11-16 23:59:59.99999{d:02d},5,5" for d in (97, 98, 99)] + ["2023-11-17 00:00:00.0000000,5,5"]
    times = [s.at_s for s in read_trace(written(tmp_path, "\n".join(lines)))]
    assert times == [0.0, 1e-07, 2e-07, 3e-07]


def test_seconds_in_text_keep_their_digits_too(tmp_path: Path) -> None:
    text = "arrived_at,num_prefill_tokens,num_decode_tokens\n1700158623.9799600,1,1\n1700158623.9799601,1,1\n"
    assert [s.at_s for s in read_trace(written(tmp_path, text))] == [0.0, 1e-07]


def test_failed_requests_of_burstgpt_are_counted(tmp_path: Path) -> None:
    workload = read_trace(written(tmp_path, BURSTGPT))
    assert len(list(workload)) == 2
    assert workload.description["source"]["counts"] == {"failed": 1, "requests": 2}


def test_rows_can_be_chosen_by_a_column(tmp_path: Path) -> None:
    path = written(tmp_path, BURSTGPT)
    workload = read_trace(path, where={"Log Type": "API log", "Model": "GPT-4"})
    assert rows(workload) == [(0.0, 417, 276)]
    with pytest.raises(TraceError, match="no column 'Kind'"):
        read_trace(path, where={"Kind": "x"})


def test_mooncake_prompts_share_what_their_hashes_say(tmp_path: Path) -> None:
    a, b = read_trace(written(tmp_path, MOONCAKE)).plan(vocab_size=2**31, seed=0)
    assert (len(a.prompt), len(b.prompt)) == (1100, 1536)
    assert common(a.prompt, b.prompt) == 1024
    assert describe(read_trace(written(tmp_path, MOONCAKE)))["shared_prefix_share"] == 1024 / (1100 + 1536)


def test_lengths_without_times_need_arrivals(tmp_path: Path) -> None:
    path = written(tmp_path, "num_prefill_tokens,num_decode_tokens,num_total_tokens\n3772,54,3826\n2015,156,2171\n")
    workload = read_trace(path)
    assert not workload.has_times
    assert workload.description["source"]["times"] == "none"
    with pytest.raises(ConfigError, match="no arrival times"):
        workload.at_rate(1.0)
    with pytest.raises(ConfigError, match="no arrival times"):
        workload.window(0.0, 1.0)
    timed = workload.with_arrivals(Constant(1.0), seed=0)
    assert rows(timed) == [(1.0, 3772, 54), (2.0, 2015, 156)]
    assert timed.at_rate(10.0).mean_rate() == pytest.approx(10.0)


def test_sharegpt_texts_are_counted_by_a_tokenizer_or_estimated(tmp_path: Path) -> None:
    path = written(tmp_path, SHAREGPT)
    assert read_trace(path).description["source"]["lengths"] == "estimated: 4 tokens for 3 words"
    counted = read_trace(path, count_tokens=len)
    assert counted.description["source"]["lengths"] == "counted by a tokenizer"
    assert [s.prompt_tokens for s in counted] == [len("one two three"), len("ünï çødé 漢字")]
    assert counted.description["source"]["counts"] == {"without an answer": 1, "requests": 2}
    as_lines = "\n".join(json.dumps(entry) for entry in json.loads(SHAREGPT))
    assert rows(read_trace(written(tmp_path, as_lines, "lines"))) == rows(read_trace(path))


@pytest.mark.parametrize(
    ("format", "text", "line", "reason"),
    [
        ("azure", AZURE + "\n2023-11-16 18:15:51.0,abc,5\n", 4, "ContextTokens is not a whole number of tokens: 'abc'"),
        ("azure", AZURE + "\n2023-11-16 18:15:51.0,5.5,5\n", 4, "ContextTokens is not a whole number"),
        ("azure", AZURE + "\n2023-11-16 18:15:51.0,,5\n", 4, "ContextTokens is not a whole number of tokens: ''"),
        ("azure", AZURE + "\n2023-11-16 18:15:51.0,7,0\n", 4, "GeneratedTokens must be at least 1"),
        ("azure", AZURE + "\n2023-11-16 18:15:51.0,-7,1\n", 4, "ContextTokens must be at least 1"),
        ("azure", AZURE + "\n2023-11-16 18:15:51.0,99999999999,1\n", 4, "less than 2.31"),
        ("azure", AZURE + "\n2023-11-16 18:15:51.0,7\n", 4, "has 2 fields, the header 3"),
        ("azure", AZURE + "\n2023-11-16 18:15:51.0,7,1,9\n", 4, "has 4 fields, the header 3"),
        ("azure", AZURE + "\n2023-11-16 18:1", 4, "has 1 fields, the header 3"),
        ("azure", AZURE + "\n2023-13-16 18:15:51.0,7,1\n", 4, "TIMESTAMP is not a date"),
        ("azure", AZURE + "\n2023-11-16 24:15:51.0,7,1\n", 4, "TIMESTAMP is not a date"),
        ("azure", AZURE + "\n16/11/2023 18:15,7,1\n", 4, "TIMESTAMP is not a date"),
        ("azure", AZURE + "\n2023-11-16 18:15:50.9951689,7,1\n", 4, "arrives before the row above"),
        ("azure", AZURE + '\n2023-11-16 18:15:51.0,"7\n', 4, "fields, the header 3"),
        ("azure", AZURE + "\n\n\n2023-11-16 18:15:51.0,x,1\n", 6, "ContextTokens"),
        ("vidur", VIDUR + "nan,1,1\n", 4, "arrived_at is not a time"),
        ("vidur", VIDUR + "1e99999999,1,1\n", 4, "arrived_at is not a time"),
        ("vidur", VIDUR + "soon,1,1\n", 4, "arrived_at is not a time in numbers: 'soon'"),
        ("burstgpt", BURSTGPT + "119,,,GPT-4,-1,5,4,API log\n", 5, "Request tokens must be at least 0"),
        ("mooncake", MOONCAKE + '{"timestamp": 2000, "input_length": 5}\n', 3, "has no output_length"),
        ("mooncake", MOONCAKE + '{"timestamp": 2000, "input_len', 3, "is not JSON"),
        ("mooncake", MOONCAKE + "[1]\n", 3, "is not a JSON object"),
        ("mooncake", MOONCAKE + MOONCAKE.replace("[0, 1, 2]", "[0, 1, 2, 3]"), 3, "names 4 blocks of 512 tokens"),
        ("mooncake", MOONCAKE + MOONCAKE.replace("[0, 1, 2]", '["a"]'), 3, "hash_ids is not a list of whole numbers"),
        ("mooncake", MOONCAKE + MOONCAKE.replace("[0, 1, 2]", "[-1]"), 3, "hash_ids is not a list of whole numbers"),
        ("mooncake", MOONCAKE + MOONCAKE.replace("1100", "true"), 3, "input_length is not a whole number"),
        ("mooncake", MOONCAKE + MOONCAKE.replace('"timestamp": 0', '"timestamp": NaN'), 3, "timestamp is not a time"),
        ("mooncake", MOONCAKE + MOONCAKE.replace('"timestamp": 0', '"timestamp": 1e300'), 3, "timestamp is not a time"),
        ("mooncake", MOONCAKE + "[" * 100_000 + "\n", 3, "is not JSON"),
        ("llmservingsim", LLMSERVINGSIM + '{"sub_requests": []}\n', 3, "wait for one another"),
        ("distserve", DISTSERVE.replace("374", "null"), 1, "has no prompt_len"),
        ("distserve", DISTSERVE.replace('"output_len": 4}', '"output_len": 0}'), 2, "output_len must be at least 1"),
        ("sharegpt", SHAREGPT.replace('"one two three"', "3"), 2, "a message without a text"),
    ],
)
def test_a_malformed_row_is_named_or_left_out_and_counted(
    format: str, text: str, line: int, reason: str, tmp_path: Path
) -> None:
    path = written(tmp_path, text)
    workload = read_trace(path)
    with pytest.raises(TraceError, match=reason) as error:
        list(workload)
    assert (error.value.file, error.value.line) == (str(path), line)
    assert str(error.value).startswith(f"{path}:{line}: ")
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)

    lenient = read_trace(path, format, skip_malformed=True)
    whole = next(expected for name, _, expected in SAMPLES.values() if name == format)
    assert set(rows(lenient)) & set(whole) or format in ("distserve", "sharegpt")
    counts = lenient.description["source"]["counts"]
    assert counts["malformed"] == 1
    assert counts["requests"] == len(rows(lenient))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is of no known format"),
        (b"a,b,c\n1,2,3\n", "is of no known format by its header; name one of azure"),
        (b'{"a": 1}\n', "is of no known format"),
        (b"[]", "is of no known format"),
        (b"\xff\xfeT\x00I\x00", "not UTF-8"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_at_once(content: bytes, reason: str, tmp_path: Path) -> None:
    path = written(tmp_path, content)
    with pytest.raises(TraceError, match=reason):
        read_trace(path)
    with pytest.raises(TraceError):
        read_trace(path, format="azure")


def test_what_goes_wrong_with_a_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"missing\.csv: cannot be read: No such file"):
        read_trace(tmp_path / "missing.csv")
    with pytest.raises(TraceError, match="cannot be read: Is a directory"):
        read_trace(tmp_path)
    path = written(tmp_path, AZURE)
    with pytest.raises(ConfigError, match="format: is unknown"):
        read_trace(path, format="azur")
    with pytest.raises(TraceError, match="has no 'arrival_timestamp', which the format splitwise needs"):
        read_trace(path, format="splitwise")
    with pytest.raises(TraceError, match="has no 'conversations', which the format sharegpt needs; it is no JSON"):
        read_trace(path, format="sharegpt")
    with pytest.raises(ConfigError, match="block_size"):
        read_trace(path, block_size=0)
    cut = written(tmp_path, gzip.compress(AZURE.encode())[:-9], "cut.gz")
    with pytest.raises(TraceError, match="gzip data is damaged or cut"):
        list(read_trace(cut, skip_malformed=True))
    late = written(tmp_path, AZURE.encode() + b"\n" + b"2023-11-16 18:15:51.0,\xff,5\n" * 3, "late")
    with pytest.raises(TraceError, match="not UTF-8"):
        list(read_trace(late, skip_malformed=True))


@pytest.mark.parametrize("broken", [DISTSERVE[:-20], DISTSERVE[:-1], DISTSERVE.replace("1.25", "1.2.5")])
def test_a_broken_array_ends_the_reading_even_where_rows_may_be_left_out(broken: str, tmp_path: Path) -> None:
    workload = read_trace(written(tmp_path, broken), skip_malformed=True)
    read: list[RequestShape] = []
    with pytest.raises(TraceError, match=r"is not JSON from here|ends within its array") as error:
        read.extend(workload)
    assert error.value.line == 2


def test_a_broken_first_row_does_not_hide_the_format(tmp_path: Path) -> None:
    path = written(tmp_path, '{"timestamp": 0, "inp\n' + MOONCAKE)
    assert rows(read_trace(path, skip_malformed=True)) == SAMPLES["mooncake"][2]
    with pytest.raises(TraceError, match=":1: is not JSON"):
        list(read_trace(path))


def test_a_large_array_is_read_across_chunks(tmp_path: Path) -> None:
    entries = [
        {
            "id": str(i),
            "conversations": [
                {"from": "human", "value": 'wörd "quoted\\" ] } ' * (1 + 700 * (i % 37 == 0))},
                {"from": "gpt", "value": "x " * (i + 1)},
            ],
        }
        for i in range(400)
    ]
    for indent in (None, 2):
        path = written(tmp_path, json.dumps(entries, indent=indent, ensure_ascii=indent is None))
        shapes = list(read_trace(path, count_tokens=lambda text: len(text.split())))
        assert [s.output_tokens for s in shapes] == list(range(1, 401))
        assert {s.prompt_tokens for s in shapes} == {4, 4 * 701}


def test_a_long_trace_is_never_held(tmp_path: Path) -> None:
    def peak_of_a_pass(num_rows: int) -> int:
        path = tmp_path / f"{num_rows}.csv.gz"
        with gzip.open(path, "wt") as file:
            file.write("arrived_at,num_prefill_tokens,num_decode_tokens\n")
            file.writelines(f"{i / 8},{1 + i % 4000},{1 + i % 300}\n" for i in range(num_rows))
        workload = read_trace(path).at_rate(100.0).scale_lengths(prompt=0.5).clip(1024)
        tracemalloc.start()
        try:
            for _ in workload.plan(vocab_size=1000, seed=0):
                pass
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak_of_a_pass(500)  # what is loaded once
    assert peak_of_a_pass(6_000) < peak_of_a_pass(1_000) + 100_000, "5,000 shapes held would be 400 kB and more"


def test_abandoned_passes_close_their_file_and_count_nothing(tmp_path: Path) -> None:
    workload = read_trace(written(tmp_path, AZURE))
    iterator: Iterator[RequestShape] = iter(workload)
    next(iterator)
    del iterator
    assert workload.description["source"]["counts"] == {}


# The published figures.


def test_the_azure_traces_have_their_published_means() -> None:
    conv = describe(read_trace(shared("traces/azure2023_conv.csv")))
    assert conv["requests"] == 19_366
    assert round(conv["prompt_tokens"]["mean"], 1) == 1154.7
    assert round(conv["output_tokens"]["mean"], 1) == 211.1
    assert (conv["prompt_tokens"]["p50"], conv["output_tokens"]["p50"]) == (1020, 129)
    assert round(conv["rate"], 2) == 5.53
    code = describe(read_trace(shared("traces/azure2023_code.csv")))
    assert code["requests"] == 8_819
    assert round(code["prompt_tokens"]["mean"], 1) == 2047.8
    assert round(code["output_tokens"]["mean"], 1) == 27.9
    assert code["output_tokens"]["p50"] == 13
    assert round(code["rate"], 2) == 2.57


def test_mooncakes_conversations_share_what_was_published() -> None:
    workload = read_trace(shared("traces/mooncake_conversation_trace.jsonl"))
    stats = describe(workload)
    assert stats["requests"] == 12_031
    assert round(stats["prompt_tokens"]["mean"]) == 12_035
    assert round(stats["output_tokens"]["mean"]) == 343
    assert stats["prompt_tokens"]["max"] == 126_195
    assert round(stats["shared_prefix_share"], 3) == 0.374
    scaled = describe(workload.scale_lengths(prompt=1 / 16))
    assert scaled["shared_prefix_share"] == pytest.approx(0.374, abs=0.005)
    # The tokens themselves, in a vocabulary where nothing is alike by chance.
    first = list(workload.first(300).plan(vocab_size=2**31, seed=0))
    pairs = [(a, b) for a, b in itertools.pairwise(first) if a.shape.blocks[:2] != b.shape.blocks[:2]][:40]
    for a, b in pairs:
        same = int(a.shape.blocks[0] == b.shape.blocks[0])
        assert common(a.prompt, b.prompt) == min(same * 512, len(a.prompt), len(b.prompt))


def test_the_measured_run_has_the_lengths_of_its_trace() -> None:
    lengths = list(read_trace(shared("traces/sharegpt_300_sps10_lengths.csv")))
    measured = list(read_trace(shared("reference/llmservingsim_RTXPRO6000_Llama-3.1-8B/requests.jsonl")))
    assert len(lengths) == 300
    assert [(s.prompt_tokens, s.output_tokens) for s in measured] == [
        (s.prompt_tokens, s.output_tokens) for s in lengths
    ]


def test_distserves_arrivals_are_read() -> None:
    stats = describe(read_trace(shared("reference/simdistserve/azconv300_rate2_seed0.json")))
    assert stats["requests"] == 300
    assert stats["rate"] == pytest.approx(2.0, rel=0.15)
    assert stats["prompt_tokens"]["max"] + stats["output_tokens"]["max"] < 2 * 2048


# Presets.


@pytest.mark.parametrize(
    ("name", "mean_prompt", "mean_output", "median_prompt", "median_output"),
    [
        ("chat", 1154.7, 211.1, 1020, 129),
        ("code", 2047.8, 27.9, 1469, 13),
        ("summarize", 2544, 294.5, 2668, 161),
        ("reasoning", 1523, 3823, None, None),
    ],
)
def test_presets_have_the_statistics_they_cite(
    name: str, mean_prompt: float, mean_output: float, median_prompt: int | None, median_output: int | None
) -> None:
    lengths = preset(name).lengths
    assert mean_tokens(lengths.prompt) == pytest.approx(mean_prompt, rel=0.02)
    assert mean_tokens(lengths.output) == pytest.approx(mean_output, rel=0.02)
    if median_prompt is not None:
        assert (lengths.prompt.at(0.5), lengths.output.at(0.5)) == (median_prompt, median_output)


@pytest.mark.parametrize("name", ["conv", "code"])
def test_azures_presets_are_its_traces(name: str) -> None:
    shapes = list(read_trace(shared(f"traces/azure2023_{name}.csv")))
    lengths = preset({"conv": "chat"}.get(name, name)).lengths
    for distribution, seen in (
        (lengths.prompt, [s.prompt_tokens for s in shapes]),
        (lengths.output, [s.output_tokens for s in shapes]),
    ):
        for percentile in (10, 30, 50, 75, 90, 95, 99):
            assert distribution.at(percentile / 100) == pytest.approx(np.percentile(seen, percentile), rel=0.01, abs=1)


def test_a_reasoning_token_has_the_context_that_deepseek_reports() -> None:
    shapes = generate(Poisson(1.0), preset("reasoning").lengths, seed=0, num_requests=20_000)
    context = tokens = 0.0
    for s in shapes:
        context += s.output_tokens * (s.prompt_tokens + s.output_tokens / 2)
        tokens += s.output_tokens
    assert context / tokens == pytest.approx(4989, rel=0.02)


def test_presets_are_made_smaller_and_say_so() -> None:
    small = preset("chat/8")
    assert small.description["length_factor"] == 0.125
    assert small.description["mean_prompt_tokens"] == pytest.approx(1159 / 8, rel=0.01)
    for name in PRESETS:
        for limit in (8, 512, 2048, 8192, 200_000):
            fitting = preset(name, max_model_len=limit)
            longest = (fitting.lengths.prompt.longest, fitting.lengths.output.longest)
            assert None not in longest
            assert sum(n for n in longest if n is not None) <= limit
            assert math.log2(fitting.factor).is_integer()
        assert preset(name, max_model_len=200_000).factor == 1.0
    with pytest.raises(ConfigError, match="must hold a prompt"):
        preset("chat", max_model_len=1)


@pytest.mark.parametrize("name", ["chats", "", "chat/", "chat/0", "chat/x", "chat/-2", "chat/1.5"])
def test_a_name_that_is_no_preset_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="chat, code, summarize, reasoning"):
        preset(name)

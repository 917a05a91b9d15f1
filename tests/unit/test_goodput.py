"""Attainment, goodput and their intervals, against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from baton.errors import ConfigError
from baton_experiments.bootstrap import Bootstrap, blocks_of, excludes_zero
from baton_experiments.columns import Columns, distribution
from baton_experiments.goodput import (
    DEFINITIONS,
    LinearReference,
    attainment,
    goodput,
    slowdowns,
    splitwise_slack,
)
from baton_experiments.records import RequestRecord, Setting, Slo
from baton_experiments.study import Study
from tests.made_up_records import point, record

SLO = Slo(ttft_ms=200, tbt_ms=30)
ALONE = LinearReference(ttft_base_ms=50, ttft_per_token_ms=0.5, tbt_ms=10)
"""100 ms until the first token of a prompt of 100 tokens."""


def good(name: str, one: RequestRecord, slo: Slo = SLO) -> bool:
    return attainment([one], slo, name) == 1.0


def test_distserve_asks_for_ttft_and_the_mean_gap() -> None:
    assert good("distserve", record(200, [30, 30])), "limits are kept where they are met exactly"
    assert good("distserve", record(200, [10, 50]))
    assert not good("distserve", record(200.1, [30, 30]))
    assert not good("distserve", record(200, [30, 30.1]))
    assert good("distserve", record(150, [])), "one token waits for no other"
    assert not good("distserve", record(error="overloaded: full"))


def test_vllm_adds_the_end_to_end_limit_where_it_is_given() -> None:
    one = record(150, [20, 20])
    assert good("vllm", one)
    assert good("vllm", one, Slo(200, 30, e2el_ms=190))
    assert not good("vllm", one, Slo(200, 30, e2el_ms=189))
    with pytest.raises(ConfigError, match="e2el_ms"):
        Slo(200, 30, e2el_ms=0)


def test_a_token_by_its_deadline_may_use_what_was_early_before() -> None:
    late_but_saved_up = record(100, [10, 10, 100])  # at 100, 110, 120, 220 ms; due at 200, 230, 260, 290
    assert good("per_token", late_but_saved_up)
    assert not good("distserve", late_but_saved_up)
    stall_first = record(190, [100, 1, 1, 1])  # the second token at 290, due at 230
    assert not good("per_token", stall_first)
    assert good("distserve", stall_first)


def test_per_token_is_a_fluidity_index_of_one() -> None:
    def fluidity(times: list[float], slo: Slo) -> float:
        """Etalon's: time of each token since the one before; deadlines begin anew after a miss."""
        slack, missed, deadlines = 0.0, 0, 0
        for number, took in enumerate(times):
            due = slo.ttft_ms if number == 0 else slo.tbt_ms
            if took <= due + slack + 1e-9:
                slack += due - took
                deadlines += 1
            else:
                misses = int((took - slack - due) // slo.tbt_ms) + 1
                missed, deadlines, slack = missed + misses, deadlines + misses, 0.0
        return 1 - missed / deadlines

    rng = np.random.default_rng(0)
    some = [record(rng.uniform(0, 300), rng.exponential(24, rng.integers(0, 12)).tolist()) for _ in range(300)]
    expected = [fluidity([r.ttft_ms or 0.0, *r.tbt_ms], SLO) == 1.0 for r in some]
    assert [good("per_token", r) for r in some] == expected
    assert 0.1 < np.mean(expected) < 0.9
    together = [
        r.__class__(**{**{f: getattr(r, f) for f in r.__struct_fields__}, "index": i}) for i, r in enumerate(some)
    ]
    assert attainment(together, SLO, "per_token") == pytest.approx(np.mean(expected)), "all at once as one by one"


def test_splitwise_judges_a_set_by_nine_slowdowns() -> None:
    twice = [record(200, [10, 10], index=i) for i in range(10)]
    found = slowdowns(Columns.of(twice), ALONE)
    assert found["ttft"] == pytest.approx(2.0)
    assert found["tbt"] == pytest.approx(1.0)
    assert found["e2e"] == pytest.approx(220 / 120)
    slack = splitwise_slack(Columns.of(twice), ALONE)
    assert slack["ttft_p50"] == pytest.approx(1.0)
    assert slack["ttft_p99"] == pytest.approx(3.0)
    assert slack["tbt_p90"] == pytest.approx(1.5)
    assert slack["e2e_p50"] == pytest.approx(1.25 * 120 / 220)
    assert attainment(twice, SLO, "splitwise", ALONE) == pytest.approx(7 / 9), "end to end misses at p50 and p90"
    alone = [record(100, [10, 10], index=i) for i in range(10)]
    assert attainment(alone, SLO, "splitwise", ALONE) == 1.0
    one_failed = [*alone[1:], record(error="worker_lost: gone")]
    assert attainment(one_failed, SLO, "splitwise", ALONE) < 1.0
    assert np.isnan(attainment(alone, SLO, "splitwise")), "nothing to compare with"


def test_what_a_request_takes_alone_is_estimated_from_the_fastest() -> None:
    rng = np.random.default_rng(1)
    some = []
    for index, prompt in enumerate(rng.integers(100, 2000, 200)):
        queue = float(rng.exponential(500))
        first = 20 + 0.3 * prompt
        stages = {"prefill_queue": queue, "prefill": first}
        gaps = 12 + rng.exponential(3, 10)
        some.append(record(first + queue, gaps.tolist(), prompt_tokens=int(prompt), index=index, stages=stages))
    found = LinearReference.estimated([Columns.of(some)])
    assert found is not None
    assert found.ttft_base_ms == pytest.approx(20, rel=0.1)
    assert found.ttft_per_token_ms == pytest.approx(0.3, rel=0.05)
    assert 12 < found.tbt_ms < 15
    assert LinearReference.estimated([Columns.of([record(100, [])])]) is None


def test_of_requests_that_ran_alone_the_median_is_taken() -> None:
    some = [record(first, [gap] * 3, index=i) for i, (first, gap) in enumerate([(100, 10), (110, 11), (500, 50)])]
    found = LinearReference.estimated([Columns.of(some)], quantile=0.5, source="alone")
    assert found is not None
    assert found.ttft(np.array([100])) == pytest.approx(110)
    assert (found.tbt_ms, found.source) == (11, "alone")


def test_requests_of_one_token_miss_no_limit_of_gaps() -> None:
    some = [record(100, [], index=i) for i in range(10)]
    slack = splitwise_slack(Columns.of(some), ALONE)
    assert slack["tbt_p99"] == np.inf
    assert attainment(some, SLO, "splitwise", ALONE) == 1.0
    study = Study(some, SLO, reference=ALONE)
    assert study.goodput_of(Setting("split:1+1"), "splitwise").at_least


def test_definitions_disagree_on_the_same_requests() -> None:
    some = [record(150, [5, 5, 90], index=0), record(190, [60, 1, 1], index=1), record(100, [45, 45, 45], index=2)]
    found = {name: attainment(some, SLO, name, ALONE) for name in DEFINITIONS}
    assert found["distserve"] == pytest.approx(1 / 3)  # the second
    assert found["per_token"] == pytest.approx(
        2 / 3
    )  # the first, and the third: 145, 190, 235 are due at 230, 260, 290
    assert found["splitwise"] not in (found["distserve"], found["per_token"])


def test_goodput_is_where_a_line_between_two_rates_crosses() -> None:
    assert goodput({1.0: 1.0, 2.0: 0.95, 3.0: 0.85}, 0.9) == (found := goodput({3.0: 0.85, 2.0: 0.95, 1.0: 1.0}, 0.9))
    assert found.rate == pytest.approx(2.5)
    assert not found.at_least
    assert goodput({1.0: 1.0, 2.0: 0.95}, 0.9).at_least
    assert goodput({1.0: 1.0, 2.0: 0.95}, 0.9).rate == 2.0
    missed = goodput({1.0: 0.89, 2.0: 0.95}, 0.9)
    assert (missed.rate, missed.at_least) == (0.0, False), "missed at the lowest rate, whatever comes after"
    assert goodput({1.0: 1.0, 2.0: 0.8, 3.0: 1.0}, 0.9).rate == pytest.approx(1.5), "the first fall counts"
    assert goodput({1.0: 1.0, 2.0: float("nan")}, 0.9).rate == 1.0
    assert goodput({}, 0.9).rate == 0.0
    assert goodput({1.0: 0.9}, 0.9).at_least


def test_distributions_have_percentiles_and_the_maximum() -> None:
    assert distribution(range(101)) == {"p50": 50.0, "p90": 90.0, "p99": 99.0, "max": 100.0}
    assert distribution([]) is None


# --- intervals ------------------------------------------------------------------------------------------


def runs(num_seeds: int, num_requests: int) -> dict[tuple[float, int], range]:
    return {(1.0, seed): range(num_requests) for seed in range(num_seeds)}


def test_few_seeds_draw_requests_too_and_say_so() -> None:
    assert Bootstrap(runs(24, 30)).method == "seeds"
    assert Bootstrap(runs(24, 30)).num_units == 24
    assert Bootstrap(runs(3, 30)).method == "seeds, and requests within each"
    assert Bootstrap(runs(1, 30)).method == "requests of one seed"
    assert Bootstrap(runs(1, 30)).num_units == blocks_of(30) == 10
    for seeds in (1, 3, 24):
        weights = Bootstrap(runs(seeds, 30)).weights
        assert np.all(weights.sum(axis=1) == weights.sum(axis=1)[0]), "every replicate is as large as the experiment"
        assert weights.mean() == pytest.approx(1.0)


def test_the_same_records_give_the_same_interval() -> None:
    some = point("split:1+1", 1.0, good=0.8)
    one, other = (Study(some, SLO).goodput_of(Setting("split:1+1")) for _ in range(2))
    assert one.interval == other.interval
    assert np.array_equal(one.replicates, other.replicates)


@pytest.mark.parametrize(("num_seeds", "num_requests"), [(1, 20), (1, 200), (3, 70), (5, 40), (24, 20)])
def test_intervals_hold_the_truth_about_as_often_as_they_say(num_seeds: int, num_requests: int) -> None:
    held = {"mean": 0, "median": 0}
    for trial in range(100):
        bootstrap = Bootstrap(runs(num_seeds, num_requests), replicates=300, seed=trial)
        rng = np.random.default_rng(trial)
        values = rng.exponential(1.0, num_seeds * num_requests)
        seeds = np.repeat(np.arange(num_seeds), num_requests)
        units = bootstrap.units(1.0, seeds, np.tile(np.arange(num_requests), num_seeds))
        for name, replicates, truth in (
            ("mean", bootstrap.means([values], units)[:, 0], 1.0),
            ("median", bootstrap.quantiles(values, units, [0.5])[0], np.log(2)),
        ):
            interval = bootstrap.interval(replicates)
            assert interval is not None
            held[name] += interval[0] <= truth <= interval[1]
    assert min(held.values()) >= 85


def test_quantiles_of_replicates_are_those_of_what_was_drawn() -> None:
    bootstrap = Bootstrap(runs(1, 400), replicates=20)
    values = np.random.default_rng(0).lognormal(size=400)
    units = bootstrap.units(1.0, np.zeros(400, int), np.arange(400))
    found = bootstrap.quantiles(values, units, [0.5, 0.9])
    for replicate in range(20):
        drawn = np.repeat(values, bootstrap.weights[replicate, units].astype(int))
        assert found[0, replicate] == pytest.approx(np.quantile(drawn, 0.5), rel=0.05)
        assert found[1, replicate] == pytest.approx(np.quantile(drawn, 0.9), rel=0.08)
    same = bootstrap.quantiles(np.full(400, 3.0), units, [0.99])
    assert np.all(same == 3.0)


def test_differences_are_paired_over_the_same_requests() -> None:
    rng = np.random.default_rng(2)
    waits = rng.exponential(100, 60)
    some = [record(50 + w, placement="colocated:2", index=i) for i, w in enumerate(waits)]
    some += [record(55 + w, placement="split:1+1", index=i) for i, w in enumerate(waits)]
    study = Study(some, SLO)
    a, b = Setting("split:1+1"), Setting("colocated:2")
    apart = [study.bootstrap.interval(study.quantile_replicates(s, 1.0, "ttft", 0.5)) for s in (a, b)]
    assert apart[0] is not None
    assert apart[1] is not None
    assert apart[0][0] < apart[1][1], "each by itself is uncertain"
    interval = study.quantile_difference(a, b, 1.0, "ttft", 0.5)
    assert interval == pytest.approx((5.0, 5.0), abs=1e-6)
    assert excludes_zero(interval)
    assert not excludes_zero((-1.0, 2.0))
    assert not excludes_zero(None)


def test_two_requests_tell_no_interval() -> None:
    study = Study([record(index=0), record(index=1)], SLO)
    assert study.goodput_of(Setting("split:1+1")).interval is None
    assert study.bootstrap.interval(study.share_replicates(Setting("split:1+1"), 1.0, "distserve")) is None


def test_an_interval_without_an_upper_end() -> None:
    some = point("split:1+1", 1.0, good=1.0) + point("split:1+1", 2.0, good=0.9)
    found = Study(some, SLO).goodput_of(Setting("split:1+1"))
    assert found.at_least
    assert found.interval is not None
    assert found.interval[0] < 2.0
    assert found.interval[1] is None


def test_warm_up_is_left_out() -> None:
    some = point("split:1+1", 1.0, good=1.0)
    ramp = [record(5000, placement="split:1+1", index=100 + i, warmup=True) for i in range(20)]
    study = Study(some + ramp, SLO)
    assert study.num_warmup == 20
    assert study.kept(Setting("split:1+1"), 1.0, "distserve") == 1.0


def test_what_ran_at_some_rates_only_still_counts() -> None:
    some = point("split:1+1", 1.0, good=1.0) + point("split:1+1", 2.0, good=0.5, seeds=(0,), num_requests=21)
    study = Study(some, SLO)
    found = study.goodput_of(Setting("split:1+1"))
    assert 1.0 < found.rate < 2.0
    assert found.interval is not None

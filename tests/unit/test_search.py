"""The placement search: optima that can be computed by hand, its parts, logs, and what is written."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import random
import signal
import subprocess
import sys
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import yaml
from typer.testing import CliRunner

from baton.config import parse_config
from baton.engine.request import StepPlan
from baton.errors import ConfigError
from baton_cli.main import app
from baton_cli.plan import Options, _config, _sentence
from baton_cluster.latency import LatencyModel, LinkModel
from baton_cluster.logs import _FORMAT, JsonFormatter
from baton_experiments.columns import Columns
from baton_experiments.goodput import DEFINITIONS
from baton_experiments.profiles.profile import EngineProfile
from baton_experiments.records import RequestRecord, Slo
from baton_experiments.results import write_records
from baton_experiments.search import plot
from baton_experiments.search.baselines import high_affinity, low_affinity
from baton_experiments.search.candidate import Candidate, Pool, all_candidates, parse_candidate, sampled_counts
from baton_experiments.search.emit import cluster_yaml, is_emitted
from baton_experiments.search.fronts import latency_front, pareto, points, total_front
from baton_experiments.search.jobs import Task, perform, runner_of
from baton_experiments.search.phases import Curve, estimate
from baton_experiments.search.planner import Plan, Planner, Row
from baton_experiments.search.rates import Attainment, crossing, highest_rate, neighbours
from baton_experiments.search.recorded import read_recorded
from baton_experiments.search.replay import Replayer
from baton_experiments.search.run import Outcome, Setup, _Judge, run_alone, run_at
from baton_experiments.search.study import Load, Study, usable_profiles
from baton_experiments.workloads import Constant, Fixed, Poisson, RequestShape, TokenLengths, TraceError, generate

PROMPT, OUTPUT, SLOTS = 100, 11, 8
PREFILL_S, DECODE_S = 1e-3, 8 / 300
"""A prompt takes 0.1 s, so a prefill worker 10 requests/s; 8 slots of 10 gaps each take 0.267 s: 30 requests/s."""


class TwoPhases(msgspec.Struct, frozen=True):
    """A step takes `prefill_s` a token of its chunks, and `decode_s` if it has decodes, however many."""

    prefill_s: float = PREFILL_S
    decode_s: float = DECODE_S

    def step_s(self, plan: StepPlan) -> float:
        chunks = [item.num_tokens for item in plan.items if item.num_tokens > 1]
        return self.prefill_s * sum(chunks) + (self.decode_s if len(chunks) < len(plan.items) else 0.0)


def profile(latency: LatencyModel, tp: int = 1, kv_tokens: int | None = 10_000) -> EngineProfile:
    return EngineProfile(f"made up, TP {tp}", "made-up", "none", latency, 1024, kv_tokens, tp)


def study(**changes: Any) -> Study:
    lengths = TokenLengths(Fixed(PROMPT), Fixed(OUTPUT))
    shapes = list(generate(Constant(1.0), lengths, seed=0, num_requests=150))
    settings: dict[str, Any] = {
        "profiles": {1: profile(TwoPhases())},
        "load": Load.of(shapes),
        "slo": Slo(150, 40),
        "config": parse_config({"engine": {"max_batch_requests": SLOTS}}),
        "link": LinkModel(latency_s=1e-5, bytes_per_s=1e12),
        "num_requests": 60,
        "chunk_tokens": (400,),
    }
    return Study(**settings | changes)


# --- candidates and rates ---------------------------------------------------------------------------


def test_candidates_have_names_that_are_read_back() -> None:
    found = all_candidates((1, 2), 4)
    # Pools: 1..4 of one GPU, 1..2 of two. Split: pairs of at most 4 GPUs together.
    sizes = [1, 2, 3, 4, 2, 4]
    assert len(found) == sum(a + b <= 4 for a in sizes for b in sizes) + len(sizes)
    assert [parse_candidate(c.name) for c in found] == found
    assert len({c.name for c in found}) == len(found)
    assert parse_candidate("split:2xtp4+3xtp2") == Candidate(Pool(2, 4), Pool(3, 2))
    assert parse_candidate("split:2xtp4+3xtp2").gpus == 14
    assert parse_candidate("colocated:3").name == "colocated:3"
    for name in ("split:3", "colocated:0", "split:1+1xtp0", "mixed:1+1", ""):
        with pytest.raises(ConfigError, match="is no placement"):
            parse_candidate(name)
    assert [sampled_counts("prefill", n) for n in (1, 3, 4, 15)] == [[1], [1, 3], [1, 4], [1, 4, 15]]
    assert [sampled_counts("decode", n) for n in (1, 3, 15)] == [[1], [1, 3], [1, 4]]
    assert [sampled_counts("both", n) for n in (1, 3, 16)] == [[1], [3], [4]]


@pytest.mark.parametrize("guess", [0.001, 0.9, 1.0, 7.0, 500.0])
def test_the_highest_rate_is_found_from_anywhere(guess: float) -> None:
    tried: list[float] = []

    def keeps(rate: float) -> bool:
        tried.append(rate)
        return rate <= 7.0

    kept, missed = highest_rate(keeps, guess, tolerance=0.02)
    assert kept <= 7.0 < missed <= kept * 1.02
    assert {kept, missed} <= set(tried)
    assert len(tried) == len(set(tried)) < 25


def test_a_promise_that_always_or_never_holds_has_no_crossing() -> None:
    assert highest_rate(lambda rate: False, 1.0, tolerance=0.1)[0] == 0
    assert highest_rate(lambda rate: True, 1.0, tolerance=0.1)[1] == float("inf")


def test_attainment_lies_between_rates_and_never_rises() -> None:
    attainment = Attainment([(0, 1.0), (10, 0.9), (5, 0.8), (20, 0.5)])
    assert [attainment.at(rate) for rate in (0, 5, 10, 15, 20, 21)] == pytest.approx([1, 0.9, 0.9, 0.7, 0.5, 0])
    values = [attainment.at(rate / 7) for rate in range(200)]
    assert values == sorted(values, reverse=True)
    assert crossing(attainment.at, 0.7, 0, 20) == pytest.approx(15)
    assert crossing(attainment.at, 0.4, 0, 20) == 20
    assert crossing(lambda rate: 0.3, 0.4, 0, 20) == 0
    assert neighbours([1, 4, 16], 4) == (4, 4, 0.0)
    assert neighbours([1, 4, 16], 2) == (1, 4, 0.5)
    assert neighbours([2, 4], 1) == (2, 2, 0.0)


# --- single runs ------------------------------------------------------------------------------------


def test_a_phase_is_busy_as_much_as_its_steps_take() -> None:
    outcome = run_at(study(), Setup(Candidate(prefill=Pool(2)), 400), 10.0, num_requests=200)
    assert outcome.good == 1
    assert outcome.busy["prefill"] == pytest.approx(10 * 0.1 / 2, rel=0.02)
    assert outcome.ttft_ms is not None
    assert outcome.ttft_ms["max"] == pytest.approx(100, abs=0.2)
    assert outcome.tbt_ms is None
    outcome = run_at(study(), Setup(Candidate(decode=Pool(1)), 400), 10.0, num_requests=200)
    assert outcome.good == 1
    assert outcome.ttft_ms is not None and outcome.tpot_ms is not None
    assert outcome.ttft_ms["max"] < 1
    assert DECODE_S * 1e3 <= outcome.tpot_ms["p50"] < 1.1 * DECODE_S * 1e3


def test_a_run_that_cannot_be_won_any_more_is_stopped() -> None:
    setup = Setup(Candidate(prefill=Pool(1)), 400)
    stopped = run_at(study(), setup, 20.0, num_requests=200)
    whole = run_at(study(), setup, 20.0, num_requests=200, may_stop=False)
    assert stopped.stopped and not whole.stopped
    assert whole.good < 0.5 < stopped.good < 0.9
    assert whole.missed_ttft == pytest.approx(1 - whole.good)


@pytest.mark.parametrize("candidate", [Candidate(Pool(1), Pool(1)), Candidate(both=Pool(1)), Candidate(decode=Pool(1))])
def test_attainment_does_not_rise_with_the_rate(candidate: Candidate) -> None:
    setup = Setup(candidate, 400)
    rates = (2.0, 5.0, 9.0, 12.0, 20.0, 40.0)
    shares = [run_at(study(), setup, rate, num_requests=100, may_stop=False).good for rate in rates]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == 1 and shares[-1] < 0.6


def test_requests_alone_are_served_as_fast_as_can_be() -> None:
    alone = run_alone(study(), Setup(Candidate(Pool(1), Pool(1)), 400), num_requests=20)
    assert (alone.requests, alone.good, alone.rate) == (20, 1, 0)
    assert alone.latency_s == pytest.approx(0.1 + 10 * DECODE_S, rel=0.01)
    assert alone.busy_s_per_request == pytest.approx(0.1 + 10 * DECODE_S, rel=0.01)


def test_the_requests_of_a_rate_are_those_of_another_stretched_and_go_round() -> None:
    load = Load((0.0, 1.0, 3.0), (5, 6, 7), (1, 2, 3))
    shapes = load.at_rate(load.mean_rate)
    first = [next(shapes) for _ in range(7)]
    assert [s.prompt_tokens for s in first] == [5, 6, 7, 5, 6, 7, 5]
    assert [s.at_s for s in first] == pytest.approx([0, 1, 3, 4.5, 5.5, 7.5, 9])
    faster = load.at_rate(2 * load.mean_rate)
    assert [next(faster).at_s for _ in range(7)] == pytest.approx([s.at_s / 2 for s in first])
    assert [s.at_s for s in load.at_rate(None)] == [0, 1, 3]


def test_requests_are_judged_as_in_experiments() -> None:
    draw = random.Random(4)
    some = study(slo=Slo(100, 20), num_requests=300)
    requests, records = [], []
    for number in range(300):
        gaps = [draw.expovariate(1 / 0.02) for _ in range(draw.randrange(30))]
        times = list(accumulate([5.0 + draw.expovariate(1 / 0.08), *gaps]))
        requests.append(
            SimpleNamespace(number=number, error=None, submitted_at=5.0, token_times=times, decode_worker="w")
        )
        records.append(
            RequestRecord(
                placement="p",
                rate=1.0,
                seed=0,
                index=number,
                at_s=0.0,
                prompt_tokens=1,
                output_tokens=len(times),
                ttft_ms=(times[0] - 5) * 1e3,
                latency_ms=(times[-1] - 5) * 1e3,
                tbt_ms=[(b - a) * 1e3 for a, b in pairwise(times)],
                stages_ms={},
                residual_ms=None,
                prefill_worker="w",
                decode_worker="w",
                kv_bytes=0,
            )
        )
    for name in ("distserve", "per_token"):
        judge = _Judge(msgspec.structs.replace(some, definition=name), 0, 300, may_stop=False)
        for request in requests:
            judge.on_end(request)  # type: ignore[arg-type]
        good = DEFINITIONS[name].good
        assert good is not None
        expected = int(good(Columns.of(records), some.slo).sum())
        assert 300 - judge.num_missed == expected
        assert 0 < expected < 300


# --- phases put together ----------------------------------------------------------------------------


def curve(candidate: Candidate, goodput: float, *, alone: float = 1.0) -> Curve:
    outcomes = (Outcome(0.0, 100, alone), Outcome(goodput, 100, 0.9), Outcome(goodput * 1.05, 100, 0.89, stopped=True))
    return Curve(Setup(candidate, 400), goodput, outcomes)


def curves(prefill: dict[Pool, float], decode: dict[Pool, float]) -> dict[Candidate, Curve]:
    found = {Candidate(prefill=pool): curve(Candidate(prefill=pool), goodput) for pool, goodput in prefill.items()}
    return found | {Candidate(decode=pool): curve(Candidate(decode=pool), goodput) for pool, goodput in decode.items()}


def test_an_estimate_is_below_the_slower_phase() -> None:
    found = curves({Pool(1): 10.0, Pool(4): 48.0}, {Pool(1): 30.0})
    expected = estimate(Candidate(Pool(2), Pool(1)), found, 0.9)
    assert expected is not None
    assert expected.limited_by == "prefill"
    # Per worker 10 alone and 12 of four: 11 of two.
    assert expected.phase_goodput == pytest.approx(2 * 11, rel=0.01)
    # Both fall in a straight line from 1 to 0.9: together they have 0.9 where the product has.
    p, d = 1 / expected.phase_goodput, 1 / 30
    rate = expected.goodput
    assert (1 - 0.1 * rate * p) * (1 - 0.1 * rate * d) == pytest.approx(0.9, abs=2e-3)
    assert rate < expected.phase_goodput
    assert estimate(Candidate(Pool(1, 2), Pool(1)), found, 0.9) is None


def test_algorithms_of_distserve_place_the_best_degrees() -> None:
    # Per GPU: prefill 10 and 15, decode 30 and 20.
    found = curves({Pool(1, 1): 10.0, Pool(1, 2): 30.0}, {Pool(1, 1): 30.0, Pool(1, 2): 40.0})
    first = high_affinity(found, 9)
    assert first is not None
    assert (first.candidate, first.goodput) == (Candidate(Pool(3, 2), Pool(3, 1)), 90.0)
    second = low_affinity(found, 9, 4)
    assert second is not None
    # The same pair, three GPUs, one to a node of four.
    assert (second.candidate, second.goodput) == (Candidate(Pool(2, 2), Pool(2, 1)), 60.0)
    assert high_affinity(found, 2) is None
    assert low_affinity(found, 9, 1) is None


# --- the search -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def four_gpus() -> tuple[Plan, list[tuple[float, float, str]]]:
    """A plan and what was told of its progress."""
    seen: list[tuple[float, float, str]] = []
    plan = Planner(study(), max_gpus=4, on_progress=lambda *step: seen.append(step)).run()
    return plan, seen


def test_the_known_ratio_is_found(four_gpus: tuple[Plan, list[tuple[float, float, str]]]) -> None:
    plan, seen = four_gpus
    assert plan.winner == Candidate(Pool(3), Pool(1))
    winner = plan.row(plan.winner)
    assert winner is not None and winner.is_simulated
    assert 0.93 * 30 < winner.goodput <= 30.3
    assert winner.per_gpu == winner.goodput / 4
    assert winner.attainment is not None and winner.attainment >= 0.9
    assert winner.ttft_ms is not None and winner.tbt_ms is not None
    by_name = {row.name: row for row in plan.rows}
    assert len(by_name) == len(all_candidates((1,), 4))
    for name, limit, expected in (
        ("split:1+1", "prefill compute", 10),
        ("split:2+1", "prefill compute", 20),
        ("split:1+3", "prefill compute", 10),
    ):
        assert by_name[name].goodput == pytest.approx(expected, rel=0.08)
        assert by_name[name].bottleneck == limit
    assert all(0 < row.goodput <= (row.phase_goodput or row.goodput) for row in plan.rows)
    assert 0 < by_name["colocated:4"].per_gpu < 6
    # DistServe's first algorithm finds it too, as phases do not interact here.
    assert next((b.candidate.name, b.simulated) for b in plan.baselines) == ("split:3+1", winner.goodput)
    assert all(0 <= done <= total for done, total, _ in seen)
    assert seen[-1][0] == seen[-1][1]


def test_more_workers_never_attain_less(four_gpus: tuple[Plan, list[tuple[float, float, str]]]) -> None:
    plan, _ = four_gpus
    goodput = {row.candidate: row.goodput for row in plan.rows}
    for candidate, rate in goodput.items():
        for other, more in goodput.items():
            if other.both and candidate.both and other.both.workers > candidate.both.workers:
                assert more > rate
            if candidate.prefill and candidate.decode and other.prefill and other.decode:
                larger = other.prefill >= candidate.prefill and other.decode >= candidate.decode
                assert not larger or more >= rate * 0.9


def test_the_highest_total_may_be_another_placement() -> None:
    # 30/s on 4 GPUs, 40/s on 6.
    named = [parse_candidate(name) for name in ("split:3+1", "split:4+2")]
    small = study()
    assert Planner(small, max_gpus=6, named=named).run().winner == named[0]
    assert Planner(small, max_gpus=6, named=named, objective="total").run().winner == named[1]


def test_a_degree_that_pays_is_taken_for_the_phase_where_it_does() -> None:
    # Prefill on two GPUs is three times as fast, decode is not faster: 30/s on three GPUs.
    profiles = {1: profile(TwoPhases()), 2: profile(TwoPhases(prefill_s=PREFILL_S / 3), 2)}
    plan = Planner(study(profiles=profiles), max_gpus=3, confirm=1).run()
    assert plan.winner == Candidate(Pool(1, 2), Pool(1))
    winner = plan.row(plan.winner)
    assert winner is not None
    assert winner.per_gpu == pytest.approx(10, rel=0.08)
    front = total_front(plan.rows)
    assert [row.gpus for row in front] == sorted({row.gpus for row in front})
    assert [row.goodput for row in front] == sorted(row.goodput for row in front)


def test_a_search_repeats_exactly_in_any_number_of_processes() -> None:
    def run(jobs: int) -> tuple[Any, ...]:
        plan = Planner(study(), max_gpus=2, jobs=jobs).run()
        return plan.rows, plan.winner, plan.baselines

    assert run(1) == run(2)


@pytest.mark.parametrize("jobs", [1, 2, 8])
def test_what_is_simulated_does_not_depend_on_the_number_of_processes(
    jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    planner = Planner(study(), max_gpus=6, jobs=jobs)
    planner._curves.update(curves({Pool(1): 10.0}, {Pool(1): 30.0}))
    batches: list[int] = []
    monkeypatch.setattr(planner, "_drive", lambda chains, runner: batches.append(len(chains)))
    planner._run_whole(SimpleNamespace(jobs=jobs))  # type: ignore[arg-type]
    assert batches[1:] == [4, 2]


def test_a_killed_process_ends_the_search_with_a_reason() -> None:
    before = set(multiprocessing.active_children())

    def search() -> None:
        with runner_of(study(), 2) as runner:
            runner.start(0, Task(Setup(Candidate(prefill=Pool(1)), 400), "search"))
            (process,) = set(multiprocessing.active_children()) - before
            process.kill()
            runner.next_done()

    with pytest.raises(ConfigError, match="--jobs: one of the processes was killed"):
        search()
    assert set(multiprocessing.active_children()) <= before


PARENT = """
import multiprocessing, os, time
from concurrent.futures import ProcessPoolExecutor
from baton_experiments.search.jobs import _prepare
pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _prepare, (None,))
pid = pool.submit(os.getpid).result()
pool.submit(time.sleep, 600)
print(pid, flush=True)
time.sleep(600)
"""


def test_processes_end_when_their_parent_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
        try:
            parent.communicate(timeout=60)  # its output is the child's too, and ends with the last of them
        except subprocess.TimeoutExpired:
            os.kill(child, signal.SIGKILL)
            raise


def test_named_candidates_are_all_simulated() -> None:
    named = [parse_candidate(name) for name in ("split:2+1", "colocated:3", "split:1+2")]
    plan = Planner(study(), max_gpus=3, named=named).run()
    assert {row.candidate for row in plan.rows} == set(named)
    assert all(row.is_simulated for row in plan.rows)
    assert plan.winner == named[0]


def test_ctrl_c_keeps_what_is_known() -> None:
    steps = 0

    def interrupt(done: float, total: float, text: str) -> None:
        nonlocal steps
        steps += 1
        if steps == 5:
            raise KeyboardInterrupt

    plan = Planner(study(), max_gpus=3, on_progress=interrupt).run()
    assert plan.interrupted
    assert plan.rows and len(plan.rows) < len(all_candidates((1,), 3))


def test_what_cannot_be_planned_is_said() -> None:
    with pytest.raises(ConfigError, match=r"TTFT of 60 ms is missed even without load, by 40 ms.*TP 1"):
        Planner(study(slo=Slo(60, 40)), max_gpus=2).run()
    with pytest.raises(ConfigError, match=r"TPOT of 20 ms is missed even without load, by 7 ms"):
        Planner(study(slo=Slo(150, 20)), max_gpus=2).run()
    with pytest.raises(ConfigError, match="takes 3 GPUs"):
        Planner(study(), max_gpus=2, named=[parse_candidate("split:2+1")])
    with pytest.raises(ConfigError, match="needs TP 2, of which the profile tells nothing"):
        Planner(study(), max_gpus=4, named=[parse_candidate("colocated:1xtp2")])
    with pytest.raises(ConfigError, match="too few for any worker"):
        Planner(study(profiles={4: profile(TwoPhases(), 4)}), max_gpus=2)
    with pytest.raises(ConfigError, match="is no share"):
        study(share=1.5)
    with pytest.raises(ConfigError, match="--definition"):
        study(definition="splitwise")


def test_requests_of_one_token_are_not_decoded() -> None:
    def load(*outputs: int) -> Load:
        return Load(tuple(map(float, range(len(outputs)))), (PROMPT,) * len(outputs), outputs)

    one_token = study(load=load(*[1] * 150))
    plan = Planner(one_token, max_gpus=2).run()
    assert plan.winner is not None and plan.rows and not any(row.candidate.is_split for row in plan.rows)
    assert plan.rows[0].per_gpu == pytest.approx(10, rel=0.08)
    for search in (Planner, Replayer):
        with pytest.raises(ConfigError, match="has nothing to decode"):
            search(one_token, max_gpus=2, named=[parse_candidate("split:1+1")])
    # Late ones alone have a second token: 1 request in 5 takes 10 gaps, of 8 at a time.
    seldom = study(load=load(*[1] * 120, *[OUTPUT] * 30))
    curve = perform(seldom, Task(Setup(Candidate(decode=Pool(1)), 400), "coarse"))
    assert curve.alone is not None and curve.alone.requests == 150
    assert curve.goodput > 30


def test_an_slo_without_limits_is_kept_up_to_what_is_served() -> None:
    plan = Planner(study(slo=Slo(1e9, 1e9)), max_gpus=2, named=[parse_candidate("split:1+1")]).run()
    (row,) = plan.rows
    assert row.bottleneck == "throughput"
    assert 10 < row.goodput < 60  # 10/s for as long as one likes
    assert "work piles up, whatever the SLO" in _sentence(plan, study())
    beyond = run_at(study(slo=Slo(1e9, 1e9)), Setup(Candidate(both=Pool(1)), 400), 1000.0, num_requests=60)
    assert beyond.good == 1 and beyond.piled_up


def late_alone(every: int, **changes: Any) -> Study:
    """One prompt of `every` is late even alone, and any other is after 9 ms in a queue."""
    lengths = TokenLengths(Fixed(PROMPT), Fixed(OUTPUT))
    shapes = list(generate(Poisson(1.0), lengths, seed=3, num_requests=300))
    for i in range(0, len(shapes), every):
        shapes[i] = msgspec.structs.replace(shapes[i], prompt_tokens=2 * PROMPT)
    return study(load=Load.of(shapes), slo=Slo(109, 150), num_requests=150, **changes)


def test_a_goodput_far_below_what_a_worker_could_do_is_found() -> None:
    # Requests that come one after another leave a prefill worker idle until 10/s; here it has to be so nine times in
    # ten, as 4 of the 10 in a hundred that may be late are late anyway.
    curve = perform(late_alone(25), Task(Setup(Candidate(prefill=Pool(1)), 400), "search"))
    assert curve.alone is not None and curve.alone.good == pytest.approx(0.96)
    assert 0.2 < curve.goodput < 1.5
    assert all(o.rate > curve.goodput for o in curve.outcomes if o.stopped)
    # Where they are late alone it is given up soon.
    assert len(perform(late_alone(8), Task(Setup(Candidate(prefill=Pool(1)), 400), "search")).outcomes) <= 2


def test_placements_of_both_kinds_are_simulated_where_little_is_kept() -> None:
    plan = Planner(late_alone(25), max_gpus=2, confirm=1).run()
    simulated = {row.name: row.goodput for row in plan.rows if row.is_simulated}
    assert 0.2 < simulated["split:1+1"] < 1.5
    assert any(name.startswith("colocated") for name in simulated)


def test_only_what_is_missed_without_load_is_said_to_be() -> None:
    planner = Planner(study(), max_gpus=2, named=[parse_candidate("split:1+1")])
    planner._curves.update(curves({Pool(1): 0.0}, {Pool(1): 30.0}))
    planner._alone["prefill", 1] = Outcome(0.0, 100, 0.91)
    planner._require_attainable()
    planner._alone["prefill", 1] = Outcome(0.0, 100, 0.89)
    with pytest.raises(ConfigError, match="cannot be kept"):
        planner._require_attainable()


def test_a_kind_without_an_algorithms_placement_is_simulated_too() -> None:
    planner = Planner(study(), max_gpus=6)
    # Four prefill workers keep what one does not, so DistServe's algorithms place nothing.
    planner._curves.update(curves({Pool(4): 20.0}, {Pool(1): 30.0}))
    assert planner._baselines() == []
    assert planner._unheard([]) == [Candidate(Pool(3), Pool(1))]
    assert planner._unheard([Candidate(Pool(1), Pool(1))]) == []


def test_a_placement_that_keeps_nothing_does_not_end_the_search() -> None:
    planner = Planner(study(), max_gpus=3)
    planner._curves.update(curves({Pool(1): 10.0}, {Pool(1): 30.0}))
    nothing = Candidate(Pool(2), Pool(1))
    planner._curves[nothing] = Curve(Setup(nothing, 400), 0.0, (Outcome(1.0, 100, 0.5),))
    assert planner._most_promising(1) == [Candidate(Pool(1), Pool(1))]


def test_a_sentence_says_what_was_simulated() -> None:
    def row(name: str, goodput: float, *, is_simulated: bool = True) -> Row:
        candidate = parse_candidate(name)
        return Row(candidate, candidate.gpus, goodput, None, is_simulated, 400, None, None, None, "")

    def sentence(*rows: Row, interrupted: bool = False) -> str:
        able = [r.candidate for r in rows if r.is_simulated and r.goodput > 0]
        return _sentence(Plan(rows, able[0] if able else None, "per-gpu", (), (), interrupted), study())

    first, other = row("colocated:2", 4.0), row("split:1+1", 0.0)
    estimated = row("split:1+1", 1.0, is_simulated=False)
    assert "100% more per GPU than the best split one, split:1+1" in sentence(first, row("split:1+1", 2.0))
    assert "split:1+1, the one split placement that was simulated, does not keep it" in sentence(first, other)
    assert "none of the 2 split placements that were" in sentence(first, other, row("split:2+1", 0.0), estimated)
    assert "no split placement was simulated, since workers of theirs miss it" in sentence(first, estimated)
    assert "no split placement was simulated before" in sentence(first, estimated, interrupted=True)
    assert "no split placement is among the candidates" in sentence(first)
    assert "No candidate was simulated as a whole" in sentence(estimated)
    assert "The one candidate that was simulated does not keep the SLO" in sentence(other)
    assert "None of the 2 candidates" in sentence(other, row("split:2+1", 0.0))


def test_profiles_whose_memory_is_too_small_are_left_out() -> None:
    profiles = {1: profile(TwoPhases(), 1, 100), 2: profile(TwoPhases(), 2, 500), 4: profile(TwoPhases(), 4, None)}
    usable, notes = usable_profiles(profiles, 200)
    assert list(usable) == [2]
    assert "TP 1 left out: its KV cache holds 100 tokens, the longest request 200" in notes
    assert any("TP 4 left out" in note and "does not say" in note for note in notes)
    assert {tp: p.kv_tokens for tp, p in usable_profiles(profiles, 200, 300)[0].items()} == {1: 300, 2: 600, 4: 1200}
    with pytest.raises(ConfigError, match="nothing that can serve this work"):
        usable_profiles(profiles, 1000)


def test_a_pool_without_room_limits_by_its_space() -> None:
    # Room for two requests of 111 tokens and their growth, while eight could decode.
    small = {1: profile(TwoPhases(), 1, 256)}
    plan = Planner(study(profiles=small, slo=Slo(400, 40)), max_gpus=2, named=[parse_candidate("split:1+1")]).run()
    row = plan.rows[0]
    assert 0 < row.goodput < 8.5
    assert row.bottleneck == "KV space"


# --- replay and logs --------------------------------------------------------------------------------


def test_a_replay_names_the_fewest_gpus_that_had_sufficed() -> None:
    shapes = list(generate(Constant(25.0), TokenLengths(Fixed(PROMPT), Fixed(OUTPUT)), seed=0, num_requests=150))
    replayed = Replayer(study(load=Load.of(shapes)), max_gpus=5).run()
    assert replayed.winner == Candidate(Pool(3), Pool(1))
    by_name = {row.name: row for row in replayed.rows}
    assert by_name["split:3+1"].attainment == 1 and by_name["split:3+1"].is_simulated
    assert by_name["split:2+1"].attainment < 0.9
    assert by_name["split:2+1"].bottleneck == "prefill compute"
    assert not replayed.interrupted
    named = Replayer(study(load=Load.of(shapes)), max_gpus=5, named=[parse_candidate("split:2+2")]).run()
    assert named.winner is None
    assert [(row.name, row.is_simulated, row.at_most) for row in named.rows] == [("split:2+2", True, False)]


FIGURES = [
    {"prompt_tokens": 30, "completion_tokens": 7, "total_ms": 2000.0},
    {"prompt_tokens": 10, "completion_tokens": 5, "total_ms": 250.0},
    {"prompt_tokens": 20, "completion_tokens": 0, "total_ms": 100.0},
]


@pytest.mark.parametrize("formatter", [JsonFormatter(), logging.Formatter(_FORMAT)])
def test_the_routers_log_is_a_workload(formatter: logging.Formatter, tmp_path: Path) -> None:
    lines = ["a line of somebody else"]
    for i, figures in enumerate(FIGURES):
        words = " ".join(f"{name}={value}" for name, value in figures.items())
        record = logging.LogRecord(
            "baton.router.requests", logging.INFO, "", 0, f"request {i:032x} ended: {words}", None, None
        )
        record.created, record.msecs = 1_700_000_000.0 + i, 0.0
        record.fields = {"request_id": f"{i:032x}", **figures}
        lines.append(formatter.format(record))
    refused = logging.LogRecord(
        "baton.router.requests", logging.INFO, "", 0, "request x was refused: overloaded", None, None
    )
    lines.append(formatter.format(refused))
    path = tmp_path / "router.log"
    path.write_text("\n".join(lines), encoding="utf-8")
    workload = read_recorded(path)
    assert list(workload) == [RequestShape(0.0, 30, 7), RequestShape(2.75, 10, 5)]
    assert workload.description["source"]["counts"]["without tokens"] == 2


def test_an_experiments_records_are_a_workload_point_by_point(tmp_path: Path) -> None:
    record = RequestRecord("split:1+1", 2.0, 0, 0, 1.5, 40, 9, 10.0, 50.0, [5.0] * 8, {}, None, "p", "d", 0)
    later = msgspec.structs.replace(record, index=1, at_s=2.25, prompt_tokens=41)
    failed = msgspec.structs.replace(record, index=2, at_s=3.0, error="overloaded")
    write_records(tmp_path, [record, later, failed, msgspec.structs.replace(record, rate=4.0)])
    path = tmp_path / "records.csv"
    with pytest.raises(TraceError, match="more than one point"):
        list(read_recorded(path))
    workload = read_recorded(path, where={"rate": "2.0"})
    assert list(workload) == [RequestShape(0.0, 40, 9), RequestShape(0.75, 41, 9)]
    with pytest.raises(TraceError, match="has no records with these values"):
        list(read_recorded(path, where={"rate": "3.0"}))


def test_a_log_without_times_or_tokens_is_not_replayed(tmp_path: Path) -> None:
    path = tmp_path / "records.csv"
    rows = ["split:1+1,2.0,1.5,40,9", "split:1+1,2.0,2.5,40,0", "split:1+1,2.0,3.0,40,2"]
    path.write_text("\n".join(["placement,rate,at_s,prompt_tokens,output_tokens", *rows]), encoding="utf-8")
    workload = read_recorded(path)
    assert list(workload) == [RequestShape(0.0, 40, 9), RequestShape(1.5, 40, 2)]
    assert workload.description["source"]["counts"] == {"requests": 2, "failed": 0, "without tokens": 1}
    path.write_text(path.read_text(encoding="utf-8").replace("3.0,40", "nan,40"), encoding="utf-8")
    with pytest.raises(TraceError, match=r"records\.csv:4.*at_s is no time: nan"):
        list(read_recorded(path))
    log = tmp_path / "router.log"
    line = "2026-01-01 00:00:0{},000 1 INFO baton.router.requests: request x ended: prompt_tokens=3 completion_tokens=2"
    log.write_text(f"{line.format(1)} total_ms=5\n{line.format(2)} total_ms=nan\n", encoding="utf-8")
    with pytest.raises(TraceError, match=r"router\.log:2.*total_ms is no time: nan"):
        list(read_recorded(log))
    with pytest.raises(ConfigError, match=r"--format: is unknown \(got 'nope'\); allowed: router, records, "):
        read_recorded(log, "nope")


def test_other_logs_are_read_as_traces(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n1.0,5,6\n1.5,7,8\n", encoding="utf-8")
    assert list(read_recorded(path)) == [RequestShape(0.0, 5, 6), RequestShape(0.5, 7, 8)]
    path.write_text("num_prefill_tokens,num_decode_tokens\n5,6\n", encoding="utf-8")
    with pytest.raises(TraceError, match="no arrival times"):
        read_recorded(path)
    with pytest.raises(TraceError, match="cannot be read"):
        read_recorded(tmp_path / "nothing.csv")


# --- what is written --------------------------------------------------------------------------------


def test_the_emitted_cluster_file_is_read_back() -> None:
    config = parse_config({"engine": {"max_batch_requests": 64, "policy": "prefill_first"}, "router": {"max_queue": 5}})
    candidate = parse_candidate("split:3xtp2+1")
    text = cluster_yaml(candidate, config=config, model="demo", chunk_tokens=768, found="for a test")
    read = parse_config(yaml.safe_load(text))
    assert {name: (pool.workers, pool.gpus) for name, pool in read.pools.items()} == {
        "prefill": (3, 2),
        "decode": (1, 1),
    }
    assert (read.engine.max_batch_tokens, read.engine.max_batch_requests) == (768, 64)
    assert (read.engine.policy, read.router.max_queue, read.model.source) == ("prefill_first", 5, "demo")
    assert text.startswith("# Found by `baton plan` for a test:\n")
    assert is_emitted(text) and not is_emitted(text.replace("# Found", "# Once found"))
    assert "no tensor parallelism" in text
    one = cluster_yaml(Candidate(both=Pool(2)), config=config, model="demo", chunk_tokens=512, found="for a test")
    assert "tensor" not in one
    assert parse_config(yaml.safe_load(one)).pools["both"].workers == 2
    cpu = cluster_yaml(
        Candidate(both=Pool(2)),
        config=config,
        model="demo",
        chunk_tokens=512,
        found="",
        kv_tokens={1: 3200},
        device="cpu",
    )
    both = parse_config(yaml.safe_load(cpu)).pools["both"]
    assert (both.device, both.gpus, both.kv_blocks) == ("cpu", 0, 200)


def test_a_pareto_front_holds_what_nothing_beats() -> None:
    items = [(1.0, 5.0), (2.0, 4.0), (2.0, 4.0), (3.0, 4.5), (1.5, 6.0), (4.0, 1.0)]
    assert pareto(items, lambda item: item) == [(1.0, 5.0), (2.0, 4.0), (4.0, 1.0)]
    distribution = {"p50": 1.0, "p90": 2.0, "p99": 3.0, "max": 4.0, "promised": 2.0}
    fast = {**distribution, "p90": 1.0}
    setup = Setup(Candidate(both=Pool(2)), 400)
    outcomes = (
        Outcome(1.0, 100, 1.0, ttft_ms=fast, tbt_ms=fast),
        Outcome(2.0, 100, 0.95, ttft_ms=distribution, tbt_ms=fast),
        Outcome(1.5, 100, 0.95, ttft_ms=distribution, tbt_ms=distribution),
        Outcome(3.0, 100, 0.5, ttft_ms=fast, tbt_ms=fast),
    )
    plan = Plan((), None, "per-gpu", (), (Curve(setup, 2.0, outcomes),))
    front = latency_front(points(plan, 0.9))
    assert [(p.rate, p.per_gpu, p.ttft_ms) for p in front] == [(2.0, 1.0, 2.0), (1.0, 0.5, 1.0)]


DISTSERVE = {
    "facebook/opt-13b": {
        tp: {
            "decoding_large_small_bs_threshold": 95,
            "prefill": [2.0, 1.0 / int(tp), 1e-6],
            "decoding_smallbs": [20.0, 1e-4, 0.01],
            "decoding_largebs": [20.0, 1e-4, 0.01],
        }
        for tp in ("1", "2")
    }
}


@pytest.fixture
def profile_path(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(DISTSERVE), encoding="utf-8")
    rows = "".join(f"facebook/opt-13b,{tp},1,{20_000 * tp}\n" for tp in (1, 2))
    (tmp_path / "kv.csv").write_text(f"model,tp,pp,max_num_tokens\n{rows}", encoding="utf-8")
    return path


SLO = ["--slo-ttft", "400", "--slo-tbt", "60"]
MADE_UP = ["--prompt-tokens", "50-150", "--output-tokens", "5-15", "--requests", "50", "--chunk-tokens", "512"]


def plan_command(profile_path: Path, *options: str) -> Any:
    common = ["plan", "--profile", str(profile_path), *SLO]
    return CliRunner().invoke(app, [*common, *(MADE_UP if "--replay" not in options else []), *options])


def test_the_command_writes_tables_json_a_plot_and_a_cluster_file(profile_path: Path, tmp_path: Path) -> None:
    folder, emitted = tmp_path / "result", tmp_path / "cluster.yaml"
    named = ["--candidate", "split:1+1", "--candidate", "colocated:2"]
    result = plan_command(
        profile_path, "--gpus", "2", "--tp", "1", *named, "--out", str(folder), "--emit", str(emitted)
    )
    assert result.exit_code == 0, result.output
    tree = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    assert (folder / "pareto.png").read_bytes().startswith(b"\x89PNG")
    names = {row["candidate"] for row in tree["candidates"]}
    assert names == {"split:1+1", "colocated:2"}
    winner = tree["winner"]
    assert winner["simulated"] and winner["goodput_per_gpu"] == winner["goodput"] / winner["gpus"]
    assert winner["goodput_per_gpu"] == max(row["goodput_per_gpu"] for row in tree["candidates"])
    assert {"p90", "p99"} <= set(winner["ttft_ms"]) & set(winner["tbt_ms"])
    assert winner["bottleneck"]
    assert tree["pareto"]["latency"] and tree["pareto"]["total"]
    assert (tree["slo"]["ttft_ms"], tree["attainment"], tree["requests"]) == (400, 0.9, 50)
    assert any("25 GB/s are assumed" in note for note in tree["notes"])
    assert winner["candidate"] in result.output
    pools = parse_config(yaml.safe_load(emitted.read_text(encoding="utf-8"))).pools
    assert sum(pool.workers * pool.gpus for pool in pools.values()) == winner["gpus"]
    assert tree["profiles"]["1"]["kv_tokens"] == 20_000


def test_a_plan_from_a_published_file_by_itself(tmp_path: Path) -> None:
    # Its memory is told by the file's name, and what its weights leave of that holds KV.
    path = tmp_path / "profiler-a100-80g.distserve.json"
    path.write_text(json.dumps(DISTSERVE), encoding="utf-8")
    folder, emitted = tmp_path / "result", tmp_path / "plan.yaml"
    options = ["--gpus", "2", "--candidate", "colocated:1xtp2", "--out", str(folder), "--emit", str(emitted)]

    def plan_of(profile: str, *more: str) -> dict[str, Any]:
        result = CliRunner().invoke(app, ["plan", "--profile", profile, *SLO, *MADE_UP, *options, *more])
        assert result.exit_code == 0, result.output
        tree: dict[str, Any] = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
        return tree

    tree = plan_of(f"{path},tp=2", "--model", "opt-13b")
    assert tree["profiles"]["2"]["kv_tokens"] == (int(0.9 * 160 * 2**30) - 25_700_000_000) // 819_200
    assert any("0.9 of 80 GiB a GPU leave beside the weights" in note for note in tree["notes"])
    unnamed = tmp_path / "mine.json"
    unnamed.write_text(json.dumps(DISTSERVE), encoding="utf-8")
    assert (
        plan_of(f"{unnamed},gpu_memory_gib=40")["profiles"]["2"]["kv_tokens"]
        == (int(0.9 * 80 * 2**30) - 25_700_000_000) // 819_200
    )
    # As `baton experiment` takes it; and over the file that the plan before has written.
    tree = plan_of(f"{path},model=opt-13b,conventions=distserve")
    assert tree["profiles"]["2"]["name"].endswith("conventions of DistServe")
    assert tree["engine"]["policy"] == "prefill_first"


def test_a_file_that_is_not_from_a_plan_is_not_overwritten(profile_path: Path, tmp_path: Path) -> None:
    mine = tmp_path / "cluster.yaml"
    mine.write_text("name: mine\n", encoding="utf-8")
    options = ["--gpus", "1", "--tp", "1", "--candidate", "colocated:1", "--out", str(tmp_path / "result")]
    refused = plan_command(profile_path, *options, "--emit", str(mine))
    assert isinstance(refused.exception, ConfigError)
    assert "`baton plan` did not write it" in str(refused.exception) and "--force" in str(refused.exception)
    assert mine.read_text(encoding="utf-8") == "name: mine\n"
    assert not (tmp_path / "result").exists()  # it is told before anything is searched
    assert plan_command(profile_path, *options, "--emit", str(mine), "--force").exit_code == 0
    assert is_emitted(mine.read_text(encoding="utf-8"))
    absent = plan_command(profile_path, *options, "--emit", str(tmp_path / "nowhere" / "plan.yaml"))
    assert "no file in a folder that is there" in str(absent.exception)


def test_the_emitted_file_has_what_was_planned_with(profile_path: Path, tmp_path: Path) -> None:
    emitted = tmp_path / "plan.yaml"
    options = ["--gpus", "2", "--candidate", "colocated:1xtp2", "--out", str(tmp_path / "out"), "--emit", str(emitted)]
    result = plan_command(profile_path, *options, "--kv-tokens-per-gpu", "9000", "--max-model-len", "900")
    assert result.exit_code == 0, result.output
    config = parse_config(yaml.safe_load(emitted.read_text(encoding="utf-8")))
    assert config.model.max_model_len == 900
    assert config.pools["both"].kv_blocks == 2 * 9000 // config.engine.block_size


def test_workers_on_cpus_keep_the_settings_for_cpus() -> None:
    options, usual = Options("profile.json", 2), parse_config({}).engine
    config, chunks = _config(options, profile(TwoPhases(), tp=0))
    assert (config.engine.max_batch_requests, chunks) == (usual.max_batch_requests, (usual.max_batch_tokens,))
    config, chunks = _config(options, profile(TwoPhases(), tp=1))
    assert (config.engine.max_batch_requests, chunks) == (256, (512, 2048))


def test_a_profile_that_cannot_be_written_is_not_measured(tmp_path: Path) -> None:
    there = tmp_path / "there.json"
    there.write_text("{}", encoding="utf-8")
    for path in (tmp_path, there / "below.json"):
        command = ["profile", "--from", str(tmp_path / "nothing"), "--out", str(path)]
        error = CliRunner().invoke(app, command).exception
        assert isinstance(error, ConfigError) and str(error).startswith("--out: cannot be written")
    error = CliRunner().invoke(app, ["profile", "--from", str(tmp_path / "nothing"), "--out", str(there)]).exception
    assert "--out" not in str(error)  # what is wrong then is the rest
    assert there.read_text(encoding="utf-8") == "{}"


def test_long_requests_of_a_trace_are_left_out(profile_path: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = "".join(f"{i},{500 if i % 4 == 0 else 100},10\n" for i in range(80))
    trace.write_text(f"arrived_at,num_prefill_tokens,num_decode_tokens\n{rows}", encoding="utf-8")
    common = ["--gpus", "1", "--tp", "1", "--candidate", "colocated:1", "--requests", "50", "--json"]
    for source in ("--workload", "--replay"):
        options = [source, str(trace), "--max-total-tokens", "200", "--out", str(tmp_path / source)]
        result = CliRunner().invoke(app, ["plan", "--profile", str(profile_path), *SLO, *common, *options])
        assert result.exit_code == 0, result.output
        statistics = json.loads(result.stdout)["work"]["statistics"]
        assert (statistics["requests"], statistics["prompt_tokens"]["max"]) == (60, 100)


def test_the_plot_of_few_candidates(tmp_path: Path) -> None:
    plan = Planner(study(), max_gpus=2, named=[parse_candidate("colocated:2")]).run()
    figures: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plot.plt, "close", figures.append)
        plot.plot_plan(plan, study().slo, 0.9, tmp_path / "pareto.png")
    (figure,) = figures
    assert all(axis.get_title() for axis in figure.axes)
    for axis in figure.axes:
        assert all("split" not in text.get_text() for text in axis.get_legend().get_texts())
    assert all(tick == int(tick) for tick in figure.axes[2].get_xticks())
    legend = figure.axes[2].get_legend()
    assert "found: colocated:2" in [text.get_text() for text in legend.get_texts()]
    box, frame = legend.get_window_extent(), figure.axes[2].get_window_extent()
    assert frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
    plot.plt.close(figure)


def test_the_command_replays_a_log(profile_path: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    rows = "".join(f"{i * 0.2:.1f},100,10\n" for i in range(60))
    log.write_text(f"arrived_at,num_prefill_tokens,num_decode_tokens\n{rows}", encoding="utf-8")
    options = ["--gpus", "2", "--replay", str(log), "--json", "--out", str(tmp_path / "out")]
    result = plan_command(profile_path, *options)
    assert result.exit_code == 0, result.output
    tree = json.loads(result.stdout)
    assert tree["kind"] == "replay"
    assert (tree["winner"]["candidate"], tree["winner"]["attainment"]) == ("colocated:1", 1.0)
    assert tree["work"]["statistics"]["requests"] == 60


def test_the_command_says_what_is_wrong(profile_path: Path) -> None:
    def problem(*options: str) -> str:
        error = plan_command(profile_path, *options).exception
        assert isinstance(error, ConfigError)
        return str(error)

    assert "--tp: 8 is not in the profile, and how steps would scale to it cannot be told" in problem("--tp", "8")
    assert "colocated:4, split:3+1" in problem("--candidate", "three")
    assert "--definition" in problem("--definition", "median")
    assert "--tp: is said twice" in str(plan_command(Path(f"{profile_path},tp=1"), "--tp", "2").exception)
    assert "allowed: keys model" in str(plan_command(Path(f"{profile_path},degree=1")).exception)
    (profile_path.parent / "kv.csv").unlink()
    unknown = problem("--gpus", "2")
    assert "TP 1, 2 left out: the profile does not say how much KV cache" in unknown
    assert "nor its file's name" in unknown and "--kv-tokens-per-gpu" in unknown and "gpu_memory_gib" in unknown
    # What is wrong with an option is said before what is wrong with a file.
    assert "--attainment" in problem("--attainment", "90")
    assert "--slo-ttft" in problem("--slo-ttft", "0")
    assert "--definition" in problem("--definition", "vllm")
    assert "colocated:4, split:3+1" in problem("--candidate", "three")
    assert "--force: is for --emit" in problem("--force")
    profile_path.write_text(json.dumps({**DISTSERVE, "facebook/opt-66b": DISTSERVE["facebook/opt-13b"]}))
    assert "holds several profiles" in problem("--kv-tokens-per-gpu", "20000")
    table = "model,tp,pp,max_num_tokens\nfacebook/opt-13b,1,1,20000\nfacebook/opt-13b,2,1,40000\n"
    (profile_path.parent / "kv.csv").write_text(table, encoding="utf-8")
    profile_path.write_text(json.dumps(DISTSERVE), encoding="utf-8")
    assert "are for made-up work, without --workload" in problem("--workload", "chat")
    assert "missed even without load" in problem("--slo-ttft", "20", "--gpus", "1")

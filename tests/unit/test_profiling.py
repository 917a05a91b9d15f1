"""`baton profile`: what is fitted to steps, what is between them, and the file that comes of it."""

from __future__ import annotations

import itertools
import json
import statistics
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from baton.config import dump_config, parse_config
from baton.errors import ClusterError, ConfigError, ModelError
from baton.step_log import StepRecord, StepShape
from baton_cli.profile import run_profile, run_profile_from
from baton_cluster.latency import LinkModel
from baton_experiments.profiles.fitted import (
    FittedLatency,
    fit,
    fit_errors,
    kind_of,
    profile_of,
    profile_tree,
)
from baton_experiments.profiles.profile import EngineProfile
from baton_experiments.profiling import host_seconds, link_of, measure_steps
from baton_experiments.records import RequestRecord
from baton_experiments.results import write_records, write_steps
from baton_experiments.step_engine import Limits, StepEngine, made_up_steps
from tests.unit.test_step_log import plan_of

LIMITS = Limits(max_batch_tokens=256, max_batch_requests=32, max_context=2048, num_blocks=2000, block_size=16)


def shapes(count: int, seed: int = 0) -> list[StepShape]:
    steps = itertools.islice(made_up_steps(LIMITS, Random(seed)), count)
    return [StepShape.of(plan_of(*sizes)) for sizes in steps]


def tiled_s(shape: StepShape) -> float:
    """An engine whose matrix products take as long for 5 rows as for 8."""
    rows = shape.chunk_tokens + shape.decodes
    return (
        0.020
        + 0.004 * -(-rows // 8)
        + 0.0005 * shape.chunks
        + 2e-7 * shape.chunk_attended
        + 1e-6 * shape.chunk_context
        + 2e-6 * shape.decode_context
    )


def test_made_up_steps_are_of_all_kinds_and_within_limits() -> None:
    steps = list(itertools.islice(made_up_steps(LIMITS, Random(1)), 400))
    assert {kind_of(StepShape.of(plan_of(*sizes))) for sizes in steps} == {"prefill", "decode", "mixed"}
    for sizes in steps:
        assert LIMITS.hold(sizes)
        assert 1 <= sum(count for _, count in sizes) <= LIMITS.max_batch_tokens
        assert len([count for _, count in sizes if count == 1]) <= LIMITS.max_batch_requests
        assert all(start >= 0 and start + count <= LIMITS.max_context for start, count in sizes)
    assert steps == list(itertools.islice(made_up_steps(LIMITS, Random(1)), 400))


def test_a_fit_predicts_steps_that_it_has_not_seen() -> None:
    found = fit([(shape, tiled_s(shape)) for shape in shapes(800)])
    for kind in ("prefill", "decode", "mixed", "all"):
        assert found.errors[kind].median < 0.03 and found.errors[kind].p90 < 0.09, found.errors
    fresh = fit_errors(found.latency, [(shape, tiled_s(shape)) for shape in shapes(300, seed=9)])
    assert fresh["all"].median < 0.03 and abs(fresh["all"].bias) < 0.02
    assert found.latency.chunk_attended_s == pytest.approx(2e-7, rel=0.2)
    assert found.latency.decode_context_s == pytest.approx(2e-6, rel=0.2)


def test_noise_widens_the_error_and_moves_the_prediction_little() -> None:
    draw = Random(3)
    noisy = [(shape, tiled_s(shape) * draw.lognormvariate(0, 0.1)) for shape in shapes(800)]
    found = fit(noisy)
    assert 0.03 < found.errors["all"].median < 0.12
    clean = fit_errors(found.latency, [(shape, tiled_s(shape)) for shape in shapes(300, seed=9)])
    assert clean["all"].median < 0.05


def test_no_coefficient_is_negative_and_more_rows_never_take_less() -> None:
    draw = Random(4)
    latency = fit([(shape, draw.uniform(0.01, 0.2)) for shape in shapes(200)]).latency
    numbers = [latency.chunk_s, latency.chunk_attended_s, latency.chunk_context_s, latency.decode_s]
    assert all(number >= 0 for number in (*numbers, latency.decode_context_s, *latency.rows_s))
    taken = [latency.shape_s(StepShape(decodes=n)) for n in range(1, 400)]
    assert taken == sorted(taken)


def test_steps_of_one_size_can_be_fitted_and_others_are_in_proportion() -> None:
    latency = fit([(StepShape(decodes=4, decode_context=40), 0.03)] * 40).latency
    assert latency.shape_s(StepShape(decodes=4, decode_context=40)) == pytest.approx(0.03)
    assert latency.shape_s(StepShape(decodes=8, decode_context=80)) == pytest.approx(0.06)


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="too few"):
        fit([(StepShape(decodes=1, decode_context=1), 0.01)] * 10)


def test_a_step_takes_its_prediction_and_the_time_to_the_next() -> None:
    latency = FittedLatency((1, 4), (0.01, 0.04), chunk_attended_s=1e-3, decode_context_s=1e-4, host_s=0.5)
    assert latency.step_s(plan_of((9, 1), (9, 1))) == pytest.approx(0.02 + 20e-4 + 0.5)
    assert latency.step_s(plan_of((0, 8))) == pytest.approx(0.08 + 36e-3 + 0.5), "beyond the last knot as before it"


def test_a_spread_is_drawn_from_the_plan_alone() -> None:
    levels = (0.9, 1.0, 1.0, 1.3)
    latency = FittedLatency((1, 4), (0.01, 0.04), spread=levels)
    plain = msgspec.structs.replace(latency, spread=())
    plans = [plan_of((position, 1)) for position in range(1, 800)]
    ratios = [latency.step_s(plan) / plain.step_s(plan) for plan in plans]
    assert ratios == [latency.step_s(plan) / plain.step_s(plan) for plan in plans]
    assert min(ratios) >= 0.9 and max(ratios) <= 1.3
    assert statistics.fmean(ratios) == pytest.approx((0.95 + 1.0 + 1.15) / 3, abs=0.02)


# --- the file --------------------------------------------------------------------------------------


def profile_with(latency: FittedLatency) -> EngineProfile:
    return EngineProfile("n", "demo", "cpu", latency, 1024, 500, gpus=0, link=LinkModel(1e-3, 2e9), source="s")


def test_a_profile_is_read_back_as_it_was_written() -> None:
    profile = profile_with(FittedLatency((1, 4), (0.01, 0.04), decode_s=1e-4, spread=(0.9, 1.1)))
    tree = json.loads(json.dumps(profile_tree(profile, {"errors": {}})))
    assert profile_of(tree, "file") == profile


@pytest.mark.parametrize(
    "change",
    [
        {"format": "another"},
        {"version": 2},
        {"kv_bytes_per_token": "many"},
        {"latency": {"rows": [4, 1], "rows_s": [1.0, 2.0]}},
        {"latency": {"rows": [1], "rows_s": [1.0, 2.0]}},
        {"latency": {"rows": [], "rows_s": []}},
        {"latency": {"rows": [1], "rows_s": [1.0], "spread": [1.0]}},
    ],
)
def test_a_file_that_is_no_profile_is_refused_with_its_name(change: dict[str, Any]) -> None:
    tree = profile_tree(profile_with(FittedLatency((1,), (0.01,))), {})
    with pytest.raises(ConfigError, match=r"^the-file\.json"):
        profile_of({**tree, **change}, "the-file.json")


# --- between steps ---------------------------------------------------------------------------------


def decode_at(start_s: float, decodes: int, context: int, *, worker: str = "w", chunks: int = 0) -> StepRecord:
    shape = StepShape(chunks=chunks, decodes=decodes, decode_context=context)
    return StepRecord(worker, start_s, 0.010, shape, 1, 1, 0)


def test_host_time_is_between_steps_of_who_had_work_all_the_while() -> None:
    steps = [
        decode_at(0.0, 1, 7),
        decode_at(0.011, 1, 8),  # 1 ms after the first
        decode_at(5.0, 1, 5),  # another request: it may have been idle
        decode_at(5.5, 2, 30),  # one more has come
        decode_at(5.513, 2, 32),  # 3 ms
        decode_at(5.525, 2, 34),  # 2 ms
        decode_at(5.536, 2, 36, chunks=1),  # a prompt came
        decode_at(0.0105, 1, 8, worker="other"),
    ]
    assert host_seconds(steps) == pytest.approx(0.002)
    assert host_seconds(steps[:1]) is None


def test_a_link_from_handoffs() -> None:
    link = link_of([(size, 2e-3 + size / 4e9) for size in (0, 100_000, 1_000_000, 9_000_000)])
    assert link is not None
    assert link.latency_s == pytest.approx(2e-3) and link.bytes_per_s == pytest.approx(4e9)
    flat = link_of([(1000, 1e-3), (2000, 1e-3)])
    assert flat is not None and flat.latency_s == pytest.approx(1e-3) and flat.bytes_per_s == 1e12
    assert link_of([]) is None


# --- from a result ---------------------------------------------------------------------------------


def result_folder(folder: Path, model: Path, *, engine: str = "real") -> None:
    """What `baton experiment` leaves of a split run, as far as a profile is made of it."""
    config = tiny(model, pools={"prefill": {"kv_blocks": 64}, "decode": {"kv_blocks": 64}})
    folder.mkdir()
    tree = {"plan": {"engine": engine}, "cluster": dump_config(config), "profile": None}
    (folder / "config.json").write_text(json.dumps(tree), encoding="utf-8")
    (folder / "summary.json").write_text("{}", encoding="utf-8")
    records = []
    for index, tokens in enumerate((16, 48, 60)):  # the last one in two chunks, of which 12 tokens are the second
        last = (tokens - 1) % 48 + 1
        stages = {"placement": 0.5, "handoff_wait": 1.0, "wire": last * 1024 / 1e6}
        record = RequestRecord("split:1+1", 1.0, 0, index, 0.0, tokens, 4, 1.0, 2.0, [1.0], stages, 3.0, "p", "d", 0)
        record.kv_bytes = tokens * 1024
        records.append(record)
    write_records(folder, records)
    steps = [StepRecord("p", i * 1.0, tiled_s(shape), shape, 1, 1, 0) for i, shape in enumerate(shapes(200))]
    steps += [decode_at(1000 + i * 0.0125, 1, 10 + i, worker="d") for i in range(5)]
    write_steps(folder, {records[0].run: steps})


def test_a_profile_of_an_experiments_steps(tiny_model: Path, tmp_path: Path) -> None:
    result_folder(tmp_path / "run", tiny_model)
    profile = run_profile_from(tmp_path / "run", pool=None, spread=False, path=tmp_path / "p.json", as_json=True)
    assert isinstance(profile.latency, FittedLatency)
    errors = fit_errors(profile.latency, [(shape, tiled_s(shape)) for shape in shapes(100, seed=9)])
    assert errors["all"].median < 0.05
    assert profile.latency.host_s == pytest.approx(0.0025)
    assert profile.link is not None
    assert profile.link.latency_s == pytest.approx(1e-3) and profile.link.bytes_per_s == pytest.approx(1e9)
    assert profile.kv_tokens == 64 * 16
    measured = json.loads((tmp_path / "p.json").read_text(encoding="utf-8"))["measured"]
    assert (measured["message_s"], measured["client_s"]) == (pytest.approx(0.5e-3), pytest.approx(3e-3))


def test_a_simulated_experiment_is_no_source_of_a_profile(tiny_model: Path, tmp_path: Path) -> None:
    result_folder(tmp_path / "run", tiny_model, engine="simulated")
    with pytest.raises(ConfigError, match="--engine real"):
        run_profile_from(tmp_path / "run", pool=None, spread=False, path=tmp_path / "p.json")


@pytest.mark.parametrize("damaged", ["plan", "cluster"])
def test_a_damaged_experiment_is_no_source_of_a_profile(tiny_model: Path, tmp_path: Path, damaged: str) -> None:
    result_folder(tmp_path / "run", tiny_model)
    file = tmp_path / "run/config.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | {damaged: None}), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config\.json: .*lacks plan or cluster"):
        run_profile_from(tmp_path / "run", pool=None, spread=False, path=tmp_path / "p.json")


# --- measured --------------------------------------------------------------------------------------


def tiny(model: Path, **sections: Any) -> Any:
    tree = {
        "launcher": "local",
        "model": {"source": str(model), "dtype": "float32"},
        "pools": {"both": {"kv_blocks": 64}},
        "engine": {"max_batch_tokens": 48, "max_batch_requests": 8},
        **sections,
    }
    return parse_config(tree)


def test_steps_of_made_up_plans_are_computed(tiny_model: Path) -> None:
    engine = StepEngine(tiny(tiny_model), "both")
    plan = engine.plan([(30, 1), (0, 10), (17, 5)])
    blocks = [block for item in plan.items for block in item.request.blocks]
    assert len(blocks) == len(set(blocks)) == 2 + 1 + 2
    assert StepShape.of(plan) == StepShape.of(plan_of((30, 1), (0, 10), (17, 5)))
    assert engine.seconds(plan) > 0
    with pytest.raises(ConfigError, match="cannot hold"):
        engine.plan([(64 * 16, 1)])


def test_a_profile_of_two_engines_and_a_cluster(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "folder/profile.json"
    profile = run_profile(
        tiny(tiny_model),
        pool=None,
        workers=2,
        seconds=4,
        max_context=128,
        cluster=True,
        spread=True,
        cpu_time=True,
        path=path,
        as_json=True,
    )
    tree = json.loads(path.read_text(encoding="utf-8"))
    assert profile_of(tree, str(path)) == profile
    measured = tree["measured"]
    assert measured["errors"].keys() == {"prefill", "decode", "mixed", "all"}
    assert measured["errors_on_a_cluster"]["decode"]["steps"] > 10
    assert profile.kv_tokens == 64 * 16 and profile.gpus == 0
    assert profile.link is not None and 0 <= profile.link.latency_s < 5
    assert isinstance(profile.latency, FittedLatency) and len(profile.latency.spread) > 2
    for name in ("host_s", "message_s"):
        assert 0 <= measured[name] < 5


def test_an_engine_that_cannot_start_says_why(tiny_model: Path) -> None:
    with pytest.raises(ModelError, match="no-such-model"):
        measure_steps(tiny(Path("./no-such-model")), "both", workers=1, seconds=1)


def test_a_process_that_dies_is_told(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton_experiments.profiling._serve", _die)
    with pytest.raises(ClusterError, match="has died"):
        measure_steps(tiny(tiny_model), "both", workers=1, seconds=1)


def _die(*arguments: Any) -> None:
    raise SystemExit(3)

"""Experiments on real clusters: threads and sockets with made-up tokens, and one with a model."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest

import baton_cli.experiment
from baton.config import ClusterConfig, parse_config
from baton.engine.request import StepPlan
from baton.errors import ConfigError, RequestFailedError
from baton.step_log import StepRecord
from baton.timeline import Stage
from baton_cli.experiment import read_against, run_experiment
from baton_cluster.latency import LinearLatency, LinkModel
from baton_experiments.experiment import Watch, run
from baton_experiments.journal import Journal
from baton_experiments.plan import Plan
from baton_experiments.profiles.profile import EngineProfile
from baton_experiments.real import RealEngine, RealStage
from baton_experiments.records import RequestRecord, Setting
from baton_experiments.results import read_result
from baton_experiments.work import Work
from baton_experiments.workloads import Lengths
from tests.fakes import VOCAB
from tests.stub_cluster import LAYOUT, StubCluster

STEP = LinearLatency(0.002, 0.00005)
PLAN = Plan(rates=(20.0,), seeds=(0, 1), num_requests=6, work=Work(lengths=Lengths((20, 60), (4, 8))))
MODEL: Any = SimpleNamespace(vocab_size=VOCAB, kv_layout=lambda block_size, dtype: LAYOUT)


class Recording(StubCluster):
    """Also tells its steps, as clusters of a launcher do."""

    def take_steps(self) -> list[StepRecord]:
        return [step for worker in self.workers.values() for step in worker.take_steps()]


def step_s(worker_id: str, plan: StepPlan) -> float:
    return STEP.step_s(plan)


@pytest.fixture
def clusters() -> Iterator[dict[str, Recording]]:
    engine = {"record_steps": True}
    with ExitStack() as stack:
        yield {
            "colocated:2": stack.enter_context(Recording({"both": {"workers": 2}}, step_s=step_s, engine=engine)),
            "split:1+1": stack.enter_context(Recording({"prefill": {}, "decode": {}}, step_s=step_s, engine=engine)),
        }


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clusters that are up need none; the command reads its vocabulary."""
    monkeypatch.setattr(baton_cli.experiment, "resolve_model", lambda source, progress: Path("."))
    monkeypatch.setattr(baton_cli.experiment, "load_spec", lambda *args: MODEL)
    monkeypatch.setattr(baton_cli.experiment, "_weight_bytes", lambda *args: 0)


def engine_of(clusters: dict[str, Recording]) -> RealEngine:
    running = {Setting(placement): cluster for placement, cluster in clusters.items()}
    return RealEngine(ClusterConfig(), MODEL, model_bytes=0, clusters=running)


def journal_of(folder: Path, plan: Plan) -> Journal:
    return Journal(folder, {"plan": msgspec.to_builtins(plan), "cluster": {}, "profile": None})


@pytest.mark.usefixtures("no_model")
def test_a_real_run_and_the_simulator_against_it(tmp_path: Path, clusters: dict[str, Recording]) -> None:
    config = parse_config({"security": {"secret": "sixteen characters"}})
    outcome, status = run_experiment(config, PLAN, folder=tmp_path / "real", clusters=clusters)
    assert status == 0
    for cluster in clusters.values():
        cluster.wait_ledger_zero()
        assert not cluster.step_failures()
    result = read_result(tmp_path / "real")
    assert len(result.records) == 2 * 2 * 8
    assert "sixteen characters" not in (tmp_path / "real" / "config.json").read_text()
    for record in result.records:
        assert record.output_tokens == len(record.tbt_ms) + 1
        assert (record.kv_bytes > 0) == (str(Stage.WIRE) in record.stages_ms) == (record.placement == "split:1+1")
        assert record.received_s is not None
        steps = result.steps[record.run]
        assert min(s.start_s for s in steps) >= record.received_s - 60
        assert any(s.start_s >= record.received_s for s in steps), "on one clock"
    computed = {run: sum(s.shape.chunk_tokens + s.shape.decodes for s in steps) for run, steps in result.steps.items()}
    for run_of, tokens in computed.items():
        mine = [r for r in result.records if r.run == run_of]
        assert tokens == sum(r.prompt_tokens + r.output_tokens - 1 for r in mine), "steps of this point and no other"
    hardware = outcome.summary["engine"]
    assert {w["worker_id"] for w in hardware["workers"]["split:1+1"]} == {"prefill-0", "decode-0"}

    simulated_config, plan, real = read_against(tmp_path / "real")
    profile = EngineProfile("stub", "none", "threads", STEP, 8, None, link=LinkModel(0.0002, 1e9))
    plan = msgspec.structs.replace(plan, engine="simulated", profiles=("stub",))
    against = run_experiment(simulated_config, plan, folder=tmp_path / "sim", profiles=[profile], against=real)[0]
    work = {(r.placement, r.seed, r.index, r.prompt_tokens, r.output_tokens) for r in against.records}
    assert work == {(r.placement, r.seed, r.index, r.prompt_tokens, r.output_tokens) for r in result.records}
    compared = against.summary["against"]
    assert {point["placement"] for point in compared["points"]} == set(PLAN.placements)
    for point in compared["points"]:
        for figure in point["figures"].values():
            assert figure["error"] == pytest.approx(figure["simulated"] / figure["real"] - 1)
            assert isinstance(figure["within"], bool)
    assert compared["figures"] == 2 * 4
    for point in against.summary["points"]:
        assert isinstance(point["error"]["against_real"]["ttft_p50_ms"]["relative"], float)
    assert against.summary["slo"]["ttft_ms"] == outcome.summary["slo"]["ttft_ms"]
    assert compared["sentence"] in against.summary["notes"]
    with pytest.raises(ConfigError, match="simulated run itself"):
        read_against(tmp_path / "sim")


class AtRecord(Watch):
    """SIGINT once so many requests have ended, in the middle of a point."""

    def __init__(self, count: int):
        self.count = count

    def on_record(self, record: RequestRecord) -> None:
        self.count -= 1
        if self.count == 0:
            signal.raise_signal(signal.SIGINT)


def test_ctrl_c_ends_the_point_and_its_requests(tmp_path: Path, clusters: dict[str, Recording]) -> None:
    journal = journal_of(tmp_path, PLAN)
    with pytest.raises(KeyboardInterrupt):
        run(PLAN, engine_of(clusters), journal, AtRecord(8 + 3))
    points = [name for name in journal.names if "_alone" not in name]
    assert points == [PLAN.schedule()[0].name]
    for cluster in clusters.values():
        cluster.wait_ledger_zero()
    run(PLAN, engine_of(clusters), journal, AtRecord(-1))
    assert {point.name for point in PLAN.schedule()} <= journal.names


def test_requests_that_fail_are_records_with_the_reason(tmp_path: Path, clusters: dict[str, Recording]) -> None:
    stage = RealStage({Setting("split:1+1"): clusters["split:1+1"]})
    assert stage.max_model_len == 512
    journal = journal_of(tmp_path, PLAN)
    journal.note(max_model_len=stage.max_model_len * 4)  # as if the clusters had been larger before
    long = msgspec.structs.replace(PLAN, work=Work(lengths=Lengths((900, 1000), (4, 8))))
    with pytest.raises(RequestFailedError, match="single request"):
        run(long, engine_of(clusters), journal, Watch())


def test_settings_are_up_together_as_far_as_memory_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse_config({"pools": {"both": {"kv_memory_mib": 1024}}})
    settings = [Setting("colocated:2", 64), Setting("colocated:2", 128), Setting("split:1+1")]
    engine = RealEngine(config, MODEL, model_bytes=1 << 30)

    def groups(gib: float) -> list[int]:
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=gib * 2**30))
        return [len(group) for group in engine.groups(settings)]

    assert groups(100) == [3]
    assert groups(14) == [2, 1], "two workers take 2.7 GiB each, of four fifths"
    assert groups(1) == [1, 1, 1], "one always runs; whether it starts is the launcher's to say"
    gpus = parse_config({"pools": {"both": {"gpus": 1, "device": "cuda"}}, "ray": {"num_gpus": 4}})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2**40))
    assert [len(g) for g in RealEngine(gpus, MODEL, model_bytes=0).groups(settings)] == [2, 1]


def test_a_model_on_the_local_launcher(tmp_path: Path, tiny_model: Path) -> None:
    config = parse_config(
        {
            "launcher": "local",
            "model": {"source": str(tiny_model), "dtype": "float32"},
            "pools": {"both": {"kv_memory_mib": 8}},
            "liveness": {"heartbeat_s": 1.0, "timeout_s": 30.0},
        }
    )
    plan = Plan(
        rates=(20.0,),
        num_requests=4,
        work=Work(source="chat/16"),
        chunk_tokens=(32, 128),
        placements=("colocated:2", "mixed:1+0+1"),
    )
    outcome, status = run_experiment(config, plan, folder=tmp_path, as_json=True)
    assert status == 0, outcome.records
    result = read_result(tmp_path)
    assert {(run.placement, run.chunk_tokens) for run in result.steps} == {
        (p, c) for p in plan.placements for c in (32, 128)
    }
    for run_of, steps in result.steps.items():
        assert steps
        assert max(step.shape.chunk_tokens for step in steps) <= (run_of.chunk_tokens or 0)
    assert max(r.prompt_tokens + r.output_tokens for r in outcome.records) <= 512

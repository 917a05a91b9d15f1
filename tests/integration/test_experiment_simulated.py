"""Experiments on simulated clusters, from the plan to the folder: whole runs, interrupted ones, the command itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

import baton_cli.experiment
import baton_experiments.outcome
from baton.config import ClusterConfig, parse_config
from baton.errors import ConfigError
from baton.timeline import Stage
from baton_cli import main
from baton_cli.experiment import INTERRUPTED, Options, default_chunks, run_experiment
from baton_cluster.latency import LatencyModel, LinearLatency, LinkModel
from baton_experiments.experiment import Watch, run
from baton_experiments.journal import Journal
from baton_experiments.outcome import SIMULATED
from baton_experiments.plan import Plan, Point
from baton_experiments.profiles.fitted import FittedLatency, profile_tree
from baton_experiments.profiles.profile import EngineProfile
from baton_experiments.records import RequestRecord, Setting
from baton_experiments.results import read_result
from baton_experiments.simulated import SimulatedEngine, SimulatedStage, layout_of, simulation
from baton_experiments.work import Work
from baton_experiments.workloads import Lengths

CONFIG = ClusterConfig()


def make_profile(latency: LatencyModel, **changes: Any) -> EngineProfile:
    profile = EngineProfile(
        name="toy",
        model="toy model",
        hardware="toy machine",
        latency=latency,
        kv_bytes_per_token=1000,
        kv_tokens=20_000,
        link=LinkModel(latency_s=0.001, bytes_per_s=1e8),
    )
    return msgspec.structs.replace(profile, **changes)


TOY = make_profile(LinearLatency(0.01, 0.0005))
PLAN = Plan(
    rates=(1.0, 4.0),
    seeds=(0, 1),
    num_requests=10,
    work=Work(lengths=Lengths((50, 150), (5, 15))),
    engine="simulated",
    profiles=("toy",),
)


ONE = msgspec.structs.replace(PLAN, rates=(1.0,), seeds=(0,))


def journal_of(folder: Path, plan: Plan) -> Journal:
    return Journal(folder, {"plan": msgspec.to_builtins(plan), "cluster": {}, "profile": None})


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody reads it: its figures take seconds."""
    monkeypatch.setattr(baton_experiments.outcome, "write_report", lambda folder, *_: folder / "report.html")


# --- points -------------------------------------------------------------------------------------------------


def test_a_folder_holds_all_that_a_result_is(tmp_path: Path) -> None:
    outcome, status = run_experiment(CONFIG, PLAN, folder=tmp_path, profiles=[TOY])
    assert status == 0
    result = read_result(tmp_path)
    assert len(result.records) == 2 * 2 * 2 * (10 + 2)
    assert sum(not record.warmup for record in result.records) == 2 * 2 * 2 * 10
    assert [r.index for r in result.records if not r.warmup][:10] == list(range(1, 11)), "the ramp is at both ends"
    assert len(result.steps) == 8
    for record in result.records:
        assert record.error is None
        assert 5 <= record.output_tokens == len(record.tbt_ms) + 1 <= 15
        assert sum(record.stages_ms.values()) + record.residual_ms == pytest.approx(
            record.ttft_ms + sum(record.tbt_ms)
        ), "the stages add up to what the client waited"
        assert (record.kv_bytes > 0) == (str(Stage.WIRE) in record.stages_ms) == (record.placement == "split:1+1")
    summary = result.summary
    assert {(p["placement"], p["rate"], p["requests"], tuple(p["seeds"])) for p in summary["points"]} == {
        (placement, rate, 20, (0, 1)) for placement in PLAN.placements for rate in PLAN.rates
    }
    assert summary["engine"]["kind"] == "simulated"
    assert summary["engine"]["profiles"]["toy"]["hardware"] == "toy machine"
    assert summary["config"]["plan"]["num_requests"] == 10
    assert summary["complete"]
    assert summary["unequal"] is None
    assert summary["workload"][0]["statistics"]["requests"] == 12
    assert summary["verdict"]["sentence"]
    assert any("Warm-up" in note for note in summary["notes"])
    assert outcome.report_path.stat().st_size > 1000
    assert result.config["environment"]["versions"]["baton-serve"]


@pytest.mark.usefixtures("no_report")
def test_a_single_request_takes_what_the_profile_says(tmp_path: Path) -> None:
    """The reference of the SLO: four requests, each of which has a cluster to itself."""
    plan = msgspec.structs.replace(PLAN, placements=("split:1+1", "colocated:2"))
    journal = journal_of(tmp_path, plan)
    run(plan, SimulatedEngine(CONFIG, [TOY]), journal, Watch())
    alone = journal.read("split-1+1_alone").records
    assert len(alone) == 4
    for record in alone:
        trips = 6 * 1.0  # client, router, prefill, decode for its room, and the way back: a millisecond each
        assert record.ttft_ms == pytest.approx(trips + 10 + 0.5 * record.prompt_tokens)
        assert record.tbt_ms[1:] == pytest.approx([10.5] * (record.output_tokens - 2))
    summary = run_experiment(CONFIG, plan, folder=tmp_path / "whole", profiles=[TOY])[0].summary
    means = [part["statistics"]["prompt_tokens"]["mean"] for part in summary["workload"]]
    colocated = 14 + 0.5 * sum(means) / 2  # no decode worker to ask
    assert summary["slo"]["ttft_ms"] == pytest.approx(5 * colocated, rel=0.02)
    assert summary["slo"]["tbt_ms"] == pytest.approx(2.5 * 10.5, rel=0.02)
    assert "alone" in summary["slo"]["source"]


@pytest.mark.usefixtures("no_report")
def test_the_same_plan_gives_the_same_records(tmp_path: Path) -> None:
    first = run_experiment(CONFIG, PLAN, folder=tmp_path / "a", profiles=[TOY])[0]
    second = run_experiment(CONFIG, PLAN, folder=tmp_path / "b", profiles=[TOY])[0]
    assert first.records == second.records
    assert first.summary["points"] == second.summary["points"]
    assert first.summary["verdict"] == second.summary["verdict"]


@pytest.mark.usefixtures("no_report")
def test_all_settings_get_the_same_requests(tmp_path: Path) -> None:
    plan = msgspec.structs.replace(PLAN, chunk_tokens=(64, 256), seeds=(3,), placements=("mixed:1+1+1", "split:2+1"))
    outcome, _ = run_experiment(CONFIG, plan, folder=tmp_path, profiles=[TOY])
    work: dict[Any, set[tuple[Any, ...]]] = {}
    for record in outcome.records:
        work.setdefault(record.run, set()).add((record.index, record.prompt_tokens, record.output_tokens))
    assert len(work) == 2 * 2 * 2
    assert len({frozenset(requests) for requests in work.values()}) == 1
    workers = {r.prefill_worker for r in outcome.records if r.placement == "mixed:1+1+1"}
    assert workers == {"prefill-0", "both-0"}, "all pools that can prefill do"
    chunks = {
        run.chunk_tokens: max(s.shape.chunk_tokens for s in steps) for run, steps in read_result(tmp_path).steps.items()
    }
    assert chunks[64] == 64 < chunks[256]


@pytest.mark.usefixtures("no_report")
def test_two_engines_in_one_experiment(tmp_path: Path) -> None:
    slow = make_profile(LinearLatency(0.02, 0.001), name="slow")
    plan = msgspec.structs.replace(PLAN, profiles=("toy", "slow"), rates=(1.0,), seeds=(0,))
    outcome, _ = run_experiment(CONFIG, plan, folder=tmp_path, profiles=[TOY, slow])
    points = {(p["engine"], p["placement"]): p["tbt_ms"]["p50"] for p in outcome.summary["points"]}
    assert len(points) == 4
    assert points["slow", "split:1+1"] == pytest.approx(2 * points["toy", "split:1+1"], rel=0.3)


@pytest.mark.usefixtures("no_report")
def test_split_wins_under_long_prompts_and_loses_under_short_ones(tmp_path: Path) -> None:
    """Prompts that hold up others' tokens, against prompts that cost nothing while a hand-over does."""
    slow_link = LinkModel(latency_s=0.02, bytes_per_s=1e6)
    cases = {
        "split:1+1": (Lengths((800, 1200), (20, 40)), TOY, (1.0, 1.5), 25.0),
        "colocated:2": (Lengths((8, 16), (5, 10)), msgspec.structs.replace(TOY, link=slow_link), (0.5, 1.0), 25.0),
    }
    for winner, (lengths, profile, rates, slo_tbt) in cases.items():
        plan = msgspec.structs.replace(
            PLAN,
            work=Work(lengths=lengths),
            rates=rates,
            seeds=(0, 1, 2),
            num_requests=40,
            slo_ttft_ms=3000.0,
            slo_tbt_ms=slo_tbt,
        )
        summary = run_experiment(CONFIG, plan, folder=tmp_path / winner[:5], profiles=[profile])[0].summary
        assert summary["verdict"]["winner"] == winner, summary["verdict"]
        assert summary["verdict"]["bottlenecks"], "what limits each is named"
        share = {p["placement"]: p["tbt_ms"]["p99"] for p in summary["points"] if p["rate"] == rates[-1]}
        assert min(share, key=lambda placement: share[placement]) == winner, "the verdict agrees with the table"


# --- interrupted and gone on with ---------------------------------------------------------------------------


class Interrupting(Watch):
    """Ctrl-C in the middle of the point of this number; counts those that began."""

    def __init__(self, at: int | None = None):
        self.at, self.begun = at, list[Point]()

    def begin(self, point: Point, planned_s: float) -> None:
        self.begun.append(point)

    def on_record(self, record: RequestRecord) -> None:
        if self.at is not None and len(self.begun) == self.at:
            raise KeyboardInterrupt


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    points = PLAN.schedule()
    first, second = Interrupting(3), Interrupting()
    with pytest.raises(KeyboardInterrupt):
        run(PLAN, SimulatedEngine(CONFIG, [TOY]), journal_of(tmp_path, PLAN), first)
    assert first.begun == points[:3]
    run(PLAN, SimulatedEngine(CONFIG, [TOY]), journal_of(tmp_path, PLAN), second)
    assert second.begun == points[2:], "whole points are not run again, the half one is"
    third = Interrupting()
    run(PLAN, SimulatedEngine(CONFIG, [TOY]), journal_of(tmp_path, PLAN), third)
    assert third.begun == []


@pytest.fixture
def interrupt_play(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Ctrl-C when the point of this number is played, once."""
    original, played = SimulatedStage.play, 0

    def after(number: int) -> None:
        def play(self: SimulatedStage, *args: Any) -> Any:
            nonlocal played
            played += 1
            if played == number:
                raise KeyboardInterrupt
            return original(self, *args)

        monkeypatch.setattr(SimulatedStage, "play", play)

    return after


@pytest.mark.usefixtures("no_report")
def test_what_is_done_at_ctrl_c_is_reported_and_the_rest_added(
    tmp_path: Path, interrupt_play: Callable[[int], None]
) -> None:
    interrupt_play(6)
    outcome, status = run_experiment(CONFIG, PLAN, folder=tmp_path / "a", profiles=[TOY])
    assert status == INTERRUPTED
    assert not outcome.summary["complete"]
    assert [note for note in outcome.summary["notes"] if "5 of 8 points" in note]
    assert {p["rate"] for p in outcome.summary["points"]} == {1.0, 4.0}
    assert {tuple(p["seeds"]) for p in outcome.summary["points"]} == {(0,)}, "seed 1 is done for one setting only"
    assert len(read_result(tmp_path / "a").records) == 5 * 12, "and is in the records all the same"
    whole, status = run_experiment(CONFIG, PLAN, folder=tmp_path / "a", profiles=[TOY])
    assert status == 0
    assert whole.records == run_experiment(CONFIG, PLAN, folder=tmp_path / "b", profiles=[TOY])[0].records


def test_ctrl_c_before_the_first_point_leaves_nothing_to_report(
    tmp_path: Path, interrupt_play: Callable[[int], None]
) -> None:
    interrupt_play(1)
    with pytest.raises(KeyboardInterrupt):
        run_experiment(CONFIG, PLAN, folder=tmp_path, profiles=[TOY])


@pytest.mark.usefixtures("no_report")
def test_a_folder_of_another_profile_is_not_gone_on_with(tmp_path: Path) -> None:
    run_experiment(CONFIG, PLAN, folder=tmp_path, profiles=[TOY])
    changed = make_profile(LinearLatency(0.01, 0.0006))
    with pytest.raises(ConfigError, match="another experiment"):
        run_experiment(CONFIG, PLAN, folder=tmp_path, profiles=[changed])
    run_experiment(CONFIG, PLAN, folder=tmp_path, profiles=[changed], anew=True)


@pytest.mark.usefixtures("no_report")
def test_a_folder_of_another_link_or_trace_is_not_gone_on_with(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = [f"{i}.5,{50 + i},{5 + i % 3}\n" for i in range(12)]
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + "".join(rows))
    plan = msgspec.structs.replace(ONE, work=Work(source=str(trace)))
    folder = tmp_path / "out"
    run_experiment(CONFIG, plan, folder=folder, profiles=[TOY])
    with pytest.raises(ConfigError, match="its link is None"):
        run_experiment(CONFIG, plan, folder=folder, profiles=[TOY], link=LinkModel(bytes_per_s=1e6))
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + "".join(rows).replace(",5\n", ",6\n"))
    with pytest.raises(ConfigError, match=r"another experiment: its trace\.blake2b"):
        run_experiment(CONFIG, plan, folder=folder, profiles=[TOY])


@pytest.mark.usefixtures("no_report")
def test_points_of_another_version_are_told(
    tmp_path: Path, interrupt_play: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def told() -> bool:
        outcome, _ = run_experiment(CONFIG, ONE, folder=tmp_path, profiles=[TOY])
        return any("the same versions" in note for note in outcome.summary["notes"])

    interrupt_play(2)
    assert not told()
    monkeypatch.setattr(baton_cli.experiment, "environment", lambda: {"commit": "another"})
    assert told()
    monkeypatch.setattr(baton_cli.experiment, "environment", lambda: {"commit": "a third"})
    assert told()
    resumed = json.loads((tmp_path / "config.json").read_bytes())["resumed_in"]
    assert resumed == [{"commit": "another"}], "the third ran nothing"


@pytest.mark.usefixtures("no_report")
def test_single_requests_that_are_missing_are_run_again(tmp_path: Path) -> None:
    whole, _ = run_experiment(CONFIG, ONE, folder=tmp_path, profiles=[TOY])
    broken = tmp_path / "journal" / "split-1+1_alone.msgpack"
    broken.write_bytes(b"\x93")
    with pytest.raises(ConfigError, match="remove it"):
        run_experiment(CONFIG, ONE, folder=tmp_path, profiles=[TOY])
    broken.unlink()
    again, status = run_experiment(CONFIG, ONE, folder=tmp_path, profiles=[TOY])
    assert status == 0
    assert again.summary["slo"] == whole.summary["slo"]
    assert again.records == whole.records


def test_a_report_that_is_interrupted_leaves_the_old_result_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def draw(folder: Path, *_: object) -> Path:
        (folder / "report.html").write_text("old")
        return folder / "report.html"

    def interrupted(*_: object) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(baton_experiments.outcome, "write_report", draw)
    run_experiment(CONFIG, ONE, folder=tmp_path, profiles=[TOY])
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()}
    assert {"report.html", "summary.json", "records.csv", "config.json"} <= before.keys()
    monkeypatch.setattr(baton_experiments.outcome, "write_report", interrupted)
    judged = msgspec.structs.replace(ONE, slo_ttft_ms=7.0)
    with pytest.raises(KeyboardInterrupt):
        run_experiment(CONFIG, judged, folder=tmp_path, profiles=[TOY])
    after = {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()}
    assert {name for name in before if before[name] != after[name]} == {"config.json"}
    assert not (tmp_path / ".new").exists()


@pytest.mark.usefixtures("no_report")
def test_what_stands_in_the_place_of_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "records.csv").mkdir()
    with pytest.raises(ConfigError, match=r"--out: cannot be written: .*records\.csv"):
        run_experiment(CONFIG, ONE, folder=tmp_path, profiles=[TOY])


@pytest.mark.usefixtures("no_report")
def test_settings_that_did_the_same_are_compared_though_others_are_missing(
    tmp_path: Path, interrupt_play: Callable[[int], None]
) -> None:
    plan = msgspec.structs.replace(ONE, colocated_chunk_tokens=(64, 256))
    interrupt_play(3)
    notes = run_experiment(CONFIG, plan, folder=tmp_path, profiles=[TOY])[0].summary["notes"]
    (note,) = [note for note in notes if "Not complete" in note]
    assert "those that are done, on the same work; split:1+1 lacks every point" in note


# --- unequal resources --------------------------------------------------------------------------------------


def test_unequal_placements_are_refused_or_flagged_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = msgspec.structs.replace(PLAN, placements=("colocated:2", "split:2+1"), rates=(1.0,), seeds=(0,))
    with pytest.raises(ConfigError, match="--allow-unequal"):
        run_experiment(CONFIG, plan, folder=tmp_path, profiles=[TOY])
    assert not (tmp_path / "config.json").exists(), "nothing was begun"
    flagged = msgspec.structs.replace(plan, allow_unequal=True)
    outcome, _ = run_experiment(CONFIG, flagged, folder=tmp_path, profiles=[TOY])
    warning = "UNEQUAL RESOURCES: colocated:2 has 2 workers, split:2+1 has 3 workers"
    assert outcome.summary["unequal"] == {"colocated:2": 2, "split:2+1": 3}
    assert outcome.summary["verdict"]["sentence"].startswith(warning)
    assert outcome.summary["verdict"]["sentences"][0].startswith(warning)
    assert outcome.summary["notes"][0].startswith(warning)
    assert warning in outcome.report_path.read_text()
    assert warning in " ".join(capsys.readouterr().out.split())


# --- what profile and configuration say ---------------------------------------------------------------------


@pytest.mark.parametrize("size", [1000, 1001, 131_072, 2_621_440, 4 * 65_537])
def test_blocks_are_as_large_as_the_profile_says(size: int) -> None:
    layout = layout_of(make_profile(LinearLatency(0.01), kv_bytes_per_token=size), 16)
    assert layout.block_size == 16
    assert size <= layout.token_bytes <= size * 1.01 + 4


def test_the_settings_of_a_profile_hold_whatever_the_cluster_file_says() -> None:
    profile = msgspec.structs.replace(TOY, config={"engine.policy": "prefill_first", "engine.max_batch_requests": 7})
    plain = simulation(CONFIG, profile, PLAN.settings[0]).config
    assert (plain.engine.policy, plain.engine.max_batch_requests) == ("prefill_first", 7)
    assert {pool.kv_blocks for pool in plain.pools.values()} == {20_000 // 16}
    own = parse_config({"engine": {"max_batch_requests": 5}, "pools": {"both": {"kv_blocks": 50}}})
    set_here = simulation(own, profile, PLAN.settings[0]).config
    assert (set_here.engine.policy, set_here.engine.max_batch_requests) == ("prefill_first", 7)
    assert {pool.kv_blocks for pool in set_here.pools.values()} == {50}
    chunked = simulation(own, profile, Setting("colocated:2", 96)).config
    assert chunked.engine.max_batch_tokens == 96
    with pytest.raises(ConfigError, match=r"engine\.no_such"):
        simulation(CONFIG, msgspec.structs.replace(TOY, config={"engine.no_such": 1}), PLAN.settings[0])
    with pytest.raises(ConfigError, match="how much KV fits"):
        simulation(CONFIG, msgspec.structs.replace(TOY, kv_tokens=None), PLAN.settings[0])


@pytest.mark.usefixtures("no_report")
def test_requests_beyond_what_workers_hold_are_cut_and_that_is_stated(tmp_path: Path) -> None:
    small = msgspec.structs.replace(TOY, kv_tokens=100)
    outcome, status = run_experiment(
        CONFIG, msgspec.structs.replace(PLAN, rates=(1.0,), seeds=(0,)), folder=tmp_path, profiles=[small]
    )
    assert status == 0
    assert max(r.prompt_tokens + r.output_tokens for r in outcome.records) <= 96
    (clip,) = [c for c in outcome.summary["workload"][0]["changes"] if c["change"] == "clip"]
    assert clip["max_model_len"] == 96
    assert clip["counts"]["clipped"] > 0
    (note,) = [note for note in outcome.summary["notes"] if "CUT" in note]
    assert f"{clip['counts']['clipped']} of 12 requests" in note
    assert f"{clip['counts']['prompt_tokens_cut']:,} tokens of prompts" in note


@pytest.mark.usefixtures("no_report")
def test_lengths_that_are_rescaled_are_told(tmp_path: Path) -> None:
    plan = msgspec.structs.replace(ONE, work=msgspec.structs.replace(PLAN.work, scale_prompt=0.5))
    notes = run_experiment(CONFIG, plan, folder=tmp_path, profiles=[TOY])[0].summary["notes"]
    assert "Workload: lengths are rescaled, prompts by 0.5 and outputs by 1." in notes
    assert not [note for note in notes if "CUT" in note], "nothing was"


@pytest.mark.usefixtures("no_report")
def test_a_simulation_says_that_it_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome, _ = run_experiment(CONFIG, ONE, folder=tmp_path, profiles=[TOY])
    assert SIMULATED in outcome.summary["notes"]
    assert capsys.readouterr().out.startswith("SIMULATED")


@pytest.mark.usefixtures("no_report")
def test_transfers_that_were_given_up_are_told(tmp_path: Path) -> None:
    config = parse_config({"transfer": {"lease_s": 1.0}})
    slow = LinkModel(latency_s=0.001, bytes_per_s=2e4)
    outcome, _ = run_experiment(config, ONE, folder=tmp_path, profiles=[TOY], link=slow)
    notes = "\n".join(outcome.summary["notes"])
    stuck = [r for r in outcome.records if r.stages_ms.get(str(Stage.WIRE), 0.0) >= 1000]
    assert stuck
    assert f"split:1+1: {len(stuck)} requests waited for KV blocks" in notes
    assert "split:1+1: workers that only decode computed" in notes
    assert "colocated:2: " not in notes
    fine, _ = run_experiment(CONFIG, ONE, folder=tmp_path, profiles=[TOY], anew=True)
    assert "split:1+1: " not in "\n".join(fine.summary["notes"])


# --- the command --------------------------------------------------------------------------------------------


@pytest.fixture
def profile_file(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile_tree(make_profile(FittedLatency((1, 1000), (0.01, 0.5))), {})))
    return path


def command(*args: object) -> Any:
    return CliRunner().invoke(main.app, ["experiment", *map(str, args)], catch_exceptions=True)


def test_the_command_simulates_a_trace_and_prints_json(
    tmp_path: Path, profile_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # no cluster.yaml here
    trace = tmp_path / "trace.csv"
    rows = "".join(f"{i}.5,{50 + i},{5 + i % 3}\n" for i in range(40))
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + rows)
    done = command(
        *("--engine", "simulated", "--profile", profile_file, "--workload", trace, "--arrivals", "trace"),
        *("--rate", 1, "--rate", 2, "--seed", 0, "--seed", 1, "--requests", 10, "--out", tmp_path / "out", "--json"),
    )
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert {p["placement"] for p in data["points"]} == {"colocated:2", "split:1+1"}
    chunks = {p["chunk_tokens"] for p in data["points"] if p["placement"] == "colocated:2"}
    assert chunks == set(default_chunks(CONFIG)), "colocated is swept if nobody says otherwise"
    assert Path(data["report"]).exists()
    assert Path(data["summary"]).exists()


def test_colocated_is_swept_unless_somebody_says_how_large_chunks_are() -> None:
    options = Options(engine="simulated", profiles=("toy",))
    assert options.plan(CONFIG, [TOY]).colocated_chunk_tokens == (128, 512)
    whole = msgspec.structs.replace(TOY, config={"engine.max_batch_tokens": 66_144})
    assert options.plan(CONFIG, [whole]).colocated_chunk_tokens == (), "prompts are computed whole"
    named = msgspec.structs.replace(options, chunks=(64,))
    assert [setting.chunk_tokens for setting in named.plan(CONFIG, [TOY]).settings] == [64, 64]
    split = msgspec.structs.replace(options, placements=("split:1+1",), ramp=0.0, requests=7)
    assert split.plan(CONFIG, [TOY]).settings == (Setting("split:1+1"),)
    assert split.plan(CONFIG, [TOY]).num_ramp == 0


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["--ramp", "2"], "no share"),
        (["--engine", "virtual"], "--engine"),
        (["--engine", "simulated"], "--profile"),
        (["--profile", "PROFILE"], "simulated engines only"),
        (["--engine", "simulated", "--profile", "PROFILE,speed=3"], "KEY=VALUE"),
        (["--engine", "simulated", "--profile", "PROFILE,tp=two"], "no number"),
        (["--link-gb-per-s", "5"], "simulated engines only"),
        (["--engine", "simulated", "--profile", "PROFILE", "--link-gb-per-s", "inf"], "is no link's"),
        (["--engine", "simulated", "--profile", "PROFILE", "--link-gb-per-s", "nan"], "is no link's"),
        (["--engine", "simulated", "--profile", "PROFILE", "--link-gb-per-s", "0"], "is no link's"),
        (["--engine", "simulated", "--profile", "PROFILE", "--scale-prompt", "0"], "--scale-prompt"),
        (["--engine", "simulated", "--profile", "PROFILE", "--scale-output", "0"], "--scale-output"),
        (["--engine", "simulated", "--profile", "PROFILE", "--arrivals", ""], "--arrivals"),
        (["--workload", "chat", "--prompt-tokens", "3-4"], "without --workload"),
        (["--workload", "/no/such/file"], "neither a preset nor a file"),
        (["--prompt-tokens", "9-3"], "LOW-HIGH"),
        (["--placement", "colocated:2", "--placement", "split:2+1"], "unequal"),
        (["--against", "EMPTY", "--profile", "PROFILE"], "holds no result"),
        (["--against", "EMPTY", "--rate", "3"], "leave it out"),
        (["--against", "EMPTY"], "needs one --profile"),
        (["--against", "EMPTY", "--engine", "real"], "must be simulated"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    tmp_path: Path, profile_file: Path, args: list[str], problem: str
) -> None:
    replaced = [a.replace("PROFILE", str(profile_file)).replace("EMPTY", str(tmp_path)) for a in args]
    done = command(*replaced, "--out", tmp_path / "out")
    assert isinstance(done.exception, ConfigError), done.output
    assert problem in str(done.exception)
    assert not (tmp_path / "out").exists()


def test_a_damaged_result_is_told_in_words(tmp_path: Path, profile_file: Path, no_report: None) -> None:
    run_experiment(CONFIG, ONE, folder=tmp_path / "real", profiles=[TOY])
    config = json.loads((tmp_path / "real" / "config.json").read_bytes())
    summary = json.loads((tmp_path / "real" / "summary.json").read_bytes())
    config["plan"] |= {"engine": "real", "profiles": []}  # as a run on a cluster says it

    def against(changes: dict[str, Any], summary: Any = summary) -> Any:
        (tmp_path / "real" / "config.json").write_text(json.dumps(config | changes))
        (tmp_path / "real" / "summary.json").write_text(json.dumps(summary))
        return command("--against", tmp_path / "real", "--profile", profile_file, "--out", tmp_path / "out").exception

    plan = config["plan"]
    for changes, found in (
        ({}, {}),
        ({}, []),
        ({}, {"slo": {"ttft_ms": "1"}}),
        ({}, {"slo": {"ttft_ms": -1, "tbt_ms": 1}}),
        ({"hardware": None}, summary),
        ({"hardware": {"kv_blocks": {}}}, summary),
        ({"max_model_len": None}, summary),
        ({"cluster": {}}, summary),
        ({"cluster": config["cluster"] | {"pools": {"both": 3}}}, summary),
        ({"cluster": config["cluster"] | {"no_such": 3}}, summary),
        ({"plan": plan | {"rates": "fast"}}, summary),
        ({"plan": plan | {"placements": ["apart"]}}, summary),
    ):
        error = against(changes, found)
        assert isinstance(error, ConfigError), (changes, found, error)
        assert not (tmp_path / "out").exists(), "refused before anything starts"
    assert against({}) is None, "whole, it is taken"
    assert json.loads((tmp_path / "out" / "summary.json").read_bytes())["against"]["points"]

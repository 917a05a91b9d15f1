"""Plans, placements, work, journal and files of an experiment: all of it but the cluster and the statistics."""

from __future__ import annotations

import csv
import itertools
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.config import ClusterConfig, parse_config
from baton.errors import BatonError, ConfigError
from baton.step_log import StepRecord, StepShape
from baton.timeline import Stage
from baton_experiments.journal import Journal, Played
from baton_experiments.placement import parse_placement, with_placement
from baton_experiments.plan import Estimate, Plan, Point
from baton_experiments.records import RequestRecord, Run, Setting, Slo
from baton_experiments.results import plain, read_records, read_steps, write_records, write_steps
from baton_experiments.work import Work
from baton_experiments.workloads import Lengths, Poisson, TraceError

VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens\n"


def test_arrivals_have_the_rate_and_scale_with_it() -> None:
    times = list(itertools.islice(Poisson(4.0).times(1), 4000))
    assert times == sorted(times)
    assert 4000 / times[-1] == pytest.approx(4.0, rel=0.05)
    faster = list(itertools.islice(Poisson(8.0).times(1), 10))
    assert faster == pytest.approx([t / 2 for t in times[:10]])
    with pytest.raises(BatonError, match="positive"):
        Poisson(0)


def test_the_same_seed_is_the_same_work_at_every_rate() -> None:
    def work(rate: float, seed: int) -> list[tuple[tuple[int, ...], int]]:
        made = Work(lengths=Lengths((3, 9), (2, 4)))
        requests = made.requests(rate=rate, seed=seed, num_requests=20, max_model_len=100, vocab_size=500)
        return [(r.prompt, r.max_tokens) for r in requests]

    def without_first(work: list[tuple[tuple[int, ...], int]]) -> list[tuple[tuple[int, ...], int]]:
        return [(prompt[1:], max_tokens) for prompt, max_tokens in work]

    assert work(1, 0) == work(1, 0) != work(1, 1)
    assert without_first(work(1, 0)) == without_first(work(5, 0))
    assert all(a[0] != b[0] for (a, _), (b, _) in zip(work(1, 0), work(5, 0), strict=True)), "no prefix in common"
    for prompt, max_tokens in work(1, 0):
        assert 3 <= len(prompt) <= 9
        assert 2 <= max_tokens <= 4
        assert all(100 <= token < 500 for token in prompt)


# --- placements ---------------------------------------------------------------------------------------------


def test_placements_become_pools_of_the_same_kind() -> None:
    config = parse_config({"pools": {"prefill": {"cores": 2, "kv_memory_mib": 64}, "decode": {}}})
    split = with_placement(config, "split:3+1")
    assert {name: (p.workers, p.cores, p.kv_memory_mib) for name, p in split.pools.items()} == {
        "prefill": (3, 2, 64),
        "decode": (1, 2, 64),
    }
    assert parse_placement("colocated:2") == {"both": 2}
    assert parse_placement("mixed:2+1+1") == {"prefill": 2, "decode": 1, "both": 1}
    assert parse_placement("mixed:1+0+1") == {"prefill": 1, "both": 1}
    assert with_placement(config, "split:1+1").name != with_placement(config, "colocated:2").name
    listening = with_placement(parse_config({"router": {"port": 5555}, "http": {"port": 8000}}), "split:1+1")
    assert (listening.router.port, listening.http.port) == (0, 0), "they run side by side"
    for wrong in ("colocated", "split:0+1", "split:1", "both:2", "", "mixed:1+0+0", "mixed:0+1+0", "split:1+1+1"):
        with pytest.raises(ConfigError, match="colocated:N"):
            with_placement(ClusterConfig(), wrong)


def test_a_chunk_size_is_the_token_budget_of_a_step() -> None:
    changed = with_placement(ClusterConfig(), "split:1+1", 64)
    assert changed.engine.max_batch_tokens == 64
    assert changed.name != with_placement(ClusterConfig(), "split:1+1", 128).name, "they are up at once"


# --- plans --------------------------------------------------------------------------------------------------


def test_chunk_sizes_multiply_placements() -> None:
    plan = Plan(chunk_tokens=(64, 256))
    assert [str(setting) for setting in plan.settings] == [
        "colocated:2 in chunks of 64",
        "colocated:2 in chunks of 256",
        "split:1+1 in chunks of 64",
        "split:1+1 in chunks of 256",
    ]
    swept = Plan(colocated_chunk_tokens=(64, 256))
    assert swept.settings == (Setting("colocated:2", 64), Setting("colocated:2", 256), Setting("split:1+1"))
    engines = Plan(engine="simulated", profiles=("a", "b"))
    assert [setting.engine for setting in engines.settings] == ["a", "a", "b", "b"]


def test_settings_take_turns_and_another_one_begins_each_round() -> None:
    plan = Plan(rates=(1.0, 2.0), seeds=(0, 1))
    points = plan.schedule()
    assert [(p.seed, p.rate, p.setting.placement) for p in points] == [
        (0, 1.0, "colocated:2"),
        (0, 1.0, "split:1+1"),
        (0, 2.0, "split:1+1"),
        (0, 2.0, "colocated:2"),
        (1, 1.0, "colocated:2"),
        (1, 1.0, "split:1+1"),
        (1, 2.0, "split:1+1"),
        (1, 2.0, "colocated:2"),
    ]
    apart = plan.schedule([[Setting("colocated:2")], [Setting("split:1+1")]])
    assert sorted(apart) == sorted(points)
    assert [p.setting.placement for p in apart] == ["colocated:2"] * 2 + ["split:1+1"] * 2 + ["colocated:2"] * 2 + [
        "split:1+1"
    ] * 2, "groups take turns seed by seed"
    assert len({p.name for p in points}) == len(points)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"placements": ("colocated:2", "split:2+1")}, "unequal"),
        ({"placements": ("colocated:two",)}, "colocated:N"),
        ({"placements": ("colocated:2", "colocated:2")}, "twice"),
        ({"placements": ("split:1+1", "split:01+1")}, "colocated:N"),
        ({"placements": ("split:\uff11+1",)}, "colocated:N"),
        ({"rates": (1e-5,)}, "0.0001 to 1,000,000"),
        ({"rates": (1e300,)}, "0.0001 to 1,000,000"),
        ({"rates": (1e-4,), "work": Work(arrivals="gamma:50"), "num_requests": 2000}, "hours between two requests"),
        ({"engine": "simulated", "profiles": ("a b", "a-b")}, "files would not"),
        ({"rates": ()}, "at least once"),
        ({"rates": (0.0,)}, "positive"),
        ({"rates": (float("nan"),)}, "positive"),
        ({"seeds": (-1,)}, "out of range"),
        ({"num_requests": 0}, "positive"),
        ({"chunk_tokens": (0,)}, "positive"),
        ({"placements": ("split:1+1",), "colocated_chunk_tokens": (64,)}, "none of the placements"),
        ({"slo_ttft_ms": -1.0}, "--slo-ttft"),
        ({"engine": "simulated"}, "--profile"),
        ({"profiles": ("a",)}, "--profile"),
        ({"work": Work(arrivals="gamma")}, "gamma:CV"),
        ({"work": Work(arrivals="gamma:x")}, "gamma:CV"),
        ({"work": Work(arrivals="gamma:-1")}, "cv"),
        ({"work": Work(arrivals="trace")}, "need a trace file"),
        ({"work": Work(source="chatt")}, "neither a preset nor a file"),
        ({"work": Work(source="chat/0")}, "no preset"),
        ({"work": Work(format="azure")}, "trace files only"),
        ({"work": Work(scale_prompt=0.0)}, "--scale-prompt"),
    ],
)
def test_a_plan_that_cannot_be_run_is_refused_in_words(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        msgspec.structs.replace(Plan(), **changes).check()


def test_unequal_placements_run_only_where_that_is_asked_for() -> None:
    plan = Plan(placements=("colocated:2", "split:2+1"), allow_unequal=True)
    plan.check()
    assert plan.is_unequal
    assert not Plan(placements=("colocated:4", "split:3+1", "mixed:1+1+2")).is_unequal


def test_an_slo_is_what_was_asked_for_and_else_the_reference() -> None:
    assert Plan().slo(None) is None
    assert Plan(slo_ttft_ms=100.0).slo(Slo(1.0, 2.0)) == Slo(100.0, 2.0)
    assert Plan(slo_ttft_ms=100.0, slo_tbt_ms=20.0).slo(None) == Slo(100.0, 20.0)
    assert Plan(slo_e2el_ms=500.0).slo(Slo(1.0, 2.0)) == Slo(1.0, 2.0, 500.0)


def test_the_time_left_follows_what_points_took() -> None:
    estimate = Estimate(40.0, at_planned_speed=True)
    assert estimate.left(0.0) == 40.0
    estimate.begin(10.0, 0.0)
    assert (estimate.done(4.0), estimate.left(4.0)) == (4.0, 36.0)
    assert estimate.left(60.0) == 30.0, "a point that lasts longer than planned is counted once"
    estimate.end(10.0, 20.0)
    assert estimate.left(70.0) == 60.0, "the others take twice as long as planned, too"
    estimate.begin(10.0, 100.0)
    assert estimate.left(110.0) == 50.0
    simulated = Estimate(40.0, at_planned_speed=False)
    assert simulated.left(0.0) is None
    simulated.end(10.0, 0.1)
    assert simulated.left(1.0) == pytest.approx(0.3)


# --- work ---------------------------------------------------------------------------------------------------


def shapes_of(work: Work, *, rate: float = 1.0, seed: int = 0, num_requests: int = 4, limit: int = 4096) -> list[Any]:
    return list(work.of(rate=rate, seed=seed, num_requests=num_requests, max_model_len=limit))


def write_trace(path: Path, rows: int, *, malformed: bool = False) -> Work:
    lines = [f"{i * i},{100 + i},{10 + i}\n" for i in range(rows)]
    if malformed:
        lines.insert(2, "oops,3,4\n")
    path.write_text(VIDUR + "".join(lines))
    return Work(source=str(path))


@pytest.mark.parametrize("arrivals", ["poisson", "gamma:3", "constant"])
def test_work_of_a_preset_is_the_same_at_every_rate(arrivals: str) -> None:
    work = Work(source="chat/8", arrivals=arrivals)
    slow, fast = shapes_of(work, rate=1.0), shapes_of(work, rate=4.0)
    assert [(s.prompt_tokens, s.output_tokens) for s in slow] == [(s.prompt_tokens, s.output_tokens) for s in fast]
    assert [s.at_s for s in slow] == pytest.approx([4 * s.at_s for s in fast])
    assert shapes_of(work) != shapes_of(work, seed=1)


def test_seeds_take_different_parts_of_a_trace(tmp_path: Path) -> None:
    work = write_trace(tmp_path / "trace.csv", 9)
    assert [s.prompt_tokens for s in shapes_of(work)] == [100, 101, 102, 103]
    assert [s.prompt_tokens for s in shapes_of(work, seed=1)] == [104, 105, 106, 107]
    work.check(4, (0, 1))
    with pytest.raises(ConfigError, match="two seeds take the same"):
        work.check(4, (0, 2))
    with pytest.raises(ConfigError, match="has 9 requests"):
        work.check(10, (0,))


def test_a_trace_keeps_its_bursts_at_any_rate(tmp_path: Path) -> None:
    work = msgspec.structs.replace(write_trace(tmp_path / "trace.csv", 8), arrivals="trace")
    work.check(4, (0, 1))
    at = [s.at_s for s in shapes_of(work, rate=2.0, seed=1)]
    assert at == pytest.approx([0.0, 9 / 22, 20 / 22, 33 / 22])
    assert 3 / at[-1] == pytest.approx(2.0)


def test_what_is_changed_about_a_trace_is_stated(tmp_path: Path) -> None:
    work = msgspec.structs.replace(
        write_trace(tmp_path / "trace.csv", 8, malformed=True), skip_malformed=True, scale_prompt=0.5
    )
    described = work.described(rate=2.0, seed=1, num_requests=4, max_model_len=60)
    assert described["source"]["part"] == {"first": 4, "requests": 4}
    assert described["source"]["file_counts"]["malformed"] == 1
    assert [change["change"] for change in described["changes"]] == ["with_arrivals", "scale_lengths", "clip"]
    assert described["changes"][2]["counts"]["clipped"] == 4
    assert described["statistics"]["prompt_tokens"]["max"] + described["statistics"]["output_tokens"]["max"] <= 120
    json.dumps(described)


def test_a_malformed_row_is_told_before_anything_runs(tmp_path: Path) -> None:
    work = write_trace(tmp_path / "trace.csv", 8, malformed=True)
    with pytest.raises(TraceError, match=r"trace\.csv:4"):
        work.check(2, (0,))
    msgspec.structs.replace(work, skip_malformed=True).check(2, (0,))


def test_a_trace_without_times_has_no_arrivals_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n" + "5,2\n" * 8)
    Work(source=str(path)).check(4, (0,))
    with pytest.raises(ConfigError, match="has no times"):
        Work(source=str(path), arrivals="trace").check(4, (0,))


def test_requests_that_are_left_out_for_their_length_are_counted(tmp_path: Path) -> None:
    work = msgspec.structs.replace(write_trace(tmp_path / "trace.csv", 9), max_total_tokens=120)
    described = work.described(rate=1.0, seed=0, num_requests=4, max_model_len=4096)
    assert described["source"]["left_out"] == {"max_total_tokens": 120, "requests": 3}, "110, 112, ... 126 tokens"


def test_a_file_that_changed_has_another_digest(tmp_path: Path) -> None:
    work = write_trace(tmp_path / "trace.csv", 9)
    before = work.digest()
    assert before is not None
    assert work.digest() == before
    text = (tmp_path / "trace.csv").read_text()
    (tmp_path / "trace.csv").write_text(text.replace("101", "102"))
    after = work.digest()
    assert after is not None
    assert (after["bytes"], after["blake2b"] == before["blake2b"]) == (before["bytes"], False)
    assert Work().digest() is None
    with pytest.raises(ConfigError, match="cannot be read"):
        Work(source=str(tmp_path / "no.csv")).digest()


# --- the folder ---------------------------------------------------------------------------------------------


def make_record(index: int = 0, **changes: Any) -> RequestRecord:
    record = RequestRecord(
        placement="split:1+1",
        rate=1.0,
        seed=0,
        index=index,
        at_s=0.5 * index,
        prompt_tokens=3,
        output_tokens=3,
        ttft_ms=100.0,
        latency_ms=140.0,
        tbt_ms=[10.0, 30.0],
        stages_ms={str(Stage.PREFILL): 90.0, str(Stage.WIRE): 1.0},
        residual_ms=0.5,
        prefill_worker="prefill-0",
        decode_worker="decode-0",
        kv_bytes=10,
        received_s=7.25,
    )
    return msgspec.structs.replace(record, **changes)


FAILED = make_record(
    1,
    output_tokens=0,
    ttft_ms=None,
    latency_ms=None,
    tbt_ms=[],
    stages_ms={},
    residual_ms=None,
    received_s=None,
    error='overloaded: "full", 3 waiting',
    chunk_tokens=64,
    warmup=True,
)
STEP = StepRecord("prefill-0", 7.5, 0.01, StepShape(1, 5, 0, 15, 2, 40), 3, 2, 1)
RUN = Run("split:1+1", None, 1.0, 0)


def test_records_and_steps_read_back_as_they_were(tmp_path: Path) -> None:
    records = [make_record(), FAILED]
    write_records(tmp_path, records)
    assert read_records(tmp_path) == records
    with (tmp_path / "records.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["prefill_ms"], first["wire_ms"], first["prefill_queue_ms"]) == ("90.0", "1.0", "")
    assert (first["tbt_ms"], second["error"], second["ttft_ms"]) == ("10.000 30.000", FAILED.error, "")
    other = RUN._replace(rate=2.0, chunk_tokens=64)
    write_steps(tmp_path, {RUN: [STEP, STEP], other: [STEP]})
    assert read_steps(tmp_path) == {RUN: [STEP, STEP], other: [STEP]}
    write_steps(tmp_path, {})
    assert read_steps(tmp_path) == {}


def test_every_field_of_a_record_is_in_its_file(tmp_path: Path) -> None:
    """A field that is added and forgotten there would come back as its default."""
    changed = {"error": "e", "attempts": 2, "engine": "a", "warmup": True, "chunk_tokens": 5}
    write_records(tmp_path, [make_record(**changed)])
    assert read_records(tmp_path) == [make_record(**changed)]
    defaults = {f.name for f in msgspec.structs.fields(RequestRecord) if not f.required}
    assert defaults <= changed.keys() | {"received_s"}


def test_what_json_cannot_say_is_null() -> None:
    assert plain({"a": (1.0, float("nan")), 2: float("inf"), "s": Slo(1.0, 2.0)}) == {
        "a": [1.0, None],
        "2": None,
        "s": {"ttft_ms": 1.0, "tbt_ms": 2.0, "e2el_ms": None},
    }


def config_of(plan: Plan) -> dict[str, Any]:
    return {"plan": msgspec.to_builtins(plan), "cluster": {"name": "x"}, "profile": None}


def test_a_journal_goes_on_with_the_same_plan_only(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "new", config_of(Plan()))
    played = Played([make_record(), FAILED], [STEP], 1.5)
    name = Point(Setting("split:1+1", 64, "OPT-13B, tp 1/2"), 0.5, 3).name
    journal.keep(name, played)
    journal.note(max_model_len=77)
    again = Journal(tmp_path / "new", config_of(Plan()))
    assert again.names == {name}
    assert again.read(name) == played
    assert again.config["max_model_len"] == 77
    with pytest.raises(ConfigError, match=r"plan\.num_requests is 20, not 21"):
        Journal(tmp_path / "new", config_of(Plan(num_requests=21)))
    with pytest.raises(ConfigError, match="its link is None"):
        Journal(tmp_path / "new", config_of(Plan()) | {"link": {"bytes_per_s": 1e9}})
    judged = Journal(tmp_path / "new", config_of(Plan(slo_ttft_ms=5.0)))
    assert judged.config["plan"]["slo_ttft_ms"] == 5.0, "another SLO is the same run"
    assert Journal(tmp_path / "new", config_of(Plan(num_requests=21)), anew=True).names == set()


def test_a_journal_takes_no_file_for_its_own_that_is_not(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"other": 1}')
    with pytest.raises(ConfigError, match="not of an experiment"):
        Journal(tmp_path, config_of(Plan()))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        Journal(tmp_path / "file" / "below", config_of(Plan()))
    journal = Journal(tmp_path / "new", config_of(Plan()))
    (tmp_path / "new" / "journal" / "broken.msgpack").write_bytes(b"\x93")
    with pytest.raises(ConfigError, match="remove it"):
        journal.read("broken")


def test_a_file_of_other_columns_is_no_result(tmp_path: Path) -> None:
    write_records(tmp_path, [make_record()])
    write_steps(tmp_path, {})
    (tmp_path / "steps.parquet").replace(tmp_path / "records.parquet")
    with pytest.raises(ConfigError, match=r"records\.parquet: cannot be read"):
        read_records(tmp_path)


def test_a_disk_that_takes_nothing_is_told_in_words(tmp_path: Path) -> None:
    journal = Journal(tmp_path, config_of(Plan()))
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match=r"--out: cannot be written: .*config\.json"):
        journal.note(hardware={})

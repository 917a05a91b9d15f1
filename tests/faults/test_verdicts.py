"""Row 33 of docs/scenarios.md: a workload where split loses, and one where it wins; the verdict is right in both.

Whole experiments on simulated clusters, whose workers take 25 ms a step and 1.6 ms a prompt token. What is right
follows from that. A prompt of 750 tokens is 1.2 s of work: beside others' tokens it holds them up for as long, whatever
the size of its chunks, on a worker of its own it holds up nobody. A prompt of 16 tokens is next to nothing; then all
tokens in one batch take longer than in two, and the hand-over is an extra pause.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from baton.config import ClusterConfig, dump_config
from baton_cluster.latency import LinearLatency, LinkModel
from baton_experiments.experiment import Watch, collect, run
from baton_experiments.journal import Journal
from baton_experiments.plan import Plan
from baton_experiments.profiles.profile import EngineProfile
from baton_experiments.records import Slo
from baton_experiments.simulated import SimulatedEngine
from baton_experiments.summary import summarize
from baton_experiments.work import Work
from baton_experiments.workloads import Lengths

PROFILE = EngineProfile(
    "made up",
    "a model",
    "a machine",
    LinearLatency(base_s=0.025, per_token_s=0.0016),
    kv_bytes_per_token=46_080,
    kv_tokens=40_000,
    link=LinkModel(latency_s=2e-4, bytes_per_s=1e9),
)
SPLIT, COLOCATED = "split:1+1", "colocated:2"


def summary_of(folder: Path, plan: Plan, slo: Slo) -> dict[str, Any]:
    config = ClusterConfig()
    described = {"plan": msgspec.to_builtins(plan), "cluster": dump_config(config), "profile": None}
    journal = Journal(folder, described)
    engine = SimulatedEngine(config, [PROFILE])
    run(plan, engine, journal, Watch())
    collected = collect(plan, journal)
    blocks = PROFILE.kv_tokens // config.engine.block_size if PROFILE.kv_tokens else 0
    workers = ("both-0", "both-1", "prefill-0", "decode-0")
    return summarize(collected.records, slo=slo, steps=collected.steps, kv_blocks=dict.fromkeys(workers, blocks))


def goodput(summary: dict[str, Any], placement: str) -> float:
    (found,) = [
        g["rate"]["90"]
        for g in summary["goodput"]
        if g["placement"] == placement and g["definition"] == "distserve" and g["best"]
    ]
    assert isinstance(found, float)
    return found


def point(summary: dict[str, Any], placement: str, rate: float) -> dict[str, Any]:
    (found,) = [p for p in summary["points"] if (p["placement"], p["rate"]) == (placement, rate) and p["best"]]
    assert isinstance(found, dict)
    return found


def test_split_wins_where_long_prompts_meet_tokens_that_must_not_wait(tmp_path: Path) -> None:
    plan = Plan(
        placements=(COLOCATED, SPLIT),
        rates=(0.2, 0.4, 0.6),
        seeds=(0, 1),
        num_requests=30,
        work=Work(lengths=Lengths((500, 1000), (24, 48))),
        colocated_chunk_tokens=(64, 256),
        engine="simulated",
        profiles=("made up",),
    )
    summary = summary_of(tmp_path, plan, Slo(ttft_ms=8000, tbt_ms=40))
    verdict = summary["verdict"]
    assert verdict["winner"] == SPLIT
    assert verdict["sentence"].startswith("split:1+1 is better here")
    assert goodput(summary, SPLIT) > goodput(summary, COLOCATED)
    by_placement = {b["placement"]: b for b in verdict["bottlenecks"]}
    assert by_placement[COLOCATED]["limit"] == "prefill compute"
    assert "tokens wait for prompts" in by_placement[COLOCATED]["sentence"]
    assert by_placement[SPLIT]["limit"] == "prefill compute"
    # The cost is told with the gain.
    split, colocated = (point(summary, placement, 0.4) for placement in (SPLIT, COLOCATED))
    assert split["tbt_ms"]["max"] < colocated["tbt_ms"]["max"]
    assert split["ttft_ms"]["p50"] > colocated["ttft_ms"]["p50"]
    assert "median TTFT" in "".join(verdict["sentences"])


def test_split_loses_where_prompts_are_short_and_load_is_low(tmp_path: Path) -> None:
    plan = Plan(
        placements=(COLOCATED, SPLIT),
        rates=(1.0, 2.0, 4.0),
        seeds=(0, 1),
        num_requests=40,
        work=Work(lengths=Lengths((8, 24), (16, 48))),
        engine="simulated",
        profiles=("made up",),
    )
    summary = summary_of(tmp_path, plan, Slo(ttft_ms=500, tbt_ms=30))
    verdict = summary["verdict"]
    assert verdict["winner"] == COLOCATED
    assert verdict["sentence"].startswith("colocated:2 is better here")
    assert goodput(summary, COLOCATED) > goodput(summary, SPLIT)
    limit = next(b for b in verdict["bottlenecks"] if b["placement"] == SPLIT)
    assert limit["limit"] == "decode batch"
    assert limit["missed"] > 0.1

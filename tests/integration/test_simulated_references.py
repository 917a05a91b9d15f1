"""The simulator against what others measured or computed: a GPU's run, DistServe's simulator, a queue's formula.

Nothing here was fitted to the figures it is compared with, but for one number of DistServe's conventions
(`profiles.distserve.MAX_DECODE_CONTEXT`). The files are public and no part of the project; where they are not on this
machine, tests skip.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping
from itertools import islice, pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import pytest

import baton_experiments.outcome
from baton.config import ClusterConfig, parse_config
from baton.layout import KVLayout
from baton.sampling_params import SamplingParams
from baton_cli.experiment import run_experiment
from baton_cluster.latency import ConstantLatency, LinkModel
from baton_cluster.simulated import SimulatedCluster, SimulatedRequest
from baton_experiments.plan import Plan
from baton_experiments.profiles.load import load_profile
from baton_experiments.profiles.profile import EngineProfile
from baton_experiments.profiles.shapes import DECODERS
from baton_experiments.work import Work
from baton_experiments.workloads import Poisson, read_trace

SHARED = Path(__file__).resolve().parents[3] / "shared" / "workloads"
BLOCK_SIZE = 16
INSTANT = LinkModel(latency_s=0.0, bytes_per_s=1e15)


def shared(name: str) -> Path:
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"the public reference {name} is not on this machine")
    return path


class Asked(NamedTuple):
    at_s: float
    prompt_tokens: int
    output_tokens: int


class Timed(NamedTuple):
    """What one request took, in the order of `Asked`."""

    ttft_s: float
    tpot_s: float
    """Of the tokens after the first."""
    ended_at: float


def play(profile: EngineProfile, pools: Mapping[str, int], work: Iterable[Asked], **overrides: Any) -> list[Timed]:
    """So many workers in each pool, as the profile and its conventions say."""
    assert profile.kv_tokens is not None
    blocks = profile.kv_tokens // BLOCK_SIZE
    tree: dict[str, Any] = {"pools": {pool: {"workers": n, "kv_blocks": blocks} for pool, n in pools.items()}}
    for dotted, value in {**profile.config, **overrides}.items():
        section, key = dotted.split(".")
        tree.setdefault(section, {})[key] = value
    shape = DECODERS[profile.model]
    kv_heads = profile.kv_bytes_per_token // (4 * shape.layers * shape.head_dim)
    cluster = SimulatedCluster(
        parse_config(tree),
        profile.latency,
        profile.link or INSTANT,
        layout=KVLayout(shape.layers, kv_heads, BLOCK_SIZE, shape.head_dim, "bfloat16"),
        max_model_len=profile.kv_tokens,
        next_token=1,
    )
    timed: dict[int, Timed] = {}

    def on_end(request: SimulatedRequest) -> None:
        assert request.finish_reason == "length", request.error
        first, last = request.token_times[0], request.token_times[-1]
        tpot = (last - first) / max(1, len(request.token_times) - 1)
        timed[request.number] = Timed(first - request.submitted_at, tpot, last)

    cluster.play(
        (
            (
                asked.at_s,
                (1,) * asked.prompt_tokens,
                SamplingParams(max_tokens=asked.output_tokens + profile.extra_output_tokens, ignore_eos=True),
            )
            for asked in work
        ),
        on_end,
    )
    cluster.check_ledger()
    return [timed[number] for number in sorted(timed)]


def test_a_measured_run_of_vllm_on_a_gpu() -> None:
    """300 ShareGPT requests, Llama 3.1 8B on an RTX PRO 6000; inputs: that GPU's kernel times, arrivals and lengths."""
    folder = shared("reference/llmservingsim_RTXPRO6000_Llama-3.1-8B")
    profile = load_profile(shared("profiles/llmservingsim_RTXPRO6000_llama31-8b"))
    with shared("traces/sharegpt_300_sps10_lengths.csv").open(newline="") as file:
        work = [
            Asked(float(r["arrived_at_s"]), int(r["num_prefill_tokens"]), int(r["num_decode_tokens"]))
            for r in csv.DictReader(file)
        ]
    settings = json.loads((folder / "meta.json").read_text())["engine_kwargs"]
    simulated = play(
        profile,
        {"both": 1},
        work,
        **{
            "engine.max_batch_requests": settings["max_num_seqs"],
            "engine.max_batch_tokens": settings["max_num_batched_tokens"],
            "engine.prefix_cache": False,
        },
    )

    rows = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    assert [(r["input_toks"], r["output_toks"]) for r in rows] == [(a.prompt_tokens, a.output_tokens) for a in work]
    ttft = fmean(r["first_token_ts"] - r["queued_ts"] for r in rows)
    tpot = fmean((r["last_token_ts"] - r["first_token_ts"]) / (r["output_toks"] - 1) for r in rows)
    makespan = max(r["last_token_ts"] for r in rows) - min(r["queued_ts"] for r in rows)
    found = (
        fmean(t.ttft_s for t in simulated),
        fmean(t.tpot_s for t in simulated),
        max(t.ended_at for t in simulated) - work[0].at_s,
    )
    print("TTFT, TPOT, makespan (s): simulated", found, "measured", (ttft, tpot, makespan))
    assert found[0] == pytest.approx(ttft, rel=0.05)
    assert found[1] == pytest.approx(tpot, rel=0.05)
    assert found[2] == pytest.approx(makespan, rel=0.03)


RATES = (0.5, 1.0, 1.5, 2.0)
"""Requests per second and GPU."""
DISTSERVE: dict[tuple[str, tuple[str, ...]], tuple[float, ...]] = {
    ("vllm", ("both",)): (96.0, 90.7, 85.0, 39.0),
    ("distserve", ("both",)): (99.0, 98.0, 96.0, 93.0),
    ("distserve", ("prefill", "decode")): (99.0, 96.7, 77.3, 36.3),
}
"""Share of requests (%) within 250 ms to the first token and 100 ms a token, by its simulator."""


@pytest.mark.parametrize(("engine", "pools"), DISTSERVE)
def test_distserves_simulator_with_its_conventions(engine: str, pools: tuple[str, ...]) -> None:
    path = shared("profiles") / f"distserve_a100_80g_{engine}.json"
    profile = load_profile(path, model="opt-13b", tp=1, conventions="distserve")
    rows = json.loads(shared("reference/simdistserve/azconv300_rate1_seed0.json").read_text())
    found = []
    for rate in RATES:
        # The files of other rates hold the same requests at times divided by the rate; of 4 a second there is none.
        work = [Asked(r["start_time"] / (rate * len(pools)), r["prompt_len"], r["output_len"]) for r in rows]
        simulated = play(profile, dict.fromkeys(pools, 1), work)
        found.append(100 * fmean(t.ttft_s <= 0.25 and t.tpot_s <= 0.1 for t in simulated))
    print(engine, pools, found)
    assert found == pytest.approx(DISTSERVE[engine, pools], abs=3.0)


def test_the_winner_turns_where_each_side_has_an_engine_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Split on its profile beats colocated on that of vLLM, per GPU; on one profile colocated wins: in one report."""
    monkeypatch.setattr(baton_experiments.outcome, "write_report", lambda folder, *_: folder / "report.html")
    profiles = [
        load_profile(
            shared("profiles") / f"distserve_a100_80g_{engine}.json", model="opt-13b", tp=1, conventions="distserve"
        )
        for engine in ("distserve", "vllm")
    ]
    plan = Plan(
        placements=("colocated:1", "split:1+1"),
        allow_unequal=True,
        rates=(0.5, 1.0, 2.0, 3.0),
        num_requests=250,
        work=Work(source=str(shared("traces/azure2023_conv.csv")), max_total_tokens=2047),
        engine="simulated",
        profiles=tuple(profile.name for profile in profiles),
        slo_ttft_ms=250.0,
        slo_tbt_ms=100.0,
    )
    outcome, _ = run_experiment(ClusterConfig(), plan, folder=tmp_path, profiles=profiles)
    effects = outcome.summary["verdict"]["engines"]
    on_one_engine = {row["better"] for row in effects["placement"]}
    assert on_one_engine == {"colocated:1"}
    assert "split:1+1" in {row["better"] for row in effects["mixed"]}
    sentence = next(s for s in outcome.summary["verdict"]["sentences"] if "that is the engine's doing" in s)
    assert sentence.index("split:1+1") < sentence.index("colocated:1")
    print(sentence, {(g["placement"], g["engine"]): g["rate"]["90"] for g in outcome.summary["goodput"]})


SPLITWISE_RATE, SPLITWISE_REQUESTS = 16.0, 640
SPLITWISE: dict[tuple[tuple[str, int], ...], tuple[float, float]] = {
    (("both", 4),): (0.101, 0.0417),
    (("prefill", 3), ("decode", 1)): (0.079, 0.0300),
}
"""Medians of TTFT and of TBT (s) by its simulator: Llama 2 70B on servers of H100, Azure's conversations."""


@pytest.mark.parametrize("pools", SPLITWISE)
def test_splitwises_simulator_with_its_conventions(pools: tuple[tuple[str, int], ...]) -> None:
    """Other draws of the same arrival process, and its scheduler takes prompts whole: close, not equal."""
    table = shared("profiles/splitwise_perf_model.csv")
    profile = load_profile(table, model="llama2-70b", hardware="h100-80gb", tp=8, conventions="splitwise")
    lengths = islice(read_trace(shared("traces/azure2023_conv.csv")), SPLITWISE_REQUESTS)
    times = Poisson(SPLITWISE_RATE).times(seed=0)
    work = [Asked(at_s, shape.prompt_tokens, shape.output_tokens) for at_s, shape in zip(times, lengths, strict=False)]
    settings = {"engine.max_batch_tokens": 2048, "engine.max_batch_requests": 512, "engine.prefix_cache": False}
    simulated = play(profile, dict(pools), work, **settings)
    # Its TBT is the time after the first token by all tokens.
    tbt = [t.tpot_s * (1 - 1 / a.output_tokens) for t, a in zip(simulated, work, strict=True) if a.output_tokens > 1]
    found = (median(t.ttft_s for t in simulated), median(tbt))
    print(pools, found)
    assert found == pytest.approx(SPLITWISE[pools], rel=0.1)


def test_a_prefill_worker_that_takes_one_request_at_a_time_is_an_m_d_1_queue() -> None:
    step_s, load, count = 0.05, 0.5, 12_000
    cluster = SimulatedCluster(
        parse_config(
            {
                "pools": {"prefill": {"kv_blocks": 8192}, "decode": {"kv_blocks": 64}},
                "engine": {"max_batch_requests": 1, "prefix_cache": False},
            }
        ),
        ConstantLatency(step_s),
        INSTANT,
        layout=KVLayout(1, 1, BLOCK_SIZE, 4, "float32"),
        max_model_len=64,
        next_token=1,
    )
    arrivals = list(islice(Poisson(load / step_s).times(seed=2), count))
    ttft: dict[int, float] = {}

    def on_end(request: SimulatedRequest) -> None:
        ttft[request.number] = request.token_times[0] - request.submitted_at

    cluster.play(((at_s, (1, 2), SamplingParams(max_tokens=1)) for at_s in arrivals), on_end)

    # Lindley's recursion: a request waits for what the one before still had to wait and to take.
    waits, wait = [0.0], 0.0
    for before, at_s in pairwise(arrivals):
        wait = max(0.0, wait + step_s - (at_s - before))
        waits.append(wait)
    assert [ttft[number] for number in range(count)] == pytest.approx([w + step_s for w in waits], abs=1e-6)
    formula = step_s + load * step_s / (2 * (1 - load))
    print("mean TTFT", fmean(ttft.values()), "formula", formula)
    assert fmean(ttft.values()) == pytest.approx(formula, rel=0.01)

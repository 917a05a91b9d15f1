"""Workloads, placements and reports: everything of an experiment but the cluster."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from baton.config import ClusterConfig, parse_config
from baton.errors import BatonError, ConfigError
from baton_experiments.experiment import Plan, RequestRecord, require_equal_resources
from baton_experiments.placement import with_placement
from baton_experiments.report import distribution, summarize, write_results
from baton_experiments.workloads import Lengths, poisson_arrivals, synthetic


def test_arrivals_have_the_rate_and_scale_with_it() -> None:
    times = list(itertools.islice(poisson_arrivals(4.0, seed=1), 4000))
    assert times == sorted(times)
    assert 4000 / times[-1] == pytest.approx(4.0, rel=0.05)
    faster = list(itertools.islice(poisson_arrivals(8.0, seed=1), 10))
    assert faster == pytest.approx([t / 2 for t in times[:10]])
    with pytest.raises(BatonError, match="positive"):
        next(poisson_arrivals(0, seed=1))


def test_the_same_seed_is_the_same_work_at_every_rate() -> None:
    def work(rate: float, seed: int) -> list[tuple[tuple[int, ...], int]]:
        requests = synthetic(rate=rate, num_requests=20, lengths=Lengths((3, 9), (2, 4)), vocab_size=500, seed=seed)
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


def test_placements_become_pools_of_the_same_kind() -> None:
    config = parse_config({"pools": {"prefill": {"cores": 2, "kv_memory_mib": 64}, "decode": {}}})
    split = with_placement(config, "split:3+1")
    assert {name: (p.workers, p.cores, p.kv_memory_mib) for name, p in split.pools.items()} == {
        "prefill": (3, 2, 64),
        "decode": (1, 2, 64),
    }
    assert {n: p.workers for n, p in with_placement(config, "colocated:2").pools.items()} == {"both": 2}
    assert with_placement(config, "split:1+1").name != with_placement(config, "colocated:2").name
    listening = with_placement(parse_config({"router": {"port": 5555}, "http": {"port": 8000}}), "split:1+1")
    assert (listening.router.port, listening.http.port) == (0, 0), "they run side by side"
    for wrong in ("colocated", "split:0+1", "split:1", "both:2", ""):
        with pytest.raises(ConfigError, match="colocated:N"):
            with_placement(ClusterConfig(), wrong)


def test_unequal_placements_are_not_compared() -> None:
    require_equal_resources(("colocated:2", "split:1+1"))
    with pytest.raises(ConfigError, match="unequal"):
        require_equal_resources(("colocated:2", "split:2+1"))


def test_placements_take_turns() -> None:
    points = Plan(rates=(1.0, 2.0), seeds=(0,)).points()
    assert [p[2] for p in points] == ["colocated:2", "split:1+1"] * 2


def make_record(index: int, *, at_s: float, gaps: list[float], error: str | None = None) -> RequestRecord:
    return RequestRecord(
        placement="split:1+1",
        rate=1.0,
        seed=0,
        index=index,
        at_s=at_s,
        prompt_tokens=3,
        output_tokens=0 if error else len(gaps) + 1,
        ttft_ms=None if error else 100.0,
        latency_ms=None if error else 100.0 + sum(gaps),
        tbt_ms=gaps,
        stages_ms={},
        residual_ms=None,
        prefill_worker="p",
        decode_worker="d",
        kv_bytes=10,
        error=error,
    )


def test_a_summary_counts_tokens_gaps_and_failures() -> None:
    records = [
        make_record(0, at_s=1.0, gaps=[10.0, 30.0]),
        make_record(1, at_s=2.0, gaps=[20.0, 880.0]),
        make_record(2, at_s=3.0, gaps=[], error="overloaded: full"),
    ]
    (point,) = summarize(records)
    assert (point["requests"], point["errors"]) == (3, 1)
    assert point["tbt_ms"]["max"] == 880.0
    assert point["tbt_ms"]["p50"] == 25.0
    assert point["tpot_ms"]["max"] == 450.0
    assert point["output_tokens_per_s"] == pytest.approx(6 / (3.0 - 1.0))
    assert distribution([]) is None


def test_results_are_files_that_read_back(tmp_path: Path) -> None:
    summary = write_results(tmp_path / "new", [make_record(0, at_s=0.0, gaps=[1.0])], {"plan": 1})
    data = json.loads(summary.read_text())
    assert data["points"][0]["placement"] == "split:1+1"
    assert data["environment"]["versions"]["baton-serve"]
    assert len((tmp_path / "new" / "records.jsonl").read_text().splitlines()) == 1
    assert (tmp_path / "new" / "latency.png").stat().st_size > 1000

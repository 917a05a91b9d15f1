"""The verdict on made-up records with known answers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from baton.step_log import StepRecord, StepShape
from baton_experiments.goodput import LinearReference
from baton_experiments.records import RequestRecord, Run, Slo
from baton_experiments.summary import summarize
from tests.made_up_records import point, record, steps

SLO = Slo(ttft_ms=500, tbt_ms=30)
COLOCATED, SPLIT = "colocated:2", "split:1+1"


def summary(records: list[RequestRecord], slo: Slo = SLO, **more: Any) -> dict[str, Any]:
    return summarize(records, slo=slo, replicates=400, **more)


def verdict(records: list[RequestRecord], slo: Slo = SLO, **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = summary(records, slo, **more)["verdict"]
    return found


def curve(placement: str, shares: dict[float, float], **more: Any) -> list[RequestRecord]:
    """Attainment by rate."""
    return [r for rate, share in shares.items() for r in point(placement, rate, good=share, **more)]


def said(found: dict[str, Any]) -> str:
    return "\n".join(found["sentences"])


WELL, BADLY = {1.0: 1.0, 2.0: 1.0, 3.0: 0.5}, {1.0: 1.0, 2.0: 0.5, 3.0: 0.2}


# --- who is better --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("better", "worse"), [(SPLIT, COLOCATED), (COLOCATED, SPLIT)])
def test_the_placement_of_the_higher_goodput_wins(better: str, worse: str) -> None:
    whole = summary(curve(better, WELL) + curve(worse, BADLY))
    found = whole["verdict"]
    assert (found["winner"], found["by"]) == (better, "goodput")
    assert found["sentence"].startswith(f"{better} is better here: it keeps the SLO (TTFT 500 ms, mean gap 30 ms)")
    rates = {g["placement"]: g["rate"]["90"] for g in whole["goodput"] if g["definition"] == "distserve"}
    assert rates[better] == pytest.approx(2.2)
    assert rates[worse] == pytest.approx(1.2)
    assert "up to 2.2/s" in found["sentence"]
    assert f"{worse} up to 1.2/s" in found["sentence"]
    assert "1 requests/s more, 95 % interval" in found["sentence"]
    comparison = next(c for c in found["comparisons"] if c["objective"] == "goodput")
    assert comparison["placements"] == (better, worse)
    assert comparison["better"] == better
    assert comparison["interval"][0] > 0


def test_who_never_misses_is_better_by_at_least_so_much() -> None:
    found = verdict(curve(SPLIT, {1.0: 1.0, 2.0: 1.0, 3.0: 1.0}) + curve(COLOCATED, BADLY))
    assert "split:1+1 is better here" in found["sentence"]
    assert "up to at least 3/s, colocated:2 up to 1.2/s (at least 1.8 requests/s more" in found["sentence"]


def test_who_is_quicker_in_one_thing_and_may_be_slower_in_another_is_not_better() -> None:
    """First tokens 50 ms earlier, told; a tenth of the requests with far longer gaps, which so few cannot tell."""
    some: dict[str, Any] = {"num_requests": 20, "seeds": (0,)}
    quick = point(COLOCATED, 1.0, good=1.0, good_ttft=50.0, **some)
    quick = [record(50, [10.0] * 4 + [500.0], placement=COLOCATED, index=r.index) if r.index == 7 else r for r in quick]
    found = verdict(quick + point(SPLIT, 1.0, good=1.0, good_ttft=100.0, **some), Slo(500, 200))
    assert found["winner"] is None
    assert "Which is better depends on what counts" in found["sentence"]


def test_equal_placements_are_not_told_apart() -> None:
    found = verdict(curve(SPLIT, BADLY) + curve(COLOCATED, BADLY))
    assert found["winner"] is None
    assert found["sentence"].startswith("No difference in goodput can be told between colocated:2 and split:1+1")
    assert found["flips"] == []
    assert all(c["better"] is None for c in found["comparisons"])


def test_a_difference_within_the_noise_is_not_told() -> None:
    found = verdict(
        point(SPLIT, 1.0, good=1.0, num_requests=12) + point(SPLIT, 2.0, good=0.75, num_requests=12)
        + point(COLOCATED, 1.0, good=1.0, num_requests=12) + point(COLOCATED, 2.0, good=0.67, num_requests=12)
    )  # fmt: skip
    assert found["winner"] is None
    assert "can be told" in found["sentence"]


def test_where_both_keep_the_slo_the_quicker_one_is_better() -> None:
    fast = curve(COLOCATED, {1.0: 1.0, 2.0: 1.0}, good_ttft=80, gap=15)
    slow = curve(SPLIT, {1.0: 1.0, 2.0: 1.0}, good_ttft=120, gap=18)
    found = verdict(fast + slow)
    assert (found["winner"], found["by"]) == (COLOCATED, "latency")
    assert "Both colocated:2 and split:1+1 keep the SLO" in found["sentence"]
    assert "at every rate tried, up to 2/s" in found["sentence"]
    assert "median TTFT 80 ms against 120 ms" in said(found)
    assert any("higher rates would tell more" in caveat for caveat in found["caveats"])


def test_a_trade_off_has_no_winner() -> None:
    found = verdict(
        curve(COLOCATED, {1.0: 1.0}, good_ttft=80, gap=18) + curve(SPLIT, {1.0: 1.0}, good_ttft=120, gap=15)
    )
    assert found["winner"] is None
    assert "depends on what counts" in found["sentence"]
    assert "colocated:2 has the shorter median TTFT (80 ms against 120 ms)" in found["sentence"]
    assert "split:1+1 has the shorter p99 gap between tokens (16 ms against 19 ms)" in found["sentence"]


def test_where_none_keeps_the_slo_the_nearer_one_is_named() -> None:
    found = verdict(curve(SPLIT, {1.0: 0.7, 2.0: 0.3}) + curve(COLOCATED, {1.0: 0.2, 2.0: 0.1}))
    assert (found["winner"], found["by"]) == (SPLIT, "attainment")
    assert "though not good enough" in found["sentence"]
    assert "Neither of split:1+1 and colocated:2 keeps the SLO" in found["sentence"]
    assert "at 1/s split:1+1 keeps it for 70 % and colocated:2 keeps it for 20 %" in found["sentence"]


def test_where_nobody_meets_the_slo_once_nothing_is_told() -> None:
    found = verdict(curve(SPLIT, {1.0: 0.0}) + curve(COLOCATED, {1.0: 0.0}))
    assert found["winner"] is None
    assert "no difference can be told" in found["sentence"]


def test_three_placements() -> None:
    records = (
        curve("split:2+1", WELL) + curve("split:1+2", BADLY) + curve("colocated:3", {1.0: 0.8, 2.0: 0.5, 3.0: 0.2})
    )
    found = verdict(records)
    assert found["winner"] == "split:2+1"
    assert "split:1+2 up to 1.2/s and colocated:3 not even at 1/s" in found["sentence"]


def test_one_placement_is_described_without_a_winner() -> None:
    found = verdict(curve(SPLIT, WELL))
    assert found["winner"] is None
    assert "nothing to compare it with" in found["sentence"]
    assert found["comparisons"] == []


def test_no_records() -> None:
    whole = summary([])
    assert whole["points"] == whole["goodput"] == []
    assert whole["verdict"]["winner"] is None
    assert whole["verdict"]["sentence"] == "No request was measured."


# --- certainty ------------------------------------------------------------------------------------------


def test_one_seed_is_said_to_be_one() -> None:
    found = verdict(curve(SPLIT, WELL, seeds=(0,)) + curve(COLOCATED, BADLY, seeds=(0,)))
    assert found["winner"] == SPLIT, "its requests alone tell it"
    assert any(caveat.startswith("One seed") for caveat in found["caveats"])
    assert found["certainty"]["method"] == "bootstrap over requests of one seed"


def test_too_few_requests_tell_nothing() -> None:
    found = verdict([record(100, placement=SPLIT), record(900, placement=COLOCATED)])
    assert found["winner"] is None
    assert all(c["interval"] is None and c["better"] is None for c in found["comparisons"])


def test_failed_requests_miss_the_slo_and_are_told() -> None:
    lost = [record(placement=SPLIT, index=i, error="worker_lost: gone") for i in range(40, 80)]
    whole = summary(
        point(SPLIT, 1.0, good=1.0, seeds=(0,)) + lost + point(COLOCATED, 1.0, good=1.0, seeds=(0,), num_requests=80)
    )
    share = {p["placement"]: (p["goodput_share"], p["errors"], p["error"]["failed_share"]) for p in whole["points"]}
    assert share == {SPLIT: (0.5, 40, 0.5), COLOCATED: (1.0, 0, 0.0)}
    assert whole["verdict"]["winner"] == COLOCATED
    assert "Requests failed: 40 with split:1+1" in said(whole["verdict"])


def test_where_all_requests_failed_there_are_no_latencies() -> None:
    lost = [record(placement=SPLIT, index=i, error="worker_lost: gone") for i in range(20)]
    whole = summary(lost + point(COLOCATED, 1.0, good=1.0, seeds=(0,), num_requests=20))
    mine = next(p for p in whole["points"] if p["placement"] == SPLIT)
    assert mine["ttft_ms"] is mine["tbt_ms"] is mine["tpot_ms"] is None
    assert whole["verdict"]["winner"] == COLOCATED


def test_unequal_sizes_are_told() -> None:
    found = verdict(curve("split:2+1", WELL) + curve(COLOCATED, BADLY))
    assert any("split:2+1 has 3" in caveat and "colocated:2 has 2" in caveat for caveat in found["caveats"])


def test_unequal_sizes_are_compared_per_worker() -> None:
    """2.2/s of three workers is less for each than 1.7/s of two."""
    found = verdict(curve("split:2+1", WELL) + curve(COLOCATED, {1.0: 1.0, 2.0: 0.857, 3.0: 0.2}))
    assert found["winner"] == COLOCATED
    assert "up to 1.67/s (0.833/s per worker), split:2+1 up to 2.2/s (0.733/s per worker)" in found["sentence"]
    assert "requests/s per worker more, 95 % interval" in found["sentence"]
    comparison = next(c for c in found["comparisons"] if c["objective"] == "goodput")
    assert comparison["unit"] == "requests/s per worker"
    assert comparison["values"] == pytest.approx((0.833, 0.733), rel=0.01)
    assert comparison["better"] == COLOCATED


# --- chunk sizes ----------------------------------------------------------------------------------------


def test_a_placement_is_compared_at_its_best_chunk_size() -> None:
    records = curve(COLOCATED, BADLY, chunk_tokens=64) + curve(COLOCATED, WELL, chunk_tokens=256)
    records += curve(SPLIT, {1.0: 1.0, 2.0: 0.7, 3.0: 0.3}, chunk_tokens=256)
    whole = summary(records)
    assert whole["verdict"]["winner"] == COLOCATED
    assert {(p["placement"], p["chunk_tokens"]) for p in whole["points"] if p["best"]} == {
        (COLOCATED, 256),
        (SPLIT, 256),
    }
    assert {p["chunk_tokens"] for p in whole["points"] if p["placement"] == COLOCATED} == {64, 256}, "all are kept"


def test_chunk_sizes_of_one_goodput_differ_by_their_gaps() -> None:
    records = curve(COLOCATED, {1.0: 1.0}, chunk_tokens=64, gap=10) + curve(
        COLOCATED, {1.0: 1.0}, chunk_tokens=256, gap=20
    )
    assert next(p for p in summary(records)["points"] if p["best"])["chunk_tokens"] == 64


# --- where it flips -------------------------------------------------------------------------------------


def test_the_rate_at_which_the_answer_flips() -> None:
    low = curve(COLOCATED, {1.0: 1.0, 2.0: 0.9, 3.0: 0.2})
    high = curve(SPLIT, {1.0: 0.7, 2.0: 0.7, 3.0: 0.7})
    found = verdict(low + high)
    flip = next(f for f in found["flips"] if f["axis"] == "rate")
    assert (flip["below"], flip["above"]) == (COLOCATED, SPLIT)
    assert 2.0 <= flip["at"] <= 3.0
    assert "The answer flips between 2/s and 3/s" in said(found)


def test_the_slo_at_which_the_answer_flips() -> None:
    found = verdict(curve(SPLIT, {1.0: 1.0, 2.0: 1.0, 3.0: 1.0}, good_ttft=400) + curve(COLOCATED, WELL, good_ttft=100))
    assert found["winner"] == SPLIT
    flips = {f["axis"]: f for f in found["flips"]}
    assert flips.keys() == {"slo", "ttft"}, "gaps are alike"
    for flip in flips.values():
        assert (flip["below"], flip["above"]) == (COLOCATED, SPLIT)
        assert flip["at"] == pytest.approx(400 / 500, rel=0.15)
    assert "colocated:2 has the higher goodput with 0.71 times this one, split:1+1 with 0.84 to 1.7 times" in said(
        found
    )


def test_an_slo_that_is_tighter_in_one_limit_alone() -> None:
    slow_start = curve(SPLIT, {1.0: 1.0, 2.0: 1.0}, good_ttft=400, gap=10)
    slow_tokens = curve(COLOCATED, {1.0: 1.0, 2.0: 1.0}, good_ttft=100, gap=25)
    found = verdict(slow_start + slow_tokens)
    sweep = {s["axis"]: {row["scale"]: row["better"] for row in s["rows"]} for s in found["slo_sweep"]}
    assert sweep["tbt"][0.5] == SPLIT, "gaps of 15 ms are asked for"
    assert sweep["ttft"][0.5] == COLOCATED, "a first token within 250 ms is"
    assert sweep["slo"][1.0] is None, "both keep it at every rate"


def test_an_answer_that_never_flips_says_so() -> None:
    found = verdict(curve(SPLIT, WELL) + curve(COLOCATED, BADLY))
    assert found["flips"] == []
    assert "No rate tried flips the answer. With " in said(found)
    assert "times this SLO split:1+1 has the higher goodput; with " in said(found)


# --- engines --------------------------------------------------------------------------------------------


def test_an_engine_is_not_taken_for_a_placement() -> None:
    records = curve(COLOCATED, {1.0: 0.8, 2.0: 0.3, 3.0: 0.1}, engine="slow")
    records += curve(COLOCATED, WELL, engine="fast") + curve(SPLIT, BADLY, engine="fast")
    found = verdict(records)
    assert found["winner"] == COLOCATED, "on the one engine that ran both"
    effects = found["engines"]
    assert [e["better"] for e in effects["placement"]] == [COLOCATED]
    assert [e["better"] for e in effects["engine"]] == ["fast"]
    assert "that is the engine's doing: on one engine, fast, colocated:2 is." in found["sentence"]
    assert "The engine alone: colocated:2 reaches 2.2/s on fast and 0/s on slow" in found["sentence"]


def test_engines_that_disagree_leave_no_winner() -> None:
    records = curve(COLOCATED, WELL, engine="a") + curve(SPLIT, BADLY, engine="a")
    records += curve(COLOCATED, BADLY, engine="b") + curve(SPLIT, WELL, engine="b")
    found = verdict(records)
    assert found["winner"] is None
    assert {d["engine"]: d["winner"] for d in found["decisions"]} == {"a": COLOCATED, "b": SPLIT}


def test_definitions_that_disagree_are_told() -> None:
    some = []
    for index in range(60):  # both keep their means; one stalls early, the other has saved up for its stall
        early, late = (400.0, [145.0, 5.0, 5.0, 5.0, 5.0]), (100.0, [5.0, 5.0, 5.0, 5.0, 145.0])
        for placement, (ttft, gaps) in ((SPLIT, early), (COLOCATED, late)):
            some.append(record(ttft, gaps, placement=placement, index=index, seed=index % 3))
    found = verdict(some, Slo(ttft_ms=500, tbt_ms=35))
    assert {c["better"] for c in found["comparisons"] if c["objective"] == "goodput"} == {None}
    assert "Definitions of goodput disagree: colocated:2 is ahead under" in said(found)
    assert "per token (1/s against 0/s)" in said(found)
    agreed = verdict(curve(SPLIT, WELL) + curve(COLOCATED, BADLY))
    assert "disagree" not in said(agreed)


# --- what limits ----------------------------------------------------------------------------------------


def limit(
    stages: dict[str, float],
    *,
    placement: str = SPLIT,
    ttft: float = 100.0,
    gap: float = 10.0,
    played: dict[str, dict[str, Any]] | None = None,
    kv_blocks: dict[str, int] | None = None,
) -> dict[str, Any]:
    """Of a point whose requests are all alike. `played`: what the steps of each worker are like."""
    some = [record(ttft, [gap] * 5, placement=placement, index=i, stages=stages) for i in range(40)]
    run = Run(placement, None, 1.0, 0)
    done: list[StepRecord] = [step for worker, kind in (played or {}).items() for step in steps(run, worker, **kind)]
    found = verdict(some, steps={run: done} if done else None, kv_blocks=kv_blocks)
    (bottleneck,) = found["bottlenecks"]
    assert isinstance(bottleneck, dict)
    return bottleneck


QUEUED = {"prefill_queue": 700.0, "prefill": 200.0, "decode_steps": 50.0}
SLOW_TOKENS = {"prefill": 100.0, "decode_steps": 200.0}


def test_prompts_that_wait_for_a_busy_prefill_worker() -> None:
    found = limit(QUEUED, ttft=900, played={"prefill-0": {"busy": 0.95, "chunk_share": 1.0}, "decode-0": {"busy": 0.3}})
    assert found["limit"] == "prefill compute"
    assert "workers that prefill are busy 95 % of the time" in found["sentence"]
    assert "a prompt waits 700 ms on average and takes 200 ms" in found["sentence"]
    assert found["missed"] == 1.0


def test_prompts_that_wait_because_decode_has_no_blocks() -> None:
    found = limit(
        QUEUED,
        ttft=900,
        played={"prefill-0": {"busy": 0.2, "chunk_share": 1.0}, "decode-0": {"busy": 0.9, "kv_blocks": 98}},
        kv_blocks={"prefill-0": 100, "decode-0": 100},
    )
    assert found["limit"] == "KV space"
    assert "less than 5 % of its KV blocks free in 100 % of its steps" in found["sentence"]


def test_prompts_that_wait_because_decode_cannot_keep_up() -> None:
    played = {"prefill-0": {"busy": 0.2, "chunk_share": 1.0}, "decode-0": {"busy": 0.97}}
    assert limit(QUEUED, ttft=900, played=played)["limit"] == "decode batch"


def test_steps_that_take_too_long_for_their_batch() -> None:
    played = {"prefill-0": {"busy": 0.2, "chunk_share": 1.0}, "decode-0": {"busy": 0.9, "step_s": 0.04}}
    found = limit(SLOW_TOKENS, gap=40, played=played)
    assert found["limit"] == "decode batch"
    assert "a decode step takes 40 ms for 3.0 requests" in found["sentence"]


def test_tokens_that_wait_for_prompts_in_the_same_steps() -> None:
    mixed = {"busy": 0.6, "chunk_share": 0.7, "step_s": 0.02, "chunk_step_s": 0.3}
    found = limit(SLOW_TOKENS, placement=COLOCATED, gap=40, played={"both-0": mixed, "both-1": mixed})
    assert found["limit"] == "prefill compute"
    assert "a step with a prompt's chunk takes 300 ms against 20 ms without" in found["sentence"]


def test_without_steps_long_gaps_tell_that_tokens_wait_for_prompts() -> None:
    some = [record(100, [20, 20, 20, 200, 20], placement=COLOCATED, index=i) for i in range(40)]
    (found,) = verdict(some)["bottlenecks"]
    assert found["limit"] == "prefill compute"
    assert "tokens wait for prompts: gaps of 200 ms at p99 against 20 ms" in found["sentence"]


def test_a_slow_hand_off() -> None:
    found = limit({"prefill": 100.0, "handoff_wait": 20.0, "wire": 280.0, "decode_steps": 100.0}, gap=80)
    assert found["limit"] == "hand-off"
    assert "takes 300 ms from the first token to the decode worker, 280 ms of it on the wire" in found["sentence"]


def test_requests_that_wait_in_the_router_while_workers_have_time() -> None:
    played = {"prefill-0": {"busy": 0.1, "chunk_share": 1.0}, "decode-0": {"busy": 0.1}}
    found = limit(
        {"router_queue": 100.0, "placement": 600.0, "prefill": 100.0, "decode_steps": 50.0}, ttft=800, played=played
    )
    assert found["limit"] == "router"
    assert "600 ms on its way to a worker" in found["sentence"]
    waiting = limit({"router_queue": 700.0, "prefill": 100.0, "decode_steps": 50.0}, ttft=800, played=played)
    assert waiting["limit"] == "router"
    full = {"prefill-0": {"busy": 0.95, "chunk_share": 1.0}, "decode-0": {"busy": 0.1}}
    held_back = limit({"router_queue": 700.0, "prefill": 100.0, "decode_steps": 50.0}, ttft=800, played=full)
    assert held_back["limit"] == "prefill compute", "the router holds back what no worker has room for"


def test_where_the_slo_is_kept_the_first_to_give_way_is_named() -> None:
    played = {"prefill-0": {"busy": 0.2, "chunk_share": 1.0}, "decode-0": {"busy": 0.6}}
    found = limit({"prefill": 100.0, "decode_steps": 50.0}, played=played)
    assert found["missed"] == 0.0
    assert found["limit"] == "decode batch"
    assert found["sentence"].startswith("nothing yet, all requests keep the SLO; the first to give way is decode batch")


def test_nothing_limits_workers_that_are_idle_and_keep_the_slo() -> None:
    played = {"prefill-0": {"busy": 0.04, "chunk_share": 1.0}, "decode-0": {"busy": 0.1}}
    found = limit({"prefill": 100.0, "decode_steps": 50.0}, played=played)
    assert found["limit"] is None
    assert found["sentence"] == "nothing limits it at such rates: no worker is busy for more than 10 % of the time"
    late = [record(900 if i == 0 else 100, index=i, stages=QUEUED) for i in range(40)]
    run = Run(SPLIT, None, 1.0, 0)
    told = said(verdict(late, steps={run: steps(run, "decode-0", busy=0.1)}))
    assert "split:1+1 at 1/s: nothing limits it at such rates (2 % of the requests miss the SLO): no worker" in told
    tight = limit(QUEUED, ttft=900, played=played)
    assert tight["limit"] is not None, "an SLO that idle workers miss has a reason"


def test_of_requests_that_all_failed_no_limit_is_named() -> None:
    found = verdict([record(error="worker_lost: gone", index=i) for i in range(10)])
    (bottleneck,) = found["bottlenecks"]
    assert bottleneck["limit"] is None
    assert "split:1+1 at 1/s: all requests failed, so what limits it is not known." in found["sentences"]
    assert found["changes"] == []
    some = [record(error="worker_lost: gone" if i < 8 else None, index=i) for i in range(10)]
    assert "(80 % of the requests miss the SLO, 80 % failed)" in said(verdict(some))


def test_tokens_of_the_ramps_are_not_taken_for_computed_again() -> None:
    run = Run(SPLIT, None, 1.0, 0)
    done = steps(run, "decode-0", busy=0.9, kv_blocks=98)
    computed = sum(s.shape.chunk_tokens + s.shape.decodes for s in done)
    ramp = [record(index=100, prompt_tokens=computed - 40 * 102 - 2, warmup=True)]

    def told(extra: list[RequestRecord]) -> str:
        some = [record(100, [40.0, 40.0], index=i, stages=QUEUED) for i in range(40)]
        return said(verdict(some + extra, steps={run: done}, kv_blocks={"decode-0": 100}))

    assert "of the tokens are computed again" in told([])
    assert "KV space" not in told(ramp)


def test_chunk_sizes_chosen_on_the_same_requests_are_a_caveat() -> None:
    some = [
        *curve(COLOCATED, BADLY, chunk_tokens=64),
        *curve(COLOCATED, BADLY, chunk_tokens=256),
        *curve(SPLIT, WELL),
    ]
    assert any("favours those that were tried with more of them" in c for c in verdict(some)["caveats"])
    assert not any("favours" in c for c in verdict(curve(COLOCATED, BADLY) + curve(SPLIT, WELL))["caveats"])


def test_few_requests_of_one_seed_have_no_intervals_to_explain() -> None:
    (caveat,) = (c for c in verdict([record(100, index=0)])["caveats"] if "intervals" in c)
    assert caveat.startswith("Too few requests for intervals, so no difference is told: 20 at each rate are the least")


def test_a_handful_of_requests_tells_no_difference_however_clear_it_looks() -> None:
    """Six of six against none of six: replicates agree, and their interval would be a point."""
    few: dict[str, Any] = {"num_requests": 6, "seeds": (0,)}
    found = verdict(curve(COLOCATED, {0.5: 1.0, 1.0: 1.0}, **few) + curve(SPLIT, {0.5: 1.0, 1.0: 0.0}, **few))
    assert found["winner"] is None
    assert all(c["interval"] is None and c["better"] is None for c in found["comparisons"])


def test_a_machine_that_was_disturbed_has_no_limit_that_another_placement_would_mend() -> None:
    run = Run(SPLIT, None, 1.0, 0)
    late = point(SPLIT, 1.0, good=1.0, gap=1000.0, noise=10.0, seeds=(0,))
    done = [
        msgspec.structs.replace(step, shape=StepShape(decodes=1, decode_context=30))
        for step in steps(run, "decode-0", busy=0.12, step_s=1.0)
    ]
    alone = LinearReference(50.0, 0.1, 60.0)
    found = verdict(late, steps={run: done}, reference=alone)
    assert "takes 17 times as long as one that runs alone, so something else had the machine: repeat the run" in said(
        found
    )
    assert found["changes"] == []
    usual = verdict(late, steps={run: done}, reference=LinearReference(50.0, 0.1, 900.0))
    assert "repeat the run" not in said(usual)
    assert usual["changes"]


def test_rates_that_only_one_tried_are_not_said_of_both() -> None:
    some = curve(COLOCATED, {1.0: 1.0, 2.0: 1.0})
    found = verdict(curve(SPLIT, {1.0: 1.0, 2.0: 1.0, 4.0: 1.0}) + some)
    assert found["winner"] is None
    assert "Both split:1+1 and colocated:2 keep the SLO" in found["sentence"]
    assert "at every rate tried, up to 2/s" in found["sentence"]
    assert all(row["better"] is None for sweep in found["slo_sweep"] for row in sweep["rows"])
    falls = verdict(curve(SPLIT, {1.0: 1.0, 2.0: 1.0, 4.0: 0.0}) + some)
    assert falls["winner"] is None, "where the other one falls was not tried"


# --- what would help ------------------------------------------------------------------------------------


def helps(placement: str, played: dict[str, dict[str, Any]], **more: Any) -> list[str]:
    some = [record(900, [10.0] * 5, placement=placement, index=i, stages=QUEUED, **more) for i in range(40)]
    run = Run(placement, more.get("chunk_tokens"), 1.0, 0)
    found = verdict(some, steps={run: [s for worker, kind in played.items() for s in steps(run, worker, **kind)]})
    return [change["sentence"] for change in found["changes"]]


def test_a_better_ratio_follows_from_how_busy_both_sides_are() -> None:
    (found,) = helps("split:1+3", {"prefill-0": {"busy": 1.0, "chunk_share": 1.0}, "decode-0": {"busy": 0.3}})
    assert "split:2+2 would share the work more evenly: prefill workers are busy 100 % of the time and no" in found
    for decode in (0.3, 1.0):  # a decode worker is busy whenever anything runs there, so that says nothing
        (found,) = helps(
            SPLIT, {"prefill-0": {"busy": 0.8, "chunk_share": 1.0}, "decode-0": {"busy": decode, "step_s": 0.01}}
        )
        assert found == (
            "For split:1+1: one more prefill worker (split:2+1): prefill workers are busy 80 % of the time."
        )


def test_no_ratio_is_advised_that_was_tried_and_did_no_better() -> None:
    def changes(shares: dict[str, float]) -> str:
        late: dict[str, Any] = {"good_ttft": 100.0, "bad_ttft": 900.0, "stages": QUEUED}
        some = [r for placement, share in shares.items() for r in point(placement, 1.0, good=share, **late)]
        return " ".join(change["sentence"] for change in verdict(some)["changes"])

    tried = changes({SPLIT: 0.48, "split:2+1": 0.84, "split:1+2": 0.52})
    assert "For split:1+1: split:2+1 keeps the SLO for 82 % of the requests here" in tried
    assert "For split:1+2: split:2+1 keeps the SLO for 82 % of the requests here" in tried
    assert "For split:2+1: one more prefill worker (split:3+1)" in tried
    assert "more workers in this ratio, as split:2+1 did no better here" in changes({SPLIT: 0.6, "split:2+1": 0.5})


def test_prompts_that_are_too_long_for_the_slo_are_not_helped_by_more_workers() -> None:
    some = point(SPLIT, 1.0, good=0.5, stages={"prefill": 600.0, "prefill_queue": 16.0, "decode_steps": 50.0})
    (change,) = verdict(some)["changes"]
    assert "a prompt takes 600 ms and hardly waits, so more workers would not help" in change["sentence"]


def test_requests_that_were_refused_are_no_matter_of_prefill() -> None:
    refused = {"error": "overloaded: 2 requests are open"}
    some = point(SPLIT, 1.0, good=1.0)
    some = [record(index=r.index, seed=r.seed, **refused) if r.index % 2 else r for r in some]
    found = verdict(some)
    (limit,) = found["bottlenecks"]
    assert (limit["limit"], limit["missed"]) == ("failures", 0.5)
    assert "failures (50 % of the requests miss the SLO, 50 % failed): most of them as `overloaded`" in said(found)
    assert "`router.max_requests`" in found["changes"][0]["sentence"]


def test_chunks_are_changed_in_the_direction_of_what_is_missed() -> None:
    def told(gap: float, ttft: float, chunks: tuple[int, ...]) -> str:
        kind = {"busy": 0.6, "chunk_share": 0.7}
        some, played = [], {}
        for chunk in chunks:
            later = 1 + 0.1 * chunks.index(chunk)
            some += [
                record(ttft * later, [gap] * 5, placement=COLOCATED, index=i, chunk_tokens=chunk) for i in range(40)
            ]
            run = Run(COLOCATED, chunk, 1.0, 0)
            played[run] = [*steps(run, "both-0", **kind), *steps(run, "both-1", **kind)]
        return " ".join(change["sentence"] for change in verdict(some, steps=played)["changes"])

    assert "smaller chunks (`engine.max_batch_tokens`) shorten the gaps" in told(40, 100, (256,))
    assert "larger chunks" in told(10, 900, (256,))
    assert "of those tried (64, 256) 64 did best" in told(40, 100, (64, 256))


def test_nothing_is_to_be_changed_where_the_slo_is_kept() -> None:
    assert verdict(curve(SPLIT, {1.0: 1.0}) + curve(COLOCATED, {1.0: 1.0}))["changes"] == []


# --- the summary ----------------------------------------------------------------------------------------


def test_a_summary_has_what_others_read() -> None:
    whole = summary(curve(SPLIT, WELL) + curve(COLOCATED, BADLY))
    first = whole["points"][0]
    assert {"placement", "rate", "seeds", "requests", "ttft_ms", "tbt_ms", "tpot_ms", "goodput_share"} <= first.keys()
    assert {"output_tokens_per_s", "error", "chunk_tokens", "attainment", "intervals"} <= first.keys()
    assert first["ttft_ms"].keys() == first["tbt_ms"].keys() == first["tpot_ms"].keys() == {"p50", "p90", "p99", "max"}
    assert (first["placement"], first["rate"], first["seeds"], first["requests"]) == (COLOCATED, 1.0, [0, 1, 2], 120)
    assert {g["definition"] for g in whole["goodput"]} == {"distserve", "vllm", "splitwise", "per_token"}
    for g in whole["goodput"]:
        assert g["rate"].keys() == g["interval"].keys() == {"90", "99"}
    assert {"winner", "sentence", "bottlenecks"} <= whole["verdict"].keys()
    assert summary(curve(SPLIT, WELL) + curve(COLOCATED, BADLY)) == whole, "the same records, the same summary"


def test_a_point_counts_tokens_gaps_and_failures() -> None:
    records = [
        record(100, [10.0, 30.0], index=1),
        record(100, [20.0, 880.0], index=2),
        record(error="overloaded: full", index=3),
    ]
    (found,) = summary(records)["points"]
    assert (found["requests"], found["errors"]) == (3, 1)
    assert found["tbt_ms"]["max"] == 880.0
    assert found["tbt_ms"]["p50"] == 25.0
    assert found["tpot_ms"]["max"] == 450.0
    assert found["output_tokens_per_s"] == pytest.approx(6 / (3.0 - 1.0))
    assert found["good_requests_per_s"] == pytest.approx(1 / 2.0)
    assert found["stages_ms"] == {"prefill": 100.0, "decode_steps": 470.0}

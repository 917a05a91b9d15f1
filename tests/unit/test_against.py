"""A simulation against the real run of the same plan, on made-up records."""

from __future__ import annotations

import pytest

from baton_experiments.against import compare
from baton_experiments.records import RequestRecord, Slo
from tests.made_up_records import point, record

SLO = Slo(ttft_ms=500, tbt_ms=30)
COLOCATED, SPLIT = "colocated:2", "split:1+1"


def test_figures_within_a_tenth_are_right_and_others_are_not() -> None:
    real = point(SPLIT, 1.0, good=1.0, good_ttft=100, gap=20)
    simulated = point(SPLIT, 1.0, good=1.0, good_ttft=150, gap=21)
    found = compare(simulated, real, SLO)
    (one,) = found["points"]
    assert one["figures"]["ttft_p50_ms"]["error"] == pytest.approx(0.5, abs=0.02)
    assert not one["figures"]["ttft_p50_ms"]["within"]
    assert one["figures"]["tbt_p90_ms"]["within"]
    assert (found["within"], found["figures"]) == (2, 4)
    assert "2 of 4 medians" in found["sentence"]


def test_winners_count_where_the_real_runs_tell_one() -> None:
    real = point(SPLIT, 1.0, good=1.0, good_ttft=200, gap=20) + point(COLOCATED, 1.0, good=1.0, good_ttft=100, gap=20)
    turned = point(SPLIT, 1.0, good=1.0, good_ttft=100, gap=20) + point(COLOCATED, 1.0, good=1.0, good_ttft=200, gap=20)
    assert "the winner is the same in 2 of 2 comparisons" in compare(real, real, SLO)["sentence"]
    assert "the winner is the same in 0 of 2 comparisons" in compare(turned, real, SLO)["sentence"]


@pytest.mark.parametrize("simulated", [[], [record(error="worker_lost: gone")], point(SPLIT, 9.0, good=1.0)])
def test_nothing_in_common_is_said(simulated: list[RequestRecord]) -> None:
    found = compare(simulated, point(SPLIT, 1.0, good=1.0), SLO)
    assert found["figures"] == 0
    assert found["sentence"].startswith("Nothing is compared with the real run")

"""What is said of a sweep of SLOs, for every pattern of rows in which a difference is told."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from baton_experiments.flips import SCALES, _flip, _told, steady

A, B = "colocated:2", "split:1+1"


def rows(*told: tuple[float, float], better: str = B) -> list[dict[str, Any]]:
    """Of all factors, told from each first to each second."""
    return [
        {
            "scale": scale,
            "better": better if any(low <= scale <= high for low, high in told) else None,
            "ttft_ms": 1000 * scale,
            "tbt_ms": 100 * scale,
        }
        for scale in SCALES
    ]


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (
            [(5.6, 8)],
            "With 5.7 to eight times this SLO split:1+1 has the higher goodput; with less, down to an eighth, no "
            "difference can be told.",
        ),
        (
            [(0, 0.3)],
            "With an eighth to 0.3 times this SLO split:1+1 has the higher goodput; with more, up to eight times, no "
            "difference can be told.",
        ),
        (
            [(0.7, 2)],
            "With 0.71 to 2 times this SLO split:1+1 has the higher goodput; with less, down to an eighth, and more, "
            "up to eight times, no difference can be told.",
        ),
        (
            [(1, 1)],
            "With this SLO split:1+1 has the higher goodput; with less, down to an eighth, and more, up to eight "
            "times, no difference can be told.",
        ),
        (
            [(0, 0.125)],
            "With an eighth of this SLO split:1+1 has the higher goodput; with more, up to eight times, no difference "
            "can be told.",
        ),
        (
            [(0.2, 0.3), (1, 1), (4, 8)],
            "With 0.21 to 0.3, 1 and 4 to eight times this SLO split:1+1 has the higher goodput; with others from an "
            "eighth to eight times no difference can be told.",
        ),
    ],
)
def test_where_one_is_better_and_where_none(told: list[tuple[float, float]], said: str) -> None:
    assert steady([A, B], rows(*told)) == f"No rate tried flips the answer. {said}"


def test_everywhere_and_nowhere() -> None:
    assert steady([A, B], rows((0, 8))) == (
        "The answer flips at no rate tried and for no SLO from an eighth of this one to eight times it: split:1+1 has "
        "the higher goodput with all."
    )
    assert steady([A, B], rows()) == (
        "No rate flips the answer, and no SLO from an eighth of this one to eight times it tells colocated:2 and "
        "split:1+1 apart by goodput."
    )


def test_no_pattern_contradicts_itself() -> None:
    """Whether a factor is said to be told is whether it is."""
    for ends in itertools.combinations(range(0, len(SCALES), 3), 4):
        one, two, three, four = (SCALES[i] for i in ends)
        for told in ([(one, two)], [(one, two), (three, four)]):
            swept = rows(*told)
            first, _, rest = steady([A, B], swept).partition(" has the higher goodput; ")
            text = first.replace("an eighth", "0.125").replace("eight", "8")
            spans = re.findall(r"([\d.]+) to ([\d.]+)", text)
            assert len(spans) == len(told)
            for (low, high), (begin, end) in zip(spans, told, strict=True):
                assert float(low) == pytest.approx(begin, rel=0.05)
                assert float(high) == pytest.approx(end, rel=0.05)
            if len(told) == 1:
                assert ("less" in rest) == (one > SCALES[0])
                assert ("more" in rest) == (two < SCALES[-1])


def test_a_flip_claims_no_more_than_what_is_told() -> None:
    low, high = rows((0.25, 0.5), better=A), rows((2, 4))
    swept = [a if a["better"] else b for a, b in zip(low, high, strict=True)]
    flip = _flip("slo", *_told(swept))
    assert (flip.below, flip.above, flip.at) == (A, B, pytest.approx(1.0))
    assert flip.sentence == (
        "With another SLO the answer flips: colocated:2 has the higher goodput with 0.25 to 0.5 times this one, "
        "split:1+1 with 2 to 4 times this one (in between: TTFT 500 ms to 2,000 ms and mean gap 50 ms to 200 ms)."
    )
    assert "with 0.25 to 0.5 times this TTFT, split:1+1" in _flip("ttft", *_told(swept)).sentence

"""The stages of a request add up, whatever marks there are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.timeline import Mark, RequestTimeline, Stage


def test_a_split_request_passes_every_stage() -> None:
    timeline = RequestTimeline()
    for mark in Mark:
        timeline.mark(mark, 10.0 + mark)
    assert list(timeline.stages()) == list(Stage)
    assert timeline.ttft() == 4.0
    assert timeline.total() == sum(timeline.stages().values()) == 9.0
    assert timeline.residual(9.5) == pytest.approx(0.5)


def test_a_colocated_request_has_no_handoff() -> None:
    timeline = RequestTimeline()
    for mark in set(Mark) - {Mark.COMMITTED, Mark.ADOPTED}:
        timeline.mark(mark, float(mark))
    stages = timeline.stages()
    assert Stage.WIRE not in stages
    assert Stage.HANDOFF_WAIT not in stages
    assert stages[Stage.DECODE_QUEUE] == 3.0


def test_the_first_sighting_counts() -> None:
    timeline = RequestTimeline()
    timeline.mark(Mark.RECEIVED, 1.0)
    timeline.merge({Mark.RECEIVED: 5.0, Mark.FINISHED: 6.0})
    assert timeline.total() == 5.0
    assert RequestTimeline().stages() == {}
    assert RequestTimeline().residual(1.0) is None


@given(
    st.sets(st.sampled_from(sorted(set(Mark) - {Mark.RECEIVED, Mark.FINISHED}))),
    st.lists(st.floats(0, 10), min_size=10, max_size=10),
)
def test_stages_sum_to_the_whole(marks: set[Mark], gaps: list[float]) -> None:
    timeline, at = RequestTimeline(), 0.0
    for mark, gap in zip(Mark, gaps, strict=True):
        at += gap
        if mark in marks | {Mark.RECEIVED, Mark.FINISHED}:
            timeline.mark(mark, at)
    assert sum(timeline.stages().values()) == pytest.approx(timeline.total())

"""`baton trace` writes Chrome's trace-event format; `baton top` fits a narrow terminal."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from baton.errors import ClusterError, InvalidRequestError
from baton.protocol import LoadReport
from baton.timeline import Mark, Stage
from baton_cli.top import top_view
from baton_cli.trace import run_trace, trace_events
from router.overview import make_overview
from router.policy import Placement
from router.records import RequestRecord
from tests.fakes_router import worker
from tests.observed import Observed

FIELDS = {"X": {"ts", "dur", "cat"}, "M": {"args"}, "s": {"ts", "id", "cat"}, "f": {"ts", "id", "cat", "bp"}}
"""What each kind of event must have beside ph, name, pid and tid (Trace Event Format, complete, metadata and flow)."""


def check_format(events: list[dict[str, Any]]) -> None:
    """What viewers rely on: required fields and types, named tracks, slices that nest, arrows between slices."""
    assert json.loads(json.dumps(events)) == events
    slices: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    names: dict[tuple[int, int], str] = {}
    flows: dict[str, dict[int, dict[str, Any]]] = {"s": {}, "f": {}}
    for event in events:
        assert {"ph", "name", "pid", "tid"} | FIELDS[event["ph"]] <= event.keys(), event
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        track = (event["pid"], event["tid"])
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name")
            if event["name"] != "process_sort_index":
                names[track] = event["args"]["name"]
            continue
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            slices[track].append((event["ts"], event["ts"] + event["dur"]))
        else:
            assert event["id"] not in flows[event["ph"]], "an arrow has two ends"
            flows[event["ph"]][event["id"]] = event
    assert set(slices) <= set(names), "every track with slices has a name"
    assert {pid for pid, _ in slices} <= {pid for pid, tid in names if tid == 0}, "every process has one"
    for spans in slices.values():
        for (_, end), (start, _) in zip(sorted(spans), sorted(spans)[1:], strict=False):
            assert start >= end - 1e-3, "slices of a track do not overlap"
    assert flows["s"].keys() == flows["f"].keys()
    for number, begin in flows["s"].items():
        end = flows["f"][number]
        assert begin["name"] == end["name"]
        assert begin["ts"] <= end["ts"]
        for event in (begin, end):
            spans = slices[event["pid"], event["tid"]]
            assert any(start - 1e-3 <= event["ts"] <= until + 1e-3 for start, until in spans), "it begins in a slice"


def record(number: int, at: float, *, prefill: str = "p0", decode: str = "d0", marks: int = 10) -> RequestRecord:
    passed = {int(mark): at + 0.1 * mark for mark in list(Mark)[:marks]}
    if prefill == decode:
        passed = {m: t for m, t in passed.items() if m not in (Mark.COMMITTED, Mark.ADOPTED)}
    return RequestRecord(f"{number:032x}", str(number), "length", "", "", 6, 5, (Placement(prefill, decode),), passed)


def test_a_split_request_is_shown_at_the_router_and_both_workers() -> None:
    events = trace_events([record(1, 50.0)])
    check_format(events)
    places = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    slices = [(places[e["pid"]], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert [(place, name.rpartition(" ")[0]) for place, name, _, _ in slices] == [
        ("router", "router queue"),
        ("router", "placement"),
        ("p0", "prefill queue"),
        ("p0", "prefill"),
        ("p0", "handoff wait"),
        ("p0", "wire"),
        ("d0", "decode queue"),
        ("d0", "first decode step"),
        ("d0", "decode steps"),
    ]
    assert [ts for _, _, ts, _ in slices] == pytest.approx([1e5 * i for i in range(9)])
    assert [dur for _, _, _, dur in slices] == pytest.approx([1e5] * 9)
    arrows = [e for e in events if e["ph"] in "sf"]
    assert [(e["ph"], e["name"], places[e["pid"]]) for e in arrows] == [
        *(("s", "placement", "router"), ("f", "placement", "p0")),
        *(("s", "hand-off", "p0"), ("f", "hand-off", "d0")),
    ]


def test_a_colocated_request_has_no_hand_off() -> None:
    events = trace_events([record(1, 50.0, prefill="b0", decode="b0")])
    check_format(events)
    assert {e["name"] for e in events if e["ph"] == "s"} == {"placement"}
    assert sum(e["ph"] == "X" for e in events) == len(Stage) - 2


def test_requests_at_the_same_time_get_tracks_of_their_own_and_share_them_later() -> None:
    events = trace_events([record(i, 50.0 + 0.15 * i) for i in range(6)] + [record(9, 90.0)])
    check_format(events)
    tracks = {e["args"]["name"] for e in events if e["name"] == "thread_name" and e["args"]["name"].startswith("p0")}
    assert tracks == {"p0 1", "p0 2", "p0 3"}, "each was there for 0.4 s, and they came 0.15 s apart"


def test_what_failed_early_is_shown_as_far_as_it_got() -> None:
    events = trace_events([record(1, 50.0, marks=4), record(2, 50.0, marks=1)])
    check_format(events)
    assert sum(e["ph"] == "X" for e in events) == 3
    assert trace_events([record(1, 50.0, marks=0)]) == []


def test_clocks_that_disagree_a_little_make_no_slice_of_negative_length() -> None:
    odd = record(1, 50.0)
    odd.marks[int(Mark.ADOPTED)] = odd.marks[int(Mark.COMMITTED)] - 0.01
    check_format(trace_events([odd]))


class Client:
    """Answers as a router that has had these requests."""

    def __init__(self, *records: RequestRecord):
        self._records = records

    def records(self, limit: int) -> list[RequestRecord]:
        return list(self._records[:limit])

    def explain(self, request_id: str) -> RequestRecord:
        return next(r for r in self._records if r.request_id.startswith(request_id))


def test_a_file_of_the_last_requests_or_of_one(tmp_path: Path) -> None:
    client: Any = Client(*(record(i, 50.0 + i) for i in range(5)))
    path = tmp_path / "trace.json"
    for request_id, last, expected in ((None, 3, 27), (f"{4:032x}", 100, 9)):
        run_trace(client, request_id, last=last, path=path)
        written = json.loads(path.read_text())
        check_format(written["traceEvents"])
        assert written["displayTimeUnit"] == "ms"
        assert sum(event["ph"] == "X" for event in written["traceEvents"]) == expected


def test_mistakes_are_told(tmp_path: Path) -> None:
    some: Any = Client(record(1, 50.0))
    none: Any = Client()
    with pytest.raises(InvalidRequestError, match="no request has ended yet"):
        run_trace(none, None, last=10, path=tmp_path / "trace.json")
    with pytest.raises(InvalidRequestError, match="--last is 0"):
        run_trace(some, None, last=0, path=tmp_path / "trace.json")
    with pytest.raises(ClusterError, match="cannot be written"):
        run_trace(some, None, last=10, path=tmp_path / "no" / "folder" / "trace.json")


# --- baton top --------------------------------------------------------------------------------------


def shown(script: Observed, width: int = 80) -> list[str]:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.capture() as capture:
        console.print(top_view(make_overview(script.config, script.core, script.latencies, script.now)))
    return capture.get().splitlines()


def test_everything_fits_into_80_columns() -> None:
    s = Observed("p0", "d0")
    s.join(worker("prefill-long-name-17", "prefill", pool="prefill"))
    s.core.on_drain("prefill-long-name-17", False, s.now)
    s.run(gap=0.5)
    s.beat("p0", LoadReport(300, 200, 123456, 1400, 20000, 7, 1000, 0, 5, 80, 20))
    s.core.on_drain("d0", False, s.now)
    lines = shown(s)
    assert all(len(line) <= 80 for line in lines)
    text = "\n".join(lines)
    for part in ("baton  down", "0 open, 0 queued", "time to first token", "93%", "300+200", "25%", "draining"):
        assert part in text
    assert "…" not in text.partition("\n")[2], "nothing is cut but a long model's name"


def test_figures_are_those_of_the_overview() -> None:
    s = Observed("p0", "d0")
    s.run(gap=0.5, tokens=5)
    line = next(line for line in shown(s) if "time to first token" in line)
    assert [float(word) for word in line.split()[-4:-1]] == pytest.approx([1000.0] * 3, rel=0.03)
    assert line.split()[-1] == "1"


def test_an_empty_cluster_can_be_shown() -> None:
    text = "\n".join(shown(Observed()))
    assert "down" in text
    assert "prefill" in text
    assert "0/1" in text

"""`baton trace`: the last requests as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing show.

The router and each worker are processes with tracks; what overlaps on one gets further tracks. A stage is a slice, a
hand-over an arrow from prefill's last slice to decode's first. The format is Chrome's trace-event JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from baton.errors import ClusterError, InvalidRequestError
from baton.timeline import Mark, RequestTimeline, Stage
from baton_cli.output import out
from router.client import RouterClient
from router.records import MAX_RECORDS, RequestRecord

ROUTER = "router"
PLACES = {
    Stage.ROUTER_QUEUE: ROUTER,
    Stage.PLACEMENT: ROUTER,
    Stage.PREFILL_QUEUE: "prefill",
    Stage.PREFILL: "prefill",
    Stage.HANDOFF_WAIT: "prefill",
    Stage.WIRE: "prefill",
    Stage.DECODE_QUEUE: "decode",
    Stage.FIRST_DECODE_STEP: "decode",
    Stage.DECODE_STEPS: "decode",
}
"""Where a stage is shown; the wire ends at decode, and is shown where it begins."""


def run_trace(client: RouterClient, request_id: str | None, *, last: int, path: Path) -> None:
    """Write the file. InvalidRequestError for an unknown id, or if no request has ended; ClusterError if it fails."""
    if not 1 <= last <= MAX_RECORDS:
        raise InvalidRequestError(f"--last is {last}, it must be 1 to {MAX_RECORDS}, which a router remembers")
    records = client.records(last) if request_id is None else [client.explain(request_id)]
    if not records:
        raise InvalidRequestError("no request has ended yet, so there is nothing to show")
    events = trace_events(records)
    try:
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
    except OSError as e:
        raise ClusterError(f"{path} cannot be written: {e.strerror or e}") from e
    requests = "1 request" if len(records) == 1 else f"{len(records)} requests"
    out.print(f"{path}: {requests}; open it at https://ui.perfetto.dev", markup=False)


def trace_events(records: Sequence[RequestRecord]) -> list[dict[str, Any]]:
    """Trace events of these requests, in any order. Time 0 is the first arrival; events' times are microseconds."""
    spans = sorted((s for record in records for s in _spans(record)), key=lambda span: (span["at"], -span["seconds"]))
    if not spans:
        return []
    zero = spans[0]["at"]
    places = sorted({span["place"] for span in spans}, key=lambda place: (place != ROUTER, place))
    pids = {place: number for number, place in enumerate(places, 1)}
    events = [_metadata("process_name", pids[place], 0, {"name": place}) for place in places]
    events += [_metadata("process_sort_index", pids[place], 0, {"sort_index": pids[place]}) for place in places]
    tracks: dict[str, list[float]] = {place: [] for place in places}
    """By place, until when each of its tracks is taken."""
    rows: dict[tuple[str, str], int] = {}
    """A request's track of a place."""
    for whole in _visits(spans):
        track = _free_track(tracks[whole["place"]], whole["at"], whole["until"])
        rows[whole["request_id"], whole["place"]] = track
    for place, ends in tracks.items():
        events += [
            _metadata("thread_name", pids[place], track, {"name": f"{place} {track}"})
            for track in range(1, len(ends) + 1)
        ]
    flows = 0
    previous: dict[str, dict[str, Any]] = {}
    for span in spans:
        place, request_id = span["place"], span["request_id"]
        where = {"pid": pids[place], "tid": rows[request_id, place]}
        start, duration = (span["at"] - zero) * 1e6, span["seconds"] * 1e6
        events.append(
            {
                "ph": "X",
                "name": span["name"],
                "cat": "stage",
                "ts": start,
                "dur": duration,
                **where,
                "args": span["args"],
            }
        )
        before = previous.get(request_id)
        if before is not None and before["place"] != place:
            flows += 1
            link = {"name": "hand-off" if before["place"] != ROUTER else "placement", "cat": "flow", "id": flows}
            from_where = {"pid": pids[before["place"]], "tid": rows[request_id, before["place"]]}
            events.append({"ph": "s", **link, "ts": (before["at"] - zero) * 1e6, **from_where})
            events.append({"ph": "f", "bp": "e", **link, "ts": start, **where})
        previous[request_id] = span
    return events


def _spans(record: RequestRecord) -> Iterator[dict[str, Any]]:
    """A request's stages, each where it is shown."""
    at = record.marks.get(Mark.RECEIVED)
    if at is None:
        return
    last = record.placements[-1] if record.placements else None
    workers = {ROUTER: ROUTER}
    if last is not None:
        workers |= {"prefill": last.prefill, "decode": last.decode}
    args = {
        "request_id": record.request_id,
        "finish_reason": record.finish_reason,
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "cached_tokens": record.cached_tokens,
        "attempts": record.attempts,
    }
    for stage, seconds in RequestTimeline(marks=record.marks).stages().items():
        seconds = max(0.0, seconds)
        yield {
            "request_id": record.request_id,
            "name": f"{stage.replace('_', ' ')} {record.request_id[:8]}",
            "place": workers.get(PLACES[stage], ROUTER),
            "at": at,
            "seconds": seconds,
            "args": args,
        }
        at += seconds


def _visits(spans: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """From when to when each request was at each place, the earliest first."""
    visits: dict[tuple[str, str], dict[str, Any]] = {}
    for span in spans:
        end = span["at"] + span["seconds"]
        visit = visits.setdefault((span["request_id"], span["place"]), {**span, "until": end})
        visit["until"] = max(visit["until"], end)
    return sorted(visits.values(), key=lambda visit: visit["at"])


def _free_track(ends: list[float], at: float, until: float) -> int:
    """The first track that is free at `at`, taken until `until`; a new one if none is. Tracks count from 1."""
    for track, end in enumerate(ends):
        if end <= at:
            ends[track] = until
            return track + 1
    ends.append(until)
    return len(ends)


def _metadata(name: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}

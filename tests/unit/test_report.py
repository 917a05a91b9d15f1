"""The report of an experiment: what is in it, and that it loads and runs nothing."""

from __future__ import annotations

import io
import math
import re
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from baton_experiments.html_report import render, write_report
from baton_experiments.number_table import NumberTable
from baton_experiments.plot import spread
from baton_experiments.plot_ticks import LogTicks, plain_number
from baton_experiments.records import RequestRecord, Run, Slo, Steps
from baton_experiments.report import environment, rate_text, tables
from baton_experiments.short_names import short_names
from baton_experiments.summary import summarize
from baton_experiments.words import number
from tests.made_up_records import point, record, steps

SLO = Slo(ttft_ms=500, tbt_ms=30)
CODE = "`engine.max_batch_tokens` and `<b>` are code"
GOODPUT = ("goodput at 90 %, with its", "Below, the rate up to which")
EVIL = '"><script>alert(1)</script>&'
FIGURES = {"attainment", "latency", "distributions", "stages", "gantt", "kv", "slo"}


class Page(HTMLParser):
    """Tags, what they refer to, and the text outside of styles and drawings."""

    def __init__(self, html: str):
        super().__init__()
        self.tags: list[str] = []
        self.refers: list[str] = []
        self.ids: list[str] = []
        self.labels: list[str] = []
        self.text = ""
        self._skip = 0
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._skip += tag in ("style", "svg")
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "action", "data") or "url(" in (value or ""):
                self.refers.append(value or "")
            if name == "id":
                self.ids.append(value or "")
            if tag == "svg" and name == "aria-label":
                self.labels.append(value or "")
            assert not name.startswith("on"), f"<{tag} {name}>"

    def handle_endtag(self, tag: str) -> None:
        self._skip -= tag in ("style", "svg")

    def handle_data(self, data: str) -> None:
        if not self._skip:
            self.text += " ".join(data.split()) + " "


def played(records: list[RequestRecord]) -> Steps:
    found = {}
    for run in {r.run for r in records}:
        names = ("prefill-0", "decode-0") if run.placement.startswith("split") else ("both-0", "both-1")
        shares = (1.0, 0.0) if run.placement.startswith("split") else (0.5, 0.5)
        found[run] = [
            s for name, share in zip(names, shares, strict=True) for s in steps(run, name, busy=0.6, chunk_share=share)
        ]
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], Page]:
    """A report of two placements, one of them with two chunk sizes."""
    records = [
        r
        for rate, colocated, split in ((1.0, 1.0, 1.0), (2.0, 0.6, 1.0), (4.0, 0.1, 0.7))
        for r in (
            *point("colocated:2", rate, good=colocated, seeds=(0, 1), chunk_tokens=64),
            *point("colocated:2", rate, good=colocated / 2, seeds=(0, 1), chunk_tokens=256),
            *point("split:1+1", rate, good=split, seeds=(0, 1)),
        )
    ]
    some = played(records)
    summary = summarize(
        records, slo=SLO, steps=some, kv_blocks=dict.fromkeys(("both-0", "both-1", "prefill-0", "decode-0"), 100)
    )
    more = {"engine": {"kv_blocks": {"both-0": 100}}, "config": {"name": EVIL}, "notes": [EVIL, CODE], "workload": None}
    folder = tmp_path_factory.mktemp("report") / "new"
    path = write_report(folder, records, some, summary | more)
    return path, summary, Page(path.read_text())


def test_a_report_loads_and_runs_nothing(whole: tuple[Path, dict[str, Any], Page]) -> None:
    path, _, page = whole
    assert not {"script", "iframe", "link", "object", "embed", "img", "form", "base"} & set(page.tags)
    assert all(reference.startswith("#") or "url(#" in reference for reference in page.refers), page.refers
    assert "default-src 'none'" in path.read_text()
    assert path.name == "report.html"


def test_what_comes_from_outside_is_escaped(whole: tuple[Path, dict[str, Any], Page]) -> None:
    path, _, page = whole
    assert "<script>alert" not in path.read_text()
    assert page.text.count("<script>alert(1)</script>&") == 2, "as text: the note and the configuration"


def test_what_stands_between_backticks_is_code(whole: tuple[Path, dict[str, Any], Page]) -> None:
    path, _, page = whole
    assert "<code>engine.max_batch_tokens</code> and <code>&lt;b&gt;</code> are code" in path.read_text()
    assert "`" not in page.text


def test_captions_say_what_is_drawn(whole: tuple[Path, dict[str, Any], Page]) -> None:
    path, _, _ = whole
    assert all(text in path.read_text() for text in (*GOODPUT, "Faint lines are chunk sizes"))


def test_a_report_says_the_verdict_and_every_number(whole: tuple[Path, dict[str, Any], Page]) -> None:
    _, summary, page = whole
    text = " ".join(page.text.split())
    assert "split:1+1 is better" in text
    for sentence in summary["verdict"]["sentences"]:
        assert " ".join(sentence.replace("`", " ").split()) in text
    for row in summary["goodput"]:
        assert f"{rate_text(row, '90')} | {rate_text(row, '99')}" in text
    for one in summary["points"]:
        assert f"{one['ttft_ms']['p50']:,.0f}" in text
        assert f"{one['goodput_share']:.0%}" in text
    for definition in summary["definitions"].values():
        assert definition["meaning"] in text


def test_each_figure_is_a_drawing_of_its_own(whole: tuple[Path, dict[str, Any], Page]) -> None:
    path, _, page = whole
    assert len(page.labels) == page.tags.count("svg") == len(FIGURES)
    assert len(set(page.labels)) == len(FIGURES)
    assert set(page.ids) >= FIGURES
    inner = [name for name in page.ids if "-" in name]
    assert len(inner) == len(set(inner)), "ids of one drawing are not those of another"
    targets = {reference.partition("#")[2].rstrip(")") for reference in page.refers}
    assert targets <= set(page.ids)
    pictures = {file.stem: file.read_bytes() for file in (path.parent / "figures").iterdir()}
    assert pictures.keys() == FIGURES
    assert all(picture.startswith(b"\x89PNG") and len(picture) > 5000 for picture in pictures.values())


def test_the_same_records_draw_the_same_page(tmp_path: Path) -> None:
    some = point("split:1+1", 1.0, good=0.9, seeds=(0,), num_requests=10)
    summary = summarize(some, slo=SLO)
    first, second = (write_report(tmp_path / name, some, None, summary).read_text() for name in ("a", "b"))
    assert first == second


@pytest.mark.parametrize(
    "records",
    [
        list,
        lambda: [record(error="worker_lost: gone", index=i) for i in range(3)],
        lambda: [record(100, [], stages={})],
    ],
    ids=["no request", "failures only", "one token, without stages"],
)
def test_a_report_of_little(records: Callable[[], list[RequestRecord]], tmp_path: Path) -> None:
    some = records()
    summary = summarize(some, slo=SLO)
    page = Page(write_report(tmp_path, some, None, summary).read_text())
    assert " ".join(summary["verdict"]["sentence"].split()) in " ".join(page.text.split())
    assert "gantt" not in page.ids, "no steps were recorded"
    assert f"{len(some)} request{'s' if len(some) != 1 else ''} measured" in page.text
    if not any(r.error is None for r in some):
        path = tmp_path / "report.html"
        assert not any(text in path.read_text() for text in GOODPUT), "a goodput of 0 has no place in the figure"


def test_a_simulation_tells_how_far_it_is_off(tmp_path: Path) -> None:
    some = point("split:1+1", 1.0, good=1.0, seeds=(0,), num_requests=10)
    summary = summarize(some, slo=SLO) | {"engine": {"kind": "simulated"}}
    page = Page(write_report(tmp_path, some, None, summary).read_text())
    assert "how far the simulation is off is not known here" in page.text
    figure = {"simulated": 104.0, "real": 100.0, "error": 0.04, "real_interval": (90.0, 110.0), "within": True}
    row = {"placement": "split:1+1", "chunk_tokens": 64, "engine": "", "rate": 1.0, "figures": {"ttft_p50_ms": figure}}
    summary["against"] = {"points": [row], "sentence": "One figure of one is near."}
    text = " ".join(Page(render(summary, {})).text.split())
    assert "One figure of one is near." in text
    assert "split:1+1 in chunks of 64 ttft p50 (ms) 104 100 90 to 110 +4.0 %" in text
    assert "not known here" not in text


def test_numbers_keep_their_digits() -> None:
    assert [number(v) for v in (0.0, 0.12345, 12.345, 123.45, 12345.6, -1234.5)] == [
        "0",
        "0.123",
        "12.3",
        "123",
        "12,346",
        "-1,234",
    ]
    assert [number(v, 2) for v in (0.049, 1.44, 12.4, 1200)] == ["0.049", "1.4", "12", "1,200"]


def test_tables_show_the_summary(whole: tuple[Path, dict[str, Any], Page]) -> None:
    _, summary, _ = whole
    file = io.StringIO()
    console = Console(file=file, width=160)
    for part in tables(summary | {"notes": ["a note"]}):
        console.print(part)
    text = file.getvalue()
    for one in summary["points"]:
        assert f"{one['ttft_ms']['p90']:.0f}" in text
    assert "64*" in text, "the better of two chunk sizes is marked"
    assert "a note" in text
    assert summary["verdict"]["sentence"].split("(")[0].strip() in text
    assert "DistServe" in text
    assert "Splitwise" in text


def test_tables_fit_a_terminal_of_80_columns(whole: tuple[Path, dict[str, Any], Page]) -> None:
    _, summary, _ = whole
    wide = [p | {"ttft_ms": dict.fromkeys(("p50", "p90", "p99", "max"), 1234.6)} for p in summary["points"]]
    engines = [{**row, "engine": name} for name in ("model on one GPU", "model on another") for row in wide]
    goodputs = [
        {**row, "engine": name} for name in ("model on one GPU", "model on another") for row in summary["goodput"]
    ]
    for shown in (summary | {"points": wide}, summary | {"points": engines, "goodput": goodputs}):
        file = io.StringIO()
        for part in tables(shown | {"verdict": {"sentences": []}}):
            Console(file=file, width=80).print(part)
        text = file.getvalue()
        assert "…" not in text, text
        assert text.count("1,235") == 4 * len(shown["points"])
        assert text.count("p90") == len({p["engine"] for p in shown["points"]}) * 2, "side by side"
    assert "on model on another" in " ".join(text.split())


@pytest.mark.parametrize("columns", [160, 80, 60, 40])
@pytest.mark.parametrize("rate", [0.001, 0.00001234, 12345.0, 1234567.0])
def test_no_number_is_cut_or_has_an_exponent(
    columns: int, rate: float, whole: tuple[Path, dict[str, Any], Page]
) -> None:
    _, summary, _ = whole
    latencies = dict(zip(("p50", "p90", "p99", "max"), (0.5, 12500.0, 125000.0, 1234567.0), strict=True))
    points = [
        p | {"rate": rate, "ttft_ms": latencies, "tbt_ms": latencies, "output_tokens_per_s": 1e7}
        for p in summary["points"]
    ]
    goodputs = [
        g | {"rate": {"90": rate, "99": rate}, "interval": {"90": (rate, None), "99": (rate, 2 * rate)}}
        for g in summary["goodput"]
    ]
    slo = summary["slo"] | {"ttft_ms": 125000.0, "tbt_ms": 1e7}
    shown = summary | {"points": points, "goodput": goodputs, "slo": slo, "verdict": {"sentences": []}}
    file = io.StringIO()
    for part in tables(shown):
        Console(file=file, width=columns).print(part)
    text = file.getvalue()
    assert all(len(line) <= columns for line in text.splitlines())
    cells = text.split()
    for cell in ("0.5", "12,500", "125,000", "1,234,567"):
        assert cells.count(cell) >= 2 * len(points), text
    assert cells.count("10,000,000") == len(points)
    exact = {0.001: "0.001", 0.00001234: "0.0000123", 12345.0: "12,345", 1234567.0: "1,234,567"}[rate]
    assert cells.count(exact) >= len(goodputs)
    assert "…" not in text
    assert not re.search(r"\de[+-]?\d", text)


def test_a_table_that_is_split_says_what_its_parts_are() -> None:
    table = NumberTable("of sizes")
    table.add_column("name", is_key=True, is_right=False)
    for group in ("first", "second"):
        for name in ("low", "high"):
            table.add_column(name, group=group)
    table.add_column("alone\nhere")
    table.add_row("a b", "1", "22,222,222", "3", "4", "5")
    table.caption = "the end"
    printed = {}
    for width in (60, 32, 18):
        file = io.StringIO()
        Console(file=file, width=width).print(table)
        printed[width] = [line.split() for line in file.getvalue().splitlines() if line.strip(" ─")]
    assert printed[60] == [
        ["of", "sizes"],
        ["first", "second", "alone"],
        ["name", "low", "high", "low", "high", "here"],
        ["a", "b", "1", "22,222,222", "3", "4", "5"],
        ["the", "end"],
    ]
    assert printed[32] == [
        ["of", "sizes"],
        ["first"],
        ["name", "low", "high"],
        ["a", "b", "1", "22,222,222"],
        ["second", "alone"],
        ["name", "low", "high", "here"],
        ["a", "b", "3", "4", "5"],
        ["the", "end"],
    ]
    assert ["first"] in printed[18] and printed[18].count(["first"]) == 2, "each part of a group is under its name"
    assert ["a", "b", "22,222,222"] in printed[18]


def test_tables_of_no_request() -> None:
    file = io.StringIO()
    for part in tables(summarize([], slo=SLO)):
        Console(file=file).print(part)
    assert "No request was measured." in file.getvalue()


def test_rates_are_spread_evenly() -> None:
    assert spread([1, 2, 3], 3) == [1, 2, 3]
    assert spread([1, 2, 3, 4, 5], 3) == [1, 3, 5]
    assert spread([1, 2, 3, 4], 3) == [1, 3, 4]
    assert spread([], 3) == []


@pytest.mark.parametrize(
    ("low", "high", "room", "ticks"),
    [
        (15, 400, 40, [20, 50, 100, 200]),
        (0.9, 120_000, 40, [1, 10, 100, 1000, 10_000, 100_000]),
        (0.5, 2e9, 40, [1, 1e3, 1e6, 1e9]),
        (210, 290, 40, [220, 240, 260, 280]),
        (100, 100, 40, []),
    ],
)
def test_logarithmic_ticks_have_room(low: float, high: float, room: float, ticks: list[float]) -> None:
    found = LogTicks(room).tick_values(low, high)
    assert found == pytest.approx(ticks)
    at = [room * math.log(tick / low) / math.log(high / low) for tick in found]
    for (one, a), (two, b) in pairwise(zip(found, at, strict=True)):
        assert b - a > (len(plain_number(one)) + len(plain_number(two))) / 2, "labels do not touch"


def test_long_engine_names_are_shortened_to_what_tells_them_apart(tmp_path: Path) -> None:
    names = [f"owner/model-13b A100-80G tp1 {engine}, conventions of Nobody" for engine in ("one", "other")]
    some = [
        r
        for name in names
        for placement in ("split:1+1", "colocated:2")
        for r in point(placement, 1.0, good=0.95, seeds=(0, 1), num_requests=10, engine=name)
    ]
    summary = summarize(some, slo=SLO) | {"notes": [f"Profile {names[0]}: a note"], "config": {"name": names[0]}}
    as_it_was = msgspec.json.encode(summary)
    page = Page(write_report(tmp_path, some, None, summary).read_text())
    assert page.text.count(names[1]) == 1, "in the note that explains"
    assert page.text.count(names[0]) == 2, "there and in the configuration"
    assert "split:1+1 on one" in page.text and "Profile one: a note" in page.text
    file = io.StringIO()
    for part in tables(summary):
        Console(file=file, width=300).print(part)
    assert file.getvalue().count(names[1]) == 1
    assert msgspec.json.encode(summary) == as_it_was, "files keep full names"


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["", "b"], {}),
        (["a long name of an engine, one of two"], {}),
        (["x" * 40, "x" * 40 + " more"], {}),  # nothing would be left of one
        (["model on hardware tp1 vllm of somebody", "model on hardware tp2 vllm of somebody"], ["tp1", "tp2"]),
        (
            ["model on hardware tp1, as somebody runs it", "model on other tp1, as somebody runs it"],
            ["hardware", "other"],
        ),
    ],
)
def test_short_names(names: list[str], short: list[str] | dict[str, str]) -> None:
    assert short_names(names) == (dict(zip(names, short, strict=True)) if isinstance(short, list) else short)


def test_the_environment_names_versions_and_machine() -> None:
    found = environment()
    assert found["versions"]["baton-serve"]
    assert found["cores"] >= 1
    assert found["commit"] is None or re.fullmatch("[0-9a-f]{40}(-dirty)?", found["commit"])


def test_a_copy_in_the_tree_of_another_project_has_not_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in (
        ["init", "-q"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x", "--allow-empty"],
    ):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    monkeypatch.setattr("baton_experiments.report.__file__", str(tmp_path / "report.py"))
    assert environment()["commit"] is None


def test_steps_of_another_run_are_not_drawn(tmp_path: Path) -> None:
    some = point("split:1+1", 1.0, good=1.0, seeds=(0,), num_requests=10)
    stranger = Run("split:1+1", 512, 1.0, 0)
    page = Page(
        write_report(
            tmp_path, some, {stranger: steps(stranger, "decode-0", busy=0.5)}, summarize(some, slo=SLO)
        ).read_text()
    )
    assert "gantt" not in page.ids

"""`baton profile`: measures, fits, tells how good the fit is, and writes the file that simulations read."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from baton.config import ClusterConfig
from baton.errors import ConfigError
from baton_cli.output import err, out, print_json
from baton_cluster.latency import LinkModel
from baton_experiments.profiles.fitted import Fit, FitError, FittedLatency, fit, fit_errors, profile_tree
from baton_experiments.profiles.profile import EngineProfile
from baton_experiments.profiling import (
    ClusterTimes,
    Engine,
    cpu_share,
    describe_engine,
    host_seconds,
    link_of,
    measure_cluster,
    measure_steps,
    read_recorded,
    require_pool,
)

QUIET = 0.97
"""Of their time measured steps have a core, where nothing else runs."""


class Between(NamedTuple):
    """What is not in a step. None: not measured."""

    host_s: float | None = None
    link: LinkModel | None = None
    message_s: float | None = None
    client_s: float | None = None


def run_profile(
    config: ClusterConfig,
    *,
    pool: str | None,
    workers: int | None,
    seconds: float,
    max_context: int,
    cluster: bool,
    spread: bool,
    cpu_time: bool,
    path: Path,
    as_json: bool = False,
) -> EngineProfile:
    """Measure this machine. Raises ConfigError, ModelError, ClusterError.

    `cpu_time`: count what steps' threads had of their cores, as if nothing else had run.
    """
    from baton.engine.build import resolve_device

    _require_writable(path)
    pool = require_pool(config, pool)
    if cpu_time and (device := resolve_device(config.pools[pool])) != "cpu":
        raise ConfigError("--cpu-time", "says nothing of a GPU", value=device, allowed="on CPUs only; leave it out")
    count = workers or sum(p.workers for p in config.pools.values())
    times: ClusterTimes | None = None
    with _bar() as bar:
        task = bar.add_task("starting", total=seconds)

        def told(text: str) -> None:
            bar.update(task, description=text)
            if not err.is_terminal:
                err.print(text, markup=False)

        def timed(passed: float, steps: int) -> None:
            bar.update(task, description=f"measuring steps: {steps}", completed=passed)

        engine, steps = measure_steps(
            config, pool, workers=count, seconds=seconds, max_context=max_context, told=told, timed=timed
        )
        if cluster:
            bar.update(task, total=None)
            times = measure_cluster(config, told=told)
    between = Between() if times is None else Between(times.host_s, times.link, times.message_s, times.client_s)
    seen_s = [(step.shape, step.cpu_seconds if cpu_time else step.seconds) for step in steps]
    fitted = fit(seen_s, host_s=between.host_s or 0.0, spread=spread)
    share = cpu_share(steps) if engine.device == "cpu" else None
    if share is not None and share < QUIET and not cpu_time:
        err.print(
            f"other work had the cores {1 - share:.0%} of the time: this is the profile of a busy machine; "
            "--cpu-time leaves that out",
            style="yellow",
        )
    seen = [] if times is None else [(step.shape, step.seconds) for step in times.steps]
    checked = fit_errors(fitted.latency, seen) if seen else {}
    measured = {
        "how": f"{count} engines at once, {seconds:g} s, contexts to {max_context} tokens",
        "clock": "cpu" if cpu_time else "wall",
        "cpu_share": share,
        "handoffs": [] if times is None else times.handoffs,
    }
    source = "measured by `baton profile`"
    return _finish(config, engine, fitted, between, checked, measured, source=source, path=path, as_json=as_json)


def run_profile_from(
    folder: Path, *, pool: str | None, spread: bool, path: Path, as_json: bool = False
) -> EngineProfile:
    """Fit the steps of an experiment. Raises ConfigError where it has none."""
    _require_writable(path)
    recorded = read_recorded(folder)
    engine = describe_engine(recorded.config, require_pool(recorded.config, pool))
    steps = [(step.shape, step.seconds) for step in recorded.steps]
    host_s = host_seconds(recorded.steps)
    fitted = fit(steps, host_s=host_s or 0.0, spread=spread)
    between = Between(host_s, link_of(recorded.handoffs), recorded.message_s, recorded.client_s)
    measured = {"how": f"steps of {recorded.runs} runs of {folder.name}"}
    source = f"steps recorded by `baton experiment` in {folder.name}"
    return _finish(recorded.config, engine, fitted, between, {}, measured, source=source, path=path, as_json=as_json)


def _require_writable(path: Path) -> None:
    """Raises ConfigError now, not after minutes of measuring. A file that is there stays as it is."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            path.open("a").close()
        else:
            tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as e:
        raise ConfigError("--out", f"cannot be written: {e.strerror or e}", value=str(path)) from e


def _finish(
    config: ClusterConfig,
    engine: Engine,
    fitted: Fit,
    between: Between,
    checked: Mapping[str, FitError],
    measured: Mapping[str, Any],
    *,
    source: str,
    path: Path,
    as_json: bool,
) -> EngineProfile:
    from baton_experiments.report import environment

    where = environment()
    hardware = str(where["cpu"]) if engine.device == "cpu" else engine.device
    pool = next(iter(config.pools.values()))
    profile = EngineProfile(
        name=f"{config.model.source} on {hardware}",
        model=config.model.source,
        hardware=hardware,
        latency=fitted.latency,
        kv_bytes_per_token=engine.kv_bytes_per_token,
        kv_tokens=engine.kv_tokens or None,
        gpus=0 if engine.device == "cpu" else max(1, round(pool.gpus)),
        link=between.link,
        source=source,
        notes=_notes(fitted, checked, measured.get("cpu_share"), measured.get("clock")),
    )
    tree = profile_tree(
        profile,
        {
            **measured,
            "engine": engine._asdict(),
            "errors": {kind: error._asdict() for kind, error in fitted.errors.items()},
            "errors_on_a_cluster": {kind: error._asdict() for kind, error in checked.items()},
            "host_s": between.host_s,
            "message_s": between.message_s,
            "client_s": between.client_s,
            "environment": where,
        },
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(tree, indent=1), encoding="utf-8")
    except OSError as e:
        raise ConfigError("--out", f"cannot be written: {e.strerror or e}", value=str(path)) from e
    if as_json:
        print_json(tree)
    else:
        for table in _tables(profile, fitted.errors, checked, between):
            out.print(table)
        out.print(f"profile: {path}", markup=False)
    return profile


def _notes(fitted: Fit, checked: Mapping[str, FitError], cpu_share: float | None, clock: str | None) -> tuple[str, ...]:
    """What whoever uses the profile must know: results made with it repeat these."""
    low, high = fitted.latency.rows[0], fitted.latency.rows[-1]
    notes = [f"measured for steps of {low} to {high} rows (decodes and prompt tokens); extrapolated beyond"]
    for errors, where in ((fitted.errors, "steps that were held out"), (checked, "steps of a small cluster")):
        error = errors.get("all")
        if error is not None:
            notes.append(f"on {where} it is off by {error.median:.0%} at the median and {error.p90:.0%} at p90")
    if cpu_share is not None and cpu_share < QUIET and clock != "cpu":
        notes.append(f"other work had the cores {1 - cpu_share:.0%} of the time when it was measured: measure again")
    return tuple(notes)


def _tables(
    profile: EngineProfile, errors: Mapping[str, FitError], checked: Mapping[str, FitError], between: Between
) -> list[Table]:
    fit_table = Table(title=f"steps of {profile.name}", box=box.SIMPLE_HEAD)
    for column in ("kind", "steps", "median error", "p90", "bias"):
        fit_table.add_column(column, justify="left" if column == "kind" else "right")
    for prefix, found in (("", errors), ("on a cluster: ", checked)):
        for kind, error in found.items():
            shares = (f"{100 * value:.1f} %" for value in (error.median, error.p90, error.bias))
            fit_table.add_row(prefix + kind, str(error.steps), *shares)
    fit_table.caption = "held-out steps: |predicted - measured| / measured; bias: of all seconds together"

    latency = profile.latency
    assert isinstance(latency, FittedLatency)
    costs = Table(title="what a step takes", box=box.SIMPLE_HEAD)
    costs.add_column("of")
    costs.add_column("ms", justify="right")
    for rows, seconds in zip(latency.rows, latency.rows_s, strict=True):
        costs.add_row(f"{rows} row{'s' if rows > 1 else ''}", f"{seconds * 1e3:.2f}")
    for text, seconds, times in (
        ("each chunk", latency.chunk_s, 1),
        ("1,000 positions that a chunk's tokens attend to", latency.chunk_attended_s, 1000),
        ("1,000 tokens before a chunk", latency.chunk_context_s, 1000),
        ("each decode, beyond its row", latency.decode_s, 1),
        ("1,000 positions that decodes attend to", latency.decode_context_s, 1000),
    ):
        costs.add_row(text, f"{seconds * times * 1e3:.4f}")
    rest = [("between two steps", between.host_s), ("router to worker", between.message_s)]
    rest.append(("client beyond router and workers", between.client_s))
    if between.link is not None:
        rest.append(("hand-over, whatever its size", between.link.latency_s))
        rest.append(("hand-over of 1 MB beyond that", 1e6 / between.link.bytes_per_s))
    for text, value in rest:
        costs.add_row(text, "-" if value is None else f"{value * 1e3:.3f}")
    return [fit_table, costs]


def _bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    return Progress(*columns, console=err, transient=True)

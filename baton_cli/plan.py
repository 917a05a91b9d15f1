"""`baton plan`: options, progress and tables around `baton_experiments.search`."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
from rich import box
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from baton.config import ClusterConfig, load_config, parse_yaml
from baton.errors import ConfigError
from baton_cli.output import err, out, print_json
from baton_cluster.latency import LinkModel
from baton_experiments.profiles.choice import choose, narrowed, parse_reference
from baton_experiments.profiles.links import link_of_speed
from baton_experiments.profiles.memory import LEFT
from baton_experiments.profiles.profile import EngineProfile
from baton_experiments.records import Slo
from baton_experiments.report import environment
from baton_experiments.results import plain
from baton_experiments.search.candidate import Candidate, parse_candidate
from baton_experiments.search.emit import NO_TENSOR_PARALLELISM, cluster_yaml, is_emitted
from baton_experiments.search.fronts import latency_front, points, total_front
from baton_experiments.search.planner import Objective, OnProgress, Plan, Planner, Row
from baton_experiments.search.recorded import read_recorded
from baton_experiments.search.replay import Replayed, Replayer, ReplayRow
from baton_experiments.search.study import Load, Study, check_question, usable_profiles
from baton_experiments.simulated import with_settings_of
from baton_experiments.work import Work
from baton_experiments.workloads import Lengths, describe, read_trace

ENGINE_DEFAULTS = {"engine.max_batch_requests": 256}
"""As engines on GPUs have it, and for them only; cluster.yaml's default is for CPUs."""
CHUNKS = (512, 2048)
"""On GPUs. On CPUs what cluster.yaml has."""
LINK_GB_PER_S = 25.0
"""Where neither profile nor user says it: 200 Gbit/s, a network card of a GPU server."""
ROUNDS = 3
"""Different requests that there are for each one that is judged: more come with warming up."""
UNLIMITED = 1 << 20
SHOWN = 12
_TIMES = ("TTFT ms\np90/p99", "TBT ms\np90/p99")
_APART = "≈ phases simulated apart; the others as a whole"
INTERRUPTED = 130


class Options(msgspec.Struct, frozen=True):
    """What the command line says. None: not said."""

    profile: str
    gpus: int
    model: str | None = None
    hardware: str | None = None
    tps: tuple[int, ...] = ()
    gpus_per_node: int = 8
    kv_tokens_per_gpu: int | None = None
    link_gb_per_s: float | None = None
    workload: str | None = None
    format: str | None = None
    skip_malformed: bool = False
    prompt_tokens: tuple[int, int] | None = None
    output_tokens: tuple[int, int] | None = None
    arrivals: str | None = None
    scale_prompt: float = 1.0
    scale_output: float = 1.0
    max_total_tokens: int | None = None
    max_model_len: int | None = None
    slo_ttft: float = 250.0
    slo_tbt: float = 100.0
    attainment: float = 0.9
    definition: str = "distserve"
    requests: int = 2000
    seed: int = 0
    chunks: tuple[int, ...] = ()
    candidates: tuple[str, ...] = ()
    objective: Objective = "per-gpu"
    confirm: int = 6
    replay: Path | None = None
    where: tuple[str, ...] = ()
    first: int | None = None
    jobs: int = 1
    config: Path | None = None
    overrides: tuple[str, ...] = ()


def run_plan(
    options: Options, *, folder: Path, emit: Path | None = None, force: bool = False, as_json: bool = False
) -> int:
    """Search or replay, show and write what came out; the exit status. Ctrl-C keeps what is known by then.

    `force`: `emit` may overwrite what somebody else wrote. Raises ConfigError before the search, or where one of its
    processes dies.
    """
    started = time.monotonic()
    named = _checked(options, folder, emit, force=force)
    study, notes, described = _study(options)
    for note in notes:
        err.print(note, style="yellow", markup=False)
    settings: dict[str, Any] = {
        "max_gpus": options.gpus,
        "gpus_per_node": options.gpus_per_node,
        "confirm": options.confirm,
        "named": named,
        "jobs": options.jobs,
    }
    with _progress("replaying" if options.replay else "searching") as on_progress:
        if options.replay is not None:
            found: Plan | Replayed = Replayer(study, **settings, on_progress=on_progress).run()
        else:
            found = Planner(study, **settings, objective=options.objective, on_progress=on_progress).run()
    if not found.rows:
        err.print("interrupted before anything was known", style="yellow")
        return INTERRUPTED
    tree = {
        **_settings(options, study),
        "work": described,
        **(_plan_tree(found, study) if isinstance(found, Plan) else _replay_tree(found)),
        "notes": notes,
        "interrupted": found.interrupted,
        "elapsed_s": round(time.monotonic() - started, 1),
        "environment": environment(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "plan.json"
    path.write_text(json.dumps(plain(tree), indent=1, allow_nan=False), encoding="utf-8")
    if isinstance(found, Plan):
        from baton_experiments.search.plot import plot_plan

        plot_plan(found, study.slo, study.share, folder / "pareto.png")
    emitted = None if emit is None else _emit(emit, found, study, options, force=force)
    if as_json:
        print_json(plain(tree))
    else:
        _show(found, study, options)
        out.print(f"all candidates, curves and settings: {folder}/", markup=False)
        if emitted:
            out.print(emitted, markup=False)
    if found.interrupted:
        err.print("interrupted: this is what was known by then", style="yellow")
        return INTERRUPTED
    return 0 if found.winner is not None else 1


# --- from options to a study ------------------------------------------------------------------------


def _checked(options: Options, folder: Path, emit: Path | None, *, force: bool) -> list[Candidate]:
    """The named candidates. Raises ConfigError for all that is wrong before anything is read or searched."""
    for option, limit in (("--slo-ttft", options.slo_ttft), ("--slo-tbt", options.slo_tbt)):
        if not 0 < limit < math.inf:
            raise ConfigError(option, "must be positive and finite", value=limit, allowed="milliseconds, > 0")
    check_question(options.attainment, options.definition, options.requests, options.chunks)
    if folder.exists() and not folder.is_dir():
        raise ConfigError("--out", "is not a folder", value=str(folder))
    if emit is not None:
        _check_emit(emit, force=force)
    elif force:
        raise ConfigError("--force", "is for --emit")
    return [parse_candidate(name) for name in options.candidates]


def _check_emit(path: Path, *, force: bool) -> None:
    """Raises ConfigError where no cluster file is to be written."""
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError("--emit", "is no file in a folder that is there", value=str(path))
    if force or not path.exists():
        return
    try:
        ours = is_emitted(path.read_text(encoding="utf-8", errors="replace"))
    except OSError as e:
        raise ConfigError("--emit", f"cannot be read: {e.strerror or e}", value=str(path)) from None
    if not ours:
        problem = "is there already, and `baton plan` did not write it"
        raise ConfigError("--emit", problem, value=str(path), allowed="another name, or --force")


def _study(options: Options) -> tuple[Study, list[str], dict[str, Any]]:
    """The study, what a reader of its result should know, and the work described."""
    profiles, notes = _profiles(options)
    first = next(iter(profiles.values()))
    extra = first.extra_output_tokens
    load, described = _recorded(options) if options.replay is not None else _load(options)
    config, chunks = _config(options, first)
    link = _link(options, first, notes)
    if extra:
        load = msgspec.structs.replace(load, outputs=tuple(tokens + extra for tokens in load.outputs))
    if options.replay is None and len(load) < options.requests:
        notes.append(f"the workload has {len(load)} requests; it goes round for the {options.requests} of each rate")
    usable, left_out = usable_profiles(profiles, load.longest, options.kv_tokens_per_gpu)
    study = Study(
        profiles=usable,
        load=load,
        slo=Slo(options.slo_ttft, options.slo_tbt),
        config=config,
        link=link,
        share=options.attainment,
        definition=options.definition,
        num_requests=options.requests,
        chunk_tokens=chunks,
    )
    return study, [*notes, *left_out], described


def _profiles(options: Options) -> tuple[dict[int, EngineProfile], list[str]]:
    """By tensor parallel degree: those that were asked for, else all that the file has and the budget allows."""
    from baton_experiments.profiles.load import list_profiles, load_profile

    path, asked, tps = _reference(options)
    names = {key: asked.get(key) for key in ("model", "hardware", "engine")}
    left = narrowed(list_profiles(path), **names)
    allowed = ", ".join(str(tp) for tp in sorted({choice.tp for choice in left}))
    if left and (missing := [tp for tp in tps if tp not in {choice.tp for choice in left}]):
        problem = f"{missing[0]} is not in the profile, and how steps would scale to it cannot be told"
        raise ConfigError("--tp", problem, allowed=allowed)
    wanted = [choice for choice in left if not tps or choice.tp in tps]
    one = choose(wanted or list_profiles(path), Path(path), None, **names)  # says what there is, where it is not one
    have = sorted({choice.tp for choice in left if choice.but_tp == one.but_tp})
    largest = min(options.gpus, options.gpus_per_node)
    usual = [tp for tp in have if (tp in tps if tps else tp & (tp - 1) == 0)]
    profiles = {tp: load_profile(path, **asked, tp=tp) for tp in usual if tp <= largest}
    if not profiles:
        option = "--gpus" if options.gpus <= options.gpus_per_node else "--gpus-per-node"
        smallest = min(usual or have)
        raise ConfigError(option, f"are too few: the smallest worker of this profile takes {smallest}", value=largest)
    notes = []
    if len(have) == 1 and largest > 1:
        notes.append(
            f"the profile has tensor parallel degree {have[0]} only: whether another were better cannot be told from it"
        )
    elif untold := [tp for tp in (1, 2, 4, 8) if tp <= largest and tp not in have and not tps]:
        degrees = " and ".join(map(str, untold))
        notes.append(
            f"the profile does not tell of TP {degrees}, so the search leaves {'them' if untold[1:] else 'it'} out"
        )
    if options.kv_tokens_per_gpu is None:
        assumed = (note for profile in profiles.values() for note in profile.notes if note.startswith(LEFT))
        notes += [f"the profile does not say how much KV fits: {note}" for note in islice(assumed, 1)]
    return profiles, notes


def _reference(options: Options) -> tuple[str, dict[str, Any], tuple[int, ...]]:
    """Of `--profile` and the options beside it: path, what else `load_profile` takes, degrees that were asked for."""
    path, asked = parse_reference(options.profile)
    tps = options.tps
    for option, key, value in (
        ("--model", "model", options.model),
        ("--hardware", "hardware", options.hardware),
        ("--tp", "tp", tps or None),
    ):
        if value is not None and key in asked:
            raise ConfigError(option, f"is said twice; leave it out, or {key}= in --profile", value=value)
        if value is not None and key != "tp":
            asked[key] = value
    if "tp" in asked:
        tps = (asked.pop("tp"),)
    return path, asked, tps


def _load(options: Options) -> tuple[Load, dict[str, Any]]:
    lengths = Lengths()
    if options.prompt_tokens or options.output_tokens:
        if options.workload is not None:
            raise ConfigError("--prompt-tokens, --output-tokens", "are for made-up work, without --workload")
        lengths = Lengths(options.prompt_tokens or lengths.prompt, options.output_tokens or lengths.output)
    elif options.workload is None:
        raise ConfigError("--workload", "is needed: chat, code, summarize, reasoning, a trace file; or --prompt-tokens")
    work = Work(
        source=options.workload,
        format=options.format,
        skip_malformed=options.skip_malformed,
        lengths=lengths,
        arrivals=options.arrivals or "poisson",
        scale_prompt=options.scale_prompt,
        scale_output=options.scale_output,
        max_total_tokens=options.max_total_tokens,
    )
    count = ROUNDS * options.requests
    if work.is_trace and options.workload is not None and Path(options.workload).is_file():
        trace = read_trace(options.workload, options.format, skip_malformed=options.skip_malformed)
        kept = trace.keep(max_total_tokens=options.max_total_tokens)
        count = max(1, min(count, sum(1 for _ in kept)))
    work.check(count, (options.seed,))
    stated = {"seed": options.seed, "num_requests": count, "max_model_len": options.max_model_len or UNLIMITED}
    shapes = list(work.of(rate=1.0, **stated))
    return Load.of(shapes, seed=options.seed), {
        "arrivals": work.arrivals,
        **work.described(rate=1.0, **stated),
    }


def _recorded(options: Options) -> tuple[Load, dict[str, Any]]:
    assert options.replay is not None
    if options.workload is not None or options.prompt_tokens or options.output_tokens or options.arrivals:
        raise ConfigError(
            "--replay", "has requests and arrivals of its own; leave --workload, lengths and --arrivals out"
        )
    where = {}
    for item in options.where:
        key, equals, value = item.partition("=")
        if not equals:
            raise ConfigError("--where", "is not COLUMN=VALUE", value=item)
        where[key] = value
    recorded = read_recorded(options.replay, options.format, where=where)
    if options.max_total_tokens is not None:
        recorded = recorded.keep(max_total_tokens=options.max_total_tokens)
    if options.first is not None:
        recorded = recorded.first(options.first)
    if (options.scale_prompt, options.scale_output) != (1.0, 1.0):
        recorded = recorded.scale_lengths(prompt=options.scale_prompt, output=options.scale_output)
    recorded = recorded.clip(options.max_model_len or UNLIMITED)
    load = Load.of(list(recorded), seed=options.seed)
    return load, {**recorded.description, "statistics": describe(recorded)}


def _config(options: Options, profile: EngineProfile) -> tuple[ClusterConfig, tuple[int, ...]]:
    """Engine settings, and step budgets to try. The profile's hold (`with_settings_of`), ours where nobody says any."""
    overrides: dict[str, Any] = {}
    for item in options.overrides:
        key, separator, text = item.partition("=")
        if not separator or not key:
            raise ConfigError("--set", "is not KEY=VALUE", value=item, allowed="such as engine.max_batch_requests=128")
        overrides[key] = parse_yaml(text, f"--set {key}")
    written: Any = {}
    if options.config is not None:
        load_config(options.config)  # says what is wrong with it
        written = parse_yaml(options.config.read_text(encoding="utf-8"), str(options.config)) or {}
    ours = {key: value for key, value in ENGINE_DEFAULTS.items() if profile.gpus and not _is_set(written, key)}
    config = with_settings_of(load_config(options.config, {**ours, **overrides}), profile)
    budget = "engine.max_batch_tokens"
    is_said = not profile.gpus or budget in overrides or budget in profile.config or _is_set(written, budget)
    return config, options.chunks or ((config.engine.max_batch_tokens,) if is_said else CHUNKS)


def _is_set(tree: Any, dotted: str) -> bool:
    for key in dotted.split("."):
        if not isinstance(tree, dict) or key not in tree:
            return False
        tree = tree[key]
    return True


def _link(options: Options, profile: EngineProfile, notes: list[str]) -> LinkModel:
    if options.link_gb_per_s is not None:
        return link_of_speed(options.link_gb_per_s)
    if profile.link is not None:
        return profile.link
    notes.append(f"the profile has no link between workers: {LINK_GB_PER_S:g} GB/s are assumed (--link-gb-per-s)")
    return LinkModel(bytes_per_s=LINK_GB_PER_S * 1e9)


@contextmanager
def _progress(what: str) -> Iterator[OnProgress]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task(what, total=None)

        def on_progress(done: float, total: float, text: str) -> None:
            bar.update(task, completed=done, total=total, description=f"{what}: {text}")

        yield on_progress


# --- what is written --------------------------------------------------------------------------------


def _settings(options: Options, study: Study) -> dict[str, Any]:
    return {
        "gpus": options.gpus,
        "gpus_per_node": options.gpus_per_node,
        "model": next(iter(study.profiles.values())).model,
        "profiles": {
            str(tp): {
                "name": p.name,
                "hardware": p.hardware,
                "kv_tokens": p.kv_tokens,
                "kv_bytes_per_token": p.kv_bytes_per_token,
                "source": p.source,
                "notes": list(p.notes),
            }
            for tp, p in study.profiles.items()
        },
        "slo": msgspec.to_builtins(study.slo),
        "attainment": study.share,
        "definition": study.definition,
        "objective": options.objective,
        "requests": study.num_requests,
        "seed": options.seed,
        "tolerance": study.tolerance,
        "chunk_tokens": list(study.chunk_tokens),
        "link": msgspec.to_builtins(study.link),
        "engine": msgspec.to_builtins(study.config.engine),
    }


def _plan_tree(plan: Plan, study: Study) -> dict[str, Any]:
    best = max((row for row in plan.rows if row.is_simulated), key=lambda row: row.goodput, default=None)
    return {
        "kind": "search",
        "winner": _row_tree(plan.row(plan.winner)),
        "highest_total": _row_tree(best),
        "baselines": [
            {
                "name": b.name,
                "candidate": b.candidate.name,
                "gpus": b.candidate.gpus,
                "expected_goodput": b.expected,
                "simulated_goodput": b.simulated,
            }
            for b in plan.baselines
        ],
        "pareto": {
            "latency": [msgspec.to_builtins(point) for point in latency_front(points(plan, study.share))],
            "total": [_row_tree(row) for row in total_front(plan.rows)],
        },
        "candidates": [_row_tree(row) for row in plan.rows],
        "curves": [
            {
                "candidate": curve.setup.name,
                "chunk_tokens": curve.setup.chunk_tokens,
                "goodput": curve.goodput,
                "warmup_s": curve.warmup_s,
                "rates": msgspec.to_builtins(curve.outcomes),
            }
            for curve in plan.curves
        ],
        "runs": plan.num_runs,
    }


def _row_tree(row: Row | None) -> dict[str, Any] | None:
    if row is None:
        return None
    return {
        "candidate": row.name,
        "gpus": row.gpus,
        "goodput": row.goodput,
        "goodput_per_gpu": row.per_gpu,
        "phase_goodput": row.phase_goodput,
        "simulated": row.is_simulated,
        "attainment": row.attainment,
        "chunk_tokens": row.chunk_tokens,
        "ttft_ms": row.ttft_ms,
        "tbt_ms": row.tbt_ms,
        "bottleneck": row.bottleneck,
    }


def _replay_tree(replayed: Replayed) -> dict[str, Any]:
    def tree(row: ReplayRow | None) -> dict[str, Any] | None:
        if row is None:
            return None
        return {
            "candidate": row.name,
            "gpus": row.gpus,
            "attainment": row.attainment,
            "at_most": row.at_most,
            "simulated": row.is_simulated,
            "chunk_tokens": row.chunk_tokens,
            "ttft_ms": row.ttft_ms,
            "tbt_ms": row.tbt_ms,
            "bottleneck": row.bottleneck,
        }

    return {
        "kind": "replay",
        "winner": tree(replayed.row(replayed.winner)),
        "candidates": [tree(row) for row in replayed.rows],
    }


def _emit(path: Path, found: Plan | Replayed, study: Study, options: Options, *, force: bool) -> str:
    if found.winner is None:
        return f"{path} was not written: no candidate that was simulated keeps the SLO"
    try:
        _check_emit(path, force=force)  # again: a search takes its time
    except ConfigError as e:
        return f"{path} was not written: {e}"
    row = found.row(found.winner)
    assert row is not None
    profile = next(iter(study.profiles.values()))
    model, config = profile.model, study.config
    if options.max_model_len is not None:
        limited = msgspec.structs.replace(config.model, max_model_len=options.max_model_len)
        config = msgspec.structs.replace(config, model=limited)
    # On GPUs workers take what memory they find, unless somebody has said what to plan with.
    is_said = not profile.gpus or options.kv_tokens_per_gpu is not None
    text = cluster_yaml(
        found.winner,
        config=config,
        model=model,
        kv_tokens={tp: study.kv_tokens(tp) for tp in study.profiles} if is_said else None,
        device="cuda" if profile.gpus else "cpu",
        chunk_tokens=row.chunk_tokens,
        found=f"for {model} on at most {options.gpus} GPUs",
        comments=(
            _sentence(found, study),
            "By simulation from the profile named in plan.json; measure before you rely on it.",
        ),
    )
    path.write_text(text, encoding="utf-8")
    note = ""
    if any(pool.tp > 1 for pool in found.winner.pools.values()):
        note = f"; note: {NO_TENSOR_PARALLELISM}"
    return f"{found.winner.name} is in {path}{note}"


# --- what is shown ----------------------------------------------------------------------------------


def _show(found: Plan | Replayed, study: Study, options: Options) -> None:
    slo = f"TTFT {study.slo.ttft_ms:g} ms, TBT {study.slo.tbt_ms:g} ms for {study.share:.0%} of requests"
    if isinstance(found, Replayed):
        out.print(_replay_table(found, slo, study.num_requests))
    else:
        out.print(_plan_table(found, slo))
        out.print(_front_table(found, study))
        for baseline in found.baselines:
            simulated = "not simulated" if baseline.simulated is None else f"simulated {baseline.simulated:.2f}/s"
            placed = f"{baseline.candidate.name} on {baseline.candidate.gpus} GPUs"
            out.print(f"{baseline.name}: {placed}, expected {baseline.expected:.2f}/s, {simulated}", markup=False)
    out.print(_sentence(found, study), markup=False, style="bold")


def _plan_table(plan: Plan, slo: str) -> Table:
    title = f"Goodput under {slo}; times at that rate"
    table = Table(title=title, caption=_APART, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("\ncandidate", no_wrap=True)
    for name in ("\nGPUs", "goodput\n/s", "per GPU\n/s", *_TIMES):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("\nlimited by", no_wrap=True)
    able = [row for row in plan.rows if row.goodput > 0]
    for row in _shown(able or plan.rows, plan.winner, lambda row: not row.candidate.is_split):
        table.add_row(
            row.name,
            str(row.gpus),
            f"{'' if row.is_simulated else '≈'}{row.goodput:.2f}",
            f"{row.per_gpu:.3f}",
            *_times(row),
            row.bottleneck,
            style="bold" if row.candidate == plan.winner else None,
        )
    return table


def _times(row: Row | ReplayRow) -> list[str]:
    """Under the headings of `_TIMES`."""
    return [f"{t['p90']:.0f}/{t['p99']:.0f}" if t else "-" for t in (row.ttft_ms, row.tbt_ms)]


def _shown(rows: Sequence[Any], winner: Any, other: Callable[[Any], bool]) -> list[Any]:
    """The first ones, and of those after them the winner and the best of the other kind."""
    first = list(rows[:SHOWN])
    for wanted in (lambda row: row.candidate == winner, other):
        if not any(map(wanted, first)):
            first += [next(filter(wanted, rows))] if any(map(wanted, rows)) else []
    return first


def _front_table(plan: Plan, study: Study) -> Table:
    table = Table(
        title="Pareto front: requests/s per GPU, p90 of TTFT and of TBT", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    table.add_column("candidate", no_wrap=True)
    for name in ("rate\n/s", "per GPU\n/s", "TTFT p90\nms", "TBT p90\nms", "in\ntime"):
        table.add_column(name, justify="right", no_wrap=True)
    for p in latency_front(points(plan, study.share))[:SHOWN]:
        table.add_row(
            p.name, f"{p.rate:.2f}", f"{p.per_gpu:.3f}", f"{p.ttft_ms:.0f}", f"{p.tbt_ms:.0f}", f"{p.attainment:.1%}"
        )
    return table


def _replay_table(replayed: Replayed, slo: str, num_requests: int) -> Table:
    title = f"Requests of the log that keep {slo}"
    table = Table(title=title, caption=_APART, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("\ncandidate", no_wrap=True)
    for name in ("\nGPUs", "in\ntime", *_TIMES):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("\nlacks", no_wrap=True)
    for row in _shown(replayed.rows, replayed.winner, lambda row: not row.candidate.is_split):
        table.add_row(
            row.name,
            str(row.gpus),
            f"{'≤' if row.at_most else '' if row.is_simulated else '≈'}{row.attainment:.1%}",
            *_times(row),
            row.bottleneck,
            style="bold" if row.candidate == replayed.winner else None,
        )
    return table


def _sentence(found: Plan | Replayed, study: Study) -> str:
    row = found.row(found.winner)
    share = f"{study.share:.0%}"
    if row is None:
        count = sum(r.is_simulated for r in found.rows)
        if not count:
            return "No candidate was simulated as a whole, so which one keeps the SLO is not known."
        which = f"None of the {count} candidates that were" if count > 1 else "The one candidate that was"
        which += f" simulated {'keeps' if count > 1 else 'does not keep'} the SLO for {share} of the requests"
        return f"{which}{', at any rate that was tried' if isinstance(found, Plan) else ''}."
    if isinstance(row, ReplayRow):
        return (
            f"{row.name} on {row.gpus} GPUs would have kept the SLO for {row.attainment:.1%} of the requests, "
            "the fewest GPUs of those simulated that suffice."
        )
    assert isinstance(found, Plan)
    text = (
        f"{row.name} keeps the SLO for {share} of the requests at up to {row.goodput:.2f}/s "
        f"on {row.gpus} GPUs, {row.per_gpu:.3f}/s per GPU"
    )
    if row.bottleneck == "throughput":
        text += " (at higher rates work piles up, whatever the SLO: it is no limit here)"
    kind = "colocated" if row.candidate.is_split else "split"
    others = [r for r in found.rows if r.candidate.is_split != row.candidate.is_split]
    other = next((r for r in others if r.is_simulated and r.goodput > 0), None)
    if other is None:
        return f"{text}; {_no_other(kind, others, interrupted=found.interrupted)}."
    gain = row.per_gpu / other.per_gpu - 1
    if found.objective == "total":
        gain = row.goodput / other.goodput - 1
    what = "per GPU" if found.objective == "per-gpu" else "in all"
    versus = f"the best {kind} one, {other.name}"
    if gain <= study.tolerance:
        return f"{text}; {versus}, is within {study.tolerance:.0%} of it, which is what the search tells apart."
    return f"{text}, {gain:.0%} more {what} than {versus}."


def _no_other(kind: str, others: Sequence[Row], *, interrupted: bool) -> str:
    """Why nothing is said of the other kind's goodput."""
    names = [row.name for row in others if row.is_simulated]
    if len(names) == 1:
        return f"{names[0]}, the one {kind} placement that was simulated, does not keep it at any rate that was tried"
    if names:
        return f"none of the {len(names)} {kind} placements that were simulated keeps it at any rate that was tried"
    if interrupted:
        return f"no {kind} placement was simulated before the search was interrupted"
    if not others:
        return f"no {kind} placement is among the candidates"
    return f"no {kind} placement was simulated, since workers of theirs miss it even without load"

"""`baton experiment`: options, progress and tables around `baton_experiments`."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from baton.config import ClusterConfig, dump_config, parse_config
from baton.engine.model_spec import CausalLMSpec, load_spec
from baton.engine.weights import resolve_model
from baton.errors import ConfigError
from baton_cli.output import err, out, print_json
from baton_cluster.latency import LinkModel
from baton_cluster.ray_session import RaySession
from baton_experiments.engine import Engine
from baton_experiments.experiment import Watch, planned_s, run
from baton_experiments.journal import Journal
from baton_experiments.number_table import NumberTable
from baton_experiments.outcome import Outcome, write_outcome
from baton_experiments.plan import EngineName, Estimate, Plan, Point
from baton_experiments.profiles.choice import parse_reference
from baton_experiments.profiles.links import link_of_speed
from baton_experiments.profiles.profile import EngineProfile
from baton_experiments.real import RealEngine, Running
from baton_experiments.records import RequestRecord, Setting, Slo
from baton_experiments.report import environment, tables
from baton_experiments.results import Result, read_result
from baton_experiments.simulated import SimulatedEngine
from baton_experiments.words import number
from baton_experiments.work import Work
from baton_experiments.workloads import Lengths

INTERRUPTED = 130
"""Exit status after Ctrl-C, as of a shell."""
_AGAINST_TAKES = ("profiles", "link_gb_per_s", "against", "engine")
"""The other options are those of the real run."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line says; None and (): nothing."""

    config: Path | None = None
    overrides: tuple[str, ...] = ()
    placements: tuple[str, ...] = ()
    allow_unequal: bool = False
    chunks: tuple[int, ...] = ()
    colocated_chunks: tuple[int, ...] = ()
    rates: tuple[float, ...] = ()
    requests: int | None = None
    ramp: float | None = None
    seeds: tuple[int, ...] = ()
    workload: str | None = None
    format: str | None = None
    skip_malformed: bool = False
    prompt_tokens: tuple[int, int] | None = None
    output_tokens: tuple[int, int] | None = None
    arrivals: str | None = None
    scale_prompt: float | None = None
    scale_output: float | None = None
    max_total_tokens: int | None = None
    slo_ttft: float | None = None
    slo_tbt: float | None = None
    slo_e2e: float | None = None
    engine: str | None = None
    profiles: tuple[str, ...] = ()
    link_gb_per_s: float | None = None
    against: Path | None = None

    def plan(self, config: ClusterConfig, profiles: Sequence[EngineProfile]) -> Plan:
        """Raises ConfigError for options that exclude each other; `Plan.check` says the rest."""
        engine = self.engine_name
        if self.workload is not None and (self.prompt_tokens or self.output_tokens):
            raise ConfigError(
                "--prompt-tokens, --output-tokens",
                "are for work without --workload",
                value=self.workload,
                allowed="--scale-prompt and --scale-output change a workload's lengths",
            )
        uniform = Lengths()
        placements = self.placements or ("colocated:2", "split:1+1")
        chunks = self.colocated_chunks
        unchunked = any("engine.max_batch_tokens" in profile.config for profile in profiles)  # by its conventions
        if not (chunks or self.chunks or unchunked) and any(p.startswith("colocated:") for p in placements):
            chunks = default_chunks(config)
        return Plan(
            placements=placements,
            rates=self.rates or (0.5, 1.0, 2.0),
            seeds=self.seeds or (0,),
            num_requests=(20 if engine == "real" else 200) if self.requests is None else self.requests,
            work=Work(
                source=self.workload,
                format=self.format,
                skip_malformed=self.skip_malformed,
                lengths=Lengths(self.prompt_tokens or uniform.prompt, self.output_tokens or uniform.output),
                arrivals="poisson" if self.arrivals is None else self.arrivals,
                scale_prompt=1.0 if self.scale_prompt is None else self.scale_prompt,
                scale_output=1.0 if self.scale_output is None else self.scale_output,
                max_total_tokens=self.max_total_tokens,
            ),
            ramp=Plan().ramp if self.ramp is None else self.ramp,
            chunk_tokens=self.chunks,
            colocated_chunk_tokens=chunks,
            engine=engine,
            profiles=tuple(profile.name for profile in profiles),
            slo_ttft_ms=self.slo_ttft,
            slo_tbt_ms=self.slo_tbt,
            slo_e2el_ms=self.slo_e2e,
            allow_unequal=self.allow_unequal,
        )

    @property
    def engine_name(self) -> EngineName:
        if self.engine not in (None, "real", "simulated"):
            raise ConfigError("--engine", "is unknown", value=self.engine, allowed="real, simulated")
        if self.against is not None and self.engine == "real":
            raise ConfigError("--engine", "must be simulated to be compared with a real run", value=self.engine)
        return "simulated" if self.engine == "simulated" or self.against is not None else "real"

    def check_against(self) -> None:
        """Raises ConfigError for what `--against` takes from the real run."""
        default = Options()
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name not in _AGAINST_TAKES and value != getattr(default, name):
                raise ConfigError("--against", f"takes {name} from the real run; leave it out", value=value)
        if len(self.profiles) != 1:
            raise ConfigError("--against", "needs one --profile to simulate with", value=list(self.profiles) or None)


def run_command(
    options: Options, read_config: Callable[[Path | None, list[str]], ClusterConfig], *, folder: Path, as_json: bool
) -> int:
    """What the command does; its exit status."""
    engine = options.engine_name
    if engine == "real" and options.link_gb_per_s is not None:
        raise ConfigError("--link-gb-per-s", "is for simulated engines only", value=options.link_gb_per_s)
    link = None if options.link_gb_per_s is None else link_of_speed(options.link_gb_per_s)
    against = None
    if options.against is not None:
        options.check_against()
        profiles = _profiles(options.profiles)
        config, plan, against = read_against(options.against)
        plan = msgspec.structs.replace(plan, engine="simulated", profiles=tuple(p.name for p in profiles))
    else:
        profiles = _profiles(options.profiles)
        config = read_config(options.config, list(options.overrides))
        plan = options.plan(config, profiles)
    _, status = run_experiment(
        config, plan, folder=folder, profiles=profiles, link=link, against=against, as_json=as_json
    )
    return status


def _profiles(texts: Sequence[str]) -> list[EngineProfile]:
    """Of `PATH` or `PATH,KEY=VALUE,...`, the keys those of `load_profile`."""
    from baton_experiments.profiles.load import load_profile

    references = [parse_reference(text) for text in texts]
    return [load_profile(path, **chosen) for path, chosen in references]


def _digest(profile: EngineProfile) -> str:
    """Tells profiles of one name apart, such as those of two measurements."""
    return hashlib.blake2b(msgspec.json.encode(profile, enc_hook=repr), digest_size=8).hexdigest()


def run_experiment(
    config: ClusterConfig,
    plan: Plan,
    *,
    folder: Path,
    profiles: Sequence[EngineProfile] = (),
    link: LinkModel | None = None,
    against: Result | None = None,
    clusters: Mapping[str, Running] | None = None,
    session: RaySession | None = None,
    anew: bool = False,
    as_json: bool = False,
) -> tuple[Outcome, int]:
    """Run what is not done yet, write and show what is; the outcome and the exit status.

    Ctrl-C ends it early and keeps the points that are done. `clusters`: placements that are up already, and stay so.
    `anew`: forget what a former run left in `folder`. Raises ConfigError before anything starts where it cannot be run.
    """
    plan.check()
    described: dict[str, Any] = {
        "plan": msgspec.to_builtins(plan),
        "cluster": dump_config(config),
        "profile": {profile.name: _digest(profile) for profile in profiles} or None,
        "link": None if link is None else msgspec.to_builtins(link),
        "trace": plan.work.digest(),
        "environment": environment(),
    }
    if against is not None:
        described["max_model_len"] = against.config["max_model_len"]
        described["against"] = {"max_model_len": against.config["max_model_len"]}
    journal = Journal(folder, described, anew=anew)
    _note_environment(journal, plan, described["environment"])
    status = 0
    with _Bar(plan) as bar:
        try:
            engine: Engine
            if plan.engine == "simulated":
                engine = SimulatedEngine(config, profiles, link=link)
            else:
                running = {
                    setting: found for setting in plan.settings if (found := (clusters or {}).get(setting.placement))
                }
                engine = _real_engine(config, bar, running, session)
            run(plan, engine, journal, bar)
        except KeyboardInterrupt:
            if not journal.has_points:
                raise
            status = INTERRUPTED
        if status:
            bar.say("interrupted: what follows is of the points that were done")
        else:
            bar.say("writing the report")
        try:
            outcome = write_outcome(plan, journal, against=against)
        except KeyboardInterrupt:
            _say_how_to_go_on(folder)
            raise
    if as_json:
        left_out = ("config", "environment")
        shown = {key: value for key, value in outcome.summary.items() if key not in left_out}
        print_json({**shown, "summary": str(outcome.summary_path), "report": str(outcome.report_path)})
    else:
        if plan.engine == "simulated":
            out.print("SIMULATED: what follows was computed from step times, and measured on no cluster.", style="bold")
        for part in tables(outcome.summary):
            out.print(part)
        if against is not None:
            out.print(_against_table(outcome.summary["against"]["points"]))
        out.print(f"report: {outcome.report_path}   all files: {folder}/", soft_wrap=True)
    failed = [record for record in outcome.records if record.error is not None]
    if failed:
        err.print(
            f"{len(failed)} of {len(outcome.records)} requests failed, the first with: {failed[0].error}", style="red"
        )
    if status:
        _say_how_to_go_on(folder)
    return outcome, status or (1 if failed else 0)


def _note_environment(journal: Journal, plan: Plan, present: dict[str, Any]) -> None:
    """Of points that are still to be run, where they run elsewhere than those that are done."""
    known = [journal.config.get("environment"), *journal.config.get("resumed_in", ())]
    if present not in known and any(point.name not in journal.names for point in plan.schedule()):
        journal.note(resumed_in=[*known[1:], present])


def _say_how_to_go_on(folder: Path) -> None:
    err.print(f"interrupted; the same command with --out {folder} goes on", style="yellow", soft_wrap=True)


def _against_table(points: list[dict[str, Any]]) -> NumberTable:
    """Simulated and real figures side by side."""
    table = NumberTable("Simulated against real, in ms")
    for name in ("rate /s", "setting"):
        table.add_column(name, is_key=True, is_right=name != "setting")
    names = list(dict.fromkeys(name for point in points for name in point["figures"]))
    for name in names:
        table.add_column(name.removesuffix("_ms").replace("_", " ").upper())
    for point in points:
        setting = Setting(point["placement"], point["chunk_tokens"], point["engine"])
        cells = [_against_text(point["figures"].get(name)) for name in names]
        table.add_row(number(point["rate"], 4), str(setting), *cells)
    table.caption = "simulated, real, difference; !: beyond 10 % and beyond the real runs' own 95 % interval"
    return table


def _against_text(figure: dict[str, Any] | None) -> str:
    if figure is None:
        return "-"
    off = f"{figure['error']:+,.0%}{'' if figure['within'] else ' !'}"
    return f"{figure['simulated']:,.0f} {figure['real']:,.0f} {off}"


def read_against(folder: Path) -> tuple[ClusterConfig, Plan, Result]:
    """The plan of a real run, to be simulated, on clusters as it had them. Raises ConfigError if `folder` has none."""
    result = read_result(folder)
    try:
        found = msgspec.convert(result.config, _Recorded)
        slo = msgspec.convert(result.summary, _Judged).slo
    except msgspec.ValidationError as e:
        raise ConfigError("--against", f"holds a damaged result: {e}", value=str(folder)) from e
    plan, tree = found.plan, found.cluster
    if plan.engine != "real":
        raise ConfigError("--against", "is a simulated run itself; name the folder of a real one", value=str(folder))
    blocks = min(found.hardware.kv_blocks.values(), default=0)
    if blocks < 1:
        raise ConfigError("--against", "holds a damaged result: its workers have no KV blocks", value=str(folder))
    tree.pop("security", None)  # its secret is not in the result, and a simulation has no sockets
    tree["http"].pop("api_keys", None)
    for pool in tree["pools"].values():
        pool |= {"kv_blocks": blocks, "kv_memory_mib": None, "memory_mib": None}
    plan = msgspec.structs.replace(plan, slo_ttft_ms=slo.ttft_ms, slo_tbt_ms=slo.tbt_ms)
    return parse_config(tree), plan, result


class _Hardware(msgspec.Struct):
    kv_blocks: dict[str, int]


class _Cluster(msgspec.Struct):
    """Whatever else there is is kept: `parse_config` says what is wrong with it."""

    http: dict[str, Any]
    pools: dict[str, dict[str, Any]]


class _Recorded(msgspec.Struct):
    """What of a result's `config.json` a simulation of it is made from."""

    plan: Plan
    cluster: dict[str, Any]
    hardware: _Hardware
    max_model_len: int

    def __post_init__(self) -> None:
        msgspec.convert(self.cluster, _Cluster)


class _Judged(msgspec.Struct):
    """The same of its `summary.json`."""

    slo: Slo


def default_chunks(config: ClusterConfig) -> tuple[int, ...]:
    """Chunk sizes that colocated placements are tried with where none is named: as configured, and a quarter of it."""
    chunk = config.engine.max_batch_tokens
    return (max(1, chunk // 4), chunk) if chunk >= 64 else (chunk,)


def _real_engine(
    config: ClusterConfig, bar: _Bar, running: Mapping[Any, Running], session: RaySession | None
) -> RealEngine:
    path = resolve_model(config.model.source, progress=bar.say)
    model = load_spec(path, config.engine.model_impl, config.model.max_model_len)
    return RealEngine(config, model, model_bytes=_weight_bytes(path, model), clusters=running, session=session)


def _weight_bytes(path: Path, model: CausalLMSpec) -> int:
    """In memory, at most: in float32."""
    widened = 1 if model.stored_dtype == "float32" else 2
    return widened * sum(file.stat().st_size for file in path.glob("*.safetensors"))


class _Bar(Watch):
    """A progress bar with the time that is left; plain lines where there is no terminal."""

    def __init__(self, plan: Plan):
        self._plan = plan
        self._num_points = len(plan.schedule())
        self._num_played = plan.num_requests + 2 * plan.num_ramp
        self._num_done = self._num_ended = 0
        total = len(plan.settings) * sum(
            planned_s(plan, Point(plan.settings[0], rate, seed)) for rate in plan.rates for seed in plan.seeds
        )
        self._estimate = Estimate(total, at_planned_speed=plan.engine == "real")
        self._progress = _Timed(
            self._estimate,
            TextColumn("{task.description}", markup=False),
            TextColumn("{task.fields[ended]}"),
            BarColumn(),
            TextColumn("{task.fields[left]}"),
            TimeElapsedColumn(),
            console=err,
            transient=True,
        )
        self._task = self._progress.add_task("starting", total=self._estimate.planned_s, left="", ended="")

    def __enter__(self) -> _Bar:
        points = f"{self._num_points} points of {self._plan.num_requests} requests"
        left = self._estimate.left(time.monotonic())
        settings = ", ".join(map(str, self._plan.settings))
        err.print(f"{settings}: {points}" + (f", {_span(left)} and the start" if left else ""), soft_wrap=True)
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        self._progress.update(self._task, description=text, ended="")
        if not err.is_terminal:
            err.print(text, markup=False, soft_wrap=True)

    def skip(self, point: Point, planned_s: float, took_s: float) -> None:
        self._num_done += 1
        self._estimate.end(planned_s, took_s)

    def begin(self, point: Point, planned_s: float) -> None:
        self._estimate.begin(planned_s, time.monotonic())
        self._num_ended = 0
        self.say(f"{self._num_done + 1}/{self._num_points}  {point}")

    def on_record(self, record: RequestRecord) -> None:
        self._num_ended += 1
        self._progress.update(self._task, ended=f"{self._num_ended}/{self._num_played}")

    def end(self, point: Point, planned_s: float, took_s: float) -> None:
        self._num_done += 1
        self._estimate.end(planned_s, took_s)


class _Timed(Progress):
    """Shows where an estimate is each time it is drawn."""

    def __init__(self, estimate: Estimate, *columns: Any, **options: Any):
        self._estimate = estimate
        super().__init__(*columns, **options)

    def get_renderable(self) -> RenderableType:
        now = time.monotonic()
        left = self._estimate.left(now)
        for task in self.tasks:
            self.update(task.id, completed=self._estimate.done(now), left=f"{_span(left)} left" if left else "")
        return super().get_renderable()


def _span(seconds: float) -> str:
    return f"about {seconds / 60:.0f} min" if seconds >= 90 else f"about {max(1, round(seconds)):d} s"

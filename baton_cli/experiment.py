"""`baton experiment`: progress, table and files around `baton_experiments`."""

from __future__ import annotations

from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from baton.config import ClusterConfig
from baton.engine.model_spec import CausalLMSpec, load_spec
from baton.engine.weights import resolve_model
from baton.errors import ConfigError
from baton_cli.output import err, out, print_json
from baton_cluster.ray_session import RaySession
from baton_experiments.experiment import HasAddress, Plan, RequestRecord, require_equal_resources, resolved, run
from baton_experiments.report import comparisons, summarize, table, write_results
from baton_experiments.workloads import Lengths


def _require_fitting(plan: Plan, config: ClusterConfig, model: CausalLMSpec) -> None:
    """Before anything starts: the longest request must fit into the model."""
    longest = plan.lengths.prompt[1] + plan.lengths.output[1]
    limit = min(config.model.max_model_len or model.max_position_embeddings, model.max_position_embeddings)
    if longest > limit:
        options = "--prompt-tokens, --output-tokens"
        raise ConfigError(options, "are too long for the model together", value=longest, allowed=f"<= {limit}")


def run_experiment(
    config: ClusterConfig,
    *,
    placements: tuple[str, ...],
    rates: tuple[float, ...],
    seeds: tuple[int, ...],
    num_requests: int,
    prompt_tokens: tuple[int, int],
    output_tokens: tuple[int, int],
    folder: Path,
    as_json: bool = False,
    clusters: dict[str, HasAddress] | None = None,
    session: RaySession | None = None,
) -> list[RequestRecord]:
    """Run, show and write an experiment. Ctrl-C ends it early and keeps the records that are done."""
    plan = Plan(placements, rates, seeds, num_requests, Lengths(prompt_tokens, output_tokens))
    require_equal_resources(placements)
    if not all(rate > 0 for rate in rates):
        raise ConfigError("--rate", "must be positive", value=list(rates), allowed="> 0")
    records: list[RequestRecord] = []
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=err,
        transient=True,
    ) as bar:
        task = bar.add_task("starting", total=len(plan.points()) * num_requests)

        def keep(record: RequestRecord) -> None:
            records.append(record)
            bar.advance(task)

        def show(text: str) -> None:
            bar.update(task, description=text)
            if not err.is_terminal:
                err.print(text, markup=False)

        try:
            path = resolve_model(config.model.source, progress=show)
            model = load_spec(path, config.engine.model_impl, config.model.max_model_len)
            _require_fitting(plan, config, model)
            run(
                config,
                plan,
                vocab_size=model.vocab_size,
                progress=show,
                on_record=keep,
                clusters=clusters,
                session=session,
            )
        except KeyboardInterrupt:
            if not records:
                raise
            err.print("interrupted: the results below are of the requests that were done", style="yellow")
    summary = write_results(folder, records, resolved(config, plan))
    points = summarize(records)
    if as_json:
        print_json({"points": points, "summary": str(summary)})
    else:
        out.print(table(points))
        for line in comparisons(points):
            out.print(line)
        out.print(f"records, summary and plot: {folder}/")
    failed = [r for r in records if r.error is not None]
    if failed:
        err.print(f"{len(failed)} of {len(records)} requests failed, the first with: {failed[0].error}", style="red")
    return records

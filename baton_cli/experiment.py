"""`baton experiment`: progress, table and files around `baton_experiments`."""

from __future__ import annotations

from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from baton.config import ClusterConfig
from baton.engine.model_spec import load_model_config
from baton.engine.weights import resolve_model
from baton_cli.output import err, out, print_json
from baton_cluster.ray_session import RaySession
from baton_experiments.experiment import HasAddress, Plan, RequestRecord, require_equal_resources, resolved, run
from baton_experiments.report import summarize, table, write_results
from baton_experiments.workload import Lengths


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

        try:
            model = resolve_model(config.model.source, progress=show)
            run(
                config,
                plan,
                vocab_size=load_model_config(model).vocab_size,
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
        out.print(f"records, summary and plot: {folder}/")
    failed = [r for r in records if r.error is not None]
    if failed:
        err.print(f"{len(failed)} of {len(records)} requests failed, the first with: {failed[0].error}", style="red")
    return records

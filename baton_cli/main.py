"""The `baton` command. Thin: reads options, calls the packages below, prints."""

from __future__ import annotations

import signal
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from baton.config import ClusterConfig, Secret, dump_config, environment_secret, load_config, parse_yaml
from baton.errors import ConfigError, InvalidRequestError
from baton.sampling_params import StructuredOutput
from baton_cli.guard import guarded, interrupt
from baton_cli.output import completion_data, logprobs_table, out, print_json, status_data, status_table, timeline_table

if TYPE_CHECKING:
    from router.client import RouterClient

app = typer.Typer(
    name="baton",
    help="Serve language models with prefill and decode on separate workers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

DEFAULT_CONFIG = Path("cluster.yaml")

ConfigPath = Annotated[
    Path | None,
    typer.Argument(
        help="Cluster description; default: cluster.yaml if it is here, else all defaults.", show_default=False
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key, such as --set engine.block_size=32. Repeatable."),
]
ClusterName = Annotated[
    str | None, typer.Option("--cluster", "-c", help="Name of the cluster; default: the only one that is up.")
]
Address = Annotated[
    str | None, typer.Option(help="The router's address (tcp://host:port) instead of a cluster's name.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]


def read_config(path: Path | None, overrides: list[str] | None) -> ClusterConfig:
    """The configuration a command runs with. Raises ConfigError."""
    if path is None and DEFAULT_CONFIG.exists():
        path = DEFAULT_CONFIG
    values: dict[str, Any] = {}
    for item in overrides or []:
        key, separator, text = item.partition("=")
        if not separator or not key:
            raise ConfigError("--set", "is not KEY=VALUE", value=item, allowed="such as engine.block_size=32")
        values[key] = parse_yaml(text, f"--set {key}")
    return load_config(path, values)


@app.command(epilog="Example: baton up cluster.yaml --set pools.decode.workers=2")
def up(
    config_path: ConfigPath = None,
    overrides: Overrides = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return once it is ready; it runs on.")] = False,
    show_config: Annotated[
        bool, typer.Option("--show-config", help="Print the resolved configuration and exit.")
    ] = False,
) -> None:
    """Start a cluster and keep it up until Ctrl-C or `baton down`."""
    config = read_config(config_path, overrides)
    if show_config:
        print(yaml.safe_dump(dump_config(config), sort_keys=False), end="")
        return
    from baton_cli.up import run_detached, run_up

    signal.signal(signal.SIGTERM, interrupt)
    if detach:
        run_detached(config)
    else:
        run_up(config)


@app.command(epilog="Example: baton down baton")
def down(
    name: Annotated[str | None, typer.Argument(help="Name of the cluster; default: the only one that is up.")] = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", help="Seconds, beyond router.shutdown_grace_s, before its process is killed.")
    ] = 30.0,
) -> None:
    """End a cluster that `baton up` started, and nothing else."""
    from baton_cluster.record import end_owner, find_record

    record = find_record(name)
    end_owner(record, timeout_s)
    out.print(f"{record.name} has ended")


@app.command(epilog="Example: baton status --json")
def status(cluster: ClusterName = None, address: Address = None, as_json: AsJson = False) -> None:
    """Show a cluster's workers, where they are pinned, and how full they are."""
    with _client(cluster, address) as client:
        where, answer = client.address, client.status()
    if as_json:
        print_json(status_data(answer, where))
    else:
        out.print(status_table(answer, where))


@app.command(epilog="Example: baton explain 0730374a")
def explain(
    request_id: Annotated[str, typer.Argument(help="The request's id, or the start of it.")],
    cluster: ClusterName = None,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Show where a request went, open or ended, why it was placed so, and where its time goes."""
    from baton_cli.output import record_tables
    from router.records import record_dict

    with _client(cluster, address) as client:
        record = client.explain(request_id)
    if as_json:
        print_json(record_dict(record))
    else:
        for table in record_tables(record):
            out.print(table)


@app.command(epilog="Example: baton top --once")
def top(
    once: Annotated[bool, typer.Option("--once", help="Show it a single time.")] = False,
    every_s: Annotated[float, typer.Option("--every", min=0.1, help="Seconds between two looks.")] = 1.0,
    cluster: ClusterName = None,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Show pools, queues, KV blocks and latencies, again every second; Ctrl-C ends it."""
    from baton_cli.top import run_top

    with _client(cluster, address) as client:
        run_top(client, once=once, as_json=as_json, every_s=every_s)


@app.command(epilog="Example: baton trace --last 20 --out trace.json")
def trace(
    request_id: Annotated[
        str | None, typer.Argument(help="Only this request: its id, or the start of it.", show_default=False)
    ] = None,
    path: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")] = Path("trace.json"),
    last: Annotated[int, typer.Option(help="So many requests, the last that ended.")] = 100,
    cluster: ClusterName = None,
    address: Address = None,
) -> None:
    """Write where the time of the last requests went, as a trace for https://ui.perfetto.dev."""
    from baton_cli.trace import run_trace

    with _client(cluster, address) as client:
        run_trace(client, request_id, last=last, path=path)


@app.command(epilog="Example: baton doctor --worker decode-0 --block-ids")
def doctor(
    worker: Annotated[str | None, typer.Option(help="Only this worker; default: all.", show_default=False)] = None,
    block_ids: Annotated[bool, typer.Option("--block-ids", help="Also list the blocks, by id.")] = False,
    cluster: ClusterName = None,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Show who holds which KV blocks, why and until when. Exit status 1 if something is wrong."""
    from baton_cli.doctor import run_doctor

    with _client(cluster, address) as client:
        if not run_doctor(client, worker, block_ids=block_ids, as_json=as_json):
            raise typer.Exit(1)


@app.command(epilog="Example: baton drain prefill-0")
def drain(
    worker: Annotated[str, typer.Argument(help="Worker id, as `baton status` shows it.")],
    undo: Annotated[bool, typer.Option("--undo", help="Let it get new requests again.")] = False,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds to wait for its requests to end.")] = 300.0,
    cluster: ClusterName = None,
    address: Address = None,
) -> None:
    """Take a worker out: it gets nothing new, finishes what it has, hands over what it owes."""
    from baton_cli.drain import run_drain

    where, secret = _where(cluster, address)
    run_drain(where, worker, undo=undo, timeout_s=timeout_s, secret=secret)


@app.command(epilog='Example: baton submit "What is the capital of France?" --temperature 0 --json')
def submit(
    text: Annotated[str, typer.Argument(help="The question; - reads it from standard input.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the most probable token.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same tokens, where temperature is above 0.")] = None,
    top_k: Annotated[int, typer.Option(help="Draw only from the k most probable tokens; 0: from all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from the fewest tokens with this probability together.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Draw from tokens at least this share as probable as the best.")] = 0.0,
    min_tokens: Annotated[int, typer.Option(help="Shortest answer, in tokens.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="End the answer before this text. Repeatable.")] = None,
    presence_penalty: Annotated[float, typer.Option(help="Against tokens that the answer has, -2 to 2.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="The same for each time that it has them.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: against tokens of question and answer.")] = 1.0,
    json_schema: Annotated[
        Path | None, typer.Option(help="File with a JSON schema that the answer is to follow.", show_default=False)
    ] = None,
    regex: Annotated[str | None, typer.Option(help="Regular expression that the whole answer is to match.")] = None,
    choice: Annotated[list[str] | None, typer.Option(help="The answer is to be one of these. Repeatable.")] = None,
    logprobs: Annotated[
        int | None, typer.Option(help="Also show each token's log probability, and so many most probable ones.")
    ] = None,
    priority: Annotated[int, typer.Option(help="Lower is served earlier where requests wait.")] = 0,
    n: Annotated[int, typer.Option("--n", "-n", help="So many answers; more than one are shown when all ended.")] = 1,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text, without the chat template.")] = False,
    timeline: Annotated[bool, typer.Option("--timeline", help="Also show where the time went.")] = False,
    cluster: ClusterName = None,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Ask a running cluster; the answer streams."""
    if text == "-":
        text = sys.stdin.read()
    prompt: Any = text if raw else [{"role": "user", "content": text}]
    form = _form(json_schema, regex, choice)
    with _client(cluster, address) as client:
        stream = client.stream(
            prompt,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            min_tokens=min_tokens,
            stop=stop or (),
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            repetition_penalty=repetition_penalty,
            structured=form,
            logprobs=logprobs,
            priority=priority,
            n=n,
        )
        with stream:
            for delta in stream:
                if not as_json and n == 1:
                    out.out(delta.text, end="")
            done = stream.result()
    if as_json:
        print_json(completion_data(done))
        return
    if n == 1:
        out.out("")
    else:
        for answer in done.choices:
            out.print(f"[{answer.index}] {answer.finish_reason}", style="bold", markup=False)
            out.out(answer.text)
    for answer in done.choices if logprobs is not None else ():
        out.print(logprobs_table(answer))
    if timeline:
        out.print(timeline_table(done))


@app.command(epilog="Example: baton demo --json results/demo.json")
def demo(
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write what was measured to this file.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Leave the comparison of placements out.")] = False,
) -> None:
    """One prefill and one decode worker on Ray answer real questions, checked against Hugging Face and timed."""
    from baton_cli.demo import run_demo

    signal.signal(signal.SIGTERM, interrupt)
    raise typer.Exit(run_demo(json_path, compare=not quick))


@app.command(epilog="Example: baton experiment --placement colocated:2 --placement split:1+1 --rate 0.5 --rate 1")
def experiment(
    config_path: ConfigPath = None,
    placement: Annotated[
        list[str] | None, typer.Option(help="colocated:N or split:P+D, of equal size. Default: colocated:2, split:1+1.")
    ] = None,
    rate: Annotated[list[float] | None, typer.Option(help="Requests per second. Default: 0.5, 1, 2.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests per placement, rate and seed.")] = 20,
    seed: Annotated[list[int] | None, typer.Option(help="Seeds of the workload. Default: 0.")] = None,
    prompt_tokens: Annotated[str, typer.Option(metavar="LOW-HIGH", help="Prompt lengths.")] = "32-96",
    output_tokens: Annotated[str, typer.Option(metavar="LOW-HIGH", help="Output lengths.")] = "8-24",
    folder: Annotated[
        Path | None, typer.Option("--out", help="Folder for records, summary and plot. Default: a new one in results/.")
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Compare placements on the real cluster: same engine, same work, equal resources."""
    from baton_cli.experiment import run_experiment

    signal.signal(signal.SIGTERM, interrupt)
    records = run_experiment(
        read_config(config_path, overrides),
        placements=tuple(placement or ("colocated:2", "split:1+1")),
        rates=tuple(rate or (0.5, 1.0, 2.0)),
        seeds=tuple(seed or (0,)),
        num_requests=requests,
        prompt_tokens=_span(prompt_tokens, "--prompt-tokens"),
        output_tokens=_span(output_tokens, "--output-tokens"),
        folder=folder or Path(f"results/experiment-{datetime.now():%Y%m%d-%H%M%S}"),
        as_json=as_json,
    )
    if any(record.error is not None for record in records):
        raise typer.Exit(1)


def _form(json_schema: Path | None, regex: str | None, choice: list[str] | None) -> StructuredOutput | None:
    given = {"--json-schema": json_schema, "--regex": regex, "--choice": choice or None}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise InvalidRequestError(f"an answer has one form; {' and '.join(names)} name {len(names)}")
    if json_schema is not None:
        try:
            return StructuredOutput.json(json_schema.read_text(encoding="utf-8"))
        except (OSError, UnicodeError) as e:
            raise InvalidRequestError(f"--json-schema {json_schema} cannot be read: {e}") from e
    if regex is not None:
        return StructuredOutput.regex(regex)
    return StructuredOutput.choice(choice) if choice else None


def _span(text: str, option: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    try:
        span = int(low), int(high or low)
    except ValueError:
        span = (0, 0)
    if not 1 <= span[0] <= span[1]:
        raise ConfigError(option, "is not a span of lengths", value=text, allowed="LOW-HIGH with 1 <= LOW <= HIGH")
    return span


def _where(cluster: str | None, address: str | None) -> tuple[str, Secret | None]:
    """A router's address and its cluster's secret: as `baton up` recorded them, or as given, with BATON_SECRET."""
    if address is not None:
        return address, environment_secret()
    from baton_cluster.record import find_record

    record = find_record(cluster)
    return record.address, record.secret


def _client(cluster: str | None, address: str | None) -> RouterClient:
    from router.client import RouterClient

    where, secret = _where(cluster, address)
    return RouterClient(where, secret=secret)


def main() -> None:
    """Entry point."""
    guarded(app)


if __name__ == "__main__":
    main()

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
WorkloadName = Annotated[
    str | None,
    typer.Option(
        "--workload", metavar="NAME|FILE", help="chat, code, summarize, reasoning (chat/8: an eighth), or a trace."
    ),
]
SkipMalformed = Annotated[
    bool, typer.Option("--skip-malformed", help="Leave a trace's malformed rows out, and count them.")
]


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


@app.command(epilog="Example: baton experiment --workload chat/16 --rate 0.5 --rate 1 --seed 0 --seed 1 --seed 2")
def experiment(
    config_path: ConfigPath = None,
    placement: Annotated[
        list[str] | None,
        typer.Option(help="colocated:N, split:P+D or mixed:P+D+B, of equal size. Default: colocated:2, split:1+1."),
    ] = None,
    allow_unequal: Annotated[
        bool, typer.Option("--allow-unequal", help="Compare placements of different size, flagged as such.")
    ] = False,
    chunk: Annotated[
        list[int] | None,
        typer.Option(help="engine.max_batch_tokens to run each placement with; the report takes each one's best."),
    ] = None,
    colocated_chunk: Annotated[
        list[int] | None,
        typer.Option(help="The same for colocated ones alone. Default: as configured and a quarter of it."),
    ] = None,
    rate: Annotated[list[float] | None, typer.Option(help="Requests per second. Default: 0.5, 1, 2.")] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Measured per placement, rate and seed. Default: 20, simulated 200.")
    ] = None,
    ramp: Annotated[
        float | None,
        typer.Option(help="More requests before and after them, left out of the figures, as a share. Default: 0.1."),
    ] = None,
    seed: Annotated[list[int] | None, typer.Option(help="Seeds of the work; each is a repetition. Default: 0.")] = None,
    workload: WorkloadName = None,
    trace_format: Annotated[
        str | None, typer.Option("--format", help="Of a trace file. Default: told from its header.")
    ] = None,
    skip_malformed: SkipMalformed = False,
    prompt_tokens: Annotated[
        str | None, typer.Option(metavar="LOW-HIGH", help="Prompt lengths, without --workload. Default: 32-96.")
    ] = None,
    output_tokens: Annotated[
        str | None, typer.Option(metavar="LOW-HIGH", help="Output lengths, without --workload. Default: 8-24.")
    ] = None,
    arrivals: Annotated[
        str | None, typer.Option(help="poisson, gamma:CV, constant, or the trace's own times, scaled: trace.")
    ] = None,
    scale_prompt: Annotated[float | None, typer.Option(help="Multiply prompt lengths.")] = None,
    scale_output: Annotated[float | None, typer.Option(help="Multiply output lengths.")] = None,
    max_total_tokens: Annotated[
        int | None,
        typer.Option(min=2, help="Leave out a trace's requests whose prompt and output together are longer."),
    ] = None,
    slo_ttft: Annotated[
        float | None, typer.Option(help="Milliseconds to the first token. Default: 5 times that of a single request.")
    ] = None,
    slo_tbt: Annotated[
        float | None, typer.Option(help="Milliseconds between tokens. Default: 2.5 times those of a single request.")
    ] = None,
    slo_e2e: Annotated[
        float | None, typer.Option(help="Milliseconds to the last token, for vLLM's definition of goodput only.")
    ] = None,
    engine: Annotated[str | None, typer.Option(help="real or simulated. Default: real.")] = None,
    profile: Annotated[
        list[str] | None, typer.Option(help="Of a simulated engine: step times, from `baton profile` or published.")
    ] = None,
    link_gb_per_s: Annotated[
        float | None, typer.Option(help="Between two simulated workers. Default: the profile's.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(help="Simulate the plan of the real run in this folder, and tell the difference.")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--out", help="Folder of the result; an interrupted one is gone on with. Default: a new one."),
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Compare placements: same engine, same work, equal resources. On real clusters, or simulated."""
    from baton_cli.experiment import Options, run_command

    signal.signal(signal.SIGTERM, interrupt)
    options = Options(
        placements=tuple(placement or ()),
        allow_unequal=allow_unequal,
        chunks=tuple(chunk or ()),
        colocated_chunks=tuple(colocated_chunk or ()),
        rates=tuple(rate or ()),
        requests=requests,
        ramp=ramp,
        seeds=tuple(seed or ()),
        workload=workload,
        format=trace_format,
        skip_malformed=skip_malformed,
        prompt_tokens=None if prompt_tokens is None else _span(prompt_tokens, "--prompt-tokens"),
        output_tokens=None if output_tokens is None else _span(output_tokens, "--output-tokens"),
        arrivals=arrivals,
        scale_prompt=scale_prompt,
        scale_output=scale_output,
        max_total_tokens=max_total_tokens,
        slo_ttft=slo_ttft,
        slo_tbt=slo_tbt,
        slo_e2e=slo_e2e,
        engine=engine,
        profiles=tuple(profile or ()),
        link_gb_per_s=link_gb_per_s,
        against=against,
        config=config_path,
        overrides=tuple(overrides or ()),
    )
    folder = folder or Path(f"results/experiment-{datetime.now():%Y%m%d-%H%M%S}")
    raise typer.Exit(run_command(options, read_config, folder=folder, as_json=as_json))


@app.command(epilog="Example: baton profile cluster.yaml --workers 2 --out results/profile.json")
def profile(
    config_path: ConfigPath = None,
    from_folder: Annotated[
        Path | None, typer.Option("--from", help="Fit the steps of this result of `baton experiment` instead.")
    ] = None,
    pool: Annotated[str | None, typer.Option(help="Whose workers. Default: the first pool's.")] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Engines that run at once: they share memory. Default: the cluster's workers."),
    ] = None,
    seconds: Annotated[float, typer.Option(min=1, help="How long to measure steps.")] = 120.0,
    max_context: Annotated[int, typer.Option(min=16, help="Longest sequence to measure.")] = 2048,
    cluster: Annotated[
        bool, typer.Option("--cluster/--no-cluster", help="Measure hand-over and messages too, on a small cluster.")
    ] = True,
    spread: Annotated[
        bool, typer.Option("--spread", help="Keep how far steps of one shape differ: simulated steps differ so too.")
    ] = False,
    cpu_time: Annotated[
        bool, typer.Option("--cpu-time", help="Count the CPU time of steps, where other work runs on the machine.")
    ] = False,
    path: Annotated[Path, typer.Option("--out", help="The profile's file.")] = Path("results/profile.json"),
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Measure what this machine's engine takes for its steps: what simulated experiments are made of."""
    from baton_cli.profile import run_profile, run_profile_from

    signal.signal(signal.SIGTERM, interrupt)
    if from_folder is not None:
        run_profile_from(from_folder, pool=pool, spread=spread, path=path, as_json=as_json)
        return
    run_profile(
        read_config(config_path, overrides),
        pool=pool,
        workers=workers,
        seconds=seconds,
        max_context=max_context,
        cluster=cluster,
        spread=spread,
        cpu_time=cpu_time,
        path=path,
        as_json=as_json,
    )


@app.command(epilog="Example: baton anatomy llama-3.1-8b --gpu H100 --workload chat")
def anatomy(
    model: Annotated[
        str,
        typer.Argument(help="A known model (llama-3.1-8b, opt-13b, ...), demo, a folder, a config.json, or a hub id."),
    ],
    gpu: Annotated[str | None, typer.Option(help="A device by name, such as A100, H100, H200, L4, MI300X.")] = None,
    gpus: Annotated[int, typer.Option(min=1, max=100_000, help="So many of them share the weights.")] = 1,
    peak_tflops: Annotated[float | None, typer.Option(help="Of a device that has no name here.")] = None,
    bandwidth: Annotated[float | None, typer.Option(help="GB/s of its memory.")] = None,
    memory: Annotated[float | None, typer.Option(help="GiB of its memory.")] = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens of each sequence of a decode batch.")] = 1024,
    dtype: Annotated[str | None, typer.Option(help="Of the weights. Default: the model's own.")] = None,
    kv_dtype: Annotated[str | None, typer.Option(help="Of the KV cache. Default: that of the weights.")] = None,
    workload: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="Lengths for KV memory: chat, code, ..., pagedattention, or a trace."),
    ] = None,
    slots: Annotated[int | None, typer.Option(min=16, help="Token slots of KV memory. Default: what fits.")] = None,
    max_len: Annotated[
        int | None, typer.Option(min=2, help="Longest request served. Default: the model's limit.")
    ] = None,
    measured: Annotated[
        bool, typer.Option("--measure", help="Ask this machine's engine too; the model must be one it can run.")
    ] = False,
    folder: Annotated[Path | None, typer.Option("--out", help="Folder for anatomy.json and plots.")] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """The arithmetic of a request: KV bytes, weights, what fits, and what limits prefill and decode."""
    from baton_cli.anatomy import chosen_device, chosen_lengths, run_anatomy
    from baton_experiments.anatomy.report import Question

    lengths, name = chosen_lengths(workload) if workload is not None else ((), "")
    question = Question(
        device=chosen_device(gpu, peak_tflops, bandwidth, memory),
        gpus=gpus,
        context=context,
        weight_dtype=dtype,
        kv_dtype=kv_dtype,
        lengths=lengths,
        lengths_name=name,
        slots=slots,
        max_len=max_len,
    )
    config = read_config(None, [*(overrides or []), f"model.source={model}"]) if measured else None
    run_anatomy(model, question, measured=config, folder=folder, as_json=as_json)


@app.command(
    epilog="Example: baton plan --gpus 16 --profile profiler-a100-80g.distserve.json --model opt-13b --workload chat "
    "--emit plan.yaml"
)
def plan(
    config_path: Annotated[
        Path | None,
        typer.Argument(help="Cluster description whose engine, transfer and router settings hold.", show_default=False),
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, help="The budget: no placement takes more.")] = 8,
    profile: Annotated[
        str,
        typer.Option(
            metavar="PATH[,KEY=VALUE...]",
            help="What steps take, from `baton profile` or published: a file or folder. Keys: model, hardware, engine, "
            "tp, gpu_memory_gib, conventions (distserve, splitwise: what its authors' simulator does besides).",
            show_default=False,
        ),
    ] = "",
    model: Annotated[str | None, typer.Option(help="Of a profile that has several: its name or a part of it.")] = None,
    hardware: Annotated[
        str | None, typer.Option(help="The same of the hardware; DistServe's files tell it by their name.")
    ] = None,
    tp: Annotated[
        list[int] | None, typer.Option(help="Tensor parallel degrees to try. Repeatable. Default: the profile's.")
    ] = None,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="No worker is larger.")] = 8,
    kv_tokens_per_gpu: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="That the KV cache holds. Default: what the profile says, else what the weights leave of the memory.",
        ),
    ] = None,
    link_gb_per_s: Annotated[
        float | None, typer.Option(help="Between workers. Default: the profile's, else 25.")
    ] = None,
    workload: WorkloadName = None,
    trace_format: Annotated[
        str | None, typer.Option("--format", help="Of the trace or log. Default: told from the file.")
    ] = None,
    skip_malformed: SkipMalformed = False,
    prompt_tokens: Annotated[
        str | None, typer.Option(metavar="LOW-HIGH", help="Prompt lengths, without --workload.")
    ] = None,
    output_tokens: Annotated[
        str | None, typer.Option(metavar="LOW-HIGH", help="Output lengths, without --workload.")
    ] = None,
    arrivals: Annotated[
        str | None, typer.Option(help="poisson (default), gamma:CV, constant, or the trace's own times, scaled: trace.")
    ] = None,
    scale_prompt: Annotated[float, typer.Option(help="Multiply prompt lengths.")] = 1.0,
    scale_output: Annotated[float, typer.Option(help="Multiply output lengths.")] = 1.0,
    max_total_tokens: Annotated[
        int | None,
        typer.Option(min=2, help="Leave out a trace's requests whose prompt and output together are longer."),
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(min=2, help="Cut longer requests.")] = None,
    slo_ttft: Annotated[float, typer.Option(help="Milliseconds to the first token.")] = 250.0,
    slo_tbt: Annotated[float, typer.Option(help="Milliseconds between tokens.")] = 100.0,
    attainment: Annotated[float, typer.Option(help="Share of the requests that must keep both.")] = 0.9,
    definition: Annotated[
        str, typer.Option(help="distserve: TTFT and the mean gap; per_token: each token by TTFT + i * TBT.")
    ] = "distserve",
    requests: Annotated[int, typer.Option(min=1, help="Judged at each rate.")] = 2000,
    seed: Annotated[int, typer.Option(min=0, help="Of the work.")] = 0,
    chunk_tokens: Annotated[
        list[int] | None,
        typer.Option(
            help="engine.max_batch_tokens to choose from. Repeatable. Default: as configured; on GPUs 512, 2048."
        ),
    ] = None,
    candidate: Annotated[
        list[str] | None, typer.Option(help="Only these: colocated:4, split:3+1, split:2xtp4+4xtp2. Repeatable.")
    ] = None,
    objective: Annotated[str, typer.Option(help="per-gpu: the highest goodput a GPU; total: of all.")] = "per-gpu",
    confirm: Annotated[int, typer.Option(min=1, help="Most estimates to confirm by simulating the whole.")] = 6,
    replay: Annotated[
        Path | None, typer.Option(help="What attainment a recorded log had had: a trace, router log or records.csv.")
    ] = None,
    where: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN=VALUE", help="Only these rows of the log. Repeatable.")
    ] = None,
    first: Annotated[int | None, typer.Option(min=1, help="Only so many requests of the log.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes to simulate in.")] = 1,
    emit: Annotated[
        Path | None, typer.Option(help="Write the winner as a cluster file, such as plan.yaml, for `baton up`.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Let --emit overwrite a file that is not from here.")] = False,
    folder: Annotated[Path | None, typer.Option("--out", help="Folder of the result. Default: a new one.")] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Search prefill and decode counts, tensor parallelism and colocated placements for the highest goodput per GPU."""
    from baton_cli.plan import Options, run_plan

    signal.signal(signal.SIGTERM, interrupt)
    if not profile:
        raise ConfigError("--profile", "is needed: what steps take on the GPUs to plan for")
    if objective not in ("per-gpu", "total"):
        raise ConfigError("--objective", "is unknown", value=objective, allowed="per-gpu, total")
    options = Options(
        profile=profile,
        gpus=gpus,
        model=model,
        hardware=hardware,
        tps=tuple(tp or ()),
        gpus_per_node=gpus_per_node,
        kv_tokens_per_gpu=kv_tokens_per_gpu,
        link_gb_per_s=link_gb_per_s,
        workload=workload,
        format=trace_format,
        skip_malformed=skip_malformed,
        prompt_tokens=None if prompt_tokens is None else _span(prompt_tokens, "--prompt-tokens"),
        output_tokens=None if output_tokens is None else _span(output_tokens, "--output-tokens"),
        arrivals=arrivals,
        scale_prompt=scale_prompt,
        scale_output=scale_output,
        max_total_tokens=max_total_tokens,
        max_model_len=max_model_len,
        slo_ttft=slo_ttft,
        slo_tbt=slo_tbt,
        attainment=attainment,
        definition=definition,
        requests=requests,
        seed=seed,
        chunks=tuple(chunk_tokens or ()),
        candidates=tuple(candidate or ()),
        objective="total" if objective == "total" else "per-gpu",
        confirm=confirm,
        replay=replay,
        where=tuple(where or ()),
        first=first,
        jobs=jobs,
        config=config_path,
        overrides=tuple(overrides or ()),
    )
    folder = folder or Path(f"results/plan-{datetime.now():%Y%m%d-%H%M%S}")
    raise typer.Exit(run_plan(options, folder=folder, emit=emit, force=force, as_json=as_json))


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

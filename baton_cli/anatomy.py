"""`baton anatomy`: tables, plots and JSON around `baton_experiments.anatomy`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from rich.progress import BarColumn, Progress, TextColumn

from baton.config import ClusterConfig
from baton.errors import ConfigError
from baton_cli.output import err, out, print_json
from baton_experiments.anatomy import published
from baton_experiments.anatomy.devices import Device, device
from baton_experiments.anatomy.models import read_shape
from baton_experiments.anatomy.report import Question, anatomy, growth_text
from baton_experiments.number_table import NumberTable
from baton_experiments.words import counted, number

REQUESTS = 3000
"""Of a distribution, for the useful share of KV memory."""
PAPER = "pagedattention"
LEAST, MOST = 1e-6, 1e9
"""Of what a device is said to have, in the options' units."""
ALLOCATIONS = {
    "max": "reserve the model's limit",
    "pow2": "prompt and a power of two",
    "oracle": "oracle: the true length",
    "max_first_fit": "the limit, no buddies",
    "pow2_first_fit": "power of two, no buddies",
    "oracle_first_fit": "oracle, no buddies",
    "paged": "paged: blocks of 16",
}


def chosen_device(
    gpu: str | None, tflops: float | None, gb_per_s: float | None, memory_gib: float | None
) -> Device | None:
    """From the options; None where none was given. Raises ConfigError where they do not make one."""
    options = {"--peak-tflops": tflops, "--bandwidth": gb_per_s, "--memory": memory_gib}
    for option, value in options.items():
        if value is not None and not LEAST <= value <= MOST:  # so is what is no number
            raise ConfigError(option, "is nothing that a device has", value=value, allowed=f"{LEAST:f} to {MOST:,.0f}")
    if gpu is None and all(value is None for value in options.values()):
        return None
    if gpu is not None:
        found = device(gpu)
        changes = {"tflops": tflops, "gb_per_s": gb_per_s, "memory_gib": memory_gib}
        return msgspec.structs.replace(found, **{name: value for name, value in changes.items() if value is not None})
    if tflops is None or gb_per_s is None:
        missing = "--peak-tflops" if tflops is None else "--bandwidth"
        raise ConfigError(missing, "is needed too, or --gpu", allowed="peaks of one device")
    return Device("given", tflops, gb_per_s, memory_gib, "options of this command")


def chosen_lengths(workload: str) -> tuple[tuple[tuple[int, int], ...], str]:
    """Prompts and answers of a workload, and its name in words: `pagedattention`, a preset, or a trace file."""
    from baton_experiments.workloads import preset, read_trace

    if workload == PAPER:
        return published.sharegpt_lengths(REQUESTS), published.NAME
    if Path(workload).suffix:
        shapes = islice(iter(read_trace(workload)), REQUESTS)
        return tuple((s.prompt_tokens, s.output_tokens) for s in shapes), Path(workload).name
    found, draw = preset(workload), Random("anatomy")
    lengths = found.lengths
    pairs = ((lengths.prompt.at(draw.random()), lengths.output.at(draw.random())) for _ in range(REQUESTS))
    return tuple(pairs), found.name


def run_anatomy(
    model: str,
    question: Question,
    *,
    measured: ClusterConfig | None,
    folder: Path | None,
    as_json: bool = False,
) -> dict[str, Any]:
    """Compute, measure where `measured` says on what, print, and write to `folder`. Raises ModelError, ConfigError."""
    if question.lengths and question.slots is None and (question.device is None or question.device.memory_gib is None):
        raise ConfigError(
            "--workload",
            "needs to know how much KV memory there is",
            allowed="--gpu, or --memory beside the peaks, or --slots",
        )
    shape = read_shape(model)
    data = anatomy(shape, question)
    data["measured"] = None
    if measured is not None:
        from baton_experiments.anatomy.measured import measure

        with Progress(TextColumn("{task.description}"), BarColumn(), console=err, transient=True) as bar:
            task = bar.add_task("starting", total=1.0)

            def progress(text: str, share: float) -> None:
                bar.update(task, description=text, completed=share)
                if not err.is_terminal:
                    err.print(text, markup=False)

            data["measured"] = measure(measured, shape, context=question.context, progress=progress)
    files = _write(data, folder) if folder is not None else []
    if as_json:
        print_json(data)
        return data
    for table in tables(data):
        out.print(table)
    if files:
        out.print(f"written: {', '.join(map(str, files))}", markup=False)
    return data


def _write(data: dict[str, Any], folder: Path) -> list[Path]:
    import json

    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "anatomy.json"
        path.write_text(json.dumps(data, indent=1), encoding="utf-8")
    except OSError as e:
        raise ConfigError("--out", f"cannot be written: {e.strerror or e}", value=str(folder)) from e
    try:
        from baton_experiments.anatomy.plot import plot_anatomy
    except ImportError:
        return [path]  # plots need the extra `demo`
    return [path, *plot_anatomy(data, folder)]


# --- tables ------------------------------------------------------------------------------------------


def tables(data: dict[str, Any]) -> list[NumberTable]:
    """What there is of the data, for a terminal."""
    found = [_model_table(data)]
    if data["memory"] is not None:
        found.append(_fit_table(data))
    found.append(_steps_table(data))
    if data["kv_memory_use"] is not None:
        found.append(_use_table(data["kv_memory_use"]))
    measured = data["measured"]
    if measured is None:
        found.append(_work_table("an answer token by token", data["work_with_cache"], data["work_without_cache"]))
        return found
    found += [_utilization_table(measured), _share_table(measured["kv_share_of_bytes"])]
    work = "the same, measured: an answer token by token"
    found.append(_work_table(work, measured["work_with_cache"], measured["work_without_cache"]))
    found[-1].caption = growth_text(measured["growth"])
    if measured["kv_useful_share"] is not None:
        found.append(_live_table(measured["kv_useful_share"]))
    return found


def _table(title: str, *columns: str, left: int = 1) -> NumberTable:
    table = NumberTable(title)
    for index, column in enumerate(columns):
        table.add_column(column, is_key=index == 0, is_right=index >= left)
    return table


def _model_table(data: dict[str, Any]) -> NumberTable:
    model, cache, weights = data["model"], data["kv_cache"], data["weights"]
    table = _table(f"{model['name']}, weights in {data['dtype']}, KV cache in {data['kv_dtype']}", "", "", left=2)
    active = weights["active_parameters"]
    rows = [
        ("layers, query heads, key heads", f"{model['layers']}, {model['heads']}, {model['kv_heads']}"),
        ("parameters", f"{weights['parameters']:,}" + (f", {active:,} for a token" if model["experts"] > 1 else "")),
        ("weights", _size(weights["bytes"]) + (f", {weights['quantization']}" if weights["quantization"] else "")),
        ("KV cache of a token", f"{cache['bytes_per_token']:,} B ({_size(cache['bytes_per_token'])})"),
        ("were it multi-head", _size(cache["bytes_per_token_multi_head"])),
        (f"KV block of {cache['block_size']} tokens", _size(cache["bytes_per_block"])),
        *((f"KV cache of {e['tokens']:,} tokens", _size(e["bytes"])) for e in cache["by_context"]),
    ]
    for row in rows:
        table.add_row(*row)
    if model["kv_windows"]:
        windows = ", ".join(f"{layers} to {window:,} tokens" for window, layers in model["kv_windows"])
        table.caption = f"layers that attend to a window only: {windows}; their cache is kept whole here"
    return table


def _fit_table(data: dict[str, Any]) -> NumberTable:
    fit, device_ = data["memory"], data["device"]
    table = _table(
        f"what fits {device_['name']} ({number(device_['memory_gib'], 4)} GiB, {fit['share']:.0%} used)",
        "",
        "",
        left=2,
    )
    table.add_row("weights", _size(fit["weight_bytes"]))
    table.add_row("KV cache", f"{_size(fit['kv_bytes'])}, {fit['kv_tokens']:,} tokens")
    for entry in fit["requests"]:
        table.add_row(f"requests of {entry['tokens']:,} tokens", f"{entry['requests']:,}")
    if not fit["kv_tokens"]:
        table.caption = "the weights alone do not fit; try --gpus"
    return table


def _steps_table(data: dict[str, Any]) -> NumberTable:
    device_ = data["device"]
    columns = ["step", "GFLOP", "GB", "KV of it", "FLOP/B"]
    title = "steps: operations and bytes"
    if device_ is not None:
        columns += ["limit", "floor ms"]
        peaks = f"{number(device_['tflops'], 4)} TFLOP/s, {number(device_['gb_per_s'], 4)} GB/s"
        title += f", on {device_['name']}: {peaks}, ridge at {number(device_['ridge'])} FLOP/B"
    table = _table(title, *columns)
    for name, entries in (("prefill", data["prefill"]), ("decode", data["decode"])):
        for entry in entries:
            what = f"{name} {entry['tokens']:,} tokens" if name == "prefill" else f"decode, batch {entry['batch']}"
            cells = [what, number(entry["operations"] / 1e9, 4), number(entry["bytes"] / 1e9)]
            cells += [f"{entry['kv_share_of_bytes']:.1%}", number(entry["intensity"])]
            if device_ is not None:
                cells += [entry["side"], number(entry["floor_ms"])]
            table.add_row(*cells)
    table.caption = f"each sequence of a decode batch has {data['decode'][0]['context']:,} tokens"
    if device_ is not None:
        first = data["decode_compute_bound_from"]
        table.caption += (
            "; no batch makes its decode compute-bound: the cache grows with it"
            if first is None
            else f"; decode is compute-bound from a batch of {first:,}"
        )
    return table


def _use_table(use: dict[str, Any]) -> NumberTable:
    title = f"KV memory of {use['slots']:,} token slots under {use['lengths']}, always full"
    columns = ["allocation", "tokens", "reserved", "internal", "external", "batch"]
    table = _table(title, *columns, *(["published"] if use["published"] else []))
    for name, usage in use["usage"].items():
        cells = [f"{100 * usage[part]:.1f} %" for part in ("token", "reservation", "internal", "external")]
        cells.append(f"{usage['batch']:,.1f}")
        if use["published"]:
            share = use["published"].get(name)
            cells.append("-" if share is None else f"{100 * share['token']:.1f} %")
        table.add_row(ALLOCATIONS[name], *cells)
    table.caption = (
        f"{counted(use['requests'], 'request')} of {number(use['mean_prompt_tokens'])} tokens in and "
        f"{number(use['mean_output_tokens'])} out on average, at most {use['max_len']:,} each"
        + (f"; {use['left_out']:,} longer left out" if use["left_out"] else "")
        + (f"; they come {use['times']:,} times, to fill it" if use["times"] > 1 else "")
    )
    return table


def _work_table(title: str, with_cache: Sequence[dict[str, Any]], without: Sequence[dict[str, Any]]) -> NumberTable:
    timed = "seconds" in with_cache[0]
    columns = ["new tokens", "computed", "no cache", "GFLOP", "no cache"]
    table = _table(title, *columns, *(("seconds", "no cache") if timed else ()), left=0)
    for one, two in zip(with_cache, without, strict=True):
        cells = [f"{one['generated']:,}", f"{one['tokens']:,}", f"{two['tokens']:,}"]
        cells += [number(one["operations"] / 1e9, 4), number(two["operations"] / 1e9, 4)]
        table.add_row(*cells, *((f"{one['seconds']:,.2f}", f"{two['seconds']:,.2f}") if timed else ()))
    return table


def _utilization_table(measured: dict[str, Any]) -> NumberTable:
    peaks = measured["utilization"]["peaks"]
    title = (
        f"measured: {measured['engine']}, {counted(peaks['threads'], 'thread')}; peaks of the same cores "
        f"{peaks['operations_per_s'] / 1e9:,.1f} GFLOP/s, {peaks['bytes_per_s'] / 1e9:,.1f} GB/s"
    )
    table = _table(title, "step", "ms", "FLOP/B", "of the arithmetic peak", "of the bandwidth")
    for name, entries in (("prefill", "prefill"), ("decode", "decode")):
        for entry in measured["utilization"][entries]:
            what = f"{name} {entry['tokens']} tokens" if name == "prefill" else f"decode, batch {entry['batch']}"
            cells = [what, f"{entry['ms']:,.1f}", f"{entry['intensity']:,.1f}"]
            table.add_row(*cells, f"{entry['of_peak']:.1%}", f"{entry['of_bandwidth']:.1%}")
    return table


def _share_table(shares: Sequence[dict[str, Any]]) -> NumberTable:
    title = f"measured: the KV cache's part of a decode step at {shares[0]['context']} tokens of context"
    table = _table(title, "batch", "KV MB", "weights MB", "of bytes", "of time", left=0)
    for entry in shares:
        cells = [f"{entry['batch']:,}", f"{entry['kv_bytes'] / 1e6:,.1f}", f"{entry['weight_bytes'] / 1e6:,.1f}"]
        table.add_row(*cells, f"{entry['share']:.1%}", f"{entry['share_of_time']:.1%}")
    return table


def _live_table(live: dict[str, Any]) -> NumberTable:
    table = _table("measured: KV blocks of a live run", "", "", left=1)
    share = live["share"]
    table.add_row("share of held slots with a token", "-" if share is None else f"{share:.1%}")
    table.add_row("requests", f"{live['requests']}")
    table.add_row("mean batch", "-" if live["mean_batch"] is None else f"{live['mean_batch']:.1f}")
    table.add_row("steps", f"{live['steps']} ({live['steps_left_out']} left out: somebody did not advance)")
    return table


def _size(num_bytes: float) -> str:
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{number(num_bytes / size, 4)} {unit}"
    return f"{number(num_bytes, 4)} B"

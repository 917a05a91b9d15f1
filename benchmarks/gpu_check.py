"""Everything that needs a GPU, checked and timed on one in under five minutes.

python -m benchmarks.gpu_check --json results/gpu.json

First whether it is right: tiny models against Hugging Face (float32; bfloat16), CUDA graphs against eager steps, a
split cluster with both workers on this GPU. Then how fast: decode steps and prompts of the demo model and of a model
of Llama 3.1 8B's shapes (random weights), bfloat16, by torch's and FlashInfer's attention, eagerly and with graphs.

step      from a packed batch to sampled tokens on the host (argmax); scheduler and sampler are not in it
floor     the larger of bytes / bandwidth and operations / product rate, both measured first in the same run
x         step / floor

Exits 2 where torch sees no GPU, 1 where something is wrong, else 0. Without FlashInfer its columns are left out; its
first use on a machine compiles kernels for minutes unless they are installed (flashinfer-jit-cache): run it twice.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from baton.engine.attention import attention_backend
from baton.engine.attention.flashinfer_backend import unavailable
from baton.engine.cuda_graphs import CudaCapture, GraphedDecoder
from baton.engine.model import DecoderModel, Model
from baton.engine.model_spec import ModelSpec, load_spec
from baton.engine.weights import iter_weights, resolve_model
from baton.errors import BatonError
from baton_experiments.report import environment
from benchmarks.engine import Work
from benchmarks.gpu_parts import (
    CHUNK,
    DTYPE,
    LLAMA_8B,
    decode_batch,
    measure_gpu,
    pool_for,
    prefill_batches,
    random_model,
    step_ms,
)

BATCHES, CONTEXTS, PROMPTS = (1, 8, 32, 128), (128, 1024, 4096), (1024, 8192)
GOLDEN = ("plain", "Qwen3", "Gemma 2", "Gemma 3", "Mistral, window")

console = Console(stderr=True, highlight=False)


@dataclass
class Run:
    """What is found, and when to stop."""

    deadline: float
    checks: dict[str, str] = field(default_factory=dict)
    """`ok`, with what was measured; `skipped: ...`; or `WRONG: ...`."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def check(self, name: str, call: Callable[[], str]) -> None:
        """`call` returns what it found, raises ImportError where a part is missing, anything else where it is wrong."""
        try:
            self.checks[name] = call() if time.monotonic() < self.deadline else "skipped: out of time"
        except ImportError as e:
            self.checks[name] = f"skipped: {e}"
        except Exception as e:  # noqa: BLE001  (the next checks are worth as much)
            traceback.print_exc()
            self.checks[name] = f"WRONG: {type(e).__name__}: {e}"
        console.print(f"{name}: {self.checks[name]}", markup=False)


def golden(kind: str, dtype: str, attention: str, graphs: bool) -> str:
    from tests.golden.test_tiny_models import KINDS
    from tests.golden.tiny_models import Driver, make_tiny_model, prompt_of
    from tests.gpu.parts import HEAD_DIM, TIE, behind, gpu_runner

    with TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder), **(KINDS[kind] | {"head_dim": HEAD_DIM, "initializer_range": 0.1}))
        driver = Driver(gpu_runner(Path(folder), dtype=dtype, attention=attention, graphs=graphs))
        requests = [driver.request(prompt_of(n)) for n in (150, 1, 16, 90)]
        for request in requests:
            driver.prefill(request, chunk=64)
        driver.decode(requests, 16)
        worst = max(behind(model, request.tokens, request.num_prompt) for request in requests)
    limit = TIE if dtype == "float32" else 0.25  # bfloat16 rounds logits around 4 to 1/64, and sums before them
    assert worst <= limit, f"a token is {worst:.2g} behind Hugging Face's most probable one"
    return f"ok: at most {worst:.1e} behind Hugging Face's logits"


def split() -> str:
    from concurrent.futures import ThreadPoolExecutor

    from baton.config import parse_config
    from baton_cluster.local import LocalCluster
    from tests.golden.tiny_models import make_tiny_model, prompt_of, save_tokenizer
    from tests.gpu.parts import TIE, behind

    prompts = [prompt_of(n) for n in (1, 16, 17, 63, 120, 200, 300, 300)]
    found = []
    with TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder))
        save_tokenizer(Path(folder))
        gpu = {"device": "cuda", "kv_memory_mib": 16}
        for pools in ({"both": gpu}, {"prefill": gpu, "decode": gpu}):
            tree = {
                "launcher": "local",
                "model": {"source": folder, "dtype": "float32"},
                "pools": pools,
                "engine": {"max_batch_tokens": 64, "max_batch_requests": 8},
                "transfer": {"transport": "zmq+tcp"},
                "liveness": {"heartbeat_s": 1.0, "timeout_s": 30.0},
            }
            with LocalCluster(parse_config(tree)) as cluster, cluster.client() as client, ThreadPoolExecutor(8) as pool:
                ask = lambda p: client.generate(p, max_tokens=24, ignore_eos=True).token_ids  # noqa: E731
                found.append(list(pool.map(ask, prompts)))
        for answers in found:
            for prompt, answer in zip(prompts, answers, strict=True):
                assert behind(model, [*prompt, *answer], len(prompt)) <= TIE, "not Hugging Face's tokens"
    equal = sum(a == b for a, b in zip(*found, strict=True))
    return f"ok: {equal} of {len(prompts)} answers equal token for token, the others but for ties"


def invariance(model: Model, kv_cache: Any) -> str:
    """How far a row's logits move with what is beside it in the batch."""
    torch.manual_seed(0)
    batch = decode_batch(8, 1024, kv_cache.num_blocks)
    alone = decode_batch(1, 1024, kv_cache.num_blocks)
    if batch is None or alone is None:
        return "skipped: the pool is too small"
    # The first sequence of both has the same blocks.
    one, many = model.forward(alone, kv_cache)[0].clone(), model.forward(batch, kv_cache)[0]
    apart = float((one - many).abs().max())
    return (
        "ok: a row is the same bit for bit alone and among 8"
        if not apart
        else f"ok: a row moves by {apart:.1e} among 8"
    )


def time_model(run: Run, name: str, model: DecoderModel, measured: dict[str, float], flashinfer: str | None) -> None:
    spec = model.spec
    work = Work(spec, DTYPE, measured)
    kv_cache = pool_for(spec, "cuda", max(BATCHES) * max(CONTEXTS))
    kv_cache.tensor.normal_()
    variants = [("torch", False), ("torch", True)] + (
        [] if flashinfer else [("flashinfer", False), ("flashinfer", True)]
    )
    longest = spec.kv_layout(16, DTYPE).num_blocks_for(max(CONTEXTS))
    for attention, graphs in variants:
        if time.monotonic() > run.deadline:
            run.left_out.append(f"{name}, {attention}, {'graphs' if graphs else 'eager'}")
            continue
        label = f"{attention}, {'graphs' if graphs else 'eager'}"
        console.print(f"{name}: {label} ...")
        model.attention = attention_backend(attention, model.device, dtype=DTYPE, head_dim=spec.head_dim)
        computes: Model = model
        if graphs:
            computes = GraphedDecoder(model, kv_cache, sizes=list(BATCHES), max_blocks=longest, capture=CudaCapture())
        run.check(f"{name}, {label}: batch", partial(invariance, computes, kv_cache))
        points = [(f"decode {b} x {c}", work.decode_ms(b, c), b, c) for c in CONTEXTS for b in BATCHES]
        for what, floor, batch, context in points:
            step = decode_batch(batch, context, kv_cache.num_blocks)
            if step is None:
                if (reason := f"{name}, {what}: more than the pool holds") not in run.left_out:
                    run.left_out.append(reason)
                continue
            if isinstance(computes, GraphedDecoder) and computes.shape_of(step) is None:
                continue  # it would run eagerly
            record(run, name, label, what, floor, partial(step_ms, computes, [step], kv_cache))
        for tokens in () if graphs else PROMPTS:
            chunks = prefill_batches(tokens, kv_cache.num_blocks)
            if chunks is not None:
                floor = work.prefill_ms(tokens, CHUNK)
                record(run, name, label, f"prefill {tokens}", floor, partial(step_ms, model, chunks, kv_cache))
        del computes
        gc.collect()


def record(run: Run, model: str, label: str, what: str, floor: float, measure: Callable[[], dict[str, float]]) -> None:
    if time.monotonic() > run.deadline:
        run.left_out.append(f"{model}, {label}, {what}")
        return
    try:
        times = measure()
    except torch.OutOfMemoryError:
        run.left_out.append(f"{model}, {label}, {what}: out of memory")
        torch.cuda.empty_cache()
        return
    run.rows.append({"model": model, "what": what, "with": label, "floor_ms": floor, **times})


def table_of(rows: list[dict[str, Any]]) -> Table:
    labels = list(dict.fromkeys(row["with"] for row in rows))
    table = Table("model", "what", "floor ms", *(f"{label}, ms (x)" for label in labels))
    for key in dict.fromkeys((row["model"], row["what"]) for row in rows):
        mine = {row["with"]: row for row in rows if (row["model"], row["what"]) == key}
        floor = next(iter(mine.values()))["floor_ms"]
        cells = [
            f"{mine[x]['median_ms']:.2f} ({mine[x]['median_ms'] / floor:.1f})" if x in mine else "-" for x in labels
        ]
        table.add_row(*key, f"{floor:.3f}", *cells)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--seconds", type=float, default=270, help="begin nothing after so long; default: %(default)s")
    parser.add_argument("--without-large", action="store_true", help="leave the model of 8B parameters out")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        console.print(f"gpu_check: torch {torch.__version__} sees no GPU here, so nothing was checked")
        return 2
    run = Run(time.monotonic() + arguments.seconds)
    flashinfer = unavailable(torch.device("cuda"), DTYPE, 64)
    try:
        found = version("flashinfer-python")
    except PackageNotFoundError:
        found = "absent"
    properties = torch.cuda.get_device_properties(0)
    console.print(f"{properties.name}, torch {torch.__version__}, flashinfer {found}", markup=False)
    if flashinfer:
        console.print(f"FlashInfer is left out: {flashinfer}", markup=False)
    measured = measure_gpu()
    console.print({name: round(value) for name, value in measured.items()})
    for kind in GOLDEN:
        for graphs in (False, True):
            mode = "graphs" if graphs else "eager"
            run.check(f"{kind}, float32, torch, {mode}", partial(golden, kind, "float32", "torch", graphs))
            if not flashinfer:
                run.check(f"{kind}, bfloat16, flashinfer, {mode}", partial(golden, kind, DTYPE, "flashinfer", graphs))
    run.check("split on one GPU", split)
    start = attention_backend("torch", torch.device("cuda"))
    for name, make in (("demo", partial(demo, start)), ("Llama 8B shapes", partial(random_model, LLAMA_8B, start))):
        if name != "demo" and arguments.without_large:
            continue
        try:
            time_model(run, name, make(), measured, flashinfer)
        except (BatonError, torch.OutOfMemoryError) as e:
            run.left_out.append(f"{name}: {e}")
        gc.collect()
        torch.cuda.empty_cache()
    Console(width=160, highlight=False).print(table_of(run.rows))
    for left in run.left_out:
        console.print(f"left out: {left}", markup=False)
    if arguments.json:
        result = {
            "environment": environment() | {"gpu": properties.name, "cuda": torch.version.cuda, "flashinfer": found},
            "flashinfer_left_out": flashinfer,
            "measured": measured,
            "checks": run.checks,
            "rows": run.rows,
            "left_out": run.left_out,
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    wrong = [name for name, found in run.checks.items() if found.startswith("WRONG")]
    console.print(
        f"{len(run.checks) - len(wrong)} checks without fault, {len(wrong)} wrong: {', '.join(wrong) or 'none'}"
    )
    return 1 if wrong else 0


def demo(attention: Any) -> DecoderModel:
    path = resolve_model("demo")
    spec = load_spec(path)
    assert isinstance(spec, ModelSpec)
    return DecoderModel(spec, iter_weights(path), attention, dtype=DTYPE, device="cuda")


if __name__ == "__main__":
    sys.exit(main())

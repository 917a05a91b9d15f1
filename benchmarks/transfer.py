"""How fast KV blocks get from one worker's pool into another's, by transport, against what the machine can do.

python -m benchmarks.transfer --transports all --tokens 16,128,1024,8192 --model demo --json results/transfer.json

transfers      Source and target are two processes (inproc: two threads) with a `KVTransport` and a pool each, whose
               refs and checksums go through a pipe, as they do through control sockets. A transfer lasts from the
               moment its first block is shipped until its last one is in the target's pool, hashed and compared. Its
               bytes are verified after the clock has stopped. Pools are far larger than any cache. Each end is
               pinned to a core, as Baton pins workers.
handoff        `benchmarks.handoff`: what is left of it between the last prefill step and the first decode step
interference   `benchmarks.interference`: what a receive costs the decode step that runs meanwhile; needs the demo model

floor          of the same bytes, in the same run, in turn with the transfers: for transports within a machine's memory
               one memcpy between two large buffers, else messages of 4 MiB over a bare socket and the copy out of each
cpu_ms         of both ends, their libraries' threads included
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from baton.errors import BatonError
from baton.layout import KVLayout
from baton_experiments.report import environment
from benchmarks.handoff import CHUNK, measure_handoffs
from benchmarks.interference import DecodeSteps, measure_interference
from benchmarks.layouts import LAYOUTS, layout_of
from benchmarks.machine import spread
from benchmarks.transfer_ends import Target, block_ids, linked
from kv_transfer.registry import SCHEMES, open_transport

STRIDES = 4
"""A pool holds so many transfers, which take turns; of very large ones two."""
LARGE_BYTES = 512 << 20
WARM_UPS = 3
REPEAT_BYTES = 8 << 30
"""Large transfers are repeated less often: so many bytes, and five times at least."""
ALONE_IN_A_PROCESS = ("inproc",)
"""Transports that no hand-over between two processes can use."""


def measure(target: Target, tokens: int, repeats: int, scattered: bool) -> dict[str, Any]:
    """An entry of `transfers`."""
    layout = target.layout
    count = layout.num_blocks_for(tokens)
    size = count * layout.block_bytes
    num_blocks = target.end.pool.num_blocks
    plain = np.arange(num_blocks)
    orders = [np.random.default_rng(seed).permutation(num_blocks) if scattered else plain for seed in (1, 2)]
    samples: list[tuple[float, float]] = []
    floors: list[float] = []
    for repeat in range(-WARM_UPS, max(min(repeats, 5), min(repeats, REPEAT_BYTES // size))):
        # The floor uses other blocks than the transfer beside it, so that neither warms the cache for the other.
        floor = target.floor(*(block_ids(2 * repeat + 1, count, plain) for _ in range(2)))
        sample = target.transfer(*(block_ids(2 * repeat, count, order) for order in orders))
        if repeat >= 0:
            samples.append(sample)
            floors.append(floor)
    seconds = [s for s, _ in samples]
    entry = {
        "transport": target.scheme,
        "checksums": target.end.hashes,
        "tokens": tokens,
        "bytes": size,
        **spread(seconds),
        "cpu_ms": float(np.median([cpu for _, cpu in samples])) * 1e3,
        "floor_ms": spread(floors)["median_ms"],
    }
    entry["gb_per_s"] = size / entry["median_ms"] / 1e6
    entry["floor_gb_per_s"] = size / entry["floor_ms"] / 1e6
    entry["of_floor"] = entry["gb_per_s"] / entry["floor_gb_per_s"]
    entry["of_floor_paired"] = float(np.median([f / s for f, s in zip(floors, seconds, strict=True)]))
    entry["samples_ms"] = [s * 1e3 for s in seconds]
    return entry


def available(transports: str) -> list[str]:
    """The schemes to be measured; `all`: those that open here. What does not is told."""
    if transports != "all":
        return transports.split(",")
    schemes = []
    for scheme in SCHEMES:
        try:
            open_transport(scheme).close()
            schemes.append(scheme)
        except BatonError as e:
            print(f"{scheme:8} is left out: {e}", flush=True)
    return schemes


def pool_blocks(layout: KVLayout, tokens: int) -> int:
    """Blocks of a pool for transfers of at most so many tokens."""
    count = layout.num_blocks_for(tokens)
    return count * (2 if count * layout.block_bytes >= LARGE_BYTES else STRIDES)


def measure_transfers(scheme: str, layout: KVLayout, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Entries of `transfers` of one transport."""
    entries = []
    lengths = [int(part) for part in arguments.tokens.split(",")]
    for hashes in (False, True):
        with linked(scheme, pool_blocks(layout, max(lengths)), layout, hashes=hashes) as target:
            for tokens in lengths:
                entry = measure(target, tokens, arguments.repeats, arguments.scattered)
                entries.append(entry)
                print(
                    f"{scheme:8} {tokens:5} tokens {'xxh3' if hashes else 'none'}: {entry['median_ms']:8.3f} ms "
                    f"(p10 {entry['p10_ms']:.3f}, p90 {entry['p90_ms']:.3f})  {entry['gb_per_s']:6.2f} GB/s, "
                    f"{entry['of_floor']:.2f} of the floor's {entry['floor_gb_per_s']:.2f}; "
                    f"cpu {entry['cpu_ms']:.3f} ms",
                    flush=True,
                )
    return entries


def measure_handoff(scheme: str, layout: KVLayout, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Entries of `handoff` of one transport."""
    lengths = [int(part) for part in arguments.handoff_tokens.split(",")]
    moved = sorted({*lengths, *(min(tokens, CHUNK) for tokens in lengths)})
    with linked(scheme, pool_blocks(layout, max(moved)), layout, hashes=True) as target:
        move_s = {n: measure(target, n, arguments.handoff_repeats, False)["median_ms"] / 1e3 for n in moved}
    entries = measure_handoffs(scheme, layout, lengths, arguments.handoff_repeats, move_s)
    for entry in entries:
        print(
            f"{scheme:8} {entry['tokens']:5} tokens {'by chunk' if entry['streamed'] else 'whole   '} "
            f"{'xxh3' if entry['checksums'] else 'none'}: exposed {entry['exposed_ms']:7.2f} ms "
            f"(p10 {entry['exposed_p10_ms']:.2f}, p90 {entry['exposed_p90_ms']:.2f}); "
            f"last chunk alone {entry['last_chunk_ms']:.2f} ms",
            flush=True,
        )
    return entries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transports", default="all", help=f"`all`, or some of {','.join(SCHEMES)}")
    parser.add_argument("--tokens", default="16,128,1024")
    parser.add_argument("--model", choices=LAYOUTS, default="demo")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--handoff-tokens", default="1024,4096", help="prompts; empty: no hand-offs")
    parser.add_argument("--handoff-repeats", type=int, default=12)
    parser.add_argument("--interference-repeats", type=int, default=20, help="0: none")
    parser.add_argument("--scattered", action="store_true", help="blocks in random order; default: neighbours")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    layout = layout_of(arguments.model, arguments.dtype)
    schemes = available(arguments.transports)
    result: dict[str, Any] = {
        "environment": environment(),
        "model": arguments.model,
        "dtype": arguments.dtype,
        "scattered": arguments.scattered,
        "load": os.getloadavg()[0],
        "transfers": [],
        "handoff": [],
        "interference": [],
    }

    def keep() -> None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=1), encoding="utf-8")

    for scheme in schemes:
        result["transfers"] += measure_transfers(scheme, layout, arguments)
        keep()
    if arguments.handoff_tokens:
        for scheme in [s for s in schemes if s not in ALONE_IN_A_PROCESS]:
            result["handoff"] += measure_handoff(scheme, layout, arguments)
            keep()
    if arguments.interference_repeats:
        steps = DecodeSteps()
        for scheme in [s for s in schemes if s not in ALONE_IN_A_PROCESS]:
            with linked(scheme, pool_blocks(layout, 1024), layout, hashes=True) as target:
                entry = measure_interference(target, steps, 1024, arguments.interference_repeats)
            result["interference"].append(entry)
            print(
                f"{scheme:8} a decode step takes {entry['step_ms_alone']:.2f} ms alone, "
                f"{entry['step_ms_during']:.2f} ms while 1024 tokens arrive",
                flush=True,
            )
            keep()


if __name__ == "__main__":
    main()

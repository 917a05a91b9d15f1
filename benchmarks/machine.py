"""What one run's machine gives, to read its figures against: floors come from these, measured in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable
from ctypes import byref
from typing import Any

import numpy as np
import torch

from baton.engine.kv_cache import TORCH_DTYPES
from baton.engine.native.library import LinearStruct, kernels
from baton.engine.native.ops import pack


def spread(samples: list[float]) -> dict[str, float]:
    """Median, p10 and p90 in milliseconds, of seconds."""
    p10, median, p90 = np.percentile(samples, (10, 50, 90)) * 1e3
    return {"median_ms": float(median), "p10_ms": float(p10), "p90_ms": float(p90)}


def timed(call: Callable[[], Any]) -> float:
    """Seconds that `call` takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def machine(dtype: str, threads: int) -> dict[str, Any]:
    """Read bandwidth (GB/s) and matrix product rate (GFLOP/s) of the calling thread's cores, best of several.

    The rate is the best that anything here reaches in `dtype`, torch or the native kernels, and torch in float32 too:
    bfloat16 is never slower than that where it is converted first.
    """
    data = torch.ones(64 << 20)  # 256 MB: far beyond any cache
    read = min(timed(data.sum) for _ in range(7))
    rows, outs, ins = 512, 1024, 1024
    rates = []
    for kind in {TORCH_DTYPES[dtype], torch.float32}:
        left, right = torch.ones(rows, ins, dtype=kind), torch.ones(outs, ins, dtype=kind)
        rates.append(min(timed(lambda a=left, b=right: a @ b.t()) for _ in range(7)))
    table = kernels()
    if table is not None and threads == 1:
        packed = pack(torch.ones(outs, ins, dtype=TORCH_DTYPES[dtype]))
        x, y = torch.ones(rows, ins), torch.empty(rows, outs)
        struct = LinearStruct(packed.data_ptr(), None, outs, ins)
        call = lambda: table.linear(int(dtype == "bfloat16"), byref(struct), x.data_ptr(), rows, y.data_ptr())  # noqa: E731
        rates.append(min(timed(call) for _ in range(7)))
    return {
        "read_gb_per_s": data.nbytes / read / 1e9,
        "gemm_gflops": 2 * rows * outs * ins / min(rates) / 1e9,
        "threads": threads,
        "dtype": dtype,
        "instruction_set": None if table is None else table.name.decode(),
    }

"""What this machine's cores give at most, to read an engine's figures against: measured, by the same threads."""

from __future__ import annotations

import time
from collections.abc import Callable
from ctypes import byref
from functools import partial
from typing import Any, NamedTuple

from baton.engine.native.library import LinearStruct, kernels

ROWS, OUTS, INS = 512, 1024, 1024
REPEATS = 7


class Peaks(NamedTuple):
    """Of the calling thread's cores, best of several."""

    bytes_per_s: float
    """Reading memory far beyond any cache."""
    operations_per_s: float
    """Of matrix products: the best that anything here reaches in the dtype, torch or the native kernels, and torch in
    float32 too, as bfloat16 is never slower than that where it is converted first."""
    threads: int
    dtype: str
    instruction_set: str | None
    """Of the native kernels; None: they are not used."""


def measure_peaks(dtype: str, threads: int) -> Peaks:
    """Takes about a second. torch must compute with so many threads already.

    By the thread's CPU time, so that other work on the machine does not count; threads that it computes with take as
    long as it does.
    """
    import torch

    from baton.engine.kv_cache import TORCH_DTYPES
    from baton.engine.native.ops import pack

    data = torch.ones(64 << 20)  # 256 MB
    read_s = min(_timed(data.sum) for _ in range(REPEATS))
    rates = []
    for kind in {TORCH_DTYPES[dtype], torch.float32}:
        left, right = torch.ones(ROWS, INS, dtype=kind), torch.ones(OUTS, INS, dtype=kind)
        rates.append(min(_timed(partial(torch.matmul, left, right.t())) for _ in range(REPEATS)))
    table = kernels()
    if table is not None and threads == 1:
        packed = pack(torch.ones(OUTS, INS, dtype=TORCH_DTYPES[dtype]))
        x, y = torch.ones(ROWS, INS), torch.empty(ROWS, OUTS)
        struct = LinearStruct(packed.data_ptr(), None, OUTS, INS)

        def product() -> None:
            table.linear(int(dtype == "bfloat16"), byref(struct), x.data_ptr(), ROWS, y.data_ptr())

        rates.append(min(_timed(product) for _ in range(REPEATS)))
    return Peaks(
        bytes_per_s=data.nbytes / read_s,
        operations_per_s=2 * ROWS * OUTS * INS / min(rates),
        threads=threads,
        dtype=dtype,
        instruction_set=None if table is None else table.name.decode(),
    )


def _timed(call: Callable[[], Any]) -> float:
    start = time.thread_time()
    call()
    return time.thread_time() - start

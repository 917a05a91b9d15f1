"""What one run's machine gives, to read its figures against: floors come from these, measured in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from baton_experiments.peaks import measure_peaks


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
    """Read bandwidth (GB/s) and matrix product rate (GFLOP/s) of the calling thread's cores, best of several."""
    peaks = measure_peaks(dtype, threads)
    return {
        "read_gb_per_s": peaks.bytes_per_s / 1e9,
        "gemm_gflops": peaks.operations_per_s / 1e9,
        "threads": threads,
        "dtype": dtype,
        "instruction_set": peaks.instruction_set,
    }

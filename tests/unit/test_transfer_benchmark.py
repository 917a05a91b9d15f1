"""The benchmark of transports moves and verifies bytes, over each kind of link."""

from __future__ import annotations

import pytest

from benchmarks.transfer import LAYOUT, linked, measure


@pytest.mark.parametrize("scheme", ["inproc", "shm", "zmq+ipc"])
@pytest.mark.parametrize("scattered", [False, True])
def test_a_transfer_is_measured_beside_its_floor(scheme: str, scattered: bool) -> None:
    with linked(scheme, num_blocks=8) as target:
        entry = measure(target, 32, checksums=scattered, repeats=2, scattered=scattered)
    assert entry["bytes"] == 2 * LAYOUT.block_bytes
    assert entry["gb_per_s"] == pytest.approx(entry["bytes"] / entry["median_ms"] / 1e6)
    assert len(entry["samples_ms"]) == 2
    assert min(entry["floor_ms"], entry["p10_ms"], entry["cpu_ms"]) > 0

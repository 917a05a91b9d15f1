"""The benchmark of transports moves and verifies bytes, over each kind of link."""

from __future__ import annotations

import pytest

from benchmarks.layouts import layout_of
from benchmarks.transfer import linked, measure

LAYOUT = layout_of("demo", "float32")


@pytest.mark.parametrize(("scheme", "hashes"), [("inproc", True), ("shm", False), ("zmq+ipc", True)])
def test_a_transfer_is_measured_beside_its_floor(scheme: str, hashes: bool) -> None:
    with linked(scheme, 8, LAYOUT, hashes=hashes) as target:
        entries = [measure(target, 32, repeats=2, scattered=on) for on in (False, True)]
    for entry in entries:
        assert entry["bytes"] == 2 * LAYOUT.block_bytes
        assert entry["gb_per_s"] == pytest.approx(entry["bytes"] / entry["median_ms"] / 1e6)
        assert len(entry["samples_ms"]) == 2
        assert min(entry["floor_ms"], entry["p10_ms"], entry["cpu_ms"]) > 0

"""GPUs and what their makers say of them: dense matrix products in 16 bits, memory bandwidth, memory.

Peaks that no kernel reaches: shares of them compare engines, and their ratio says which side of the roofline work
falls on. Figures with sparsity are halved. Pure data.
"""

from __future__ import annotations

import msgspec

from baton.errors import ConfigError


class Device(msgspec.Struct, frozen=True):
    """One device."""

    name: str
    tflops: float
    """10^12 operations a second, bf16 or fp16, dense, a multiplication and an addition counted apart."""
    gb_per_s: float
    """10^9 bytes a second."""
    memory_gib: float | None
    """Nominal; None: not known."""
    source: str

    @property
    def ridge(self) -> float:
        """Operations a byte at which both limits meet: work with fewer waits for memory."""
        return self.tflops * 1e3 / self.gb_per_s

    def seconds(self, operations: float, num_bytes: float) -> float:
        """The least that such work can take: whatever limits it longer."""
        return max(operations / (self.tflops * 1e12), num_bytes / (self.gb_per_s * 1e9))

    def side(self, operations: float, num_bytes: float) -> str:
        """What limits it: `compute` or `memory`."""
        return "compute" if operations / num_bytes >= self.ridge else "memory"


DEVICES: dict[str, Device] = {
    device.name.lower(): device
    for device in (
        Device("V100", 125, 900, 32, "NVIDIA V100 datasheet, SXM2 32 GB (fp16)"),
        Device("A10", 125, 600, 24, "NVIDIA A10 datasheet"),
        Device("A100-40G", 312, 1555, 40, "NVIDIA A100 datasheet, SXM 40 GB"),
        Device("A100", 312, 2039, 80, "NVIDIA A100 datasheet, SXM 80 GB"),
        Device("L4", 121, 300, 24, "NVIDIA L4 datasheet (242 with sparsity)"),
        Device("L40S", 362, 864, 48, "NVIDIA L40S datasheet (733 with sparsity)"),
        Device("RTX4090", 165.2, 1008, 24, "NVIDIA Ada GPU architecture paper, GeForce RTX 4090"),
        Device("H100-PCIe", 756, 2000, 80, "NVIDIA H100 datasheet, PCIe (1,513 with sparsity)"),
        Device("H100", 989.4, 3350, 80, "NVIDIA H100 datasheet, SXM (1,979 with sparsity)"),
        Device("H200", 989.4, 4800, 141, "NVIDIA H200 datasheet, SXM (1,979 with sparsity)"),
        Device("B200", 2250, 8000, 180, "NVIDIA HGX B200 datasheet (4,500 with sparsity)"),
        Device("MI300X", 1307.4, 5300, 192, "AMD Instinct MI300X datasheet"),
    )
}
"""By name in lower case."""


def device(name: str) -> Device:
    """Raises ConfigError for a name that is not in the table."""
    found = DEVICES.get(name.lower())
    if found is None:
        allowed = ", ".join(d.name for d in DEVICES.values())
        raise ConfigError(
            "--gpu", "is not in the table; give --peak-tflops and --bandwidth", value=name, allowed=allowed
        )
    return found

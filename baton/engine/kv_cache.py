"""The KV pool as memory: one tensor, seen per layer by attention and per block, as bytes, by transports.

Knows torch and `KVLayout`. Must not know requests, who owns which block, or how blocks travel:
`baton.engine.blocks` hands blocks out, `kv_transfer` moves them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from baton.errors import ConfigError
from baton.host_memory import HostMemory
from baton.layout import KVLayout

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class KVCache:
    """A pool of `num_blocks` KV blocks; implements `kv_transfer.base.BlockMemory`.

    One allocation, seen as `[blocks, layers, 2, kv_heads, block_size, head_dim]`, so that a block of
    all layers is one span of `block_bytes` bytes.

    Attention multiplies masked positions by zero, which only hides what is *finite*. So the pool starts
    as zeros, and whoever starts to fill a block partly must `clear` it first: it may hold bytes of a
    transfer that failed its checksum.
    """

    def __init__(
        self, layout: KVLayout, num_blocks: int, device: str = "cpu", *, scratch: bool = False, shared: bool = False
    ):
        """`scratch`: hold a further block that belongs to nobody, see `scratch_block`.

        `shared`: in memory that other processes of this machine can map; on a CPU only.
        Raises ConfigError if `num_blocks` is less than 1 or the memory cannot be had.
        """
        if num_blocks < 1:
            raise ConfigError("kv_blocks", "must be at least 1", value=num_blocks)
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_bytes = layout.block_bytes
        self.device = torch.device(device)
        self.scratch_block = num_blocks if scratch else None
        """Where rows write that only fill up a batch; behind all blocks of `num_blocks`, None: there is none."""
        self.written: torch.cuda.Event | None = None
        """Of a pool on a GPU: reached when all that the last step wrote is in the pool, see `mark_written`."""
        total = num_blocks + scratch
        if shared and self.device.type != "cpu":
            raise ConfigError("transfer.transport", "needs KV pools on the CPU", value="shm", allowed="auto, zmq+tcp")
        try:
            if self.device.type == "cpu":
                self.host_memory = HostMemory(total * self.block_bytes, shared=shared)
                """Where a CPU pool lies, `scratch_block` behind the others."""
                flat = torch.from_numpy(self.host_memory.array)
            else:
                flat = torch.zeros(total * self.block_bytes, dtype=torch.uint8, device=self.device)
            self._bytes = flat.view(total, self.block_bytes)
        except (RuntimeError, MemoryError) as e:
            mib = total * self.block_bytes / 2**20
            raise ConfigError("kv_blocks", f"{mib:.0f} MiB cannot be allocated on {device}", value=num_blocks) from e
        self.tensor = self._bytes.view(TORCH_DTYPES[layout.dtype]).view(total, *layout.block_shape)
        """The whole pool, shape `[blocks, layers, 2, kv_heads, block_size, head_dim]`."""
        self._layers = [(self.tensor[:, i, 0], self.tensor[:, i, 1]) for i in range(layout.num_layers)]
        self._numpy: npt.NDArray[np.uint8] | None = self._bytes.numpy() if self.device.type == "cpu" else None

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer: strided views `[blocks, kv_heads, block_size, head_dim]`."""
        return self._layers[index]

    def block(self, block_id: int) -> npt.NDArray[np.uint8]:
        """The block's bytes, all layers, writable, without a copy; shape `[block_bytes]`. CPU pools only."""
        if not 0 <= block_id < self.num_blocks:
            raise IndexError(f"block {block_id} is not in a pool of {self.num_blocks}")
        assert self._numpy is not None, f"a pool on {self.device} has no host view"
        view: npt.NDArray[np.uint8] = self._numpy[block_id]
        return view

    def block_tensor(self, block_id: int) -> torch.Tensor:
        """The block's bytes on its device, without a copy; shape `[block_bytes]`."""
        return self._bytes[block_id]

    def mark_written(self) -> None:
        """After each step, by the thread that ran it: who copies blocks on another stream waits for `written`."""
        if self.device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self.device))
            self.written = event

    def clear(self, block_ids: Sequence[int]) -> None:
        """Zero these blocks, all layers."""
        for block_id in block_ids:
            self._bytes[block_id].zero_()

    def copy(self, source: int, target: int) -> None:
        """Give block `target` what block `source` holds, all layers."""
        self._bytes[target].copy_(self._bytes[source])

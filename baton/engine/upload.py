"""Small index arrays from host to device: through pinned memory, without waiting, several arrays in one copy.

On a CPU they are views of the arrays. Knows numpy and torch only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch


def upload(arrays: Sequence[npt.NDArray[np.integer]], device: torch.device) -> list[torch.Tensor]:
    """The arrays, one-dimensional and of one dtype, as tensors on `device`; ordered with its current stream.

    On a GPU they are parts of one tensor, copied at once. The caller may change or drop the arrays afterwards: torch
    does not hand a pinned buffer out again before the copies from it are done.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    packed = pinned(np.concatenate(arrays), device).to(device, non_blocking=True)
    return list(torch.split(packed, [len(array) for array in arrays]))


def pinned(array: npt.NDArray[np.integer], device: torch.device) -> torch.Tensor:
    """The array as a host tensor from which `device` copies without waiting; on a CPU a view of it."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor

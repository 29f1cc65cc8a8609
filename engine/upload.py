"""Sends a step's arrays to the device in one copy. Knows nothing of what they mean."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

_ALIGNMENT = 16
"""Bytes. Triton compiles a second variant of a kernel for pointers that are aligned less."""

_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
}


def upload(arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, torch.Tensor]:
    """The arrays as tensors on `device`, under the same names.

    On CPU they share the arrays' memory. On CUDA they are views of one buffer that was copied from pinned memory on the
    current stream; the call does not wait, and torch's host allocator keeps the pinned memory until the copy is over.
    """
    if device.type == "cpu":
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    offsets, total = {}, 0
    for name, array in arrays.items():
        offsets[name] = total
        total += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    pinned = torch.empty(total, dtype=torch.uint8, pin_memory=True)
    target = pinned.numpy()
    for name, array in arrays.items():
        start = offsets[name]
        target[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    buffer = pinned.to(device, non_blocking=True)
    return {
        name: buffer[offsets[name] : offsets[name] + array.nbytes].view(_DTYPES[array.dtype]).view(array.shape)
        for name, array in arrays.items()
    }

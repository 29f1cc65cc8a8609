"""Sends a step's arrays to the device in one copy. Knows nothing of what they mean."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

_ALIGNMENT = 16
"""Bytes. Triton compiles a second variant of a kernel for pointers that are aligned less."""

_NUM_STAGES = 3
"""Host buffers of a fixed layout: at most two steps are in flight while the host fills the next."""

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
    offsets, total = _offsets({name: array.nbytes for name, array in arrays.items()})
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


class FixedUpload:
    """Arrays of one layout that always arrive at the same place on the device, as captured graphs need it.

    For each step: take `next_arrays`, fill them, and `send` on the stream that reads the tensors.
    """

    def __init__(self, layout: Mapping[str, tuple[type[np.generic], int]], device: torch.device) -> None:
        """`layout`: dtype and length of each array."""
        sizes = {name: np.dtype(dtype).itemsize * length for name, (dtype, length) in layout.items()}
        offsets, total = _offsets(sizes)
        on_cuda = device.type == "cuda"
        self._device_buffer = torch.zeros(total, dtype=torch.uint8, device=device)
        self._stages = [torch.zeros(total, dtype=torch.uint8, pin_memory=on_cuda) for _ in range(_NUM_STAGES)]
        self._was_read = [torch.cuda.Event() if on_cuda else None for _ in range(_NUM_STAGES)]
        self._current = 0

        def views(buffer: torch.Tensor) -> dict[str, torch.Tensor]:
            return {
                name: buffer[offsets[name] : offsets[name] + sizes[name]].view(_DTYPES[np.dtype(dtype)])
                for name, (dtype, _) in layout.items()
            }

        self.tensors = views(self._device_buffer)
        self._arrays = [{name: view.numpy() for name, view in views(stage).items()} for stage in self._stages]

    def next_arrays(self) -> dict[str, np.ndarray]:
        """The arrays of the next step, with the contents of an earlier one."""
        self._current = (self._current + 1) % _NUM_STAGES
        was_read = self._was_read[self._current]
        if was_read is not None:
            was_read.synchronize()  # long over, except after more than two launches without a result
        return self._arrays[self._current]

    @property
    def stage(self) -> int:
        """Names the arrays that `next_arrays` gave last, for `send`."""
        return self._current

    def send(self, stage: int) -> None:
        """Copy a step's arrays to `tensors` on the current stream, without waiting."""
        self._device_buffer.copy_(self._stages[stage], non_blocking=True)
        was_read = self._was_read[stage]
        if was_read is not None:
            was_read.record()


def _offsets(sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Where each array starts in the packed buffer, and the buffer's size, in bytes."""
    offsets, total = {}, 0
    for name, size in sizes.items():
        offsets[name] = total
        total += -(-size // _ALIGNMENT) * _ALIGNMENT
    return offsets, total

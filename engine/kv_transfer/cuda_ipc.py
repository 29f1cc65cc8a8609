"""GPU memory that another process of the node writes into: CUDA's driver calls for it. Knows no blocks and no frames.

The target allocates a buffer and gives its handle away; the sender opens it and copies into it. The memory lives until
both have let go: the driver keeps what a dead process shared, or had opened, until the other end is done.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

_HANDLE_BYTES = 64
_ENABLE_PEER_ACCESS = 1


class IpcUnavailable(Exception):
    """This process cannot share GPU memory with that one. The message says why."""


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * _HANDLE_BYTES)]


class SharedBuffer:
    """Bytes on a GPU that other processes of the node can open."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Raises IpcUnavailable when the device has no room or cannot share."""
        self._address = ctypes.c_uint64()
        with _context(device):
            _call("cuMemAlloc_v2", ctypes.byref(self._address), ctypes.c_size_t(num_bytes))
        self._device = device
        self.num_bytes = num_bytes
        handle = _Handle()
        try:
            with _context(device):
                _call("cuIpcGetMemHandle", ctypes.byref(handle), self._address)
        except IpcUnavailable:
            self.close()
            raise
        self.handle = bytes(handle)

    @property
    def address(self) -> int:
        """In this process."""
        return self._address.value

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"shape": (self.num_bytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def tensor(self) -> torch.Tensor:
        """The bytes, without a copy; not to be used after `close`."""
        return torch.as_tensor(self, device=self._device)

    def close(self) -> None:
        """Let the memory go; nothing on the device may still use it."""
        if self._address.value:
            with _context(self._device):
                _call("cuMemFree_v2", self._address)
            self._address.value = 0


class OpenedBuffer:
    """Another process's SharedBuffer, as a target of copies."""

    def __init__(self, handle: bytes, device: torch.device) -> None:
        """`device`: this process's, from which copies go. Raises IpcUnavailable when it cannot reach the memory."""
        self._device = device
        self._address = ctypes.c_uint64()
        with _context(device):
            _call(
                "cuIpcOpenMemHandle_v2",
                ctypes.byref(self._address),
                _Handle.from_buffer_copy(handle),
                ctypes.c_uint(_ENABLE_PEER_ACCESS),
            )

    @property
    def address(self) -> int:
        """In this process."""
        return self._address.value

    def close(self) -> None:
        """Let the memory go; no copy into it may be under way."""
        if self._address.value:
            with _context(self._device):
                _call("cuIpcCloseMemHandle", self._address)
            self._address.value = 0


def copy_on_stream(target: int, source: torch.Tensor, num_bytes: int, stream: torch.cuda.Stream) -> None:
    """Copy the front of `source` to an address of another buffer, behind what is on the stream."""
    with _context(source.device):
        _call(
            "cuMemcpyDtoDAsync_v2",
            ctypes.c_uint64(target),
            ctypes.c_uint64(source.data_ptr()),
            ctypes.c_size_t(num_bytes),
            ctypes.c_void_p(stream.cuda_stream),
        )


@cache
def node_name() -> str:
    """The same for two processes that run under one kernel and see one another."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id} {os.readlink('/proc/self/ns/pid')}"


@cache
def _driver() -> ctypes.CDLL:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise IpcUnavailable(f"NVIDIA's driver is not there: {error}") from None
    if code := driver.cuInit(0):
        raise IpcUnavailable(f"cuInit says {code}")
    return driver


@cache
def _primary_context(index: int) -> ctypes.c_void_p:
    """The one that torch uses; kept until the process ends."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    return context


@contextlib.contextmanager
def _context(device: torch.device) -> Iterator[None]:
    """Driver calls inside are for this device."""
    index = torch.cuda.current_device() if device.index is None else device.index
    _call("cuCtxPushCurrent_v2", _primary_context(index))
    try:
        yield
    finally:
        _call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


def _call(name: str, *arguments: object) -> None:
    code = getattr(_driver(), name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorName(ctypes.c_int(code), ctypes.byref(text))
        raise IpcUnavailable(f"{name} says {(text.value or b'?').decode()} ({code})")

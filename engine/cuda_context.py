"""Makes the CUDA context of a device while Python imports libraries: the driver needs neither torch nor Python's lock.

Torch finds the context when it first uses the device. Whatever goes wrong here goes wrong there again, with a message.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable


def begin_cuda_context(device: str) -> Callable[[], None]:
    """Start to make the context of `auto`, `cuda` or `cuda:N` on a thread; returns what waits for its end.

    Does nothing for other devices and on a machine without NVIDIA's driver.
    """
    match = re.fullmatch(r"auto|cuda(?::(\d+))?", device)
    if match is None:
        return lambda: None
    thread = threading.Thread(
        target=_retain_context, args=(int(match[1] or 0),), name="manta-cuda-context", daemon=True
    )
    thread.start()
    return thread.join


def _retain_context(index: int) -> None:
    """The device's primary context (CUDA driver API), which the runtime uses too; kept until the process ends."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(handle), index) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)

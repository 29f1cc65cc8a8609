"""Waiting for a number in shared memory to change, in the kernel: nothing spins. Linux; knows no layout of memory."""

from __future__ import annotations

import ctypes
import errno
import platform

_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 202)
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_EVERYBODY = 2**31 - 1

_libc = ctypes.CDLL(None, use_errno=True)  # its calls release the interpreter's lock


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def wait(word: ctypes.c_uint32, value: int, timeout_s: float) -> None:
    """Sleep until somebody wakes `word`, unless it is not `value` any more; at most `timeout_s`."""
    seconds = int(timeout_s)
    timeout = _TimeSpec(seconds, int((timeout_s - seconds) * 1e9))
    _futex(word, _FUTEX_WAIT, value, ctypes.byref(timeout))


def wake(word: ctypes.c_uint32) -> None:
    """Wake all that wait for `word`."""
    _futex(word, _FUTEX_WAKE, _EVERYBODY, None)


def _futex(word: ctypes.c_uint32, operation: int, value: int, timeout: object) -> None:
    failed = _libc.syscall(_SYS_FUTEX, ctypes.byref(word), operation, ctypes.c_uint32(value), timeout, None, 0)
    if failed == -1 and ctypes.get_errno() not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
        raise OSError(ctypes.get_errno(), "futex")

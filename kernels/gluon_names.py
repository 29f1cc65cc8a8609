"""What Gluon calls differently in the versions of Triton that are supported, up to 3.6 and by 3.9."""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma

copy_rows: Any = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
"""From places in memory to shared memory."""
copy_box: Any = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""A descriptor's box to shared memory."""
store_box: Any = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
"""And back."""
barrier: Any = getattr(gl, "thread_barrier", None) or gl.barrier
"""Of the threads of a group of warps."""

"""Makes Triton's interpreter fit for these tests: right in bfloat16 and e4m3, usable with new numpy, twice as fast.

The interpreter keeps bfloat16 and e4m3 as bit patterns, casts by truncation and multiplies bfloat16 matrices as bits.
Only what our kernels use is repaired: casts and `tl.dot`; they do all other arithmetic in fp32. Knows no kernel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter as triton_interpreter

Handle: Any = triton_interpreter.TensorHandle
Builder: Any = triton_interpreter.InterpreterBuilder


def widen(handle: Any) -> np.ndarray:
    """The numbers of a handle, bfloat16 as fp32."""
    if handle.dtype.scalar == tl.bfloat16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data


def round_to_bfloat16(numbers: np.ndarray) -> np.ndarray:
    """The bit patterns of the nearest bfloat16 numbers, ties to even, as the hardware rounds."""
    numbers = np.ascontiguousarray(numbers, dtype=np.float32)
    bits = numbers.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(numbers), 0x7FC0, rounded).astype(np.uint16)


def round_to_e4m3(numbers: np.ndarray) -> np.ndarray:
    """The bit patterns of the nearest e4m3 numbers, ties to even; what is too large becomes the largest, as in PTX."""
    wide = torch.from_numpy(np.array(numbers, dtype=np.float32))
    bits = torch.where(wide.isnan(), wide, wide.clamp(-448.0, 448.0)).to(torch.float8_e4m3fn).view(torch.uint8)
    return bits.numpy().reshape(np.shape(numbers))


def install() -> None:
    """Patch the interpreter of this process, once, before the first launch."""
    _repair_casts()
    _repair_dot()
    _repair_scalars()
    _patch_language_once_per_launch()


def _is_bfloat16(dtype: Any) -> bool:
    return not isinstance(dtype, tl.pointer_type) and dtype.scalar == tl.bfloat16


def _is_fp32(dtype: Any) -> bool:
    return not isinstance(dtype, tl.pointer_type) and dtype.scalar == tl.float32


def _repair_casts() -> None:
    def repaired(original: Any) -> Any:
        def cast(self: Any, source: Any, target: Any, *rest: Any) -> Any:
            if _is_bfloat16(source.dtype) and _is_bfloat16(target.scalar):
                return source
            if _is_bfloat16(target.scalar) and not isinstance(source.dtype, tl.pointer_type):
                return Handle(round_to_bfloat16(source.data), tl.bfloat16)
            if target.scalar == tl.float8e4nv and _is_fp32(source.dtype):
                return Handle(round_to_e4m3(source.data), tl.float8e4nv)
            if _is_bfloat16(source.dtype):
                source = Handle(widen(source), tl.float32)
                if target.scalar == tl.float32:
                    return source
            return original(self, source, target, *rest)

        return cast

    Builder.cast_impl = repaired(Builder.cast_impl)
    Builder.create_fp_to_fp = repaired(Builder.create_fp_to_fp)


def _repair_dot() -> None:
    original = Builder.create_dot

    def dot(self: Any, a: Any, b: Any, accumulator: Any, *rest: Any) -> Any:
        if not (_is_bfloat16(a.dtype) or _is_bfloat16(b.dtype)):
            return original(self, a, b, accumulator, *rest)
        product = np.matmul(widen(a), widen(b)) + accumulator.data
        return Handle(product.astype(accumulator.data.dtype), accumulator.dtype.scalar)

    Builder.create_dot = dot


def _repair_scalars() -> None:
    original = triton_interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        # Triton 3.6 converts one-element arrays in a way that numpy 2.5 refuses.
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))

    triton_interpreter._patch_lang_tensor = patch
    if not hasattr(Builder, "get_bf16"):  # Triton 3.6 lacks constants of this type
        Builder.get_bf16 = lambda self, value: Handle(round_to_bfloat16(np.array([value])), tl.bfloat16)


class _NothingToRestore:
    def restore(self) -> None:
        pass


def _patch_language_once_per_launch() -> None:
    """Nested kernel functions patch `triton.language` again at every call; inside a launch once a module is enough."""
    patch_language = triton_interpreter._patch_lang
    launch = triton_interpreter.GridExecutor.__call__
    patched: set[int] | None = None

    def patch_once(function: Any) -> Any:
        module = id(function.__globals__)
        if patched is None:
            return patch_language(function)
        if module in patched:
            return _NothingToRestore()
        # Not restored before the launch ends: the launch restores what it patched itself, which is the same module.
        patched.add(module)
        return patch_language(function)

    def launch_once(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal patched
        patched = set()
        try:
            return launch(self, *args, **kwargs)
        finally:
            patched = None

    triton_interpreter._patch_lang = patch_once
    triton_interpreter.GridExecutor.__call__ = launch_once

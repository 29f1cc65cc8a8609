"""Quantized numbers to 16-bit ones in registers, two at a time. Knows no product and no scale.

Each conversion stands twice: in Triton's own operations, which run everywhere, and in NVIDIA's assembly, which does the
same on pairs of numbers with a third of the instructions. The assembly puts the bits of a small integer into the
mantissa of a number of known exponent and subtracts that number, which is exact (Kim et al. 2022, "Who Says Elephants
Can't Run", arXiv 2211.10017); e4m3 becomes bfloat16 by moving its exponent and multiplying by 2^120.
"""

from __future__ import annotations

import triton
import triton.language as tl

from manta.kernels.runtime import jit


@triton.constexpr_function
def _int4_asm(nibble, is_bf16):
    """Nibble `nibble` of two words, minus 8. bfloat16: 128 + q - 136; fp16: 1024 + q - 1032."""
    magic, minus = ("0x43004300", "0xC308C308") if is_bf16 else ("0x64006400", "0xE408E408")
    add = "fma.rn.bf16x2 $0, t, o, c;" if is_bf16 else "add.rn.f16x2 $0, t, c;"  # sm_80 has no add of bf16x2
    shift = f"shr.u32 t, $1, {4 * nibble};"
    bits = f"lop3.b32 t, t, 0x000F000F, {magic}, 0xEA; mov.b32 c, {minus}; mov.b32 o, 0x3F803F80;"
    return "{ .reg .b32 t, c, o; " + shift + bits + add + " }"


@triton.constexpr_function
def _int8_asm(is_bf16):
    """Four bytes. bfloat16 has seven bits of mantissa: 128 + low bits, minus 128 or, for negative numbers, 256. fp16:
    1024 + q + 128 - 1152."""
    if is_bf16:
        half = (
            "prmt.b32 p, $2, 0, {0};"
            "lop3.b32 m, p, 0x007F007F, 0x43004300, 0xEA;"
            "lop3.b32 p, p, 0x00800080, 0xC300C300, 0xEA;"
            "fma.rn.bf16x2 ${1}, m, o, p;"
        )
        start = "{ .reg .b32 p, m, o; mov.b32 o, 0x3F803F80;"
    else:
        half = "prmt.b32 m, p, e, {0}; add.rn.f16x2 ${1}, m, c;"
        start = "{ .reg .b32 p, m, e, c; xor.b32 p, $2, 0x80808080; mov.b32 e, 0x64646464; mov.b32 c, 0xE480E480;"
    return start + half.format("0x4140", 0) + half.format("0x4342", 1) + "}"


@triton.constexpr_function
def _fp8_asm():
    """Four e4m3 bytes to bfloat16, subnormal ones included; s is 2^120, z is -0."""
    half = (
        "prmt.b32 p, $2, 0, {0};"
        "shr.u32 m, p, 4;"
        "and.b32 m, m, 0x07F007F0;"
        "lop3.b32 m, p, 0x80008000, m, 0xEA;"
        "fma.rn.bf16x2 ${1}, m, s, z;"
    )
    start = "{ .reg .b32 p, m, s, z; mov.b32 s, 0x7B807B80; mov.b32 z, 0x80008000;"
    return start + half.format("0x1404", 0) + half.format("0x3424", 1) + "}"


@triton.constexpr_function
def _subtract_asm(is_bf16):
    if is_bf16:
        return "{ .reg .b32 c; mov.b32 c, 0xBF80BF80; fma.rn.bf16x2 $0, $2, c, $1; }"
    return "sub.rn.f16x2 $0, $1, $2;"


@jit
def int4_values(words, NIBBLE: tl.constexpr, DTYPE: tl.constexpr, INLINE_PTX: tl.constexpr):
    """q - 8 in DTYPE of one nibble of int16 `words`."""
    if INLINE_PTX:
        return tl.inline_asm_elementwise(
            _int4_asm(NIBBLE, tl.bfloat16 == DTYPE), "=r,r", [words], dtype=DTYPE.value, is_pure=True, pack=2
        )
    return (((words >> (4 * NIBBLE)) & 15).to(tl.float32) - 8.0).to(DTYPE)


@jit
def int8_values(numbers, DTYPE: tl.constexpr, INLINE_PTX: tl.constexpr):
    """int8 `numbers` in DTYPE."""
    if INLINE_PTX:
        return tl.inline_asm_elementwise(
            _int8_asm(tl.bfloat16 == DTYPE), "=r,=r,r", [numbers], dtype=DTYPE.value, is_pure=True, pack=4
        )
    return numbers.to(tl.float32).to(DTYPE)


@jit
def fp8_values(numbers, DTYPE: tl.constexpr, INLINE_PTX: tl.constexpr):
    """e4m3 `numbers` in DTYPE; to fp16 the hardware has an instruction, which the compiler takes."""
    if INLINE_PTX and tl.bfloat16 == DTYPE:
        return tl.inline_asm_elementwise(
            _fp8_asm(), "=r,=r,r", [numbers.to(tl.int8, bitcast=True)], dtype=DTYPE.value, is_pure=True, pack=4
        )
    return numbers.to(tl.float32).to(DTYPE)


@jit
def minus_zeros(values, zeros, DTYPE: tl.constexpr, INLINE_PTX: tl.constexpr):
    """`values` [N, K] minus `zeros` [N], both in DTYPE: exact for whole numbers up to 256."""
    wide = tl.broadcast_to(zeros[:, None], values.shape[0], values.shape[1])
    if INLINE_PTX:
        return tl.inline_asm_elementwise(
            _subtract_asm(tl.bfloat16 == DTYPE), "=r,r,r", [values, wide], dtype=DTYPE.value, is_pure=True, pack=2
        )
    return (values.to(tl.float32) - wide.to(tl.float32)).to(DTYPE)

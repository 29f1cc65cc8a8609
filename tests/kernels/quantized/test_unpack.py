"""The assembly that unpacks quantized numbers, executed instruction by instruction over all numbers there are."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch.testing import assert_close

from manta.kernels.quantized import unpack
from manta.kernels.quantized.layout import FP8_DTYPE

Registers = dict[str, torch.Tensor]
"""32-bit words as int64 [numbers]."""
WORD = 0xFFFFFFFF


def halves(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[numbers, 2], the lower half first."""
    return torch.stack((words & 0xFFFF, words >> 16), 1).to(torch.uint16).view(dtype)


def joined(pairs: torch.Tensor) -> torch.Tensor:
    bits = pairs.contiguous().view(torch.uint16).long()
    return bits[:, 0] | bits[:, 1] << 16


def permuted(first: torch.Tensor, second: torch.Tensor, selector: int) -> torch.Tensor:
    """PTX's prmt: byte i of the result is byte (selector >> 4 i) & 7 of second:first."""
    source = [first >> 8 * i & 0xFF for i in range(4)] + [second >> 8 * i & 0xFF for i in range(4)]
    result = torch.zeros_like(first)
    for i in range(4):
        result |= source[selector >> 4 * i & 7] << 8 * i
    return result


def fused(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """a b + c of pairs, rounded once."""
    wide = halves(a, dtype).double() * halves(b, dtype).double() + halves(c, dtype).double()
    return joined(wide.to(dtype))


def and_or(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    assert int(table[0]) == 0xEA
    return a & b | c


ONES = torch.tensor([0x3C003C00])
INSTRUCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "mov.b32": lambda a: a,
    "shr.u32": lambda a, count: a >> count,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "lop3.b32": and_or,
    "prmt.b32": lambda a, b, selector: permuted(a, b, int(selector[0])),
    "fma.rn.bf16x2": lambda a, b, c: fused(a, b, c, torch.bfloat16),
    "add.rn.f16x2": lambda a, b: fused(a, ONES.expand_as(a), b, torch.float16),
    "sub.rn.f16x2": lambda a, b: fused(a, ONES.expand_as(a), b ^ 0x80008000, torch.float16),
}


def execute(assembly: str, outputs: int, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Results $0, $1, ... for 32-bit words in the operands behind them."""
    registers: Registers = {f"${outputs + index}": words for index, words in enumerate(inputs)}
    body = re.sub(r"\.reg \.b32 [^;]*;", "", assembly.strip("{} "))
    for line in filter(None, (line.strip() for line in body.split(";"))):
        name, _, operands = line.partition(" ")
        target, *sources = (operand.strip() for operand in operands.split(","))
        values = [
            registers[source] if source in registers else torch.full_like(inputs[0], int(source, 0))
            for source in sources
        ]
        registers[target] = INSTRUCTIONS[name](*values) & WORD
    return [registers[f"${index}"] for index in range(outputs)]


def asm(function: object, *arguments: object) -> str:
    return str(getattr(function, "fn", function)(*arguments))  # pyright: ignore[reportCallIssue]


DTYPES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("nibble", range(4))
def test_nibbles_become_numbers(nibble: int, dtype: torch.dtype) -> None:
    low = torch.arange(1 << 16)
    words = low | low.flip(0) << 16
    (result,) = execute(asm(unpack._int4_asm, nibble, dtype == torch.bfloat16), 1, words)
    both = torch.stack((low, low.flip(0)), 1)
    assert_close(halves(result, dtype), ((both >> 4 * nibble & 15) - 8).to(dtype), rtol=0, atol=0)


def all_bytes() -> tuple[torch.Tensor, torch.Tensor]:
    """Words of four bytes, every byte in every place, and the bytes [words, 4]."""
    each = torch.arange(256)
    four = torch.stack([each.roll(shift) for shift in (0, 37, 101, 190)], 1)
    return (four << torch.tensor([0, 8, 16, 24])).sum(1), four.to(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_become_numbers(dtype: torch.dtype) -> None:
    words, four = all_bytes()
    results = execute(asm(unpack._int8_asm, dtype == torch.bfloat16), 2, words)
    actual = torch.cat([halves(result, dtype) for result in results], 1)
    assert_close(actual, four.view(torch.int8).to(dtype), rtol=0, atol=0)


def test_e4m3_becomes_bfloat16() -> None:
    words, four = all_bytes()
    results = execute(asm(unpack._fp8_asm), 2, words)
    actual = torch.cat([halves(result, torch.bfloat16) for result in results], 1)
    expected = four.view(FP8_DTYPE).bfloat16()
    is_number = ~expected.isnan()  # 127 and 255 alone are none
    assert int(is_number.sum()) == 4 * 254
    assert_close(actual[is_number], expected[is_number], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zero_points_are_subtracted(dtype: torch.dtype) -> None:
    values, zeros = torch.arange(-8, 8).repeat(16), torch.arange(-8, 8).repeat_interleave(16)

    def pairs(numbers: torch.Tensor) -> torch.Tensor:
        return joined(numbers.view(-1, 2).to(dtype))

    (result,) = execute(asm(unpack._subtract_asm, dtype == torch.bfloat16), 1, pairs(values), pairs(zeros))
    assert_close(halves(result, dtype).flatten(), (values - zeros).to(dtype), rtol=0, atol=0)

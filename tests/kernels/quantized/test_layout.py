"""The layouts of quantized weights: what is packed is unpacked, and what the numbers stand for."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from manta.kernels.quantized.layout import (
    FP8_DTYPE,
    Format,
    QuantizedWeight,
    dequantize,
    num_words,
    pack_int4,
    plane_size,
    scales_of_blocks,
    scales_per_row,
    uniform_rows_of,
    unpack_int4,
)

SIZES = [(4096, 128), (4096, 32), (4096, 64), (576, 64), (576, 576), (192, 32), (100, 100), (80, 32), (1536, 128)]


@pytest.mark.parametrize(("in_features", "group"), SIZES)
def test_unpacking_gives_what_was_packed(in_features: int, group: int) -> None:
    values = torch.randint(16, (5, in_features), dtype=torch.uint8)
    packed = pack_int4(values, group)
    assert packed.dtype == torch.int16
    assert packed.shape == (5, num_words(in_features, group))
    assert_close(unpack_int4(packed, in_features, group), values, rtol=0, atol=0)


def test_nibbles_lie_in_planes() -> None:
    values = torch.zeros(1, 512, dtype=torch.uint8)
    values[0, 256 + 2 * 64 + 5] = 9
    packed = pack_int4(values, 128)
    assert packed.nonzero().tolist() == [[0, 64 + 5]]
    assert packed[0, 64 + 5] == 9 << 8


def test_planes_are_as_long_as_groups_and_padding_allow() -> None:
    assert plane_size(4096, 128) == 64
    assert plane_size(4096, 32) == 32
    assert plane_size(576, 64) == 16, "no padding: 576 is 9 blocks of 64"
    assert plane_size(100, 100) == 16
    with pytest.raises(ValueError, match="groups of 24"):
        plane_size(4096, 24)


def test_a_number_is_its_distance_from_the_zero_point_in_steps_of_its_groups_scale() -> None:
    values = torch.randint(16, (3, 256), dtype=torch.uint8)
    scales, zeros = torch.rand(2, 3), torch.randint(16, (2, 3)).float()
    weight = QuantizedWeight(Format.INT4, pack_int4(values, 128), scales, 256, 128, zeros)
    expected = (values[2, 130].float() - zeros[1, 2]) * scales[1, 2]
    assert_close(dequantize(weight)[2, 130], expected)
    symmetric = QuantizedWeight(Format.INT4, pack_int4(values, 128), scales, 256, 128)
    assert_close(dequantize(symmetric)[2, 130], (values[2, 130].float() - 8) * scales[1, 2])


def test_columns_return_to_the_inputs_order() -> None:
    original = torch.randint(-128, 128, (4, 64), dtype=torch.int8)
    order = torch.randperm(64)
    scales = scales_per_row(torch.tensor(1.0), 4)
    weight = QuantizedWeight(Format.INT8, original[:, order].contiguous(), scales, 64, 64, order=order)
    assert_close(dequantize(weight), original.float())


def test_blocks_share_a_scale() -> None:
    blocks = torch.rand(2, 3)
    numbers = torch.ones(200, 384).to(FP8_DTYPE)
    weight = QuantizedWeight(Format.FP8, numbers, scales_of_blocks(blocks, 200), 384, 128)
    wide = dequantize(weight)
    assert_close(wide[127, 300], blocks[0, 2])
    assert_close(wide[128, 0], blocks[1, 0])


def test_what_does_not_fit_is_refused() -> None:
    numbers, scales = torch.zeros(4, 64, dtype=torch.int8), torch.ones(1, 4)
    with pytest.raises(ValueError, match="int8 weight"):
        QuantizedWeight(Format.INT8, numbers.float(), scales, 64, 64)
    with pytest.raises(ValueError, match="scales are"):
        QuantizedWeight(Format.INT8, numbers, scales.t(), 64, 64)
    with pytest.raises(ValueError, match="zero points"):
        QuantizedWeight(Format.FP8, numbers.to(FP8_DTYPE), scales, 64, 64, scales)
    with pytest.raises(ValueError, match="order"):
        QuantizedWeight(Format.INT8, numbers, scales, 64, 64, order=torch.arange(3))


def test_rows_of_blocks_are_uniform_also_when_two_products_are_interleaved() -> None:
    gate, up = (scales_of_blocks(torch.rand(2, 3), 256) for _ in range(2))
    assert uniform_rows_of(gate) == 128
    assert uniform_rows_of(torch.stack((gate, up), 2).flatten(1)) == 128
    assert uniform_rows_of(gate[:, 64:]) == 1
    assert uniform_rows_of(torch.rand(3, 256)) == 1

"""Devices, links and number formats against figures that can be computed by hand."""

import pytest

from manta.engine.errors import ConfigError
from manta.engine.hardware import HARDWARE, Link, all_reduce_s, hardware_named
from manta.engine.precision import PRECISIONS, kv_dtype_named, precision_named


def test_the_table_has_the_gpus_that_are_planned_for():
    assert {"h100", "h200", "a100", "l40s", "b200", "mi300x"} <= set(HARDWARE)


def test_the_h100_reaches_the_stated_share_of_its_data_sheet():
    h100 = hardware_named("h100")
    assert h100.memory_bandwidth / 3.35e12 == pytest.approx(0.94, abs=0.005)
    assert h100.matrix_flops / 989e12 == pytest.approx(0.8, abs=0.005)
    assert h100.flops_of(8) / 1979e12 == pytest.approx(0.8, abs=0.005)


def test_eight_bits_are_multiplied_at_their_own_rate_and_sixteen_at_theirs():
    h100 = hardware_named("h100")
    assert h100.flops_of(8) == h100.matrix_flops_8bit > h100.flops_of(16) == h100.matrix_flops


def test_the_sum_of_a_megabyte_over_four_devices_moves_one_and_a_half_over_each_link():
    link = Link(bytes_per_s=1e9, latency_s=1e-5)
    assert all_reduce_s(1e6, 4, link) == pytest.approx(1e-5 + 1.5e-3)


def test_one_device_has_nothing_to_exchange():
    assert all_reduce_s(1e6, 1, Link(1e9, 1e-5)) == 0.0


def test_fp8_gains_nothing_where_it_is_not_multiplied():
    assert PRECISIONS["fp8"].misfit(hardware_named("a100")) == "a100 multiplies no FP8 numbers"
    assert PRECISIONS["int8"].misfit(hardware_named("a100")) is None
    assert PRECISIONS["bf16"].misfit(hardware_named("a100")) is None


def test_unknown_formats_are_refused_with_those_that_are_known():
    with pytest.raises(ConfigError, match="bf16, fp8, int8, int4"):
        precision_named("fp3")
    with pytest.raises(ConfigError, match="bf16, fp8, int8"):
        kv_dtype_named("int2")

"""The step-time model against figures that were measured or can be computed by hand."""

import pytest

from manta.engine.errors import ConfigError
from manta.engine.step_time import StepShape, StepTimeModel, hardware_named, hardware_of
from tests.shapes import LLAMA_8B


@pytest.fixture
def model() -> StepTimeModel:
    return StepTimeModel(LLAMA_8B, hardware_named("h200"))


def test_weights_and_cache_of_llama_8b_have_their_known_sizes(model: StepTimeModel):
    assert LLAMA_8B.num_parameters == pytest.approx(8.03e9, rel=0.01)
    assert model.weight_bytes == pytest.approx(15.0e9, rel=0.01)
    assert model.kv_bytes_per_token == 128 * 1024


@pytest.mark.parametrize(
    ("step", "measured_s"),
    [
        (StepShape(num_decode_seqs=1, num_decode_context_tokens=1024), 4.12e-3),
        (StepShape(num_decode_seqs=64, num_decode_context_tokens=64 * 576), 5.89e-3),
        (StepShape(num_prefill_tokens=8192, num_prefill_pairs=8192 * 8193 // 2), 191e-3),
    ],
    ids=["batch 1", "batch 64", "prefill 8192"],
)
def test_predictions_are_near_what_an_h200_does(model: StepTimeModel, step: StepShape, measured_s: float):
    assert model.predict(step) == pytest.approx(measured_s, rel=0.25)


def test_an_empty_step_takes_no_time(model: StepTimeModel):
    assert model.predict(StepShape()) == 0.0


def test_unknown_hardware_is_refused_with_what_is_known():
    with pytest.raises(ConfigError, match="h200"):
        hardware_named("abacus")


def test_the_floor_is_the_bytes_at_batch_1_and_the_operations_in_a_prefill(model: StepTimeModel):
    decode = StepShape(num_decode_seqs=1, num_decode_context_tokens=1000)
    assert model.floor(decode) == pytest.approx((15.0e9 + 1000 * 131_072) / 4.53e12, rel=2e-3)
    prefill = StepShape(num_prefill_tokens=8192, num_prefill_pairs=8192 * 8193 // 2)
    # One row leaves the last layer whole, the others end there with their keys and values.
    layer, keys_and_values = 4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336, 2 * 4096 * 1024
    linears_s = 2 * (8192 * 31 * layer + 8191 * keys_and_values + layer) / 792e12
    head_s, attention_s = 4096 * 128256 * 2 / 4.53e12, 4 * 31 * 4096 * 8192 * 8193 / 2 / 792e12
    assert model.floor(prefill) == pytest.approx(linears_s + head_s + attention_s, rel=1e-3)
    assert model.floor(StepShape()) == 0.0


def test_nothing_is_predicted_to_be_faster_than_the_floor(model: StepTimeModel):
    for step in (
        StepShape(num_decode_seqs=1, num_decode_context_tokens=1),
        StepShape(num_decode_seqs=1024, num_decode_context_tokens=1024 * 600),
        StepShape(num_prefill_tokens=100, num_decode_seqs=7, num_decode_context_tokens=70, num_prefill_pairs=5050),
    ):
        assert model.predict(step) > model.floor(step) > 0


def test_peaks_are_found_by_the_device_s_name():
    assert hardware_of("NVIDIA H200") == hardware_of("sim:h200")
    assert hardware_of("NVIDIA A100-SXM4-80GB") is not None
    assert hardware_of("cpu") is None
    assert hardware_of("sim:20ms") is None

"""Step times of split and quantized models: bytes, rates, exchanges and pipelines by hand; how shares are fitted."""

import json
from pathlib import Path

import pytest

from manta.bench.step_errors import read_measured, tables_of
from manta.engine.hardware import hardware_named
from manta.engine.step_fit import errors, fit_shares
from manta.engine.step_profile import StepPoint
from manta.engine.step_time import H200_SHARES, Shares, StepShape, StepTimeModel
from tests.engine.test_step_time import LLAMA_8B

H100 = hardware_named("h100")
DECODE = StepShape(num_decode_seqs=8, num_decode_context_tokens=8000)
PREFILL = StepShape(num_prefill_tokens=8192, num_prefill_pairs=8192 * 8193 // 2)
REPORT = Path(__file__).parents[2] / "bench/results/h200/engine-llama8b-bf16.json"


def model(**options: object) -> StepTimeModel:
    return StepTimeModel(LLAMA_8B, H100, **options)  # type: ignore[arg-type]


def test_eight_bit_weights_halve_the_layers_bytes_and_leave_embedding_and_head():
    whole, half = model(), model(weight_bits=8.0)
    head = 2 * 128256 * 4096
    assert half.weight_bytes - head == pytest.approx((whole.weight_bytes - head) / 2)
    assert half.resident_bytes - half.weight_bytes == head


def test_eight_bit_products_take_the_time_of_their_rate():
    seconds = [one.terms(PREFILL).compute_s for one in (model(), model(weight_bits=8.0, activation_bits=8))]
    assert seconds[0] / seconds[1] == pytest.approx(1583 / 790)


def test_four_bit_weights_are_multiplied_at_sixteen_bits():
    assert model(weight_bits=4.125).terms(PREFILL).compute_s == model().terms(PREFILL).compute_s


@pytest.mark.parametrize("kv_dtype", ["fp8", "int8"])
def test_an_eight_bit_cache_has_a_byte_an_element_and_a_scale_a_head(kv_dtype: str):
    assert model(kv_dtype=kv_dtype).kv_bytes_per_token == model().kv_bytes_per_token / 2 * (1 + 4 / 128)
    seconds = [one.terms(DECODE).context_s for one in (model(kv_dtype=kv_dtype), model())]
    assert seconds[0] == pytest.approx(seconds[1] / 2 * (1 + 4 / 128))


def test_two_ranks_share_bytes_and_exchange_two_sums_a_layer():
    one, two = model().terms(DECODE), model(tp=2).terms(DECODE)
    assert two.weights_s == one.weights_s / 2
    assert two.context_s == one.context_s / 2
    sums_s = 2 * 32 * (8e-6 + 8 * 4096 * 2 / 360e9)  # each of a ring of two sends its bytes once
    assert two.communication_s == pytest.approx(sums_s)
    assert one.communication_s == 0.0


def test_what_is_predicted_is_the_sum_of_its_terms():
    for one in (
        model(),
        model(tp=4, pp=2, weight_bits=8.0, activation_bits=8),
        model(shares=Shares(0.8, 0.7, 0.6, 1e-3)),
    ):
        for step in (DECODE, PREFILL, StepShape(100, 7, 70, 5050)):
            assert one.predict(step) == pytest.approx(one.terms(step).total_s)


def test_a_lone_step_gains_nothing_from_stages_and_a_full_pipeline_does():
    one, two = model(), model(pp=2)
    hop_s = 8e-6 + 8192 * 4096 * 2 / 360e9
    assert two.predict(PREFILL) == pytest.approx(one.predict(PREFILL) + hop_s)
    assert two.predict_full(PREFILL) < 0.55 * one.predict(PREFILL)
    assert one.predict_full(PREFILL) == one.predict(PREFILL)


def test_stages_read_all_weights_once_a_round():
    assert model(pp=2).predict_full(DECODE) > model().terms(DECODE).weights_s


def test_fitted_shares_are_those_that_the_points_were_made_with():
    true = model(shares=Shares(matrices=0.8, attention=0.5, context=0.7, overhead_s=1e-3))
    steps = [StepShape(0, n, n * c, 0) for n in (1, 16, 256) for c in (128, 2048)]
    steps += [StepShape(t, 0, 0, t * c + t * (t + 1) // 2) for t in (512, 2048, 8192) for c in (0, 8192)]
    points = [
        StepPoint(
            s.num_prefill_tokens, s.num_decode_seqs, s.num_decode_context_tokens, s.num_prefill_pairs, true.predict(s)
        )
        for s in steps
    ]
    found = fit_shares(model(), points)
    assert (found.matrices, found.attention, found.context) == pytest.approx((0.8, 0.5, 0.7), rel=0.01)
    assert found.overhead_s == pytest.approx(1e-3, rel=0.02)
    assert errors(model(shares=found).predict, points).max_percent < 1.0


def test_the_h200_s_shares_are_those_that_its_report_gives():
    measured = read_measured(REPORT, LLAMA_8B)
    found = fit_shares(measured.model(), measured.points)
    assert (found.matrices, found.attention, found.context) == pytest.approx(
        (H200_SHARES.matrices, H200_SHARES.attention, H200_SHARES.context), abs=0.006
    )
    assert found.overhead_s == pytest.approx(H200_SHARES.overhead_s, abs=1e-5)


def test_steps_on_the_h200_that_were_not_fitted_to_are_predicted_within_ten_percent():
    tables = tables_of(read_measured(REPORT, LLAMA_8B))
    assert tables["fitted"].median_percent < 10.0 < tables["peaks"].median_percent
    assert len(tables["fitted"].rows) == len(json.loads(REPORT.read_text())["workload"]["batch_sizes"]) + 4

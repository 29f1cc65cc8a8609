"""Step times from measured points: exact there, monotone between, continued by the roofline beyond."""

from __future__ import annotations

import itertools
import pickle
import random
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from manta.engine.errors import ConfigError
from manta.engine.step_profile import (
    StepPoint,
    StepProfile,
    Surface,
    find_profile,
    model_sizes,
    read_profile,
)
from manta.engine.step_time import StepShape, StepTimeModel, hardware_named
from tests.engine.test_step_time import LLAMA_8B

H200 = hardware_named("h200")


def true_s(step: StepShape) -> float:
    """A device that reaches less than its peaks: attention at 0.8 of the bandwidth and 0.6 of the rate."""
    num_tokens = step.num_prefill_tokens + step.num_decode_seqs
    matrices_s = 3.9e-3 + num_tokens * 20e-6
    return matrices_s + step.num_decode_context_tokens * 36e-9 + step.num_prefill_pairs * 1.1e-9


def point(step: StepShape) -> StepPoint:
    sizes = (step.num_prefill_tokens, step.num_decode_seqs, step.num_decode_context_tokens, step.num_prefill_pairs)
    return StepPoint(*sizes, true_s(step))


def decode(num_seqs: int, context: int) -> StepShape:
    return StepShape(num_decode_seqs=num_seqs, num_decode_context_tokens=num_seqs * context)


def prefill(num_tokens: int, context: int) -> StepShape:
    pairs = num_tokens * context + num_tokens * (num_tokens + 1) // 2
    return StepShape(num_prefill_tokens=num_tokens, num_prefill_pairs=pairs)


@pytest.fixture
def profile() -> StepProfile:
    return StepProfile(
        gpu="h200",
        model=model_sizes(LLAMA_8B),
        dtype="bfloat16",
        decode=[point(decode(n, c)) for n, c in itertools.product((1, 16, 64, 256), (128, 1024, 4096))],
        prefill=[point(prefill(t, c)) for t, c in itertools.product((64, 512, 2048, 8192), (0, 4096))],
        held_out=[point(decode(100, 700)), point(prefill(3000, 1000))],
    )


@pytest.fixture
def model(profile: StepProfile) -> StepTimeModel:
    return StepTimeModel(LLAMA_8B, H200, profile=profile)


def test_measured_points_come_out_as_they_were_measured(model: StepTimeModel, profile: StepProfile):
    assert model.is_measured
    for measured in (*profile.decode, *profile.prefill):
        assert model.predict(StepShape.of_point(measured)) == pytest.approx(measured.seconds)
    assert model.predict(StepShape()) == 0.0


def test_a_model_with_a_profile_can_go_to_another_process(model: StepTimeModel):
    step = StepShape(500, 1500, 700_000, 200_000)
    assert pickle.loads(pickle.dumps(model)).predict(step) == model.predict(step)


@pytest.mark.parametrize(
    "step",
    [
        decode(100, 700),
        decode(8, 3000),
        prefill(3000, 1000),
        StepShape(num_prefill_tokens=8000, num_prefill_pairs=40 * 200 * 201 // 2),  # 40 short prompts
        replace(prefill(1000, 0), num_decode_seqs=200, num_decode_context_tokens=200 * 600),
        replace(prefill(7900, 0), num_decode_seqs=256, num_decode_context_tokens=256 * 900),
    ],
    ids=["decode", "few decodes", "prefill", "short prompts", "mixed", "full mixed"],
)
def test_steps_between_the_points_are_near_the_truth_where_the_roofline_is_not(model: StepTimeModel, step: StepShape):
    assert model.predict(step) == pytest.approx(true_s(step), rel=0.04)
    assert StepTimeModel(LLAMA_8B, H200).predict(step) < 0.9 * true_s(step)


def test_more_work_never_takes_less_time(profile: StepProfile):
    rng = random.Random(0)
    noisy = [msgspec.structs.replace(p, seconds=p.seconds * rng.uniform(0.8, 1.2)) for p in profile.decode]
    model = StepTimeModel(
        LLAMA_8B,
        H200,
        profile=StepProfile(gpu="h200", model=profile.model, dtype="bfloat16", decode=noisy, prefill=profile.prefill),
    )
    seqs, contexts = (1, 5, 16, 40, 64, 130, 256, 300, 1000), (0, 100, 1000, 16_000, 100_000, 2_000_000)
    times = {(n, c): model.predict(StepShape(0, n, c)) for n in seqs for c in contexts}
    for n, c in times:
        assert all(times[n, c] <= times[m, d] for m, d in times if m >= n and d >= c)
    tokens = [model.predict(StepShape(t, 50, 30_000, 10_000)) for t in range(1, 20_000, 97)]
    assert tokens == sorted(tokens)


def test_beyond_the_points_the_roofline_goes_on(model: StepTimeModel):
    roofline = StepTimeModel(LLAMA_8B, H200)
    inside, outside = decode(256, 4096), decode(1024, 8192)
    assert model.predict(outside) - model.predict(inside) == pytest.approx(
        roofline.predict(outside) - roofline.predict(inside), rel=1e-6
    )
    inside, outside = prefill(8192, 4096), prefill(32768, 4096)
    assert model.predict(outside) - model.predict(inside) == pytest.approx(
        roofline.predict(outside) - roofline.predict(inside), rel=1e-6
    )


def test_a_surface_of_one_point_follows_the_model_alone():
    surface = Surface([(4, 10, 1.0)], seconds_per_work=0.01, seconds_of_x=lambda x: 0.1 * x)
    assert surface.at(4, 10) == pytest.approx(1.0)
    assert surface.at(4, 20) == pytest.approx(1.1)
    assert surface.at(6, 10) == pytest.approx(1.2)
    assert surface.at(2, 0) == pytest.approx(0.7)
    assert surface.at(0, -1000) == 0.0


def test_profiles_are_found_by_gpu_model_and_dtype(tmp_path: Path, profile: StepProfile):
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "llama.json").write_bytes(msgspec.json.encode(profile))
    assert read_profile(tmp_path / "h200" / "llama.json") == profile
    folders = [tmp_path / "missing", tmp_path]
    assert find_profile(LLAMA_8B, dtype="bfloat16", gpu="h200", folders=folders) == profile
    assert find_profile(replace(LLAMA_8B, num_layers=3), dtype="bfloat16", gpu="h200", folders=folders) is None
    assert find_profile(LLAMA_8B, dtype="float16", gpu="h200", folders=folders) is None
    assert find_profile(LLAMA_8B, dtype="bfloat16", gpu="a100", folders=folders) is None
    assert StepTimeModel.known(LLAMA_8B, H200, profile_folders=folders).is_measured
    assert not StepTimeModel.known(replace(LLAMA_8B, num_layers=3), H200, profile_folders=folders).is_measured


def test_a_file_that_is_no_profile_is_told(tmp_path: Path):
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "broken.json").write_text('{"gpu": 7}')
    with pytest.raises(ConfigError, match=r"broken.json is no step-time profile .*manta profile"):
        StepTimeModel.known(LLAMA_8B, H200, profile_folders=[tmp_path])

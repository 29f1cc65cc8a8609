"""Where a step's time went: from literal intervals, and the traced stretches on a simulated device."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import manta.kernels
from manta.bench.drive import start
from manta.bench.timeline import Kernel, Timeline, idle_gaps, kind_of
from manta.bench.trace import DECODE_STEPS, MIX_STEPS, Scenes, kernel_table, torch_recorder
from manta.deploy.config import load_engine_config
from manta.engine.config import with_overrides
from manta.engine.core import EngineCore
from manta.engine.errors import ConfigError, EngineFailed


def kernels(*intervals: tuple[float, float]) -> list[Kernel]:
    return [Kernel(f"k{index}", start, end) for index, (start, end) in enumerate(intervals)]


@pytest.mark.parametrize(
    ("intervals", "gaps"),
    [
        ([(0, 10)], []),
        ([(0, 10), (10, 20)], []),
        ([(0, 10), (12, 20), (21, 30)], [2, 1]),
        ([(12, 20), (0, 10)], [2]),
        ([(0, 30), (5, 6), (31, 40)], [1]),  # the second runs beside the first
        ([(0, 10), (5, 15), (14, 18), (20, 21)], [2]),
    ],
    ids=["one", "back to back", "gaps", "any order", "inside", "overlapping"],
)
def test_gaps_are_what_no_kernel_covers(intervals: list[tuple[float, float]], gaps: list[float]) -> None:
    assert idle_gaps(kernels(*intervals)) == gaps


def test_a_timeline_adds_up() -> None:
    found = [
        Kernel("decode_attention_kernel", 100, 130),
        Kernel("nvjet_tst_128x64", 131, 191),
        Kernel("nvjet_tst_128x64", 211, 291),
        Kernel("Memcpy DtoH", 280, 290),
    ]
    timeline = Timeline.of(found, num_steps=2)
    assert (timeline.wall_us, timeline.busy_us, timeline.gaps_us) == (191, 170, (1, 20))
    assert timeline.idle_percent == pytest.approx(100 * 21 / 191)
    assert [(share.name, share.count_per_step, share.us_per_step) for share in timeline.kernels] == [
        ("nvjet_tst_128x64", 1, 70),
        ("decode_attention_kernel", 0.5, 15),
        ("Memcpy DtoH", 0.5, 5),
    ]
    assert [share.name for share in timeline.kinds] == ["linear", "attention", "copy"]
    assert sum(share.percent for share in timeline.kinds) == pytest.approx(100)
    figures = timeline.figures("d_")
    assert figures["d_wall_us_per_step"] == 95.5
    assert figures["d_kernels_per_step"] == 2
    assert figures["d_idle_in_long_gaps_percent"] == pytest.approx(100 * 20 / 191)
    gaps = timeline.tree(most_kernels=1)["gaps"]
    assert isinstance(gaps, dict)
    assert (gaps["count"], gaps["long_count"], gaps["longest_us"]) == (2, 1, [20, 1])


def test_kernels_of_one_name_are_one_line_however_many() -> None:
    many = [Kernel(f"kernel_{index}", 2 * index, 2 * index + 1) for index in range(50)]
    assert len(Timeline.of(many, num_steps=1).tree()["kernels"]) == 30  # pyright: ignore[reportArgumentType]
    assert kind_of("kernel_7") == "other"
    assert kind_of("_rms_norm_kernel") == "norm"
    assert kind_of("nvjet_tst_64x8_64x16_4x1_v_bz_TNT") == "linear"
    assert kind_of("void at::native::vectorized_gather_kernel<16, long>") == "inputs"
    assert kind_of("Memcpy HtoD (Pinned -> Device)") == "copy"


class Recorder:
    """Counts the steps that the core launches while it records, each of which is one kernel of 8 us every 10."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.names: list[str] = []

    def __call__(self, name: str, work: Callable[[], None]) -> list[Kernel]:
        self.names.append(name)
        before = self.core.scheduler._step_ids
        first = next(before)
        work()
        count = next(before) - first - 1
        return [Kernel("step", 10.0 * index, 10.0 * index + 8) for index in range(count)]


@pytest.fixture
def core():
    config = with_overrides(
        load_engine_config("sim-h200"), {"device": "sim:1ms", "model.tokenizer": None, "max_num_batched_tokens": 2048}
    )
    core, _ = start(config)
    yield core
    core.close()


def test_exactly_the_steps_of_a_stretch_are_traced(core: EngineCore) -> None:
    recorder = Recorder(core)
    scenes = Scenes(core, recorder)
    decode = scenes.decode(8)  # 8 prompts of 512 tokens take 2 steps
    assert decode.timeline.wall_us == 10 * DECODE_STEPS - 2
    assert decode.untraced_step_us >= 900
    prefill = scenes.prefill(3000)  # 2 steps
    assert prefill.timeline.figures("")["wall_us_per_step"] == 18
    traces = scenes.mix(60)
    assert [trace.timeline.num_steps for trace in traces] == [MIX_STEPS] * 3
    assert [trace.timeline.wall_us for trace in traces] == [10 * MIX_STEPS - 2] * 3
    assert recorder.names == [
        *("decode_batch_8", "prefill_3000"),
        *("d2_at_15_percent", "d2_at_50_percent", "d2_at_80_percent"),
    ]
    assert not core.has_work
    assert kernel_table(decode).row_count == 2


def test_a_workload_that_ends_too_early_is_told(core: EngineCore) -> None:
    with pytest.raises(EngineFailed, match="more requests"):
        Scenes(core, Recorder(core)).mix(1)


def test_without_a_gpu_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="needs a CUDA GPU"):
        torch_recorder()


@pytest.mark.gpu
def test_the_profiler_sees_what_a_gpu_runs() -> None:
    import torch

    record = torch_recorder()
    x = torch.ones(512, 512, device="cuda")

    def work() -> None:
        for _ in range(5):
            torch.mm(x, x)

    found = record("products", work)
    assert len(found) >= 5
    timeline = Timeline.of(found, num_steps=5)
    assert 0 < timeline.busy_us <= timeline.wall_us


def test_every_kernel_of_ours_has_a_kind() -> None:
    folder = Path(manta.kernels.__path__[0])
    names = {
        name for file in folder.rglob("*.py") for name in re.findall(r"^def (\w*kernel)\(", file.read_text(), re.M)
    }
    assert len(names) > 10
    assert {name for name in names if kind_of(name) == "other"} == set()

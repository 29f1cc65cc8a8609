"""`manta plan`: files in, a plan out; a problem is not mistaken for a server, nor a server for a problem."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from manta.deploy import cli
from manta.deploy.config import CONFIGS_DIR, bundled, load_config, read_yaml
from manta.engine.errors import ConfigError

Run = Callable[..., tuple[int, str, str]]

SMALL = f"""
plan:
  model: {CONFIGS_DIR}/llama_3_1_8b/config.json
  workload:
    rate: 10
    prompt: {{median: 500, sigma: 0.5, low: 16, high: 2048}}
    output: {{median: 60, sigma: 0.5, low: 4, high: 400}}
  slo: {{ttft_s: 0.5, tpot_s: 0.05}}
  cluster: {{gpu: h200, gpus_per_node: 2}}
  search: {{tensor_parallel: [1], pipeline_parallel: [1], weights: [bf16], kv: [bf16], pools: [mixed]}}
"""


@pytest.fixture
def manta(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Runs the command in this process; (exit code, stdout, stderr)."""
    monkeypatch.setenv("MANTA_HOME", str(tmp_path / "home"))

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["manta", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        output = capsys.readouterr()
        assert "Traceback" not in output.err
        return int(caught.value.code or 0), output.out, output.err

    return run


@pytest.fixture
def small(tmp_path: Path) -> Path:
    file = tmp_path / "small.yaml"
    file.write_text(SMALL)
    return file


def test_a_plan_is_printed_and_written(manta: Run, small: Path, tmp_path: Path) -> None:
    code, out, _ = manta("plan", "--config", str(small), "--requests", "150", "--json", str(tmp_path / "plan.json"))
    assert code == 0
    assert "1 GPUs: 1 mixed x TP1, bf16 weights, bf16 KV" in out
    tree = json.loads((tmp_path / "plan.json").read_text())
    assert tree["bench"] == "plan"
    assert tree["best"]["num_gpus"] == 1
    for name in ("ttft_p50_s", "ttft_p95_s", "ttft_p99_s", "tpot_p50_s", "tpot_p95_s", "tpot_p99_s", "utilization"):
        assert tree["best"][name] > 0
    assert str(tmp_path) not in json.dumps(tree["best"])
    assert tree["with_fitted_step_times"]["feasible"]


def test_another_rate_can_be_asked_for(manta: Run, small: Path, tmp_path: Path) -> None:
    manta("plan", "--config", str(small), "--rate", "5", "--requests", "150", "--json", str(tmp_path / "plan.json"))
    assert json.loads((tmp_path / "plan.json").read_text())["workload"]["rate"] == 5.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--config", "nowhere.yaml"), "--config nowhere.yaml: there is no such file"),
        (("--config", "{small}", "--rate", "-3"), "plan.workload.rate = -3.0: must be above 0"),
        (("--config", "{small}", "--step-times", "guessed"), "must be of peaks, fitted"),
        (("--config", str(CONFIGS_DIR / "smollm2.yaml")), "has no section `plan`"),
    ],
)
def test_mistakes_get_a_sentence(manta: Run, small: Path, arguments: tuple[str, ...], message: str) -> None:
    code, _, error = manta("plan", *(one.replace("{small}", str(small)) for one in arguments))
    assert code == 2
    assert message in error


def test_a_server_is_not_started_from_a_problem() -> None:
    with pytest.raises(ConfigError, match=r"its section `plan` is for `manta plan --config reference-70b.yaml`"):
        load_config("reference-70b")
    assert "reference-70b" not in bundled()


def test_the_reference_problem_is_as_stated() -> None:
    plan = read_yaml(CONFIGS_DIR / "reference-70b.yaml")["plan"]
    assert plan["workload"]["rate"] == 45
    assert plan["workload"]["prompt"] == {"median": 1800, "sigma": 0.6, "low": 16, "high": 8192}
    assert plan["workload"]["output"] == {"median": 320, "sigma": 0.7, "low": 4, "high": 2048}
    assert (plan["slo"]["ttft_s"], plan["slo"]["tpot_s"], plan["slo"]["percentile"]) == (0.9, 0.045, 95)
    cluster = plan["cluster"]
    assert (cluster["gpu"], cluster["num_nodes"], cluster["gpus_per_node"]) == ("h100", 2, 8)
    assert cluster["network_gbit_s"] == 400
    assert Path(plan["model"]).is_file()

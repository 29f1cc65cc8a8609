"""`manta simulate`: bundled configurations, what it writes, and what it says to those who ask for the impossible."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from manta.bench.plan_judge import read_plan
from manta.bench.simulation import read_rates, requests_of, scenario_of
from manta.deploy.config import CONFIGS_DIR
from manta.deploy.simulate_cli import simulate_command
from manta.deploy.simulation_config import WorkloadConfig, load_simulation
from manta.engine.errors import ConfigError

BUNDLED = sorted(path.stem for path in CONFIGS_DIR.glob("autoscale-*.yaml"))


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_configurations_make_a_scenario(name: str) -> None:
    config = load_simulation(name, {"duration_s": 30.0})
    scenario = scenario_of(config, rate_scale=1.0)
    assert scenario.requests
    assert scenario.pools[0].gpus_per_replica == 2
    assert scenario.pools[0].kind.room > 300_000


def test_a_run_writes_figures_decisions_and_its_course(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    assert simulate_command(config="autoscale-steady", duration=60.0, scale=[0.1], json=path) == 0
    found = json.loads(path.read_text())
    assert found["figures"]["slo_attainment"] == 1.0
    assert found["scales"][0]["workload"]["rate_scale"] == 0.1
    assert len(found["scales"][0]["samples"]["time_s"]) > 50
    assert found["figures"]["times_real_time"] > 0


def test_a_comparison_has_each_policy_by_name(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    assert simulate_command(config="autoscale-steady", duration=20.0, scale=[0.1], compare=True, json=path) == 0
    policies = json.loads(path.read_text())["policies"]
    assert set(policies) == {"manta", "fixed_peak", "serve_stock", "queue_depth", "oracle"}
    assert all({"slo_attainment", "gpu_hours", "parameters"} <= set(found) for found in policies.values())


def test_hindsight_says_what_known_sizes_standing_fleets_and_the_present_cost_and_attain(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    options = {"duration": 20.0, "scale": [0.1], "compare": True, "hindsight": True, "json": path}
    assert simulate_command(config="autoscale-steady", **options) == 0
    found = json.loads(path.read_text())["scales"][0]["hindsight"]
    assert found["most_gpu_hours"] > 0
    assert all({"window_s", "cheapest", "best"} == set(one) for one in found["windows"])
    assert {"cheapest", "best"} == set(found["standing"])
    assert [one["keep_s"] for one in found["present"]] == [0.0, 40.0, 120.0]
    assert all({"keep_s", "cheapest", "best"} == set(one) for one in found["present"])


def test_hindsight_without_a_comparison_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs --compare"):
        simulate_command(config="autoscale-steady", hindsight=True)


def test_a_course_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "course.png"
    simulate_command(config="autoscale-steady", duration=20.0, scale=[0.1], plot=path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_trace_replaces_the_workload(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("t_s,input_len,output_len\n0,100,10\n2,200,20\n")
    config = load_simulation("autoscale-spike", {"trace": str(trace), "arrivals": "trace", "duration_s": None})
    assert [one.num_prompt_tokens for one in scenario_of(config, rate_scale=1.0).requests] == [100, 200]


def test_blocks_that_a_trace_names_are_kept() -> None:
    workload = WorkloadConfig(trace="mooncake_conversation_5000", duration_s=30.0)
    requests = requests_of(workload, 512, rate_scale=1.0, seed=0)
    assert all(len(one.block_hashes) == one.num_prompt_tokens // 512 for one in requests)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give --plan FILE or --config FILE"),
        ({"config": "autoscale-steady", "plan": Path("x.json")}, "one of them"),
        ({"plan": Path("x.json"), "compare": True}, "belong to --config"),
        ({"config": "autoscale-nothing"}, "bundled ones are autoscale-64-replicas"),
        ({"config": "sim-h200"}, "no section `simulate`"),
        ({"config": "autoscale-steady", "trace": Path("nowhere.csv")}, "there is no trace"),
    ],
)
def test_each_mistake_has_its_sentence(arguments: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate_command(**arguments)


def test_a_model_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "one.yaml"
    text = (CONFIGS_DIR / "autoscale-steady.yaml").read_text().replace("./llama", f"{CONFIGS_DIR}/llama")
    file.write_text(text.replace("tensor_parallel_size: 2, weight_bits: 8", "tensor_parallel_size: 1"))
    with pytest.raises(ConfigError, match="leave no room for KV"):
        scenario_of(load_simulation(str(file), {"duration_s": 10.0}), rate_scale=1.0)


def test_made_up_arrivals_without_a_rate_are_an_error() -> None:
    with pytest.raises(ConfigError, match="need a rate"):
        load_simulation("autoscale-azure-conv", {"arrivals": "poisson"})


def test_a_table_that_lacks_rates_names_the_line(tmp_path: Path) -> None:
    file = tmp_path / "rates.csv"
    file.write_text("t_s,rate\n0,1\n600,\n")
    with pytest.raises(ConfigError, match="line 3"):
        read_rates(file)


def test_what_is_no_plan_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text("{}")
    with pytest.raises(ConfigError, match="is no plan"):
        read_plan(file)

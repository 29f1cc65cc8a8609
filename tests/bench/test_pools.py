"""The pools bench: arrangements, SLOs, where a rate counts as served, and a small run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from manta.autoscaling.simulator.workload import Outcome, SimRequest
from manta.bench.pools import Slo, _crossing, arrangements, run
from manta.deploy.config import load_engine_config
from manta.engine.errors import ConfigError

TIGHT = Slo(0.5, 0.015)


def test_slos_are_pairs_of_seconds() -> None:
    assert Slo.parse("0.5:0.015,5:0.05") == [TIGHT, Slo(5.0, 0.05)]
    with pytest.raises(ConfigError, match="TTFT:TPOT"):
        Slo.parse("0.5")


def test_a_request_keeps_an_slo_with_both_of_its_times() -> None:
    request = SimRequest("a", 1.0, 10, 11)
    assert TIGHT.is_met(Outcome(request, first_token_s=1.5, finished_s=1.65))
    assert not TIGHT.is_met(Outcome(request, first_token_s=1.51, finished_s=1.6))
    assert not TIGHT.is_met(Outcome(request, first_token_s=1.1, finished_s=1.3))
    assert not TIGHT.is_met(Outcome(request, first_token_s=1.1))


def test_arrangements_use_all_gpus() -> None:
    found = list(arrangements(8, [TIGHT, Slo(0.5, 0.05)]))
    assert [one.name for one in found[:3]] == ["colocated", "colocated, steps of 15 ms", "colocated, steps of 50 ms"]
    assert [one.name for one in found[3:5]] == ["1 prefill, 7 decode", "1 prefill, 7 decode, always"]
    assert {len(one.roles) for one in found} == {8}


def test_the_served_rate_lies_between_the_rates_that_were_run() -> None:
    assert _crossing([(0.0, 1.0), (10.0, 0.95), (20.0, 0.85)]) == pytest.approx(15.0)
    assert _crossing([(0.0, 1.0), (10.0, 0.95)]) == 10.0


def test_the_command_reports_goodput_of_both_kinds(tmp_path: Path) -> None:
    path = tmp_path / "pools.json"
    config = load_engine_config("sim-h200")
    run(config, trace="azure2023_code", num_gpus=2, shares=(0.3,), slos=[TIGHT], num_requests=100, json_path=path)
    found = json.loads(path.read_text())
    assert len(found["points"]) == 4
    detours = {point["arrangement"]: point["num_detours"] for point in found["points"]}
    assert detours["colocated"] == 0
    assert detours["1 prefill, 1 decode, always"] > detours["1 prefill, 1 decode"]
    [slo] = found["slos"].values()
    assert set(slo["goodput_per_s"]) == set(slo["served_rate_per_s"]) == {"colocated", "pools"}

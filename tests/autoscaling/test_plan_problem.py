"""Planning problems as people write them: what is read, and what each mistake is answered with."""

from __future__ import annotations

import random
from typing import Any

import pytest

from manta.autoscaling.planner.demand import Demand
from manta.autoscaling.planner.problem import Lengths, problem_from
from manta.engine.errors import ConfigError
from tests.autoscaling.planning import problem, tree


def test_a_problem_is_read_with_its_defaults() -> None:
    found = problem()
    assert found.workload.rate == 20.0
    assert found.slo.percentile == 95.0
    assert found.search.kv == ("bf16", "fp8")
    assert found.cluster.num_gpus == 8


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"workload": {"rate": 0}}, "plan.workload.rate = 0.0: must be above 0"),
        ({"workload": {"rate": None}}, "give requests a second, or a trace"),
        ({"workload": {"prompt": None}}, "plan.workload.prompt is missing"),
        ({"workload": {"trace": "azure2023_conv"}}, "leave out prompt and output"),
        ({"workload": {"prompt": {"median": 9, "sigma": 1, "low": 9, "high": 8}}}, "must be from 1 to high"),
        ({"slo": {"ttft_s": None, "tpot_s": None}}, "give ttft_s, tpot_s or both"),
        ({"slo": {"ttft_s": -1}}, "give seconds above 0"),
        ({"slo": {"ttft": 1}}, "plan.slo.ttft is unknown; known are ttft_s"),
        ({"cluster": {"gpu": "abacus"}}, "no figures for 'abacus'"),
        ({"cluster": {"num_nodes": 0}}, "plan.cluster.num_nodes = 0: must be at least 1"),
        ({"search": {"weights": ["fp3"]}}, "'fp3' is unknown"),
        ({"search": {"tensor_parallel": []}}, "must be numbers of at least 1"),
        ({"search": {"depth": 3}}, "unknown field `depth`"),
    ],
)
def test_each_mistake_is_named(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        problem(**sections)
    assert message in str(caught.value)


def test_a_server_s_configuration_is_no_problem() -> None:
    with pytest.raises(ConfigError, match="has no section `plan`"):
        problem_from({"engine": {}})


def test_a_problem_stands_alone_in_its_file() -> None:
    with pytest.raises(ConfigError, match="has engine beside `plan`"):
        problem_from({"engine": {}, **tree()})


def test_clipped_lengths_have_the_mean_of_their_samples() -> None:
    lengths, rng = Lengths(median=1800, sigma=0.6, low=16, high=8192), random.Random(0)
    drawn = [min(8192, max(16, 1800 * rng.lognormvariate(0.0, 0.6))) for _ in range(40_000)]
    assert lengths.mean == pytest.approx(sum(drawn) / len(drawn), rel=0.01)
    assert lengths.mean_square == pytest.approx(sum(x * x for x in drawn) / len(drawn), rel=0.03)
    assert lengths.quantile(0.5) == pytest.approx(1800)


def test_equal_seeds_draw_equal_requests() -> None:
    one, other, third = (Demand.drawn(problem().workload, 50, random.Random(seed)) for seed in (3, 3, 4))
    assert one == other != third


def test_a_trace_is_squeezed_to_the_rate_that_is_asked_for() -> None:
    demand = Demand.recorded([(10.0, 100, 5), (11.0, 200, 5), (14.0, 300, 5)], rate=1.0)
    assert [one.arrival_s for one in demand.requests] == [0.0, 0.5, 2.0]
    assert demand.num_prompt_tokens == 200


def test_a_trace_without_times_is_refused() -> None:
    with pytest.raises(ConfigError, match="fewer than two requests at different times"):
        Demand.recorded([(1.0, 10, 1), (1.0, 10, 1)], rate=None)

"""Small planning problems of literal sizes."""

from __future__ import annotations

import random
from typing import Any

from manta.autoscaling.planner.demand import Demand
from manta.autoscaling.planner.problem import Problem, problem_from
from manta.autoscaling.planner.search import Plan, Planner
from tests.shapes import LLAMA_8B


def tree(*, rate: float = 20.0, **sections: Any) -> dict[str, Any]:
    """As in a file: Llama 3.1 8B on at most eight H100s."""
    plan: dict[str, Any] = {
        "model": "llama-8b",
        "workload": {
            "rate": rate,
            "prompt": {"median": 1000, "sigma": 0.5, "low": 16, "high": 4096},
            "output": {"median": 150, "sigma": 0.5, "low": 4, "high": 1024},
        },
        "slo": {"ttft_s": 0.5, "tpot_s": 0.03},
        "cluster": {"gpu": "h100", "gpus_per_node": 8},
        "search": {"tensor_parallel": [1, 2], "pipeline_parallel": [1]},
    }
    for name, section in sections.items():
        plan[name] = section if not isinstance(section, dict) else plan[name] | section
    return {"plan": plan}


def problem(**options: Any) -> Problem:
    return problem_from(tree(**options))


def demand_of(asked: Problem, num_requests: int = 250) -> Demand:
    return Demand.drawn(asked.workload, num_requests, random.Random(0))


def plan_of(asked: Problem, num_requests: int = 250) -> Plan:
    return Planner(asked, LLAMA_8B, demand_of(asked, num_requests)).plan()

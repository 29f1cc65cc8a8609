"""Plans really travel: what is reported follows from followers' clocks, near and far."""

from __future__ import annotations

import pytest

from manta.bench.step_plan import _decode_steps, measure, run
from manta.engine.errors import ConfigError


def test_the_steps_are_decodes_of_all_requests_one_token_after_the_other():
    plans = list(_decode_steps(5, 10))
    assert len(plans) >= 10
    assert [[row.start for row in plan.rows] for plan in plans[:3]] == [[100] * 5, [101] * 5, [102] * 5]


def test_every_step_arrives_after_it_was_made_on_this_node_and_on_others():
    costs = measure(num_ranks=3, num_requests=4, num_steps=15, num_nodes=2, step_s=0.0)
    assert len(costs.arrived_us) == len(costs.encode_us) == 15
    assert all(arrived > encode for arrived, encode in zip(costs.arrived_us, costs.encode_us, strict=True))
    assert min(costs.message_bytes) > 4 * 8


def test_one_rank_is_refused():
    with pytest.raises(ConfigError, match="at least 2 ranks"):
        run(num_ranks=1, num_requests=1, num_steps=1)

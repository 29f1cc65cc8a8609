"""The same with three stages, each on a Ray node of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from manta.bench.node_lab import NodeLab
from tests.cluster_nodes.lab import ClusterServed, lab_of
from tests.cluster_nodes.split_cases import FrozenRankCase, Split, SplitCases, serve_split, tokens_of_one_rank

pytestmark = [pytest.mark.cluster, pytest.mark.model, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def one_rank() -> list[list[int]]:
    return tokens_of_one_rank()


@pytest.fixture(scope="module")
def lab() -> Iterator[NodeLab]:
    with lab_of(3) as three:
        yield three


@pytest.fixture(scope="class")
def engine(request: pytest.FixtureRequest, lab: NodeLab) -> Iterator[ClusterServed]:
    assert request.cls is not None
    yield from serve_split(lab, request.cls.split)


class TestPp3(SplitCases, FrozenRankCase):
    split = Split(1, 3)

"""SmolLM2 split over ranks on two Ray nodes, over HTTP: the tokens of one rank. CI runs two of the splits."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from manta.bench.node_lab import NodeLab
from tests.cluster_nodes.lab import PORT, ClusterServed, lab_of
from tests.cluster_nodes.split_cases import FrozenRankCase, Split, SplitCases, serve_split, tokens_of_one_rank
from tests.deploy.test_serve import ROOT, manta

pytestmark = [pytest.mark.cluster, pytest.mark.model, pytest.mark.timeout(400)]


START_SERVE = """
import sys
from manta.deploy.ray_local import join
join(sys.argv[1])
from ray import serve
serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": int(sys.argv[2])})
"""


@pytest.fixture(scope="module")
def one_rank() -> list[list[int]]:
    return tokens_of_one_rank()


@pytest.fixture(scope="module")
def lab() -> Iterator[NodeLab]:
    with lab_of(2) as two:
        yield two


@pytest.fixture(scope="class")
def engine(request: pytest.FixtureRequest, lab: NodeLab) -> Iterator[ClusterServed]:
    assert request.cls is not None
    yield from serve_split(lab, request.cls.split)


@pytest.mark.ray
class TestTp3(SplitCases):
    split = Split(3, 1)


@pytest.mark.ray
class TestTp2Pp2(SplitCases, FrozenRankCase):
    split = Split(2, 2)


class TestTp2(SplitCases):
    split = Split(2, 1)


class TestPp2(SplitCases, FrozenRankCase):
    split = Split(1, 2)


def test_manta_serve_refuses_a_port_on_which_the_cluster_s_serve_does_not_listen(lab: NodeLab) -> None:
    started = subprocess.run([sys.executable, "-c", START_SERVE, lab.address, str(PORT)], cwd=ROOT, timeout=60)
    assert started.returncode == 0
    done = manta("serve", "sim-h200", "--port", "8001", "--set", f"serving.ray_address={lab.address}")
    assert done.returncode == 1
    assert f"listens at 127.0.0.1:{PORT}: use --host 127.0.0.1 --port {PORT}" in done.stderr

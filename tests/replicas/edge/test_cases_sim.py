"""The API's cases on the simulated device: random single-byte tokens, so characters are cut and broken all the time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.replicas.edge.cases import ApiCases
from tests.replicas.edge.local_server import local_server, sim_config, write_byte_model
from tests.replicas.edge.server import Server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = write_byte_model(tmp_path_factory.mktemp("bytes"))
    with local_server(sim_config(folder)) as local:
        yield local.server
        local.core.scheduler.check()


class TestSimulated(ApiCases):
    num_dropped = 160

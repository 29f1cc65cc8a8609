"""A short run of `manta chaos` on a real Ray: a rank is killed and a replica drained, and no client notices."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.ray
@pytest.mark.model
@pytest.mark.timeout(300)
def test_nobody_notices_that_a_rank_is_killed_and_a_replica_drained(tmp_path: Path) -> None:
    file = tmp_path / "chaos.json"
    command = [sys.executable, "-m", "manta", "chaos", "--minutes", "0.1", "--seed", "1", "--json", str(file)]
    command += ["--faults", "kill_rank,drain_replica", "--replicas", "2", "--set", "device=sim:10ms"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(file.read_text())
    assert report["faults"] == {"kill_rank": 1, "drain_replica": 1}
    assert report["requests"] > 20
    assert report["moved_requests"] > 0
    names = ("failed_requests", "altered_outputs", "leaked_blocks", "leaked_actors", "leaked_placement_groups")
    assert {name: report[name] for name in names} == dict.fromkeys(names, 0)
    assert report["by_kind"]["kill_rank"]["worst_out_of_routing_s"] < 5.0

"""A short run of `manta chaos --pools`: every fault once on simulated engines, and no client notices."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from manta.deploy.chaos_cli import POOL_KINDS

ROOT = Path(__file__).parents[2]


@pytest.mark.model
@pytest.mark.timeout(300)
def test_nobody_notices_what_is_done_to_two_pools_and_their_link(tmp_path: Path) -> None:
    file = tmp_path / "chaos.json"
    command = [sys.executable, "-m", "manta", "chaos", "--pools", "1x1", "--minutes", "0.1", "--seed", "1"]
    command += ["--streams", "4", "--max-tokens", "40", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(file.read_text())
    assert set(report["faults"]) == set(POOL_KINDS)
    assert all(fault["recovered_s"] is not None for fault in report["fault_log"])
    assert report["requests"] > 50
    assert report["transfers"] > 20
    assert (report["failed_requests"], report["altered_outputs"], report["problems"]) == (0, 0, [])
    nothing = {"blocks": 0, "leases": 0, "running": 0}
    assert report["left"] == {"prefill": nothing, "decode": nothing}


def test_what_cannot_be_is_said() -> None:
    for arguments, message in (
        (["--pools", "two"], "--pools two: write how many engines of each, as 2x2"),
        (["--pools", "1x1", "--faults", "kill_rank"], "--faults kill_rank: with --pools there are kill_prefill"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "manta", "chaos", *arguments], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 2
        assert message in done.stderr

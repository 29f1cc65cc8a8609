"""Step-time profiles that were recorded on this machine are found without a setting."""

from __future__ import annotations

from pathlib import Path

from manta.deploy.checks import locate_profiles
from manta.deploy.config import DeployConfig
from manta.deploy.settings import Settings
from manta.engine.config import with_overrides


def test_profiles_of_this_machine_are_named_when_there_are_any(tmp_path: Path) -> None:
    config, folder = DeployConfig(), Settings.from_environment({"MANTA_HOME": str(tmp_path)}).profiles_dir
    assert folder == tmp_path / "profiles"
    assert locate_profiles(config, folder) == config
    folder.mkdir()
    assert locate_profiles(config, folder).engine.scheduler.step_profiles == str(folder)
    chosen = with_overrides(config, {"step_profiles": "elsewhere"})
    assert locate_profiles(chosen, folder) == chosen

"""The environment, as Settings sees it."""

from __future__ import annotations

from pathlib import Path

import pytest

from manta.deploy.settings import DEFAULT_URL, Settings, ray_authentication
from manta.engine.errors import ConfigError


def test_defaults() -> None:
    settings = Settings.from_environment({})
    assert settings.home == Path("~/.cache/manta").expanduser()
    assert settings.models_dir == settings.home / "models"
    assert settings.url == DEFAULT_URL
    assert settings.api_key is None


def test_every_variable_is_read(tmp_path: Path) -> None:
    settings = Settings.from_environment(
        {"MANTA_HOME": str(tmp_path), "MANTA_API_KEY": "k", "MANTA_URL": "http://example.test:9/"}
    )
    assert settings == Settings(home=tmp_path, url="http://example.test:9", api_key="k")
    assert "'k'" not in repr(settings)


def test_empty_counts_as_absent() -> None:
    empty = {"MANTA_HOME": "", "MANTA_API_KEY": "", "MANTA_URL": ""}
    assert Settings.from_environment(empty) == Settings.from_environment({})


def test_wrong_values_are_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match="MANTA_HOME"):
        Settings.from_environment({"MANTA_HOME": str(file)})
    with pytest.raises(ConfigError, match="MANTA_URL"):
        Settings.from_environment({"MANTA_URL": "localhost:8000"})


def test_a_token_is_shown_to_ray_unless_the_user_decided_otherwise(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("secret")
    named = {"RAY_AUTH_TOKEN_PATH": str(file)}
    assert ray_authentication(named) == {"RAY_AUTH_MODE": "token"}
    assert ray_authentication({**named, "RAY_AUTH_MODE": "disabled"}) == {}
    assert ray_authentication({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "missing")}) == {}

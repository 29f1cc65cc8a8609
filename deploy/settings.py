"""The only reader and writer of the process environment. Knows no configuration file and no Ray.

Variables of Manta:

- `MANTA_HOME`: folder for models, logs and profiles; default `~/.cache/manta`.
- `MANTA_API_KEY`: the key that `manta serve` asks for and that `manta chat` and `manta status` send.
- `MANTA_URL`: the server that `manta chat` and `manta status` talk to; default `http://127.0.0.1:8000`.
- `MANTA_GRAFANA_TOKEN`: the token of a Grafana service account, for `manta dashboards`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from manta.engine.errors import ConfigError

DEFAULT_URL = "http://127.0.0.1:8000"
RAY_TOKEN_FILE = Path("~/.ray/auth_token")
"""Where Ray looks for its token when RAY_AUTH_TOKEN and RAY_AUTH_TOKEN_PATH are not set."""


@dataclass(frozen=True)
class Settings:
    """What the environment says."""

    home: Path
    url: str = DEFAULT_URL
    api_key: str | None = field(default=None, repr=False)
    grafana_token: str | None = field(default=None, repr=False)

    @property
    def models_dir(self) -> Path:
        return self.home / "models"

    @property
    def logs_dir(self) -> Path:
        return self.home / "logs"

    @property
    def profiles_dir(self) -> Path:
        """Step-time profiles that were recorded here."""
        return self.home / "profiles"

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Read the variables above; an empty one counts as absent. Raises ConfigError."""
        environ = os.environ if environ is None else environ
        home = Path(environ.get("MANTA_HOME") or "~/.cache/manta").expanduser().absolute()
        if home.exists() and not home.is_dir():
            raise ConfigError(f"MANTA_HOME = {str(home)!r} is not a folder", field="MANTA_HOME")
        url = (environ.get("MANTA_URL") or DEFAULT_URL).rstrip("/")
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"MANTA_URL = {url!r} must start with http:// or https://", field="MANTA_URL")
        return cls(
            home=home,
            url=url,
            api_key=environ.get("MANTA_API_KEY") or None,
            grafana_token=environ.get("MANTA_GRAFANA_TOKEN") or None,
        )


def ray_token_file(environ: Mapping[str, str] | None = None) -> Path:
    """Where Ray looks for its token, unless RAY_AUTH_TOKEN holds it."""
    environ = os.environ if environ is None else environ
    path = environ.get("RAY_AUTH_TOKEN_PATH")
    return (Path(path) if path else RAY_TOKEN_FILE).expanduser()


def has_ray_token(environ: Mapping[str, str] | None = None) -> bool:
    """Whether there is a token by which this machine's processes join a Ray that asks for one."""
    environ = os.environ if environ is None else environ
    return bool(environ.get("RAY_AUTH_TOKEN")) or ray_token_file(environ).is_file()


def ray_authentication(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """What makes this process show its token to the Ray that it joins: Ray itself does so only when it is told."""
    environ = os.environ if environ is None else environ
    return {"RAY_AUTH_MODE": "token"} if "RAY_AUTH_MODE" not in environ and has_ray_token(environ) else {}


def export(variables: Mapping[str, str]) -> None:
    """Set variables for this process and the processes that it starts."""
    os.environ.update(variables)


def with_defaults(defaults: Mapping[str, str]) -> dict[str, str]:
    """A copy of the environment over `defaults`, for a child process: what the user has set stays."""
    return {**defaults, **os.environ}


def inherited(extra: Mapping[str, str]) -> dict[str, str]:
    """A copy of the environment with `extra` on top, for a child process."""
    return {**os.environ, **extra}

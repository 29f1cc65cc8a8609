"""Configuration of a deployment: one engine's configuration plus how it is served. Knows no environment and no Ray.

`load_config` turns what a user typed (a model's name, path, Hugging Face id, GGUF file or a YAML file) and his
`--set name=value` overrides into a DeployConfig. Later sources win: defaults, YAML file, environment (the caller
passes it as `defaults`), overrides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, field_validator

from manta.engine.config import EngineConfig, Section, resolve_name, with_overrides
from manta.engine.errors import ConfigError

CONFIGS_DIR = Path(__file__).parent / "configs"
"""YAML files that come with the package; each is also a name, as in `manta serve sim-h200`."""

_PATH_FIELDS = ("model", "tokenizer", "chat_template")


class ServingConfig(Section):
    """The HTTP service around the engine."""

    host: str = Field(
        default="127.0.0.1", min_length=1, description="address to listen on; 0.0.0.0 for every interface"
    )
    port: int = Field(default=8000, ge=1, le=65535)
    num_replicas: int = Field(default=1, ge=1, description="engine replicas")
    gpus_per_rank: float = Field(
        default=1.0, gt=0, le=1, description="of each rank of a replica on GPUs; below 1, ranks share a GPU (slowly)"
    )
    node_labels: dict[str, str] = Field(
        default={},
        description="engines run on nodes with these labels only, in Ray's notation: manta/gpu: NVIDIA-H200, "
        "zone: in(a,b), pool: '!edge'",
    )
    num_edges: int = Field(
        default=1, ge=1, description="processes that speak HTTP, tokenize and own the clients' streams"
    )
    api_keys: tuple[str, ...] = Field(
        default=(), repr=False, description="accepted bearer tokens; none: no key is needed"
    )
    max_queued_requests: int = Field(default=256, ge=0, description="requests that may wait in one edge; more get 429")
    request_timeout_s: float | None = Field(default=None, gt=0, description="a request that takes longer is ended")
    startup_timeout_s: float = Field(
        default=1800.0, gt=0, description="`manta serve` gives up when nothing is ready by then"
    )
    replica_wait_s: float = Field(
        default=60.0, gt=0, description="how long a request or a stream that must move waits for a replica, then 503"
    )
    drain_grace_s: float = Field(
        default=5.0, ge=0, description="requests on a replica that leaves may end there for so long, then they move"
    )
    graceful_shutdown_timeout_s: float = Field(
        default=30.0, ge=0, description="when all of it ends, running streams may finish for so long"
    )
    edge_drain_timeout_s: float = Field(
        default=3600.0, ge=0, description="an edge that is replaced ends its streams, which cannot move, for so long"
    )
    proxy: Literal["auto", "haproxy", "serve"] = Field(
        default="auto", description="what listens on the port: HAProxy where its binary runs, else Serve's own proxy"
    )
    ray_address: str | None = Field(
        default=None, description="a running Ray to join (`auto` or host:port); default: start one on this machine"
    )

    @field_validator("api_keys")
    @classmethod
    def keys_not_empty(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if any(not key.strip() for key in value):
            raise ValueError("an API key must not be empty")
        return value


class DeployConfig(Section):
    """All that `manta serve` needs."""

    engine: EngineConfig = EngineConfig()
    serving: ServingConfig = ServingConfig()


def load_config(
    target: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    defaults: Mapping[str, Any] | None = None,
) -> DeployConfig:
    """The deployment that `target` and `overrides` describe.

    `target` is a YAML file, the name of a bundled one, or anything that `engine.model.model` takes. `defaults` are
    weaker than the YAML file and the overrides. Raises ConfigError in one sentence.
    """
    config = with_overrides(DeployConfig(), dict(defaults or {}))
    if target is not None:
        file = config_file(target)
        config = (
            with_overrides(config, _flat(read_yaml(file), ()))
            if file is not None
            else with_overrides(config, {"engine.model.model": target})
        )
    return with_overrides(config, dict(overrides or {}))


def load_engine_config(model: str | None, overrides: Mapping[str, Any] | None = None) -> EngineConfig:
    """As `load_config`, for commands that need the engine's part only."""
    return load_config(model, overrides).engine


def config_file(target: str) -> Path | None:
    """The YAML file that `target` means, or None when it means a model. Raises ConfigError if the file is missing."""
    if Path(target).suffix in (".yaml", ".yml"):
        if not Path(target).is_file():
            raise ConfigError(f"there is no configuration file {target!r}; bundled ones: {', '.join(bundled())}")
        return Path(target)
    bundled_file = CONFIGS_DIR / f"{target}.yaml"
    return bundled_file if target in bundled() else None


def bundled() -> list[str]:
    """Names of the configurations that come with the package."""
    return sorted(file.stem for file in CONFIGS_DIR.glob("*.yaml"))


def read_yaml(file: Path) -> dict[str, Any]:
    """The mapping in a YAML file; paths that start with ./ or ../ are taken from the file's folder."""
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration file {file}: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{file} is not valid YAML{where}: {getattr(error, 'problem', error)}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{file} must hold a mapping with `engine` and `serving`, not a {type(tree).__name__}")
    return _with_absolute_paths(tree, file.resolve().parent)


def parse_overrides(settings: Sequence[str]) -> dict[str, Any]:
    """`["a.b=1", "c=x"]` as `{"a.b": 1, "c": "x"}`; values are YAML. Raises ConfigError; names are checked later."""
    overrides: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        name = name.strip()
        if not equals or not name:
            raise ConfigError(f"--set {setting!r}: write name=value, for example --set block_size=32")
        try:
            overrides[name] = yaml.safe_load(text)
        except yaml.YAMLError:
            overrides[name] = text
        overrides[name] = _number_or_same(overrides[name])
    return overrides


def override_names(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The same overrides by their full dotted names in DeployConfig. Raises ConfigError for an unknown one."""
    return {resolve_name(DeployConfig, name): value for name, value in overrides.items()}


def _number_or_same(value: Any) -> Any:
    """YAML 1.1 reads 1e-3 as text; a person means a number."""
    if isinstance(value, str) and value[:1] in "+-.0123456789" and "e" in value.lower():
        try:
            number = float(value)
        except ValueError:
            return value
        return number if math.isfinite(number) else value
    return value


def _with_absolute_paths(tree: dict[str, Any], folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            value = _with_absolute_paths(value, folder)
        elif name in _PATH_FIELDS and isinstance(value, str) and value.startswith(("./", "../")):
            value = str((folder / value).resolve())
        result[name] = value
    return result


def _flat(tree: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """Nested mappings as dotted names, so that a file replaces single fields and every unknown name is reported."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        here = (*path, str(name))
        if isinstance(value, Mapping) and value:
            flat.update(_flat(value, here))
        elif isinstance(value, Mapping) or (value is None and len(here) == 1):
            continue  # an empty section
        else:
            flat[".".join(here)] = value
    return flat

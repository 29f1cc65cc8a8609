"""Configuration of a deployment: one engine's configuration plus how it is served. Knows no environment and no Ray.

`load_config` turns what a user typed (a model's name, path, Hugging Face id, GGUF file or a YAML file) and his
`--set name=value` overrides into a DeployConfig. Later sources win: defaults, YAML file, environment (the caller
passes it as `defaults`), overrides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, field_validator

from manta.cluster.hardware import GPU_LABEL
from manta.cluster.routing.roles import Role
from manta.engine.config import EngineConfig, Section, known_fields, resolve_name, with_overrides
from manta.engine.errors import ConfigError

from .autoscaling_config import AutoscalingConfig, SloConfig
from .observability_config import ObservabilityConfig
from .traffic_config import RoutingConfig, TenantConfig, check_tenants

CONFIGS_DIR = Path(__file__).parent / "configs"
"""YAML files that come with the package; each is also a name, as in `manta serve sim-h200`."""

ENGINE = "engine"
"""Name in Serve of the one deployment of engines where there are no pools."""

QUESTIONS = {"plan": "manta plan", "simulate": "manta simulate"}
"""Sections that make a file a question, and the command that answers it: no such file describes a server."""

_PATH_FIELDS = ("model", "tokenizer", "chat_template")


class ServingConfig(Section):
    """The HTTP service around the engine."""

    host: str = Field(
        default="127.0.0.1", min_length=1, description="address to listen on; 0.0.0.0 for every interface"
    )
    port: int = Field(default=8000, ge=1, le=65535)
    num_replicas: int = Field(default=1, ge=1, description="engine replicas; with autoscaling, at the beginning")
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
    deadline_s: float | None = Field(
        default=None,
        gt=0,
        description="a request whose first token cannot come in so many seconds gets 429 at once; requests and tenants "
        "may have their own",
    )
    tenants: tuple[TenantConfig, ...] = Field(
        default=(), description="who holds which API key, with weights, limits, priorities and deadlines"
    )
    routing: RoutingConfig = RoutingConfig()
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

    @field_validator("tenants")
    @classmethod
    def tenants_told_apart(cls, value: tuple[TenantConfig, ...]) -> tuple[TenantConfig, ...]:
        check_tenants(value)
        return value


class PoolConfig(Section):
    """One pool of replicas; what it leaves open is as in `engine` and `serving`."""

    full_names_only = True

    num_replicas: int = Field(default=1, ge=1, description="replicas of the pool; with autoscaling, at the beginning")
    min_replicas: int | None = Field(default=None, ge=0, description="default: autoscaling.min_replicas")
    max_replicas: int | None = Field(default=None, ge=1, description="default: autoscaling.max_replicas")
    tensor_parallel_size: int | Literal["auto"] | None = Field(
        default=None, description="of each replica of the pool; default: engine.parallel's"
    )
    pipeline_parallel_size: int | Literal["auto"] | None = Field(
        default=None, description="of each replica of the pool; default: engine.parallel's"
    )
    gpu: str | None = Field(default=None, min_length=1, description="type of GPU by node label, as NVIDIA-H200")
    gpus_per_rank: float | None = Field(default=None, gt=0, le=1, description="default: serving.gpus_per_rank")
    node_labels: dict[str, str] | None = Field(
        default=None, description="nodes of the pool, in Ray's notation; default: serving.node_labels"
    )
    engine: dict[str, Any] = Field(
        default={}, description="the pool's own fields of `engine`, as max_num_batched_tokens: 16384"
    )


class PoolsConfig(Section):
    """Separate replicas for prompts and for answers; without them every replica does both (colocated)."""

    prefill: PoolConfig | None = None
    decode: PoolConfig | None = None


class DeployConfig(Section):
    """All that `manta serve` needs."""

    engine: EngineConfig = EngineConfig()
    serving: ServingConfig = ServingConfig()
    pools: PoolsConfig = PoolsConfig()
    slo: SloConfig = SloConfig()
    autoscaling: AutoscalingConfig = AutoscalingConfig()
    observability: ObservabilityConfig = ObservabilityConfig()


@dataclass(frozen=True)
class Pool:
    """Replicas of one kind, with all that was left open filled in."""

    name: str
    """Of its deployment in Serve."""
    role: Role
    engine: EngineConfig
    num_replicas: int
    gpus_per_rank: float
    node_labels: Mapping[str, str]
    min_replicas: int = 1
    max_replicas: int = 1
    """With autoscaling, between which the number of replicas moves."""
    is_scaled: bool = False

    @property
    def most_replicas(self) -> int:
        """That there may ever be."""
        return self.max_replicas if self.is_scaled else self.num_replicas


def pools_of(config: DeployConfig) -> tuple[Pool, ...]:
    """The one pool of a colocated deployment, or prefill and decode.

    Raises ConfigError when one is there without the other, or KV could not go from one to the other.
    """
    serving, prefill, decode = config.serving, config.pools.prefill, config.pools.decode
    if prefill is None and decode is None:
        return (
            _within_limits(
                config,
                Pool(
                    *(ENGINE, Role.MIXED, config.engine, serving.num_replicas, serving.gpus_per_rank),
                    *(serving.node_labels, config.autoscaling.min_replicas, config.autoscaling.max_replicas),
                ),
                "serving.num_replicas",
            ),
        )
    if prefill is None or decode is None:
        given, missing = ("decode", "prefill") if prefill is None else ("prefill", "decode")
        raise ConfigError(
            f"pools.{given} is there without pools.{missing}: give both, or neither for replicas that do both",
            field=f"pools.{missing}",
        )
    if serving.num_replicas != 1:
        raise ConfigError(
            f"serving.num_replicas = {serving.num_replicas}: with pools, replicas are counted by "
            "pools.prefill.num_replicas and pools.decode.num_replicas",
            field="serving.num_replicas",
        )
    pools = _pool(config, "prefill", Role.PREFILL, prefill), _pool(config, "decode", Role.DECODE, decode)
    _check_alike(*pools)
    return pools


def _pool(config: DeployConfig, name: str, role: Role, pool: PoolConfig) -> Pool:
    own = {"cache.kv_transfer": True, **pool.engine}
    sizes = {"tensor_parallel_size": pool.tensor_parallel_size, "pipeline_parallel_size": pool.pipeline_parallel_size}
    own |= {f"parallel.{size}": value for size, value in sizes.items() if value is not None}
    try:
        engine = with_overrides(config.engine, own)
    except ConfigError as error:
        raise ConfigError(f"pools.{name}.engine: {error}", field=f"pools.{name}.engine") from None
    labels = dict(config.serving.node_labels if pool.node_labels is None else pool.node_labels)
    if pool.gpu is not None:
        labels[GPU_LABEL] = pool.gpu
    gpus_per_rank = config.serving.gpus_per_rank if pool.gpus_per_rank is None else pool.gpus_per_rank
    scaling = config.autoscaling
    least = scaling.min_replicas if pool.min_replicas is None else pool.min_replicas
    most = scaling.max_replicas if pool.max_replicas is None else pool.max_replicas
    found = Pool(name, role, engine, pool.num_replicas, gpus_per_rank, labels, least, most)
    return _within_limits(config, found, f"pools.{name}.num_replicas")


def _within_limits(config: DeployConfig, pool: Pool, field: str) -> Pool:
    """With autoscaling: begins with as many replicas as there may be. Raises ConfigError for any other number."""
    if not config.autoscaling.enabled:
        return pool
    if not pool.min_replicas <= pool.num_replicas <= pool.max_replicas:
        raise ConfigError(
            f"{field} = {pool.num_replicas} is outside min_replicas = {pool.min_replicas} and max_replicas = "
            f"{pool.max_replicas} of the pool: autoscaling begins with that many",
            field=field,
        )
    return replace(pool, is_scaled=True)


def _check_alike(prefill: Pool, decode: Pool) -> None:
    """What both sides of a hand-over must have in common, as far as the configuration alone says it; engines of the
    same kind of device that leave it open choose the same."""
    one, other = prefill.engine, decode.engine
    if one.model != other.model:
        differ = [
            name for name in type(one.model).model_fields if getattr(one.model, name) != getattr(other.model, name)
        ]
        name = differ[0]
        raise ConfigError(
            f"model.{name} is {getattr(one.model, name)!r} in pools.prefill and {getattr(other.model, name)!r} in "
            "pools.decode: both pools serve the same model; set it in `engine`",
            field=f"pools.prefill.engine.model.{name}",
        )
    kinds = [engine.device.partition(":")[0] for engine in (one, other)]
    sizes = [engine.cache.block_size for engine in (one, other)]
    if sizes[0] != sizes[1] or (sizes[0] is None and kinds[0] != kinds[1]):
        shown = [f"{size or 'left open'} (on {kind})" for size, kind in zip(sizes, kinds, strict=True)]
        raise ConfigError(
            f"cache.block_size is {shown[0]} in pools.prefill and {shown[1]} in pools.decode: KV is handed over in "
            "blocks of one size; set block_size in `engine`",
            field="pools.prefill.engine.cache.block_size",
        )


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
            with_overrides(config, _flat(_server_tree(file), (), dict(known_fields(DeployConfig))))
            if file is not None
            else with_overrides(config, {"engine.model.model": target})
        )
    config = with_overrides(config, dict(overrides or {}))
    pools_of(config)
    return config


def load_engine_config(model: str | None, overrides: Mapping[str, Any] | None = None) -> EngineConfig:
    """As `load_config`, for commands that need the engine's part only."""
    return load_config(model, overrides).engine


def _server_tree(file: Path) -> dict[str, Any]:
    tree = read_yaml(file)
    for name, command in QUESTIONS.items():
        if name in tree:
            raise ConfigError(
                f"{file.name} is no configuration of a server: its section `{name}` is for "
                f"`{command} --config {file.name}`"
            )
    return tree


def config_file(target: str) -> Path | None:
    """The YAML file that `target` means, or None when it means a model. Raises ConfigError if the file is missing."""
    if Path(target).suffix in (".yaml", ".yml"):
        if not Path(target).is_file():
            raise ConfigError(f"there is no configuration file {target!r}; bundled ones: {', '.join(bundled())}")
        return Path(target)
    names = {file.stem for file in CONFIGS_DIR.glob("*.yaml")}
    return CONFIGS_DIR / f"{target}.yaml" if target in names else None


def bundled() -> list[str]:
    """Names of the servers' configurations that come with the package."""
    files = CONFIGS_DIR.glob("*.yaml")
    return sorted(file.stem for file in files if not QUESTIONS.keys() & read_yaml(file).keys())


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


def _flat(tree: Mapping[str, Any], path: tuple[str, ...], fields: Mapping[str, bool]) -> dict[str, Any]:
    """Nested mappings as dotted names, so that a file replaces single fields and every unknown name is reported.

    `fields` tells sections from fields, whose value may be a mapping itself.
    """
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        here = ".".join((*path, str(name)))
        is_section = fields.get(here, isinstance(value, Mapping))
        if isinstance(value, Mapping) and value and is_section:
            flat.update(_flat(value, (*path, str(name)), fields))
        else:  # an empty section may be one that is absent otherwise
            flat[here] = {} if is_section and value is None else value
    return flat

"""`manta chaos`: arguments in, one line a fault and the verdict out. Work is done in manta.bench.chaos."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .bench_options import Overrides

KINDS = ("kill_rank", "stop_rank", "drain_replica", "rolling_update")
NODE_KINDS = ("kill_node", "cut_link")
"""Need several nodes."""
POOL_KINDS = ("kill_prefill", "kill_decode", "cut_link", "silent_link", "slow_link", "cancel_in_transfer")
"""Of prefill and decode engines."""


def chaos_command(
    target: Annotated[
        str, typer.Argument(help="Known name, folder, Hugging Face id, GGUF file or YAML file.")
    ] = "sim-h200",
    minutes: Annotated[
        float, typer.Option(help="Faults follow one another for so long, each kind at least once.")
    ] = 10,
    seed: Annotated[int, typer.Option(help="Of requests and of the order of faults.")] = 0,
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="The whole report.")] = None,
    faults: Annotated[
        str | None, typer.Option(help=f"Of {', '.join((*KINDS, *NODE_KINDS))}, with commas; default: all that can be.")
    ] = None,
    nodes: Annotated[
        int, typer.Option(help="Ray nodes in network namespaces (root), one replica each; more than replicas; 0: none.")
    ] = 0,
    pools: Annotated[
        str | None,
        typer.Option(
            metavar="PxD",
            help=f"So many prefill and decode engines instead, as 2x2: processes without Ray whose link can be broken "
            f"({', '.join(POOL_KINDS)}).",
        ),
    ] = None,
    min_requests: Annotated[int, typer.Option(help="With --pools: go on until so many were answered.")] = 0,
    replicas: Annotated[int, typer.Option(min=2, help="Engine replicas; at least one stays healthy.")] = 3,
    streams: Annotated[int, typer.Option(min=1, help="Requests that are open at once.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=8, help="Longest answer.")] = 600,
    overrides: Overrides = None,
) -> int:
    """Break a served model again and again under load, and compare every answer with the undisturbed one."""
    from manta.bench import chaos
    from manta.engine.errors import ConfigError

    from .checks import locate_model
    from .config import load_config, parse_overrides
    from .settings import Settings

    if pools is not None:
        return _break_pools(pools, target, minutes, seed, json, faults, streams, max_tokens, min_requests, overrides)
    possible = (*KINDS, *NODE_KINDS) if nodes else KINDS
    kinds = possible if faults is None else tuple(kind.strip() for kind in faults.split(","))
    if unknown := ", ".join(sorted(set(kinds) - set(possible))):
        hint = "" if nodes else f" (and with --nodes {', '.join(NODE_KINDS)})"
        raise ConfigError(f"--faults {unknown}: there are {', '.join(possible)}{hint}", field="faults")
    if 0 < nodes <= replicas:
        raise ConfigError(f"--nodes {nodes}: a lost node's replica needs another one; use {replicas + 1} or more")
    settings = Settings.from_environment()
    defaults = {"engine.device": "sim:20ms"} if target == "sim-h200" else {"engine.model.dtype": "float32"}
    config = load_config(target, {**defaults, **parse_overrides(overrides or []), "serving.num_replicas": replicas})
    config = locate_model(config, settings.models_dir)
    plan = chaos.ChaosPlan(minutes, seed, kinds, nodes, num_streams=streams, max_tokens=max_tokens)
    report = chaos.run(config, plan, say=lambda text: print(text, flush=True), logs_dir=settings.logs_dir)
    if json is not None:
        chaos.write(report, json)
    for line in chaos.summary(report):
        print(line)
    return 0 if report.is_clean else 1


def _break_pools(
    pools: str,
    target: str,
    minutes: float,
    seed: int,
    json: Path | None,
    faults: str | None,
    streams: int,
    max_tokens: int,
    min_requests: int,
    overrides: list[str] | None,
) -> int:
    from manta.bench import chaos_pools
    from manta.engine.errors import ConfigError

    from .checks import locate_model
    from .config import load_config, parse_overrides
    from .settings import Settings

    num_prefill, _, num_decode = pools.partition("x")
    if not (num_prefill.isdecimal() and num_decode.isdecimal()):
        raise ConfigError(f"--pools {pools}: write how many engines of each, as 2x2", field="pools")
    kinds = POOL_KINDS if faults is None else tuple(kind.strip() for kind in faults.split(","))
    if unknown := ", ".join(sorted(set(kinds) - set(POOL_KINDS))):
        raise ConfigError(f"--faults {unknown}: with --pools there are {', '.join(POOL_KINDS)}", field="faults")
    is_simulated = target == "sim-h200"
    defaults = {"engine.device": "sim:5ms"} if is_simulated else {"engine.model.dtype": "float32"}
    fields = {
        "pools.prefill.num_replicas": int(num_prefill),
        "pools.decode.num_replicas": int(num_decode),
        "serving.routing.detour_from_tokens": 1,
        "engine.cache.kv_lease_s": 5.0,
        "engine.cache.kv_wait_s": 2.0,
        "engine.cache.kv_checksums": True,
    }
    config = load_config(target, {**defaults, **fields, **parse_overrides(overrides or [])})
    config = locate_model(config, Settings.from_environment().models_dir)
    plan = chaos_pools.PoolChaosPlan(
        minutes,
        seed,
        kinds,
        min_requests,
        num_streams=streams,
        max_tokens=max_tokens,
        longest_prompt=400 if is_simulated else 40,
    )
    report = chaos_pools.run(config, plan, say=lambda text: print(text, flush=True))
    if json is not None:
        chaos_pools.write(report, json)
    for line in chaos_pools.summary(report):
        print(line)
    return 0 if report.is_clean else 1

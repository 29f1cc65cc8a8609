"""`manta top`: a server's metrics live in the terminal, as on the dashboards. Knows its HTTP API only."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from .chat import ServerClient, ServerError
from .metrics_text import Numbers, Rise

NOTHING = "-"
_NUM_DECISIONS = 5


def watch(
    base_url: str,
    console: Console,
    *,
    interval_s: float,
    once: bool,
    client: ServerClient | None = None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Until Ctrl-C, or one view with `once`. Raises Unavailable or ServerError when the server does not answer."""
    client = client or ServerClient(base_url, timeout_s=10.0)

    def look() -> Numbers:
        try:
            return Numbers.read(client.metrics(), clock())
        except ValueError:
            raise ServerError(f"{base_url}/metrics is no page of metrics; is the address right?") from None

    before = look()
    if once:
        sleep(interval_s)
        console.print(view(base_url, Rise(before, look()), client.ready()[1], client.autoscaling()))
        return
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while True:
            sleep(interval_s)
            after = look()
            live.update(view(base_url, Rise(before, after), client.ready()[1], client.autoscaling()), refresh=True)
            before = after


def view(base_url: str, rise: Rise, ready: Mapping[str, Any], scaling: Mapping[str, Any] | None) -> RenderableType:
    """All of it. `ready` and `scaling` are the bodies of /ready and /autoscaling."""
    title = Text(f"{base_url}  {ready.get('model', '')}  {ready.get('status', '')}", style="bold")
    parts: list[RenderableType] = [title, _load(rise), _latencies(rise), _pools(rise), _replicas(ready)]
    if scaling is not None:
        parts.append(_decisions(scaling))
    return Group(*parts)


def _load(rise: Rise) -> Table:
    now = rise.after
    cached, prompt = rise.count("manta_cached_prompt_tokens_total"), rise.count("manta_prompt_tokens_total")
    outcomes = {name: rise.count("manta_slo_requests_total", outcome=name) for name in _OUTCOMES}
    ever = now.by("manta_slo_requests_total", "outcome")
    cost = now.value("manta_cost_per_million_tokens_dollars")
    waiting = now.total("manta_requests_waiting") + now.total("manta_edge_requests_waiting")
    refused = sum(rise.rate("manta_requests_refused_total", status=status) for status in ("429", "503"))
    shown = {
        "requests/s": f"{rise.rate('manta_requests_total'):.2f}",
        "prompt tok/s": f"{rise.rate('manta_prompt_tokens_total'):,.0f}",
        "cached": _share(cached, prompt),
        "output tok/s": f"{rise.rate('manta_generation_tokens_total'):,.0f}",
        "running": f"{now.total('manta_requests_running'):g}",
        "waiting": f"{waiting:g}",
        "429, 503/s": f"{refused:.2f}",
        "objective kept": _share(outcomes["met"], sum(outcomes.values())),
        "since start": _share(ever.get("met", 0.0), sum(ever.values())),
        "GPUs": _number(now.value("manta_scaling_gpus", state="used"), "g"),
        "$/M tokens": _number(cost, ".3f"),
    }
    table = _table(*shown)
    table.add_row(*shown.values())
    return table


_OUTCOMES = ("met", "late_ttft", "late_tpot", "failed")


def _latencies(rise: Rise) -> Table:
    table = _table("seconds", "p50", "p95", "p99", "limit")
    limits = rise.after.by("manta_slo_limit_seconds", "limit")
    for label, name in (
        ("TTFT", "manta_time_to_first_token_seconds"),
        ("TPOT", "manta_time_per_output_token_seconds"),
        ("ITL", "manta_inter_token_seconds"),
        ("end to end", "manta_request_seconds"),
        ("step", "manta_step_seconds"),
        ("step, predicted", "manta_step_predicted_seconds"),
    ):
        values = [rise.quantile(share, name) for share in (0.5, 0.95, 0.99)]
        table.add_row(label, *(_number(value, ".3f") for value in values), _number(limits.get(label.lower()), ".3f"))
    return table


def _pools(rise: Rise) -> Table:
    now = rise.after
    desired = now.by("manta_scaling_desired_replicas", "pool")
    table = _table("pool", "desired", "ready", "starting", "draining", "output tok/s", "steps/s", "preempted/s")
    for pool in sorted(desired.keys() | now.by("manta_generation_tokens_total", "pool").keys()):
        states = now.by("manta_scaling_replicas", "state", pool=pool)
        table.add_row(
            pool,
            _number(desired.get(pool), "g"),
            *(_number(states.get(state), "g") for state in ("ready", "starting", "draining")),
            f"{rise.rate('manta_generation_tokens_total', pool=pool):,.0f}",
            f"{rise.rate('manta_engine_steps_total', pool=pool):,.1f}",
            f"{rise.rate('manta_preemptions_total', pool=pool):.2f}",
        )
    return table


def _replicas(ready: Mapping[str, Any]) -> Table:
    """In the order of the label `replica`."""
    table = _table("replica", "role", "state", "running", "waiting", "cache")
    replicas: Sequence[Mapping[str, Any]] = ready.get("replicas", [])
    for replica in sorted(replicas, key=lambda one: one["replica_id"]):
        state = "draining" if replica.get("draining") else "ready" if replica.get("ready") else "not ready"
        table.add_row(
            replica["replica_id"],
            replica.get("role") or NOTHING,
            state,
            _number(replica.get("num_running"), "g"),
            _number(replica.get("num_waiting"), "g"),
            _number(replica.get("kv_cache_usage"), ".0%"),
        )
    return table


def _decisions(scaling: Mapping[str, Any]) -> Table:
    table = _table("decided", "pool", "replicas", "reason", "because")
    for one in list(scaling.get("decided", []))[-_NUM_DECISIONS:]:
        at = time.strftime("%H:%M:%S", time.localtime(one["time_s"]))
        table.add_row(at, one["pool"], f"{one['before']} to {one['after']}", one["reason"], one["sentence"])
    return table


def _table(*columns: str) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if not index else "right", overflow="fold")
    return table


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else NOTHING


def _number(value: float | None, form: str) -> str:
    return NOTHING if value is None else format(value, form)

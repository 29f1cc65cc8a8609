"""PromQL over the table of metrics: how numbers of several edges and replicas go together. Pure; knows no dashboard.

An edge's own numbers are added up over edges. What every edge shows alike (engines, scaling) is taken once, the most
that one of them says, before it is added up over replicas and pools. So the same queries are right whether Prometheus
asks every edge's own page or the public one.
"""

from __future__ import annotations

import re

from manta.replicas.metrics_table import BY_NAME, MetricSpec, Scope

WINDOW = "$__rate_interval"
"""Of rates; Grafana puts in four scrape intervals or more."""
JOB = '{job=~"$job"}'

_NAME = re.compile(r"\bmanta_[a-z0-9_]+")
_SUFFIXES = ("_bucket", "_sum", "_count")


def now(name: str, *by: str, match: str = "") -> str:
    """A gauge, added up over the labels that are not in `by`. `match` narrows it down, as 'state="ready"'."""
    return _together(_spec(name), _selector(name, match), by)


def most(name: str, *by: str) -> str:
    """The greatest of a gauge."""
    return f"max{_by(by)}({_selector(name)})"


def mean_of(name: str, *by: str) -> str:
    """The mean of a gauge over replicas."""
    spec = _spec(name)
    return f"avg{_by(by)}(max{_by(spec.labels)}({_selector(name)}))"


def rate(name: str, *by: str, match: str = "", window: str = WINDOW) -> str:
    """A counter's rise a second."""
    return _together(_spec(name), f"rate({_selector(name, match)}[{window}])", by)


def increase(name: str, *by: str, match: str = "", window: str = WINDOW) -> str:
    """A counter's rise over the window."""
    return _together(_spec(name), f"increase({_selector(name, match)}[{window}])", by)


def quantile(share: float, name: str, *by: str, window: str = WINDOW) -> str:
    """A histogram's quantile over the window."""
    buckets = _together(_spec(name), f"rate({_selector(f'{name}_bucket')}[{window}])", ("le", *by), more=("le",))
    return f"histogram_quantile({share:g}, {buckets})"


def mean(name: str, *by: str, window: str = WINDOW) -> str:
    """A histogram's mean over the window."""
    spec = _spec(name)
    total, count = (_together(spec, f"rate({_selector(f'{name}_{what}')}[{window}])", by) for what in ("sum", "count"))
    return f"{total} / {count}"


def metrics_in(expression: str) -> list[str]:
    """The table's metrics that a query uses, in order. Raises KeyError for a name that is not in the table."""
    found: dict[str, None] = {}
    for name in _NAME.findall(expression):
        stem = next((name.removesuffix(suffix) for suffix in _SUFFIXES if name.removesuffix(suffix) in BY_NAME), name)
        found[_spec(stem).name] = None
    return list(found)


def with_values(expression: str, *, window: str, job: str = ".+") -> str:
    """The query with Grafana's variables filled in, for a Prometheus that is asked without Grafana."""
    filled = expression.replace("$__rate_interval", window).replace("$__range", window).replace("$job", job)
    return filled.replace("$__interval", window)


def _spec(name: str) -> MetricSpec:
    return BY_NAME[name]


def _selector(name: str, match: str = "") -> str:
    return f"{name}{JOB[:-1]}, {match}}}" if match else f"{name}{JOB}"


def _together(spec: MetricSpec, expression: str, by: tuple[str, ...], *, more: tuple[str, ...] = ()) -> str:
    if spec.scope is Scope.EDGE:
        return f"sum{_by(by)}({expression})"
    once = f"max{_by((*more, *spec.labels))}({expression})"
    return once if set(by) == {*more, *spec.labels} else f"sum{_by(by)}({once})"


def _by(labels: tuple[str, ...]) -> str:
    return f" by ({', '.join(labels)}) " if labels else ""

"""The page docs/metrics.md, made from the table of metrics, the dashboards and the alerts. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from manta.replicas.metric_aliases import VLLM
from manta.replicas.metrics_table import METRICS, Group, MetricSpec, Scope

from .panels import BOARDS
from .rules import ALERTS

_HEAD = """# Metrics

Written by `tools/metrics_docs.py` from the table in `replicas/metrics_table.py`; change it there.
[observability.md](observability.md) says where they are shown and what Prometheus and Grafana make of them.

- **Units** are base units: seconds, bytes, ratios of 1, and counts.
- **Whose.** `edge`: each edge's own, to be added up. `fleet`: of engines and autoscaler, of which every edge shows the
  same; take the greatest over edges before adding up over pools and replicas. The dashboards' queries do so.
- **Labels.** `edge` is the id of an edge's process. `pool` is `engine`, or `prefill` and `decode`. `replica` is the
  position of a live replica in its pool, in the order of the ids in `GET /ready`, not an id: replicas that come and go
  begin no new series. Counters and histograms of engines belong to the pool and keep what replicas counted that are
  gone. No label ever holds a request's id; `tenant` holds the names of the configuration.
- A histogram `x` is `x_bucket`, `x_sum` and `x_count`.
"""


def metrics_page() -> str:
    """All of it."""
    parts = [_HEAD]
    for group in Group:
        parts.append(f"## {group}\n\n" + _table(spec for spec in METRICS if spec.group is group))
    parts.append("## Buckets\n\n" + _buckets())
    parts.append(
        "## Under vLLM's names\n\nWith `manta serve --metrics-aliases vllm`, the public port's `/metrics` has these, "
        'too, for the whole service, with the labels `model_name` and `engine="0"`:\n\n'
        + _rows(("vLLM's name", "is"), ((f"`{one.name}`", f"`{one.source}`") for one in VLLM))
    )
    parts.append("## Dashboards\n\n" + _boards())
    parts.append(
        "## Alerts\n\n"
        + _rows(
            ("alert", "fires when", "for", "severity"),
            ((one.title, one.summary, f"{one.for_s} s", one.severity) for one in ALERTS),
        )
    )
    return "\n".join(parts)


def _table(specs: Iterable[MetricSpec]) -> str:
    return _rows(
        ("name", "kind", "unit", "whose", "labels", "what"),
        (
            (
                f"`{spec.name}`",
                spec.kind,
                str(spec.unit),
                "edge" if spec.scope is Scope.EDGE else "fleet",
                ", ".join(f"`{label}`" for label in spec.labels),
                spec.help,
            )
            for spec in specs
        ),
    )


def _buckets() -> str:
    shown: dict[tuple[float, ...], list[str]] = {}
    for spec in METRICS:
        if spec.buckets:
            shown.setdefault(spec.buckets, []).append(spec.name)
    return _rows(
        ("upper bounds", "of"),
        ((_bounds(bounds), ", ".join(f"`{name}`" for name in names)) for bounds, names in shown.items()),
    )


def _bounds(bounds: tuple[float, ...]) -> str:
    if len(bounds) > 20:
        return (
            f"{bounds[0]:g} to {bounds[-1]:g}, {len(bounds)} of them, each {bounds[1] / bounds[0]:.3f} times the last"
        )
    return ", ".join(f"{bound:g}" for bound in bounds)


def _boards() -> str:
    lines = []
    for board in BOARDS:
        lines.append(f"**{board.title}** (`{board.uid}`). {board.description}\n")
        lines += [f"- {row.title}: {', '.join(panel.title for panel in row.panels)}" for row in board.rows]
        lines.append("")
    return "\n".join(lines)


def _rows(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "|".join("---" for _ in head) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"

"""Metrics of several edges as one page, and as Prometheus text. Knows the table's scopes and no edge.

What each edge has of its own stands side by side, by the label `edge`. What all show alike, engines and scaling, stands
there once: the greatest of each number, since the edge that was there longest has counted most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from .metrics_table import BY_NAME, Scope


def merge(pages: Sequence[Sequence[Metric]]) -> list[Metric]:
    """One page out of those of several edges; a family that any of them has is there."""
    merged: dict[str, Metric] = {}
    for page in pages:
        for family in page:
            if (known := merged.get(family.name)) is None:
                known = merged[family.name] = Metric(family.name, family.documentation, family.type)
            known.samples.extend(family.samples)
    for family in merged.values():
        if _scope(family) is Scope.FLEET:
            family.samples = _greatest(family.samples)
    return list(merged.values())


def render_text(families: Iterable[Metric]) -> bytes:
    """Prometheus text, version 0.0.4."""
    registry = CollectorRegistry()
    registry.register(Page(lambda: families))
    return generate_latest(registry)


class Page(Collector):
    """Whatever is there when it is asked for, as a collector of prometheus_client."""

    def __init__(self, families: Callable[[], Iterable[Metric]]) -> None:
        self._families = families

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        return self._families()


def _scope(family: Metric) -> Scope:
    """Of the table's row; of what is no row, as the process's own metrics, each edge's stands for itself."""
    spec = BY_NAME.get(family.name) or BY_NAME.get(f"{family.name}_total")
    return Scope.EDGE if spec is None else spec.scope


def _greatest(samples: Iterable[Sample]) -> list[Sample]:
    """Of the samples with the same labels the greatest, each where the first of them stood."""
    found: dict[tuple[str, tuple[tuple[str, str], ...]], Sample] = {}
    for sample in samples:
        key = sample.name, tuple(sorted(sample.labels.items()))
        known = found.get(key)
        if known is None or sample.value > known.value:
            found[key] = sample
    return list(found.values())

"""Numbers out of a page of Prometheus text, and what rose between two of them. Pure; knows no server and no view."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True)
class Numbers:
    """One page, read at one moment."""

    at_s: float
    samples: dict[str, list[tuple[dict[str, str], float]]]
    """By name: labels and value."""

    @classmethod
    def read(cls, text: str, at_s: float) -> Numbers:
        """Raises ValueError for what is no page of metrics."""
        samples: dict[str, list[tuple[dict[str, str], float]]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((sample.labels, sample.value))
        return cls(at_s, samples)

    def of(self, name: str, **labels: str) -> Iterator[tuple[dict[str, str], float]]:
        """The samples of that name that have these labels."""
        for found, value in self.samples.get(name, ()):
            if all(found.get(label) == wanted for label, wanted in labels.items()):
                yield found, value

    def total(self, name: str, **labels: str) -> float:
        """Their sum; 0 where there is none."""
        return sum(value for _, value in self.of(name, **labels))

    def value(self, name: str, **labels: str) -> float | None:
        """Their sum; None where there is none."""
        found = list(self.of(name, **labels))
        return sum(value for _, value in found) if found else None

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Their sums by a label's value."""
        sums: dict[str, float] = {}
        for found, value in self.of(name, **labels):
            sums[found.get(label, "")] = sums.get(found.get(label, ""), 0.0) + value
        return sums


@dataclass(frozen=True)
class Rise:
    """What happened between two pages."""

    before: Numbers
    after: Numbers

    @property
    def seconds(self) -> float:
        return self.after.at_s - self.before.at_s

    def count(self, name: str, **labels: str) -> float:
        """By how much a counter rose; a server that started anew began at 0."""
        rise = self.after.total(name, **labels) - self.before.total(name, **labels)
        return rise if rise >= 0 else self.after.total(name, **labels)

    def rate(self, name: str, **labels: str) -> float:
        """The same a second."""
        return self.count(name, **labels) / self.seconds if self.seconds > 0 else 0.0

    def quantile(self, share: float, name: str) -> float | None:
        """Of a histogram over what came between the pages, linear inside a bucket; None when nothing came."""
        before = self.before.by(f"{name}_bucket", "le")
        after = self.after.by(f"{name}_bucket", "le")
        bounds = sorted(after, key=float)
        counts = [max(after[bound] - before.get(bound, 0.0), 0.0) for bound in bounds]
        if not counts or not counts[-1]:
            return None
        wanted, low, below = share * counts[-1], 0.0, 0.0
        for bound, count in zip(bounds, counts, strict=True):
            if count >= wanted and count > below:
                if bound == "+Inf":
                    return low
                return low + (float(bound) - low) * (wanted - below) / (count - below)
            low, below = (low if bound == "+Inf" else float(bound)), count
        return low

"""What edges know of engines, as metrics: gauges of live ones, sums over all that a pool ever had. Knows no channel.

Counters never fall and no series begins because a replica came: the numbers of replicas that are gone stay in their
pool's sums, and a live replica is known by its position in the pool.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from manta.cluster.routing.roles import Role
from manta.engine.stats import EngineInfo, Snapshot

from .edge.client import ReplicaStatus
from .engine_times import Counts, EngineTimes
from .metrics_table import BY_NAME, METRICS, MetricSpec
from .step_histogram import StepHistogram

_OF_ENGINES = [spec for spec in METRICS if spec.field is not None]
_GAUGES = [spec for spec in _OF_ENGINES if spec.kind == "gauge"]
_COUNTERS = [spec for spec in _OF_ENGINES if spec.kind == "counter"]
_HISTOGRAMS = [spec for spec in _OF_ENGINES if spec.kind == "histogram"]

NUM_REMEMBERED = 256
"""Replicas that are not connected and whose numbers are still told apart, as they may come back."""


@dataclass
class Totals:
    """What engines counted."""

    snapshot: Snapshot
    step_times: StepHistogram = field(default_factory=StepHistogram)
    times: EngineTimes = field(default_factory=EngineTimes)


class EngineCollector(Collector):
    """Turns the latest that is known into metrics when they are asked for."""

    def __init__(self, pools: Mapping[str, Role], pool_of: Callable[[str], str | None]) -> None:
        """`pools`: those that are configured, which are shown from the beginning, with their roles. `pool_of` names a
        replica's pool as long as it is a member; None for one that is none."""
        self.replicas: Sequence[ReplicaStatus] = ()
        self._roles = pools
        self._pool_of = pool_of
        self._pools: dict[str, str] = {}
        """Of replicas that are connected or remembered."""
        self._gone = {pool: _Sums() for pool in pools}
        """Of replicas that are forgotten, by pool."""
        self._last: dict[str, Totals] = {}
        """Of replicas that are not connected now."""
        self._info: dict[str, EngineInfo] = {}
        """Of the replica that came last, by pool."""

    def joined(self, replica_id: str, snapshot: Snapshot, info: EngineInfo | None) -> None:
        """A replica's engine was reached; `snapshot` is where its counters stand."""
        pool = self._pool(replica_id)
        if info is not None:
            self._info[pool] = info
        before = self._last.pop(replica_id, None)
        if before is not None and before.snapshot.num_steps > snapshot.num_steps:  # another engine under the same id
            self._gone[pool].add(before)

    def left(self, replica_id: str, last: Totals) -> None:
        """No more is heard of it; what it counted stays."""
        self._pool(replica_id)
        self._last[replica_id] = last
        while len(self._last) > NUM_REMEMBERED:
            oldest = next(iter(self._last))
            self._gone[self._pool(oldest)].add(self._last.pop(oldest))
            del self._pools[oldest]

    def num_ready(self) -> Counter[str]:
        """Ready replicas by pool."""
        return Counter(self._pool(one.replica_id) for one in self.replicas if one.ready)

    def num_generated_tokens(self) -> float:
        """By all engines that ever were."""
        return sum(sums.numbers["num_generated_tokens"] for sums in self._sums().values())

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        places = self._places()
        for spec in _GAUGES:
            assert spec.field is not None
            gauge = GaugeMetricFamily(spec.name, spec.help, labels=spec.labels)
            for place, status in places:
                if status.snapshot is not None:
                    gauge.add_metric(place, getattr(status.snapshot, spec.field))
            yield gauge
        yield from self._states(places)
        sums = self._sums()
        for spec in _COUNTERS:
            assert spec.field is not None
            counter = CounterMetricFamily(spec.name, spec.help, labels=spec.labels)
            for pool, one in sums.items():
                counter.add_metric([pool], one.numbers[spec.field])
            yield counter
        for spec in _HISTOGRAMS:
            family = HistogramMetricFamily(spec.name, spec.help, labels=spec.labels)
            for pool, one in sums.items():
                _add_histogram(family, pool, spec, one)
            yield family
        yield from self._starts()

    def _places(self) -> list[tuple[tuple[str, str], ReplicaStatus]]:
        """Pool and position of each replica."""
        number: Counter[str] = Counter()
        places = []
        for status in sorted(self.replicas, key=lambda one: one.replica_id):
            pool = self._pool(status.replica_id)
            places.append(((pool, str(number[pool])), status))
            number[pool] += 1
        return places

    def _states(self, places: Sequence[tuple[tuple[str, str], ReplicaStatus]]) -> Iterator[Metric]:
        ready, role, states = (_gauge(name) for name in ("manta_replica_ready", "manta_replica_role", "manta_replicas"))
        counts: Counter[tuple[str, str, str]] = Counter()
        for place, status in places:
            ready.add_metric(place, float(status.ready))
            if status.role is not None:
                role.add_metric((*place, status.role), 1.0)
            state = "draining" if status.draining else "ready" if status.ready else "connecting"
            its_role = status.role or self._roles.get(place[0], Role.MIXED)
            counts[place[0], its_role, state] += 1
        for pool, its_role in sorted({(pool, role) for pool, role, _ in counts} | set(self._roles.items())):
            for state in ("connecting", "ready", "draining"):
                states.add_metric((pool, its_role, state), counts[pool, its_role, state])
        yield from (ready, role, states)

    def _starts(self) -> Iterator[Metric]:
        phases, ledger = _gauge("manta_startup_phase_seconds"), _gauge("manta_memory_ledger_bytes")
        for pool, info in self._info.items():
            for phase, seconds in info.startup_s.items():
                phases.add_metric((pool, phase), seconds)
            for part, size in info.memory_ledger_bytes.items():
                ledger.add_metric((pool, part), size)
        yield from (phases, ledger)

    def _sums(self) -> dict[str, _Sums]:
        sums = {pool: one.copy() for pool, one in self._gone.items()}
        for status in self.replicas:
            if status.snapshot is not None:
                live = Totals(status.snapshot, status.step_times or StepHistogram(), status.times or EngineTimes())
                sums[self._pool(status.replica_id)].add(live)
        for replica_id, last in self._last.items():
            sums[self._pool(replica_id)].add(last)
        return sums

    def _pool(self, replica_id: str) -> str:
        pool = self._pool_of(replica_id)
        if pool is None:  # one that leaves is no member any more
            pool = self._pools.get(replica_id) or next(iter(self._gone))
        self._pools[replica_id] = pool
        if pool not in self._gone:
            self._gone[pool] = _Sums()
        return pool


class _Sums:
    """Of all engines of a pool."""

    def __init__(self) -> None:
        self.numbers = dict.fromkeys((spec.field for spec in _COUNTERS if spec.field is not None), 0.0)
        self.step_times = StepHistogram()
        self.times = EngineTimes()

    def copy(self) -> _Sums:
        new = _Sums()
        new.numbers = dict(self.numbers)
        new._merge(self.step_times, self.times)
        return new

    def add(self, totals: Totals) -> None:
        for name in self.numbers:
            self.numbers[name] += getattr(totals.snapshot, name)
        self._merge(totals.step_times, totals.times)

    def _merge(self, step_times: StepHistogram, times: EngineTimes) -> None:
        counts = [one + more for one, more in zip(self.step_times.counts, step_times.counts, strict=True)]
        self.step_times = StepHistogram(counts, self.step_times.sum_s + step_times.sum_s)
        self.times.merge(times)


def _gauge(name: str) -> GaugeMetricFamily:
    spec = BY_NAME[name]
    return GaugeMetricFamily(spec.name, spec.help, labels=spec.labels)


def _add_histogram(family: HistogramMetricFamily, pool: str, spec: MetricSpec, sums: _Sums) -> None:
    assert spec.field is not None
    if spec.field == "step_s":
        counted = Counts(sums.step_times.counts, sums.step_times.sum_s)
    else:
        counted = getattr(sums.times, spec.field)
    bounds = [*map(str, spec.buckets), "+Inf"]
    buckets = list(zip(bounds, itertools.accumulate(counted.counts), strict=True))
    family.add_metric([pool], buckets, counted.total)

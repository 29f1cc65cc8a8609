"""Reads a fleet's load out of a Prometheus, by Manta's metric names or vLLM's, for `manta advise`. Decides nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import httpx

from manta.autoscaling.advice import Sample
from manta.autoscaling.signals import Counters
from manta.cluster.slo import Slo
from manta.engine.errors import ConfigError, Unavailable

TIMEOUT_S = 20.0
MOST_POINTS = 5000
"""Prometheus gives up to 11,000 a series."""

MANTA = {
    "num_replicas": "sum(max by (replica) (manta_replica_ready{matcher}))",
    "num_running": "sum(max by (replica) (manta_requests_running{matcher}))",
    "num_waiting": "sum(max by (replica) (manta_requests_waiting{matcher})) + "
    "(sum(manta_edge_requests_waiting{matcher}) or vector(0))",
    "kv_cache_usage": "avg(max by (replica) (manta_kv_cache_usage{matcher}))",
    "num_prompt_tokens": "max(manta_prompt_tokens_total{matcher})",
    "num_cached_tokens": "max(manta_cached_prompt_tokens_total{matcher})",
    "num_output_tokens": "max(manta_generation_tokens_total{matcher})",
    "num_finished": "sum(manta_request_seconds_count{matcher})",
    "ttft": "manta_time_to_first_token_seconds",
    "tpot": "manta_time_per_output_token_seconds",
}
VLLM = {
    "num_replicas": "count(vllm:num_requests_running{matcher})",
    "num_running": "sum(vllm:num_requests_running{matcher})",
    "num_waiting": "sum(vllm:num_requests_waiting{matcher})",
    "kv_cache_usage": "avg(vllm:kv_cache_usage_perc{matcher} or vllm:gpu_cache_usage_perc{matcher})",
    "num_prompt_tokens": "sum(vllm:prompt_tokens_total{matcher})",
    "num_cached_tokens": "sum(vllm:prefix_cache_hits_total{matcher})",
    "num_output_tokens": "sum(vllm:generation_tokens_total{matcher})",
    "num_finished": "sum(vllm:request_success_total{matcher})",
    "ttft": "vllm:time_to_first_token_seconds",
    "tpot": "vllm:request_time_per_output_token_seconds",
}
DIALECTS = {"manta": MANTA, "vllm": VLLM}
NEEDED = ("num_replicas", "num_running", "num_finished")
"""Without these nothing can be said; what else is missing counts as nothing."""

Series = dict[float, float]


@dataclass(frozen=True)
class Window:
    """Of the past, which is looked at. Seconds."""

    end_s: float
    range_s: float
    step_s: float

    @property
    def times_s(self) -> list[float]:
        """Of the samples."""
        num = int(self.range_s // self.step_s)
        return [self.end_s - (num - index) * self.step_s for index in range(num + 1)]


class PrometheusReader:
    """Asks one Prometheus. Raises Unavailable when it does not answer, ConfigError when what it says is no use."""

    def __init__(self, url: str, *, client: httpx.Client | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--prometheus {url!r}: write an address as http://127.0.0.1:9090", field="prometheus")
        self._url = url.rstrip("/")
        self._client = client or httpx.Client(timeout=TIMEOUT_S, trust_env=False)

    def series(self, query: str, window: Window) -> Series:
        """Values by time, empty when there are none. Of several series that match, an error: the query sums."""
        params = {"query": query, "start": window.times_s[0], "end": window.end_s, "step": window.step_s}
        try:
            reply = self._client.get(f"{self._url}/api/v1/query_range", params=params)
        except httpx.HTTPError as error:
            raise Unavailable(
                f"Prometheus at {self._url} does not answer: {error or type(error).__name__}", retry_after_s=5.0
            ) from None
        try:
            tree = reply.json()
        except ValueError:
            raise ConfigError(
                f"{self._url} is no Prometheus: it answers {reply.status_code} without JSON; give the address of its "
                "web page",
                field="prometheus",
            ) from None
        if reply.status_code in (401, 403):
            raise ConfigError(
                f"Prometheus at {self._url} wants a login ({reply.status_code}): write it into the address, as "
                "https://user:password@host",
                field="prometheus",
            )
        if reply.status_code != 200 or tree.get("status") != "success":
            raise ConfigError(
                f"Prometheus at {self._url} refuses {query!r}: {tree.get('error', reply.status_code)}",
                field="prometheus",
            )
        found: Series = {}
        for result in tree["data"]["result"]:
            found.update({float(at): float(value) for at, value in result["values"] if value != "NaN"})
        return found

    def samples(self, window: Window, slo: Slo, *, matcher: str = "") -> tuple[str, list[Sample]]:
        """The dialect that was found, and samples from the first moment at which there was a replica."""
        for name, queries in DIALECTS.items():
            replicas = self.series(_with(queries["num_replicas"], matcher), window)
            if replicas:
                return name, self._read(queries, window, slo, matcher, replicas)
        raise ConfigError(
            f"Prometheus at {self._url} has neither manta_replica_ready nor vllm:num_requests_running in the last "
            f"{window.range_s:.0f} s{f' with {matcher}' if matcher else ''}: check that it scrapes the servers",
            field="prometheus",
        )

    def _read(
        self, queries: Mapping[str, str], window: Window, slo: Slo, matcher: str, replicas: Series
    ) -> list[Sample]:
        columns = {
            name: self.series(_with(query, matcher), window)
            for name, query in queries.items()
            if name not in ("ttft", "tpot", "num_replicas")
        }
        columns["num_replicas"] = replicas
        missing = [name for name in NEEDED if not columns[name]]
        if missing:
            raise ConfigError(
                f"Prometheus at {self._url} has no values for {_with(queries[missing[0]], matcher)}", field="prometheus"
            )
        for name, limit in (("ttft", slo.ttft_s), ("tpot", slo.tpot_s)):
            columns[f"late_{name}"] = {} if limit is None else self._late(queries[name], limit, window, matcher)
        return _samples(columns, window)

    def _late(self, histogram: str, limit_s: float, window: Window, matcher: str) -> Series:
        """Observations above the largest bucket's bound that is not above the limit: rather too many than too few."""
        # `le` is text: Prometheus is asked for all buckets once, and the best bound is chosen here.
        params = {"query": f"sum by (le) ({histogram}_bucket{{{matcher}}})", "time": window.end_s}
        try:
            tree = self._client.get(f"{self._url}/api/v1/query", params=params).json()
        except (httpx.HTTPError, ValueError):
            return {}
        bounds = [result["metric"]["le"] for result in tree.get("data", {}).get("result", [])]
        kept = [bound for bound in bounds if float(bound) <= limit_s * (1 + 1e-9)]
        if not kept:
            return {}
        label = f'le="{max(kept, key=float)}"' + (f",{matcher}" if matcher else "")
        counts = self.series(f"sum({histogram}_count{{{matcher}}})", window)
        within = self.series(f"sum({histogram}_bucket{{{label}}})", window)
        return {at: max(counts[at] - within.get(at, 0.0), 0.0) for at in counts}


def window_of(*, range_s: float, step_s: float, now_s: float | None = None) -> Window:
    """The last `range_s`. Raises ConfigError for sizes that make no sense."""
    if not 0 < step_s <= range_s / 10:
        raise ConfigError(
            f"--range {range_s:g} and --step {step_s:g}: at least ten steps must fit into the range", field="range"
        )
    if range_s / step_s > MOST_POINTS:
        raise ConfigError(f"--range {range_s:g} has more than {MOST_POINTS} steps: raise --step", field="range")
    return Window(time.time() if now_s is None else now_s, range_s, step_s)


def _with(query: str, matcher: str) -> str:
    return query.replace("{matcher}", f"{{{matcher}}}" if matcher else "")


def _samples(columns: Mapping[str, Series], window: Window) -> list[Sample]:
    """Counters carry their last value on over gaps, and past restarts; gauges are 0 where nothing was seen."""
    rising = {name: _carried(columns[name], window) for name in columns if _is_counter(name)}
    gauges = {name: _aligned(columns[name], window) for name in columns if not _is_counter(name)}
    found = []
    for index, time_s in enumerate(window.times_s):
        if not gauges["num_replicas"][index] and not found:
            continue
        at = {name: values[index] for name, values in rising.items()}
        running, waiting = (round(gauges[name][index]) for name in ("num_running", "num_waiting"))
        late_ttft, late_tpot = round(at["late_ttft"]), round(at["late_tpot"])
        finished = round(at["num_finished"])
        counters = Counters(
            num_arrived=finished + running + waiting,
            num_prompt_tokens=round(at["num_prompt_tokens"]),
            num_cached_tokens=round(at["num_cached_tokens"]),
            num_finished=finished,
            num_output_tokens=round(at["num_output_tokens"]),
            num_good=max(finished - late_ttft - late_tpot, 0),
            num_late_ttft=late_ttft,
            num_late_tpot=late_tpot,
        )
        usage = gauges["kv_cache_usage"][index]
        found.append(
            Sample(
                time_s=time_s,
                num_replicas=round(gauges["num_replicas"][index]),
                counters=counters,
                num_running=running,
                num_waiting=waiting,
                kv_cache_usage=usage,
            )
        )
    return found


def _is_counter(name: str) -> bool:
    return name not in ("num_replicas", "num_running", "num_waiting", "kv_cache_usage")


def _aligned(series: Series, window: Window) -> list[float]:
    by_index = {round((at - window.times_s[0]) / window.step_s): value for at, value in series.items()}
    return [by_index.get(index, 0.0) for index in range(len(window.times_s))]


def _carried(series: Series, window: Window) -> list[float]:
    """What was counted since the first value; a fall is a restart, from which counting goes on."""
    by_index = {round((at - window.times_s[0]) / window.step_s): value for at, value in series.items()}
    total, last, found = 0.0, None, []
    for index in range(len(window.times_s)):
        value = by_index.get(index)
        if value is not None:
            total += 0.0 if last is None else value - last if value >= last else value
            last = value
        found.append(total)
    return found

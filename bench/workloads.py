"""Requests to measure with: reproducible token ids, workloads, lengths, arrival times. Knows no engine and no HTTP.

Token ids and lengths are the same under every Python: `random.Random` is used for `random()` and what is specified
through it only, token ids come from a generator written out here. Figures of different engines are therefore
comparable when workload, vocabulary and seed are.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from manta.engine.errors import ConfigError

FIRST_TOKEN_ID = 1000
"""Lower ids are left out: special tokens and single bytes live there in most vocabularies."""
_MASK = 2**64 - 1


@dataclass(frozen=True)
class Item:
    """One request of a workload: exactly `max_tokens` tokens are to be generated (end-of-sequence is ignored)."""

    prompt_token_ids: list[int]
    max_tokens: int
    arrival_s: float = 0.0
    """Seconds after the start of the run; meaningless in a closed loop."""


def token_ids(count: int, vocab_size: int, seed: int) -> list[int]:
    """`count` pseudo-random ids in [1000, vocab_size): Knuth's MMIX generator, upper bits. Raises ConfigError."""
    if vocab_size <= FIRST_TOKEN_ID:
        raise ConfigError(f"workloads need a vocabulary of more than {FIRST_TOKEN_ID} tokens, not {vocab_size}")
    state = (seed * 0x9E3779B97F4A7C15 + 0x1234567) & _MASK
    ids: list[int] = []
    for _ in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) & _MASK
        ids.append(FIRST_TOKEN_ID + (state >> 33) % (vocab_size - FIRST_TOKEN_ID))
    return ids


def from_lengths(prompt_lens: Sequence[int], output_lens: Sequence[int], *, vocab_size: int, seed: int) -> list[Item]:
    """One item for each pair of lengths; item i has the same prompt whatever the others are."""
    pairs = zip(prompt_lens, output_lens, strict=True)
    return [Item(token_ids(p, vocab_size, seed * 1_000_003 + i), o) for i, (p, o) in enumerate(pairs)]


def uniform(num_requests: int, prompt_len: int, output_len: int, *, vocab_size: int, seed: int) -> list[Item]:
    """Requests of one size, with different prompts."""
    return from_lengths([prompt_len] * num_requests, [output_len] * num_requests, vocab_size=vocab_size, seed=seed)


def mix_lengths(num_requests: int = 1000) -> tuple[list[int], list[int]]:
    """Chat-like lengths: lognormal, prompts of median 220 (4 to 2,000), outputs of median 180 (4 to 1,000)."""
    return (
        lognormal_lengths(num_requests, median=220, sigma=1.0, low=4, high=2000, seed=0),
        lognormal_lengths(num_requests, median=180, sigma=0.8, low=4, high=1000, seed=1),
    )


def mix(num_requests: int = 1000, *, vocab_size: int, seed: int) -> list[Item]:
    """Requests with `mix_lengths`."""
    prompt_lens, output_lens = mix_lengths(num_requests)
    return from_lengths(prompt_lens, output_lens, vocab_size=vocab_size, seed=seed)


def shared_prefix(
    num_requests: int,
    *,
    prefix_len: int,
    suffix_len: int,
    output_len: int,
    vocab_size: int,
    prefix_seed: int,
    suffix_seed: int,
) -> list[Item]:
    """Requests that begin with the same `prefix_len` tokens."""
    head = token_ids(prefix_len, vocab_size, 77_000_000 + prefix_seed)
    suffixes = uniform(num_requests, suffix_len, output_len, vocab_size=vocab_size, seed=suffix_seed)
    return [replace(item, prompt_token_ids=head + item.prompt_token_ids) for item in suffixes]


def lognormal_lengths(count: int, *, median: float, sigma: float, low: int, high: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [min(high, max(low, round(rng.lognormvariate(math.log(median), sigma)))) for _ in range(count)]


def lengths(spec: str, count: int, *, seed: int) -> list[int]:
    """`count` lengths from a distribution: `512`, `fixed:512`, `uniform:LOW:HIGH`, `lognormal:MEDIAN:SIGMA[:LOW:HIGH]`.

    Raises ConfigError for any other text.
    """
    kind, *numbers = spec.split(":") if ":" in spec else ("fixed", spec)
    try:
        match kind, [float(number) for number in numbers]:
            case "fixed", [value] if value >= 1:
                return [int(value)] * count
            case "uniform", [low, high] if 1 <= low <= high:
                rng = random.Random(seed)
                return [int(low) + int(rng.random() * (int(high) - int(low) + 1)) for _ in range(count)]
            case "lognormal", [median, sigma] if median >= 1:
                return lognormal_lengths(count, median=median, sigma=sigma, low=1, high=2**31, seed=seed)
            case "lognormal", [median, sigma, low, high] if 1 <= low <= median <= high:
                return lognormal_lengths(count, median=median, sigma=sigma, low=int(low), high=int(high), seed=seed)
    except ValueError:
        pass
    raise ConfigError(
        f"lengths {spec!r}: write 512, fixed:512, uniform:128:1024 or lognormal:220:1.0:4:2000 "
        "(median, sigma, low, high)"
    )


def poisson_arrivals(count: int, rate: float, *, seed: int) -> list[float]:
    """Arrival times in seconds of a Poisson process with `rate` requests a second; the first is after one gap."""
    rng = random.Random(seed)
    now_s, times = 0.0, []
    for _ in range(count):
        now_s -= math.log(1.0 - rng.random()) / rate
        times.append(now_s)
    return times


def constant_arrivals(count: int, rate: float) -> list[float]:
    """Arrival times in seconds, one every 1/rate."""
    return [index / rate for index in range(count)]


ARRIVALS: dict[str, Callable[[int, float, int], list[float]]] = {
    "poisson": lambda count, rate, seed: poisson_arrivals(count, rate, seed=seed),
    "constant": lambda count, rate, seed: constant_arrivals(count, rate),
}


def at_rate(items: Sequence[Item], rate: float, *, process: str = "poisson", seed: int = 0) -> list[Item]:
    """The same requests, arriving at `rate` a second. Raises ConfigError for an unknown process or rate."""
    if rate <= 0 or process not in ARRIVALS:
        raise ConfigError(f"arrivals need a rate above 0 and one of {', '.join(ARRIVALS)}, not {rate:g} {process!r}")
    times = ARRIVALS[process](len(items), rate, seed)
    return [replace(item, arrival_s=time_s) for item, time_s in zip(items, times, strict=True)]


def rescaled(items: Sequence[Item], rate: float) -> list[Item]:
    """A trace's own arrivals stretched or squeezed, so that the mean rate is `rate` requests a second."""
    first_s, last_s = items[0].arrival_s, items[-1].arrival_s
    if len(items) < 2 or last_s <= first_s:
        raise ConfigError("this trace has no arrival times: choose poisson or constant arrivals")
    scale = (len(items) - 1) / rate / (last_s - first_s)
    return [replace(item, arrival_s=(item.arrival_s - first_s) * scale) for item in items]

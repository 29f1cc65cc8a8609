"""`manta bench handoff`: what it costs to prefill in one engine and decode in another. Knows no Ray.

Three measurements. Transfer: blocks of a prompt between two processes that do nothing else, over each transport.
TTFT: a lone prompt that one engine prefills and the other decodes, beside one engine that does both. ITL: running
decodes while long prompts arrive, in a decode engine beside a prefill engine and in one engine with chunked prefill,
with the same share of the device's memory in all.

On one device both engines share it, so prefill still takes its time from decode: the kernels of two processes take
turns. What it shows is the cost of a hand-over and how evenly turns are taken, not what a GPU of its own would give.
With two devices each engine has one to itself, and the engine with chunked prefill stands for one of two equal ones: it
gets half of the decodes, and long prompts half as often.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from manta.engine.config import EngineConfig, with_overrides
from manta.engine.errors import ConfigError, EngineFailed
from manta.engine.kv_transfer.messages import (
    Accepted,
    KvAccept,
    KvOpen,
    KvPeer,
    KvRange,
    KvRevoke,
    Received,
    Revoked,
    SendKv,
    Sent,
    TakeKv,
)
from manta.engine.model_shape import ModelShape
from manta.engine.model_source import load_shape, resolve_model
from manta.engine.request import EngineRequest, SamplingParams
from manta.engine.stats import EngineInfo, Snapshot

from .drive import describe_engine
from .handoff_processes import (
    CacheOrder,
    Child,
    Digest,
    Expect,
    Happened,
    Obeyed,
    Tokens,
    first_ready,
    run_endpoint,
    run_engine,
)
from .report import Report, sayer
from .stats import median, percentile
from .workloads import token_ids

PARTS = ("transfer", "ttft", "itl")
TRANSPORTS = {"gpu": True, "host": False}
"""Whether GPU memory is shared. On a CPU there is `host` alone."""

Engine = Child[EngineInfo]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Sizes:
    """Lengths in tokens."""

    prompt_lens: tuple[int, ...] = (2048, 8192, 32768)
    repeats: int = 5
    answer_len: int = 16
    num_decodes: int = 64
    decode_prompt_len: int = 512
    long_prompt_len: int = 8192
    long_answer_len: int = 64
    interval_s: float = 1.0
    """Between two long prompts."""
    duration_s: float = 30.0
    """For which long prompts arrive."""
    settle_s: float = 2.0
    """Decodes run for so long before the first of them."""
    decode_share: float = 0.6
    """Of the memory that one engine would have: the decode engine's, where there are two."""


ON_CPU = Sizes(
    prompt_lens=(64, 256),
    repeats=2,
    answer_len=8,
    num_decodes=4,
    decode_prompt_len=32,
    long_prompt_len=160,
    long_answer_len=8,
    interval_s=2.0,
    duration_s=8.0,
    settle_s=1.0,
)
"""The same shapes for a small model on a few cores: it shows that everything works, not what it costs."""


def run(
    config: EngineConfig,
    *,
    parts: Sequence[str] = PARTS,
    prompt_lens: Sequence[int] | None = None,
    duration_s: float | None = None,
    repeats: int | None = None,
    devices: Sequence[str] | None = None,
    json_path: Path | None = None,
    console: Console | None = None,
) -> Report:
    """Measure in processes that are started for this. Sizes that are None follow from the device. `devices`: of
    prefill and of decode; None: one for both.

    Raises ConfigError, or EngineFailed when a process ends or a hand-over was computed again.
    """
    if unknown := sorted(set(parts) - set(PARTS)):
        raise ConfigError(f"unknown part {', '.join(unknown)!r}; known: {', '.join(PARTS)}", field="parts")
    on_cpu = config.device == "cpu" or not _has_gpu()
    sizes = ON_CPU if on_cpu else Sizes()
    sizes = replace(
        sizes,
        prompt_lens=tuple(prompt_lens or sizes.prompt_lens),
        duration_s=duration_s or sizes.duration_s,
        repeats=repeats or sizes.repeats,
    )
    if devices is not None and len(devices) != 2:
        raise ConfigError(f"devices = {','.join(devices)!r}: must be two, as in cuda:0,cuda:1", field="devices")
    bench = HandoffBench(config, sizes, on_cpu, sayer(console), devices)

    def report() -> Report:
        details = {"notes": bench.notes()}
        return Report("handoff", model=bench.model, workload=asdict(sizes), figures=bench.figures, details=details)

    for part in PARTS:
        if part in parts:
            bench.figures |= getattr(bench, part)()
            report().finish(None, json_path)  # a part that fails or is cut off leaves those before it
    finished = report()
    finished.finish(console, json_path)
    return finished


class HandoffBench:
    """The measurements, each a method that returns figures."""

    def __init__(
        self,
        config: EngineConfig,
        sizes: Sizes,
        on_cpu: bool,
        say: Say,
        devices: Sequence[str] | None = None,
    ) -> None:
        """`devices`: of prefill and of decode."""
        self._devices = devices
        self.figures: dict[str, float] = {}
        self.model: dict[str, Any] = {}
        self._on_cpu = on_cpu
        self._sizes = sizes
        self._say = say
        self._shape = load_shape(resolve_model(config.model))
        longest = max(*sizes.prompt_lens, sizes.long_prompt_len) + 1024
        self._config = with_overrides(
            config,
            {
                "model.max_model_len": min(longest, self._shape.max_position_embeddings),
                "cache.kv_transfer": True,
                "cache.enable_prefix_caching": False,  # every prompt is computed and moved whole
            },
        )
        self._seed = 0

    def transfer(self) -> dict[str, float]:
        """Bytes a second from cache to cache, the first order to the last byte, nothing else running."""
        figures: dict[str, float] = {}
        for name, gpu_sharing in self._transports():
            for length, seconds, num_bytes in self._transfers(gpu_sharing):
                figures[f"transfer_{name}_{length}_ms"] = seconds * 1e3
                figures[f"transfer_{name}_{length}_gb_per_s"] = num_bytes / seconds / 1e9
                self._say(f"{name}: {length} tokens, {num_bytes / 1e6:.0f} MB in {seconds * 1e3:.1f} ms")
        return figures

    def ttft(self) -> dict[str, float]:
        """What a lone request's first two tokens take, with and without a hand-over.

        `exposed`: by how much longer the second token takes after the first. `share of TTFT`: that, and the bare
        transfer (where it was measured), over the TTFT.
        """
        figures: dict[str, float] = {}
        for name, gpu_sharing in self._transports():
            with self._pair(gpu_sharing) as (prefill, decode):
                for length in self._sizes.prompt_lens:
                    figures |= self._lone(name, length, prefill, decode)
        return figures

    def itl(self) -> dict[str, float]:
        """Times between tokens of running decodes while long prompts arrive."""
        figures: dict[str, float] = {}
        with closing(self._engine(self._config)) as one:
            self.model = self.model or describe_engine(self._config, one.about)
            figures |= self._mixed("chunked", one, one, share=1.0 if self._devices is None else 0.5)
        name = next(iter(dict(self._transports())))
        with self._pair(dict(self._transports())[name]) as (prefill, decode):
            figures |= self._mixed("pd", prefill, decode)
        return figures

    def notes(self) -> list[str]:
        """What the figures do not show, for the report."""
        found = [
            "two engines share one device: their kernels take turns, prefill takes its time from decode"
            if self._devices is None
            else "each engine has a device; chunked is one of two equal engines, with half of the load",
            "no edge, channel or router: times are taken at the engines, a request's second submission comes from "
            "this benchmark",
            "prefix caching is off, so that every prompt is computed and moved whole",
        ]
        if self._on_cpu:
            found.append("on a CPU this shows that hand-overs work and nothing about their cost on GPUs")
        return found

    def _transports(self) -> Iterator[tuple[str, bool]]:
        for name, gpu_sharing in TRANSPORTS.items():
            if not (gpu_sharing and self._on_cpu):
                yield name, gpu_sharing

    def _transfers(self, gpu_sharing: bool) -> Iterator[tuple[int, float, int]]:
        """(tokens, median seconds, bytes) for each length."""
        block_size = self._config.cache.block_size or (16 if self._on_cpu else 64)
        num_blocks = -(-max(self._sizes.prompt_lens) // block_size)
        dtype = self._dtype(self._shape)
        first, second = self._devices or (("cpu",) * 2 if self._on_cpu else ("cuda:0",) * 2)
        order = CacheOrder(self._shape, dtype, first, block_size, num_blocks, gpu_sharing, seed=1)
        empty = replace(order, device=second, seed=0)
        with ExitStack() as stack:
            source: Child[KvPeer] = stack.enter_context(closing(Child(run_endpoint, order)))
            target: Child[KvPeer] = stack.enter_context(closing(Child(run_endpoint, empty)))
            for length in self._sizes.prompt_lens:
                block_ids = list(range(-(-length // block_size)))
                times = [self._transfer(source, target, length, block_ids) for _ in range(self._sizes.repeats + 1)]
                digests = []
                for child in (source, target):
                    child.send(Digest(block_ids))
                    digests.append(child.receive())
                if digests[0] != digests[1]:
                    raise EngineFailed("Blocks arrived that are not those that were sent: this is a bug.")
                yield length, median([seconds for seconds, _ in times[1:]]), times[0][1]  # the first connects

    def _transfer(
        self, source: Child[KvPeer], target: Child[KvPeer], num_tokens: int, block_ids: list[int]
    ) -> tuple[float, int]:
        """Seconds and bytes of one."""
        generation = secrets.randbits(62)
        target.send([KvAccept(generation, block_ids, 0, num_tokens)])
        assert isinstance(target.receive(), Obeyed)
        self._expect(target, Accepted)
        source.send(
            [
                KvOpen(generation, target.about, block_ids, block_ids),
                KvRange(generation, 0, num_tokens, is_last=True),
            ]
        )
        begun = source.receive()
        assert isinstance(begun, Obeyed)
        received = self._expect(target, Received)
        self._expect(source, Sent)
        target.send([KvRevoke(generation)])
        assert isinstance(target.receive(), Obeyed)
        self._expect(target, Revoked)
        assert isinstance(received.event, Received)
        return received.at_s - begun.at_s, received.event.num_bytes

    def _expect(self, child: Child[Any], kind: type) -> Happened:
        happened = child.receive()
        if not isinstance(happened, Happened) or not isinstance(happened.event, kind):
            raise EngineFailed(f"A transfer of the benchmark did not go as it should: {happened}")
        return happened

    def _engine(self, config: EngineConfig) -> Engine:
        return Child(run_engine, config)

    @contextmanager
    def _pair(self, gpu_sharing: bool) -> Iterator[tuple[Engine, Engine]]:
        """(prefill, decode): together they have what one engine would have of the device's memory."""
        cache, share = self._config.cache, self._sizes.decode_share
        config = with_overrides(self._config, {"cache.kv_gpu_sharing": gpu_sharing})
        if self._devices is not None:
            of_prefill, of_decode = (with_overrides(config, {"device": device}) for device in self._devices)
            with closing(self._engine(of_decode)) as decode, closing(self._engine(of_prefill)) as prefill:
                self.model = self.model or describe_engine(config, decode.about)
                yield prefill, decode
            return
        # The first counts what is used on the device when it starts, and so does the second, which sees the first.
        first = {
            "cache.memory_fraction": cache.memory_fraction * share,
            "cache.cpu_cache_gib": cache.cpu_cache_gib * share,
        }
        second = {"cache.cpu_cache_gib": cache.cpu_cache_gib * (1 - share)}
        with (
            closing(self._engine(with_overrides(config, first))) as decode,
            closing(self._engine(with_overrides(config, second))) as prefill,
        ):
            self.model = self.model or describe_engine(config, decode.about)
            yield prefill, decode

    def _lone(self, name: str, length: int, prefill: Engine, decode: Engine) -> dict[str, float]:
        alone, handed = [], []
        num_equal = 0
        for repeat in range(self._sizes.repeats + 1):
            prompt = self._prompt(length)
            whole = self._drive_one(prompt, prefill, prefill)
            parts = self._drive_one(prompt, prefill, decode)
            if repeat:  # the first is the warm-up
                alone.append(whole)
                handed.append(parts)
                num_equal += whole.token_ids == parts.token_ids
        ttft_s = median([one.ttft_s for one in handed])
        exposed_s = median([one.second_s for one in handed]) - median([one.second_s for one in alone])
        figures = {
            f"ttft_alone_{length}_ms": median([one.ttft_s for one in alone]) * 1e3,
            f"ttft_{name}_{length}_ms": ttft_s * 1e3,
            f"second_token_alone_{length}_ms": median([one.second_s for one in alone]) * 1e3,
            f"second_token_{name}_{length}_ms": median([one.second_s for one in handed]) * 1e3,
            f"exposed_{name}_{length}_ms": exposed_s * 1e3,
            f"exposed_{name}_{length}_percent_of_ttft": 100 * exposed_s / ttft_s,
            f"equal_answers_{name}_{length}_percent": 100 * num_equal / self._sizes.repeats,
        }
        bare_ms = self.figures.get(f"transfer_{name}_{length}_ms")
        if bare_ms is not None:
            figures[f"transfer_{name}_{length}_percent_of_ttft"] = 100 * bare_ms / (ttft_s * 1e3)
        self._say(
            f"{name}: {length} tokens, TTFT {ttft_s * 1e3:.1f} ms, second token {exposed_s * 1e3:+.1f} ms later than "
            "without a hand-over"
        )
        return figures

    def _drive_one(self, prompt: list[int], prefill: Engine, decode: Engine) -> _Request:
        drive = _Drive(prefill, decode)
        before = drive.snapshot()
        request = drive.submit(prompt, self._sizes.answer_len)
        drive.run_until(lambda: request.is_finished)
        drive.check_handed_over(before, 1)
        return request

    def _mixed(self, name: str, prefill: Engine, decode: Engine, *, share: float = 1.0) -> dict[str, float]:
        """Long prompts beside running decodes; those begin where they run and are not handed over. `share`: of the
        load."""
        sizes = self._sizes
        num_decodes, interval_s = max(1, int(sizes.num_decodes * share)), sizes.interval_s / share
        drive = _Drive(prefill, decode)
        # Enough tokens that no decode ends before the last long prompt has.
        decodes = [
            drive.submit(self._prompt(sizes.decode_prompt_len), self._room(sizes.decode_prompt_len), begins_there=True)
            for _ in range(num_decodes)
        ]
        drive.run_until(lambda: all(request.times_s for request in decodes))
        drive.run_for(sizes.settle_s)
        before, begin_s = drive.snapshot(), time.monotonic()
        long = []
        for number in range(max(1, int(sizes.duration_s / interval_s))):
            drive.run_for(begin_s + number * interval_s - time.monotonic())
            long.append(drive.submit(self._prompt(sizes.long_prompt_len), sizes.long_answer_len))
        drive.run_until(lambda: all(request.is_finished for request in long))
        end_s = time.monotonic()
        drive.check_handed_over(before, len(long), may_recompute=True)
        quiet, busy = _gaps(decodes, begin_s - sizes.settle_s, begin_s), _gaps(decodes, begin_s, end_s)
        if any(request.is_finished for request in decodes):
            raise EngineFailed("Decodes ended before the long prompts did: shorten --duration, or raise max_model_len.")
        ttfts = [request.ttft_s for request in long]
        figures = {
            f"{name}_itl_p50_ms": median(busy) * 1e3,
            f"{name}_itl_p99_ms": percentile(busy, 99) * 1e3,
            f"{name}_itl_max_ms": max(busy) * 1e3,
            f"{name}_decode_tokens_per_s": len(busy) / (end_s - begin_s),
            f"{name}_long_ttft_median_ms": median(ttfts) * 1e3,
            f"{name}_long_ttft_p95_ms": percentile(ttfts, 95) * 1e3,
            f"{name}_long_per_s": len(long) / (end_s - begin_s),
            f"{name}_recomputed": float(drive.num_recomputed(before)),
        }
        if quiet:  # none where steps take seconds
            figures[f"{name}_itl_quiet_p50_ms"] = median(quiet) * 1e3
        self._say(
            f"{name}: ITL p50 {median(busy) * 1e3:.1f} ms, p99 {percentile(busy, 99) * 1e3:.1f} ms, max "
            f"{max(busy) * 1e3:.1f} ms; TTFT of long prompts {median(ttfts) * 1e3:.0f} ms"
        )
        return figures

    def _room(self, prompt_len: int) -> int:
        max_model_len = self._config.model.max_model_len
        assert max_model_len is not None
        return max_model_len - prompt_len

    def _prompt(self, length: int) -> list[int]:
        self._seed += 1
        return token_ids(length, self._shape.vocab_size, self._seed)

    def _dtype(self, shape: ModelShape) -> str:
        wanted = self._config.model.dtype
        if wanted != "auto":
            return str(wanted)
        return "float32" if self._on_cpu else shape.dtype


@dataclass
class _Request:
    """What happened to one."""

    prompt_token_ids: list[int]
    num_tokens: int
    submitted_s: float
    ticket: str | None = None
    times_s: list[float] = field(default_factory=list)
    """Of tokens."""
    token_ids: list[int] = field(default_factory=list)
    is_finished: bool = False

    @property
    def ttft_s(self) -> float:
        return self.times_s[0] - self.submitted_s

    @property
    def second_s(self) -> float:
        """From the first token to the second."""
        return self.times_s[1] - self.times_s[0]


class _Drive:
    """Requests over two engines, or over one that is both."""

    def __init__(self, prefill: Engine, decode: Engine) -> None:
        self._prefill, self._decode = prefill, decode
        self._requests: dict[str, _Request] = {}

    @property
    def hands_over(self) -> bool:
        return self._prefill is not self._decode

    def submit(self, prompt: list[int], num_tokens: int, *, begins_there: bool = False) -> _Request:
        """A request; with `begins_there` the decode engine computes its prompt too."""
        request_id = secrets.token_hex(8)
        request = self._requests[request_id] = _Request(prompt, num_tokens, time.monotonic())
        if begins_there or not self.hands_over:
            self._decode.send(_engine_request(request_id, request, num_tokens))
            return request
        peer = self._decode.about.kv
        assert peer is not None
        request.ticket = request_id
        self._decode.send(Expect(request.ticket, prompt))
        self._prefill.send(_engine_request(request_id, request, 1, handoff=SendKv(request.ticket, peer)))
        return request

    def run_for(self, seconds: float) -> None:
        """Take what comes for so long."""
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            self._take(left_s)

    def run_until(self, is_over: Callable[[], bool]) -> None:
        """Take what comes until it is so."""
        while not is_over():
            self._take(1.0)

    def snapshot(self) -> Snapshot:
        """The decode engine's."""
        self._decode.send(Snapshot)
        while True:
            message = self._decode.receive()
            if isinstance(message, Snapshot):
                return message
            self._took(message)

    def num_recomputed(self, before: Snapshot) -> int:
        """Hand-overs since then that did not come in time."""
        return self.snapshot().num_kv_recomputed - before.num_kv_recomputed

    def check_handed_over(self, before: Snapshot, count: int, *, may_recompute: bool = False) -> None:
        """Raises EngineFailed unless so many requests went from engine to engine."""
        if not self.hands_over:
            return
        now = self.snapshot()
        received = now.num_kv_received - before.num_kv_received
        recomputed = now.num_kv_recomputed - before.num_kv_recomputed
        if received + recomputed != count or (recomputed and not may_recompute):
            raise EngineFailed(f"Of {count} hand-overs {received} arrived and {recomputed} were computed again.")

    def _take(self, timeout_s: float) -> None:
        for child in first_ready([self._prefill, self._decode] if self.hands_over else [self._decode], timeout_s):
            self._took(child.receive())

    def _took(self, tokens: Tokens) -> None:
        for request_id, ids, reason in tokens.deltas:
            request = self._requests[request_id]
            request.times_s += [tokens.at_s] * len(ids)
            request.token_ids += ids
            if reason is None:
                continue
            if len(request.token_ids) == request.num_tokens:
                request.is_finished = True
            elif request.ticket is not None and len(request.token_ids) == 1:
                take = TakeKv(request.ticket)
                self._decode.send(_engine_request(request_id, request, request.num_tokens, handoff=take))
            else:
                raise EngineFailed(f"A request ended with {reason} after {len(request.token_ids)} tokens.")


def _engine_request(
    request_id: str, request: _Request, num_tokens: int, handoff: SendKv | TakeKv | None = None
) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=request.prompt_token_ids,
        params=SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, seed=0),
        output_token_ids=list(request.token_ids),
        handoff=handoff,
    )


def _gaps(requests: Sequence[_Request], begin_s: float, end_s: float) -> list[float]:
    """Times between tokens of one request that came inside."""
    found: dict[int, list[float]] = defaultdict(list)
    for number, request in enumerate(requests):
        times = [time_s for time_s in request.times_s if begin_s <= time_s <= end_s]
        found[number] = [after - before for before, after in itertools.pairwise(times)]
    return [gap for gaps in found.values() for gap in gaps]


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()

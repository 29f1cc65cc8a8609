"""A rank that runs what rank 0 plans: builds its part, receives plans, launches them. Knows no requests.

The rank that samples reports results; the others report nothing but that they live. A second thread waits for the
steps, so that the next plan is launched while the one before still runs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING

from manta.engine.config import EngineConfig
from manta.engine.kv_transfer.ranks import KV_KEY, FollowerEvents, shards_of
from manta.engine.kv_transfer.start import open_endpoint
from manta.engine.model_shape import ModelShape
from manta.engine.model_source import load_shape, resolve_model
from manta.engine.plan import Runner, StepHandle, StepPlan
from manta.engine.sim_device import start_simulated

from .link import FollowerLink
from .member import GangMember
from .plan_codec import Order, StepReport, decode, encode_report
from .rank import Report, build_rank, open_store
from .ring import SLICE_S
from .watch import Store, Watch, end_process

if TYPE_CHECKING:
    from manta.engine.runner import ModelRunner


@dataclass(frozen=True)
class FollowerProgress:
    """What a follower can say about itself at any time."""

    phases_s: dict[str, float]
    """Phases of start-up that are over, seconds."""
    is_ready: bool
    num_steps: int
    """Steps whose end it has seen."""


class Follower:
    """One rank but rank 0. `run` owns the calling thread; the other members may be used by any."""

    def __init__(
        self,
        config: EngineConfig,
        member: GangMember,
        report: Report = lambda name, seconds: None,
        *,
        on_broken: Callable[[str], None] = end_process,
        minds_silence: bool = True,
    ) -> None:
        """`on_broken(reason)` is called by another thread when the gang is broken; it ends the process, since the
        thread of `run` may be stuck in an exchange with a rank that is gone. `minds_silence`: False where rank 0 may be
        suspended, and its end is noticed all the same."""
        assert not member.place.is_driver, "rank 0 plans"
        self._config = config
        self._member = member
        self._report = report
        self._on_broken = on_broken
        self._minds_silence = minds_silence
        self._phases = _PhaseTimes()
        self._stop = threading.Event()
        self._num_steps = 0

    @property
    def progress(self) -> FollowerProgress:
        """Start-up and steps so far."""
        return FollowerProgress(dict(self._phases.seconds), self._phases.is_over, self._num_steps)

    def stop(self) -> None:
        """End `run` soon; rank 0 learns that this rank leaves."""
        self._stop.set()

    def run(self) -> None:
        """Start, then follow until rank 0 ends the gang or `stop` is called.

        Raises ConfigError or CheckpointError when this rank cannot start; rank 0 raises the same.
        """
        store, events = open_store(self._member), None
        watch = Watch(self._member, store, self._on_broken, minds_silence=self._minds_silence)
        try:
            link = FollowerLink(self._member, store)
            self._end_phase("connect")
            source = resolve_model(self._config.model)
            shape = load_shape(source)
            if self._config.device.startswith("sim"):
                runner = start_simulated(self._config, shape).runner
            else:
                built = build_rank(self._config, source, shape, self._member, store, self._end_phase)
                runner = built.runner
                if built.device.type == "cuda":
                    link.look_for_plans(self._member)
                if self._config.cache.kv_transfer:
                    events = _open_endpoint(self._config, shape, self._member, store, built.runner)
        except Exception as error:
            watch.fail(error)
            raise
        self._phases.is_over = True
        watch.say_ready()
        try:
            self._follow(runner, link, watch)
        except Exception as error:
            watch.fail(error)
            raise
        watch.close()
        link.close()
        if events is not None:
            events.close()

    def _follow(self, runner: Runner, link: FollowerLink, watch: Watch) -> None:
        steps: SimpleQueue[tuple[int, StepHandle] | None] = SimpleQueue()
        collector = threading.Thread(target=self._collect, args=(steps, link, watch), name="manta-collect", daemon=True)
        collector.start()
        while not self._stop.is_set():
            data = link.receive(SLICE_S)
            if data is None:
                if watch.is_left_alone:
                    break
                continue
            message = decode(data)
            if message is Order.END:
                break
            if message is Order.PREPARE_MORE:
                runner.prepare_more()
            elif isinstance(message, StepPlan):
                steps.put((message.step_id, runner.launch(message)))
            else:
                assert not isinstance(message, Order)
                runner.obey(message)
        steps.put(None)
        collector.join()
        runner.close()

    def _collect(self, steps: SimpleQueue[tuple[int, StepHandle] | None], link: FollowerLink, watch: Watch) -> None:
        samples = self._member.place.samples
        try:
            while (step := steps.get()) is not None:
                step_id, handle = step
                result = handle.result()
                self._num_steps += 1
                if samples:
                    link.report(encode_report(StepReport(step_id, result)), watch.check)
        except Exception as error:
            cause = watch.cause_of(error)
            watch.fail(error)
            self._on_broken(f"{type(cause).__name__}: {cause}")

    def _end_phase(self, name: str, seconds: float | None = None) -> None:
        self._report(name, self._phases.end(name, seconds))


def _open_endpoint(
    config: EngineConfig, shape: ModelShape, member: GangMember, store: Store, runner: ModelRunner
) -> FollowerEvents:
    """Let KV come to this rank and go from it. Returns what is to be closed after the runner."""
    events = FollowerEvents(member, store)
    shards = shards_of(shape, tp_size=member.place.tp_size, pp_size=member.place.pp_size)
    rank, key = member.place.rank, member.key(KV_KEY)
    url = open_endpoint(runner, config, shards, rank, key=key, host=member.host, on_event=events.put)
    events.say_url(url)
    return events


@dataclass
class _PhaseTimes:
    seconds: dict[str, float] = field(default_factory=dict)
    is_over: bool = False
    _since_s: float = field(default_factory=time.monotonic)

    def end(self, name: str, seconds: float | None) -> float:
        """`seconds`: as measured elsewhere; None: since the last phase ended."""
        now_s = time.monotonic()
        took_s = now_s - self._since_s if seconds is None else seconds
        self._since_s = now_s
        self.seconds[name] = self.seconds.get(name, 0.0) + took_s
        return took_s

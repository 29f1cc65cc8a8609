"""A runner without a model: steps take the predicted time, tokens are a hash of all that came before. Torch-free.

The next token depends on every preceding token id and on the seed only, so a stream that is resumed elsewhere goes
on as it would have. It never is an EOS token: lengths are what the request asks for.
"""

from __future__ import annotations

import hashlib
import re
import time
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING

from .errors import ConfigError
from .kv_transfer.messages import KvOrder
from .plan import NewSequence, Row, StepPlan, StepResult
from .request import TokenLogprobs
from .step_time import StepShape

if TYPE_CHECKING:
    from .kv_transfer.sim_endpoint import SimEndpoint

FIXED_STEP = re.compile(r"(\d+)ms")
"""`sim:20ms` is a device whose every step takes 20 ms."""


def fixed_step_s(device: str) -> float | None:
    """Seconds of a device such as sim:20ms; None for one that is named after hardware."""
    match = FIXED_STEP.fullmatch(device.partition(":")[2])
    return int(match[1]) / 1000 if match else None


class TokenStream:
    """The simulated model: a hash state over token ids that yields the next one."""

    def __init__(self, token_ids: list[int], *, seed: int, vocab_size: int, excluded: frozenset[int]) -> None:
        if vocab_size <= len(excluded):
            raise ConfigError("the simulated device needs a vocabulary with more than special tokens", field="device")
        self._state = hashlib.blake2b(seed.to_bytes(8, "little", signed=False), digest_size=8)
        self._state.update(array("I", token_ids).tobytes())
        self._vocab_size = vocab_size
        self._excluded = excluded

    def next(self) -> int:
        """The token after all tokens so far; it becomes one of them."""
        token_id = int.from_bytes(self._state.digest(), "little") % self._vocab_size
        while token_id in self._excluded:
            token_id = (token_id + 1) % self._vocab_size
        self._state.update(array("I", (token_id,)).tobytes())
        return token_id


class _Slot:
    def __init__(self, new: NewSequence, stream: TokenStream) -> None:
        self.token_ids = new.token_ids
        self.num_prompt_tokens = new.num_prompt_tokens
        self.num_logprobs = new.params.logprobs
        self.stream = stream


class SimRunner:
    """Implements plan.Runner. `predict` gives a step's seconds, through all `num_stages` of a pipeline, each of which
    holds one step at a time; clock and sleep can be virtual."""

    def __init__(
        self,
        predict: Callable[[StepShape], float],
        *,
        vocab_size: int,
        excluded_token_ids: frozenset[int] = frozenset(),
        num_stages: int = 1,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._predict = predict
        self._vocab_size = vocab_size
        self._excluded = excluded_token_ids
        self._clock = clock
        self._sleep = sleep
        self._slots: dict[int, _Slot] = {}
        self._stages_free_at_s = [clock()] * num_stages
        self._endpoint: SimEndpoint | None = None

    def attach(self, endpoint: SimEndpoint) -> None:
        """KV comes and goes by this endpoint, on time.monotonic's clock. It is closed with the runner."""
        self._endpoint = endpoint

    def obey(self, order: KvOrder) -> None:
        """Pass an order on. Followers of a simulated gang have no endpoint: rank 0 simulates all."""
        if self._endpoint is not None:
            self._endpoint.obey(order, not_before_s=self._stages_free_at_s[-1])

    def launch(self, plan: StepPlan) -> SimHandle:
        for slot in plan.freed_slots:
            del self._slots[slot]
        for new in plan.new:
            seed = 0 if new.params.is_greedy else (new.params.seed or 0) % 2**64
            stream = TokenStream(new.token_ids, seed=seed, vocab_size=self._vocab_size, excluded=self._excluded)
            self._slots[new.slot] = _Slot(new, stream)
        result = StepResult([])
        for index, row in enumerate(plan.rows):
            self._run(index, row, result)
        done_at_s, stages = self._clock(), self._stages_free_at_s
        stage_s = self._predict(StepShape.of(plan)) / len(stages)
        for stage, free_at_s in enumerate(stages):
            done_at_s = stages[stage] = max(done_at_s, free_at_s) + stage_s
        for order in plan.sends:
            self.obey(order)
        return SimHandle(result, done_at_s, self._clock, self._sleep)

    def prepare_more(self) -> bool:
        return False

    def close(self) -> None:
        self._slots.clear()
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None

    def _run(self, index: int, row: Row, result: StepResult) -> None:
        slot = self._slots[row.slot]
        if row.prompt_logprobs_start is not None:
            end = min(row.start + row.num_tokens + 1, slot.num_prompt_tokens)
            result.prompt_logprobs[index] = [_logprobs(t, 0) for t in slot.token_ids[row.start + 1 : end]]
        if row.samples:
            token_id = slot.stream.next()
            result.token_ids.append(token_id)
            if slot.num_logprobs is not None:
                result.logprobs[index] = _logprobs(token_id, slot.num_logprobs)


class SimHandle:
    """A simulated step in flight."""

    def __init__(
        self, result: StepResult, done_at_s: float, clock: Callable[[], float], sleep: Callable[[float], None]
    ) -> None:
        self._result = result
        self._done_at_s = done_at_s
        self._clock = clock
        self._sleep = sleep

    def result(self) -> StepResult:
        left_s = self._done_at_s - self._clock()
        if left_s > 0:
            self._sleep(left_s)
        return self._result


def _logprobs(token_id: int, num_alternatives: int) -> TokenLogprobs:
    """The simulated model is certain: log-probability 0 for its token, which is the only alternative it knows."""
    top = [token_id] if num_alternatives else []
    return TokenLogprobs(token_id, 0.0, top, [0.0] * len(top))

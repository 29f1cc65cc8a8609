"""From logits to tokens: penalties, biases, minimum lengths, the draw, log-probabilities. Knows slots, no scheduler.

What a step needs is prepared on the host from per-slot arrays (`SlotSampling`) and run on the device (`Sampler`); a
feature that no row of a step uses costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from manta.kernels.sampling import argmax, sample

from .logprobs import Logprobs, logprobs_of
from .penalties import PenalizedRows, PenaltyPool
from .plan import NewSequence, StepPlan


@dataclass(frozen=True)
class SamplingLayout:
    """What a step's sampling does, as the host knows it."""

    num_rows: int
    all_greedy: bool
    need_filter: bool
    num_penalized: int
    num_pool_rows: int
    """Rows that the penalty pool must have."""
    enters_pool: bool
    has_bias: bool
    has_forbidden: bool
    logprob_rows: Sequence[int]
    """Sampling rows that report log-probabilities, and how many alternatives each wants."""
    num_top: Sequence[int]

    @property
    def adjusts(self) -> bool:
        return self.num_penalized > 0 or self.has_bias or self.has_forbidden


@dataclass(frozen=True)
class Sampled:
    """Results on the device (or, after `to_host`, on their way to the host)."""

    token_ids: torch.Tensor  # [rows] int64
    logprobs: Logprobs | None  # of the layout's logprob_rows

    def to_host(self) -> Sampled:
        return Sampled(
            self.token_ids.to("cpu", non_blocking=True), None if self.logprobs is None else self.logprobs.to_host()
        )


class SlotSampling:
    """What each slot asks for, in arrays indexed by slot. Host only; called once a plan, in order, by one thread."""

    def __init__(self, *, max_num_seqs: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size

        def zeros(dtype: type[np.generic]) -> np.ndarray:
            return np.zeros(max_num_seqs, dtype=dtype)

        self._temperature, self._top_p, self._min_p = zeros(np.float32), zeros(np.float32), zeros(np.float32)
        self._top_k, self._seed = zeros(np.int32), zeros(np.int64)
        self._penalties = np.zeros((3, max_num_seqs), dtype=np.float32)  # repetition, presence, frequency
        self._pool_row = np.full(max_num_seqs, -1, dtype=np.int64)
        self._num_top = np.full(max_num_seqs, -1, dtype=np.int64)
        self._min_position = zeros(np.int64)
        """Tokens at positions below it must not end the sequence."""
        self._bias: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._forbidden: dict[int, np.ndarray] = {}
        self._free_pool_rows: list[int] = []
        self._num_pool_rows = 0

    def lay_out(
        self, plan: StepPlan, slots: np.ndarray, positions: np.ndarray, arrays: dict[str, np.ndarray]
    ) -> SamplingLayout:
        """Bring in the plan's changes and add the step's arrays to `arrays`.

        `slots` and `positions` [sampling rows] int64: whose tokens are sampled, and where those stand.
        """
        for slot in plan.freed_slots:
            self._leave(slot)
        for new in plan.new:
            self._enter(new)
        enters_pool = self._add_pool_entries([new for new in plan.new if self._pool_row[new.slot] >= 0], arrays)
        temperature, top_k = self._temperature[slots], self._top_k[slots]
        all_greedy = not temperature.any()
        need_filter = False
        if not all_greedy:
            top_p, min_p = self._top_p[slots], self._min_p[slots]
            drawn = temperature > 0
            need_filter = bool((drawn & ((top_k > 0) | (top_p < 1) | (min_p > 0))).any())
            arrays |= {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
            arrays |= {"seeds": self._seed[slots], "draw_positions": positions}
        penalized = (self._pool_row[slots] >= 0).nonzero()[0]
        if len(penalized):
            arrays |= {"penalized_rows": penalized, "pool_rows": self._pool_row[slots[penalized]]}
            arrays["penalties"] = self._penalties[:, slots[penalized]]
        has_bias = self._add_bias(slots, arrays)
        has_forbidden = self._add_forbidden(slots, positions, arrays)
        logprob_rows = (self._num_top[slots] >= 0).nonzero()[0]
        if 0 < len(logprob_rows) < len(slots):
            arrays["logprob_rows"] = logprob_rows
        return SamplingLayout(
            num_rows=len(slots),
            all_greedy=all_greedy,
            need_filter=need_filter,
            num_penalized=len(penalized),
            num_pool_rows=self._num_pool_rows,
            enters_pool=enters_pool,
            has_bias=has_bias,
            has_forbidden=has_forbidden,
            logprob_rows=logprob_rows.tolist(),
            num_top=self._num_top[slots[logprob_rows]].tolist(),
        )

    def _enter(self, new: NewSequence) -> None:
        slot, params = new.slot, new.params
        self._temperature[slot] = 0.0 if params.is_greedy else params.temperature
        self._top_k[slot] = params.top_k if 0 < params.top_k < self._vocab_size else 0
        self._top_p[slot], self._min_p[slot] = params.top_p, params.min_p
        self._seed[slot] = np.uint64((params.seed or 0) % 2**64).astype(np.int64)
        self._num_top[slot] = -1 if params.logprobs is None else params.logprobs
        if params.has_penalties:
            self._penalties[:, slot] = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
            if not self._free_pool_rows:
                added = min(max(self._num_pool_rows, 1), len(self._pool_row) - self._num_pool_rows)
                self._free_pool_rows = list(range(self._num_pool_rows + added - 1, self._num_pool_rows - 1, -1))
                self._num_pool_rows += added
            self._pool_row[slot] = self._free_pool_rows.pop()
        if params.logit_bias:
            ids = np.fromiter(params.logit_bias.keys(), np.int64, len(params.logit_bias))
            self._bias[slot] = ids, np.fromiter(params.logit_bias.values(), np.float32, len(ids))
        forbidden = {*new.eos_token_ids, *params.stop_token_ids}
        self._min_position[slot] = new.num_prompt_tokens + params.min_tokens
        if params.min_tokens and forbidden:
            self._forbidden[slot] = np.asarray(sorted(forbidden), dtype=np.int64)

    def _leave(self, slot: int) -> None:
        if self._pool_row[slot] >= 0:
            self._free_pool_rows.append(int(self._pool_row[slot]))
            self._pool_row[slot] = -1
        self._bias.pop(slot, None)
        self._forbidden.pop(slot, None)

    def _add_pool_entries(self, entering: list[NewSequence], arrays: dict[str, np.ndarray]) -> bool:
        if not entering:
            return False
        rows = self._pool_row[[new.slot for new in entering]]
        prompts, outputs = [], []
        for row, new in zip(rows, entering, strict=True):
            places = row * self._vocab_size + np.asarray(new.token_ids, dtype=np.int64)
            prompts.append(places[: new.num_prompt_tokens])
            outputs.append(places[new.num_prompt_tokens :])
        arrays["entering_pool_rows"] = rows
        arrays["prompt_token_places"], arrays["output_token_places"] = np.concatenate(prompts), np.concatenate(outputs)
        return True

    def _add_bias(self, slots: np.ndarray, arrays: dict[str, np.ndarray]) -> bool:
        if not self._bias:
            return False
        rows = [(row, *self._bias[slot]) for row, slot in enumerate(slots.tolist()) if slot in self._bias]
        if rows:
            arrays["bias_rows"] = np.concatenate([np.full(len(ids), row, dtype=np.int64) for row, ids, _ in rows])
            arrays["bias_ids"] = np.concatenate([ids for _, ids, _ in rows])
            arrays["bias_values"] = np.concatenate([values for _, _, values in rows])
        return bool(rows)

    def _add_forbidden(self, slots: np.ndarray, positions: np.ndarray, arrays: dict[str, np.ndarray]) -> bool:
        if not self._forbidden:
            return False
        short = (positions < self._min_position[slots]).nonzero()[0].tolist()
        rows = [(row, self._forbidden[slots[row]]) for row in short if slots[row] in self._forbidden]
        if rows:
            arrays["forbidden_rows"] = np.concatenate([np.full(len(ids), row, dtype=np.int64) for row, ids in rows])
            arrays["forbidden_ids"] = np.concatenate([ids for _, ids in rows])
        return bool(rows)


class Sampler:
    """Runs what `SlotSampling` laid out, on the device and in step order."""

    def __init__(self, *, vocab_size: int, device: torch.device) -> None:
        self._penalties = PenaltyPool(vocab_size=vocab_size, device=device)
        self._minus_infinity = torch.full((), -torch.inf, dtype=torch.float32, device=device)

    def enter(self, layout: SamplingLayout, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take in new sequences; for every step, also those that sample nothing."""
        if layout.enters_pool:
            self._penalties.reserve(layout.num_pool_rows)
            self._penalties.enter(
                tensors["entering_pool_rows"], tensors["prompt_token_places"], tensors["output_token_places"]
            )

    def run(self, logits: torch.Tensor, layout: SamplingLayout, tensors: Mapping[str, torch.Tensor]) -> Sampled:
        """Draw a token for each row of `logits` [rows, vocab], which may be changed."""
        raw = logits
        penalized = _penalized(layout, tensors)
        if layout.adjusts:
            logits = self._adjusted(logits, layout, tensors, penalized)
        if layout.all_greedy:
            token_ids = argmax(logits)
        else:
            token_ids = sample(
                logits,
                tensors["temperature"],
                tensors["top_k"],
                tensors["top_p"],
                tensors["min_p"],
                tensors["seeds"],
                tensors["draw_positions"],
                all_greedy=False,
                need_filter=layout.need_filter,
            )
        if penalized is not None:
            self._penalties.add(penalized, token_ids)
        return Sampled(token_ids, _logprobs(raw, token_ids, layout, tensors))

    def _adjusted(
        self,
        logits: torch.Tensor,
        layout: SamplingLayout,
        tensors: Mapping[str, torch.Tensor],
        penalized: PenalizedRows | None,
    ) -> torch.Tensor:
        """fp32 logits after penalties, bias and minimum length; the raw ones stay when they are needed."""
        logits = logits.float() if logits.dtype != torch.float32 else logits.clone() if layout.logprob_rows else logits
        if penalized is not None:
            self._penalties.penalize(logits, penalized)
        if layout.has_bias:
            logits.index_put_((tensors["bias_rows"], tensors["bias_ids"]), tensors["bias_values"], accumulate=True)
        if layout.has_forbidden:
            logits.index_put_((tensors["forbidden_rows"], tensors["forbidden_ids"]), self._minus_infinity)
        return logits


def _penalized(layout: SamplingLayout, tensors: Mapping[str, torch.Tensor]) -> PenalizedRows | None:
    if not layout.num_penalized:
        return None
    repetition, presence, frequency = tensors["penalties"]
    return PenalizedRows(tensors["penalized_rows"], tensors["pool_rows"], repetition, presence, frequency)


def _logprobs(
    raw: torch.Tensor, token_ids: torch.Tensor, layout: SamplingLayout, tensors: Mapping[str, torch.Tensor]
) -> Logprobs | None:
    if not layout.logprob_rows:
        return None
    if len(layout.logprob_rows) < layout.num_rows:
        rows = tensors["logprob_rows"]
        raw, token_ids = raw.index_select(0, rows), token_ids.index_select(0, rows)
    return logprobs_of(raw, token_ids, max(layout.num_top))

"""One rank's part of every step: takes over from the stage before, hands on to the next, or draws tokens for all.

All ranks of a gang run the same plans in the same order. The last stage's first rank samples. Without a pipeline the
ranks that share the layers learn the tokens on the device, one step ahead of the host; stages get them with the plan.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from manta.engine.batch import BatchLayout, StepPlaces
from manta.engine.decode_step import StepShare
from manta.engine.layers.attention import LastRows, LayerCache
from manta.engine.logprobs import Logprobs, project_in_chunks
from manta.engine.models.decoder import Decoder
from manta.engine.plan import StepResult
from manta.engine.runner import ModelRunner, Outcome, RunnerOptions
from manta.engine.sampler import Sampled, SamplingLayout

from .groups import Groups


def share_of(groups: Groups) -> StepShare | None:
    """What a rank does of the end of padded steps, which only ranks of one stage run."""
    return None if groups.tensor is None else StepShare(groups.place.samples, groups.tensor.broadcast_)


class RankRunner(ModelRunner):
    """A ModelRunner for one rank of several. Only the rank that samples has results to report."""

    def __init__(
        self,
        model: Decoder,
        caches: list[LayerCache],
        *,
        device: torch.device,
        options: RunnerOptions,
        groups: Groups,
    ) -> None:
        self._groups = groups
        self._place = groups.place
        self._tensor = groups.tensor
        self._stages = groups.stages
        assert not options.pads_decodes or self._stages is None, "steps of stages are not padded"
        super().__init__(model, caches, device=device, options=options)

    def abort(self) -> None:
        self._groups.abort()

    def leave(self) -> None:
        self._drop_graphs()  # NCCL waits until those that hold its collectives are gone
        self._groups.close()

    @property
    def _share(self) -> StepShare | None:
        return share_of(self._groups)

    def _result(
        self, outcome: Outcome, batch: BatchLayout, sampling: SamplingLayout, num_top: tuple[int, ...]
    ) -> StepResult:
        if not self._place.samples:
            return StepResult([])
        return super()._result(outcome, batch, sampling, num_top)

    def _last_rows(self, batch: BatchLayout, tensors: Mapping[str, torch.Tensor]) -> LastRows | None:
        return super()._last_rows(batch, tensors) if self._place.is_last_stage else None

    def _inputs(self, batch: BatchLayout, tensors: Mapping[str, torch.Tensor], places: StepPlaces) -> torch.Tensor:
        if self._place.is_first_stage:
            return super()._inputs(batch, tensors, places)
        assert self._stages is not None
        model = self._model
        return self._stages.receive(batch.num_tokens, model.shape.hidden_size, dtype=model.dtype, device=self._device)

    def _read_out(
        self,
        hidden: torch.Tensor,
        batch: BatchLayout,
        places: StepPlaces,
        sampling: SamplingLayout,
        num_top: tuple[int, ...],
        tensors: Mapping[str, torch.Tensor],
    ) -> Outcome:
        if not self._place.is_last_stage:
            assert self._stages is not None
            self._stages.send(hidden)
            return Outcome(None)
        outcome = super()._read_out(hidden, batch, places, sampling, num_top, tensors)
        return outcome if self._place.samples else Outcome(None)

    def _enter(self, sampling: SamplingLayout, tensors: Mapping[str, torch.Tensor]) -> None:
        if self._place.samples:
            super()._enter(sampling, tensors)

    def _draw(self, logits: torch.Tensor, sampling: SamplingLayout, tensors: Mapping[str, torch.Tensor]) -> Sampled:
        if self._place.samples:
            sampled = super()._draw(logits, sampling, tensors)
        else:
            sampled = Sampled(torch.empty(sampling.num_rows, dtype=torch.int64, device=logits.device), None)
        if self._tensor is not None and self._place.pp_size == 1:
            self._tensor.broadcast_(sampled.token_ids)
        return sampled

    def _prompt_logprobs(
        self, hidden: torch.Tensor, batch: BatchLayout, num_top: tuple[int, ...], tensors: Mapping[str, torch.Tensor]
    ) -> tuple[Logprobs, ...]:
        if self._place.samples:
            return super()._prompt_logprobs(hidden, batch, num_top, tensors)
        for prompt in batch.prompt_rows:
            rows = hidden[prompt.first_token : prompt.first_token + len(prompt.targets)]
            project_in_chunks(rows, head=self._model.logits, vocab_size=self._model.shape.vocab_size)
        return ()

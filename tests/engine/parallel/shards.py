"""Shards of tiny random models, and greedy decoding over all ranks of a gang step by step, without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from manta.engine.config import EngineConfig
from manta.engine.layers.attention import AttentionBatch, DecodeRows, LayerCache, PrefillRows
from manta.engine.logprobs import logprobs_in_chunks, logprobs_of, project_in_chunks
from manta.engine.model_runner import BuiltRunner, build_model_runner
from manta.engine.model_shape import ModelShape
from manta.engine.model_source import ModelSource
from manta.engine.models.decoder import Decoder
from manta.engine.parallel.groups import Groups
from manta.engine.parallel.place import RankPlace
from manta.engine.plan import StepPlan, StepResult
from manta.engine.runner import RunnerOptions
from tests.engine.parallel.ranks import on_ranks

CPU = torch.device("cpu")


class Parts:
    """Stands for a runner: keeps a rank's decoder and caches, and runs no plan."""

    def __init__(
        self, model: Decoder, caches: list[LayerCache], *, device: torch.device, options: RunnerOptions
    ) -> None:
        self.model, self.caches, self.options = model, caches, options

    def launch(self, plan: StepPlan) -> Parts:
        return self

    def result(self) -> StepResult:
        return StepResult([])

    def close(self) -> None:
        self.caches = []


@dataclass(frozen=True)
class Generated:
    """Tokens of each prompt, each with its log-probability and those of the best five."""

    token_ids: list[list[int]]
    logprobs: torch.Tensor  # [prompts, tokens, 1 + 5]


def random_shape(*, q: int, kv: int, **changes: Any) -> ModelShape:
    """A random Llama with so many query and KV heads."""
    sizes: dict[str, Any] = {
        "architecture": "LlamaForCausalLM",
        "num_layers": 3,
        "hidden_size": 64,
        "num_heads": q,
        "num_kv_heads": kv,
        "head_dim": 16,
        "intermediate_size": 144,
        "vocab_size": 320,
        "max_position_embeddings": 256,
    }
    return ModelShape(**{**sizes, **changes})


def build_shard(
    shape: ModelShape, place: RankPlace, groups: Groups, source: ModelSource | None = None, **overrides: Any
) -> BuiltRunner:
    """A rank's part of `source` (None: random weights), in fp32 with a small cache unless `overrides` say otherwise."""
    defaults = {"device": "cpu", "dtype": "float32", "cpu_cache_gib": 0.02, "max_num_seqs": 8}
    config = EngineConfig.build("random", **{**defaults, **overrides})
    source = source or ModelSource("random", "dummy", Path(), None)
    return build_model_runner(config, source, shape, place=place, groups=groups, make_runner=Parts)


def generate(
    shape: ModelShape,
    prompts: Sequence[list[int]],
    num_tokens: int,
    *,
    tp_size: int = 1,
    pp_size: int = 1,
    source: ModelSource | None = None,
    device: torch.device = CPU,
    **overrides: Any,
) -> Generated:
    """Greedy tokens, the same on every rank of the gang."""

    def work(place: RankPlace, groups: Groups) -> Generated:
        built = build_shard(shape, place, groups, source, **{"device": str(device), **overrides})
        try:
            return _Stepper(built, groups, device).generate(prompts, num_tokens)
        finally:
            built.runner.close()

    first, *others = on_ranks(work, tp_size=tp_size, pp_size=pp_size, device=device)
    for other in others:
        assert other.token_ids == first.token_ids
        assert torch.equal(other.logprobs, first.logprobs)
    return first


def prompt_logprobs(shape: ModelShape, prompt: list[int], *, tp_size: int = 1, pp_size: int = 1) -> torch.Tensor:
    """Of each token of the prompt but the first, [tokens - 1], as the rank that samples has them."""

    def work(place: RankPlace, groups: Groups) -> torch.Tensor:
        return _Stepper(build_shard(shape, place, groups), groups, CPU).prompt_logprobs(prompt)

    return on_ranks(work, tp_size=tp_size, pp_size=pp_size)[(pp_size - 1) * tp_size]


class _Stepper:
    """One rank's steps: a stage takes the residual of the one before, the last one's tokens are told to all."""

    def __init__(self, built: BuiltRunner, groups: Groups, device: torch.device) -> None:
        self._model, self._caches = built.runner.model, built.runner.caches
        self._groups, self._place = groups, groups.place
        self._block_size = built.block_size
        self._device = device

    @torch.inference_mode()
    def generate(self, prompts: Sequence[list[int]], num_tokens: int) -> Generated:
        blocks_each = -(-(max(map(len, prompts)) + num_tokens) // self._block_size)
        table = torch.arange(len(prompts) * blocks_each, dtype=torch.int32).view(len(prompts), blocks_each)
        first, logprobs = zip(
            *(self._prefill(prompt, table[i : i + 1]) for i, prompt in enumerate(prompts)), strict=True
        )
        tokens, entries = [torch.cat(first)], [torch.cat(logprobs)]
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        for step in range(num_tokens - 1):
            positions = lengths + step
            rows = torch.arange(len(prompts))
            slots = table[rows, positions // self._block_size].long() * self._block_size + positions % self._block_size
            decode = DecodeRows(
                num_rows=len(prompts),
                block_table=self._put(table),
                table_rows=self._put(rows.int()),
                seq_lens=self._put((positions + 1).int()),
                max_seq_len=int(positions.max()) + 1,
            )
            batch = AttentionBatch(self._put(positions), self._put(slots), decode, None)
            token_ids, logprobs = self._step(tokens[-1], batch, rows)
            tokens.append(token_ids)
            entries.append(logprobs)
        return Generated(torch.stack(tokens, dim=1).tolist(), torch.stack(entries, dim=1))

    @torch.inference_mode()
    def prompt_logprobs(self, prompt: list[int]) -> torch.Tensor:
        table = torch.arange(-(-len(prompt) // self._block_size), dtype=torch.int32)[None]
        residual = self._forward(torch.tensor(prompt), self._whole_prompt(len(prompt), table))
        if not self._place.is_last_stage:
            return torch.empty(0)
        chunks: dict[str, Any] = {"head": self._model.logits, "vocab_size": self._model.shape.vocab_size}
        if not self._place.samples:
            project_in_chunks(residual[:-1], **chunks)
            return torch.empty(0)
        return logprobs_in_chunks(residual[:-1], torch.tensor(prompt[1:]), 0, **chunks).chosen

    def _prefill(self, prompt: list[int], table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        length = len(prompt)
        return self._step(torch.tensor(prompt), self._whole_prompt(length, table), torch.tensor([length - 1]))

    def _whole_prompt(self, length: int, table: torch.Tensor) -> AttentionBatch:
        positions = torch.arange(length)
        slots = table[0, positions // self._block_size].long() * self._block_size + positions % self._block_size
        prefill = PrefillRows(
            block_table=self._put(table),
            table_rows=self._put(torch.zeros(1, dtype=torch.int32)),
            seq_lens=self._put(torch.tensor([length], dtype=torch.int32)),
            query_start=self._put(torch.tensor([0, length], dtype=torch.int32)),
            max_query_len=length,
            max_seq_len=length,
        )
        return AttentionBatch(self._put(positions), self._put(slots), None, prefill)

    def _step(
        self, token_ids: torch.Tensor, batch: AttentionBatch, sampling_rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual = self._forward(token_ids, batch)
        found = torch.zeros(len(sampling_rows), 7, dtype=torch.float64)
        if self._place.is_last_stage:
            logits = self._model.logits(residual[self._put(sampling_rows)])
            if self._place.samples:
                assert logits.shape == (len(sampling_rows), self._model.shape.vocab_size)
                chosen = logits.argmax(-1)
                best = logprobs_of(logits, chosen, 5)
                found = torch.cat([chosen[:, None].double(), best.chosen[:, None].double(), best.top.double()], 1).cpu()
        everyone = self._groups.everyone
        if everyone is not None:
            everyone.broadcast_(found, source=self._place.sampling_rank)
        return found[:, 0].long(), found[:, 1:]

    def _forward(self, token_ids: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """The residual behind this stage, which is sent on to the next."""
        model, stages = self._model, self._groups.stages
        if self._place.is_first_stage:
            inputs = self._put(token_ids)
        else:
            assert stages is not None
            size = model.shape.hidden_size
            inputs = stages.receive(len(token_ids), size, dtype=model.dtype, device=self._device)
        residual = model.forward(inputs, batch, self._caches)
        if not self._place.is_last_stage:
            assert stages is not None
            stages.send(residual)
        return residual

    def _put(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device)

"""Tiny Llamas made by transformers, runners for them, and plans written by hand as a scheduler would send them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from manta.engine.config import EngineConfig
from manta.engine.model_runner import BuiltRunner, build_model_runner
from manta.engine.model_source import load_shape, resolve_model
from manta.engine.plan import NewSequence, Row, StepHandle, StepPlan, StepResult
from manta.engine.request import SamplingParams
from manta.engine.runner import ModelRunner, RunnerOptions

GREEDY = SamplingParams(temperature=0.0, seed=0)


def save_tiny(folder: Path, *, seed: int = 0, max_shard_size: str = "5GB", **config: Any) -> Any:
    """A small random LlamaForCausalLM in fp32, saved to `folder` as safetensors. Returns transformers' model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": 211,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attn_implementation": "eager",
        "initializer_range": 0.15,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **config})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:  # transformers starts them at 0 and 1
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def build(model: str | Path, **overrides: Any) -> BuiltRunner:
    """A runner as an engine gets it; on CPU in fp32 with a small cache unless `overrides` say otherwise."""
    defaults = {"device": "cpu", "dtype": "float32", "cpu_cache_gib": 0.05, "max_num_seqs": 32}
    config = EngineConfig.build(str(model), **{**defaults, **overrides})
    source = resolve_model(config.model)
    return build_model_runner(config, source, load_shape(source))


def padded(built: BuiltRunner, *, deterministic: bool = False, max_padded_tokens: int = 0) -> BuiltRunner:
    """The same model and cache behind a runner whose decode steps take the padded path, as on CUDA, and steps with
    prefills of up to `max_padded_tokens`."""
    options = RunnerOptions(
        max_num_seqs=32,
        max_model_len=built.max_model_len,
        block_size=built.block_size,
        pads_decodes=True,
        max_padded_tokens=max_padded_tokens,
        deterministic=deterministic,
    )
    runner = ModelRunner(built.runner._model, built.runner._caches, device=built.device, options=options)
    return dataclasses.replace(built, runner=runner)


@dataclass
class Driver:
    """Sends plans to a runner one step ahead, as the engine core does, with a block table of its own."""

    built: BuiltRunner
    tokens: dict[int, list[int]] = field(default_factory=dict)
    """Slot -> tokens that were sampled since it was entered."""
    results: list[tuple[StepPlan, StepResult]] = field(default_factory=list)
    _next_block: int = 0
    _next_step: int = 0
    _in_flight: list[tuple[StepPlan, StepHandle]] = field(default_factory=list)

    def sequence(
        self,
        slot: int,
        token_ids: list[int],
        params: SamplingParams = GREEDY,
        *,
        num_prompt_tokens: int | None = None,
        room: int = 80,
        eos: tuple[int, ...] = (2,),
    ) -> NewSequence:
        """With fresh blocks for its tokens and `room` more."""
        count = -(-(len(token_ids) + room) // self.built.block_size)
        blocks = list(range(self._next_block, self._next_block + count))
        self._next_block += count
        assert self._next_block <= self.built.num_blocks
        self.tokens[slot] = []
        return NewSequence(slot, token_ids, num_prompt_tokens or len(token_ids), blocks, params, list(eos))

    def launch(self, rows: list[Row], new: list[NewSequence] | None = None, freed: list[int] | None = None) -> None:
        """Launch a step; collect the one before the last."""
        plan = StepPlan(self._next_step, freed or [], new or [], rows)
        self._next_step += 1
        self._in_flight.append((plan, self.built.runner.launch(plan)))
        if len(self._in_flight) > 1:
            self._collect()

    def finish(self) -> None:
        """Collect what is in flight."""
        while self._in_flight:
            self._collect()

    def generate(
        self, prompts: list[list[int]], num_tokens: int, params: SamplingParams = GREEDY, *, chunk: int | None = None
    ) -> list[list[int]]:
        """`num_tokens` tokens for each prompt, side by side; prompts in chunks of `chunk` tokens, then slots freed."""
        new = [self.sequence(slot, prompt, params, room=num_tokens) for slot, prompt in enumerate(prompts)]
        size = chunk or max(map(len, prompts))
        done = [0] * len(prompts)
        entered = False
        while any(len(self.tokens[slot]) < num_tokens for slot in range(len(prompts))):
            decodes, prefills = [], []
            for slot, prompt in enumerate(prompts):
                if done[slot] >= len(prompt) + num_tokens - 1:
                    continue
                is_decode = done[slot] >= len(prompt)
                count = 1 if is_decode else min(size, len(prompt) - done[slot])
                asks = params.prompt_logprobs is not None and not is_decode
                row = Row(slot, done[slot], count, [], True, is_decode, done[slot] if asks else None)
                row.samples = done[slot] + count >= len(prompt)
                (decodes if is_decode else prefills).append(row)
                done[slot] += count
            if decodes or prefills:
                self.launch(decodes + prefills, [] if entered else new)
                entered = True
            else:
                self.finish()
        self.launch([], freed=list(range(len(prompts))))
        self.finish()
        return [self.tokens[slot] for slot in range(len(prompts))]

    def _collect(self) -> None:
        plan, handle = self._in_flight.pop(0)
        result = handle.result()
        self.results.append((plan, result))
        sampling = [row.slot for row in plan.rows if row.samples]
        for slot, token_id in zip(sampling, result.token_ids, strict=True):
            self.tokens[slot].append(token_id)


def expected_greedy(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """transformers' tokens, without a cache and without a stop."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(num_tokens):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]

"""`manta bench reference`: our engine beside transformers' generate, in one process, with the same weights and threads.

Both are warmed up, then measured in turn; figures are medians and their ratios (above 1: ours is faster). Prompts are
new in every repetition, so that the prefix cache plays no part.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from manta.engine.config import EngineConfig
from manta.engine.core import EngineCore
from manta.engine.model_source import load_shape, resolve_model

from .drive import describe_engine, drive, start
from .hf_model import load_hf_model
from .report import Report, memory_figures
from .stats import median
from .workloads import Item, uniform


@dataclass(frozen=True)
class Sizes:
    """Lengths in tokens."""

    prefill_len: int = 512
    decode_prompt_len: int = 64
    decode_len: int = 48
    concurrency: int = 8
    repeats: int = 5


def run(
    config: EngineConfig,
    *,
    sizes: Sizes = Sizes(),
    json_path: Path | None = None,
    console: Console | None = None,
) -> Report:
    """Compare on the engine's device, in the engine's dtype. Raises ConfigError or CheckpointError."""
    core, figures = start(config)
    try:
        source = resolve_model(config.model)
        model = load_hf_model(source, load_shape(source), dtype=core.info.dtype, device=core.info.device)
        times = Comparison(core, model, sizes).measure(console)
        figures |= figures_of(times, sizes)
        report = Report(
            "reference",
            model=describe_engine(config, core.info),
            workload={**asdict(sizes), "torch_threads": torch.get_num_threads()},
            figures={**figures, **memory_figures()},
            details={"seconds": {name: [round(value, 6) for value in values] for name, values in times.items()}},
        )
    finally:
        core.close()
    report.finish(console, json_path)
    return report


def figures_of(times_s: dict[str, list[float]], sizes: Sizes) -> dict[str, float]:
    """Medians as rates, and their ratios."""
    ours, theirs = median(times_s["decode"]), median(times_s["decode_transformers"])
    prefill, prefill_theirs = median(times_s["prefill"]), median(times_s["prefill_transformers"])
    together = sizes.concurrency / median(times_s["concurrent"])
    return {
        "decode_tokens_per_s": 1 / ours,
        "decode_transformers_tokens_per_s": 1 / theirs,
        "decode_ratio": theirs / ours,
        f"prefill_{sizes.prefill_len}_tokens_per_s": sizes.prefill_len / prefill,
        f"prefill_{sizes.prefill_len}_transformers_tokens_per_s": sizes.prefill_len / prefill_theirs,
        f"prefill_{sizes.prefill_len}_ratio": prefill_theirs / prefill,
        f"concurrent_{sizes.concurrency}_tokens_per_s": together,
        f"concurrent_{sizes.concurrency}_ratio_to_one": together * ours,
        "same_tokens_median_percent": 100 * median(times_s["same_tokens"]),
        "same_tokens_worst_percent": 100 * min(times_s["same_tokens"]),
    }


class Comparison:
    """Measures both sides in turn. Seconds for each token (decode, concurrent) or prompt (prefill)."""

    def __init__(self, core: EngineCore, model: Any, sizes: Sizes) -> None:
        self._core = core
        self._model = model
        self._sizes = sizes
        self._seed = 0

    def measure(self, console: Console | None) -> dict[str, list[float]]:
        self._round()  # warm-up
        times: dict[str, list[float]] = {}
        for _ in range(self._sizes.repeats):
            for name, value in self._round().items():
                times.setdefault(name, []).append(value)
            if console is not None:
                console.print(", ".join(f"{name} {values[-1]:.4g}" for name, values in times.items()), highlight=False)
        return times

    def _round(self) -> dict[str, float]:
        sizes = self._sizes
        (decode,) = self._items(1, sizes.decode_prompt_len, sizes.decode_len)
        (ours,) = drive(self._core, [decode]).records
        theirs_s, their_ids = generate(self._model, decode.prompt_token_ids, sizes.decode_len)
        (prefill,) = self._items(1, sizes.prefill_len, 1)
        prefill_s = drive(self._core, [prefill]).records[0].ttft_s
        begin_s = time.monotonic()
        first_s = generate(self._model, prefill.prompt_token_ids, 1)[0][0]
        together = drive(self._core, self._items(sizes.concurrency, sizes.decode_prompt_len, sizes.decode_len))
        assert ours.tpot_s is not None
        assert prefill_s is not None
        assert together.decode_step_s is not None
        same = sum(a == b for a, b in zip(ours.token_ids, their_ids, strict=True)) / len(their_ids)
        return {
            "decode": ours.tpot_s,
            "decode_transformers": (theirs_s[-1] - theirs_s[0]) / (len(theirs_s) - 1),
            "prefill": prefill_s,
            "prefill_transformers": first_s - begin_s,
            "concurrent": together.decode_step_s,
            "same_tokens": same,
        }

    def _items(self, count: int, prompt_len: int, output_len: int) -> list[Item]:
        self._seed += 1
        return uniform(count, prompt_len, output_len, vocab_size=self._core.info.vocab_size, seed=self._seed)


class TokenTimes:
    """A streamer for transformers' generate: when each token came, and which."""

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self.token_ids: list[int] = []
        self._has_prompt = False

    def put(self, value: torch.Tensor) -> None:
        """Called with the prompt, then with each token."""
        if not self._has_prompt:
            self._has_prompt = True
            return
        self.times_s.append(time.monotonic())
        self.token_ids.append(int(value.reshape(-1)[0]))

    def end(self) -> None:
        """Called after the last token."""


@torch.inference_mode()
def generate(model: Any, prompt_token_ids: Sequence[int], num_tokens: int) -> tuple[list[float], list[int]]:
    """Greedy tokens of transformers and the time of each, exactly `num_tokens`."""
    streamer = TokenTimes()
    ids = torch.tensor([list(prompt_token_ids)], device=model.device)
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        streamer=streamer,
    )
    return streamer.times_s, streamer.token_ids

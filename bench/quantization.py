"""`manta eval quantization`: what each scheme costs a model in quality, and what it saves, beside the model as it is.

Of each: bytes of weights against the scheme's formula, perplexity of a text, log-likelihood of the reference answers of
a fixed part of GSM8K, and how far greedy answers are those of the baseline.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from manta.engine.config import EngineConfig, QuantizationConfig, with_overrides
from manta.engine.errors import ConfigError
from manta.engine.llm import LLM
from manta.engine.model_shape import ModelShape
from manta.engine.model_source import load_shape, resolve_model
from manta.engine.quant.calibrated.quantizer import quantize_checkpoint
from manta.engine.quant.schemes import SCHEMES
from manta.engine.request import SamplingParams
from manta.engine.tokenizer import Tokenizer

from .drive import describe_engine
from .perplexity import perplexity_of
from .quantization_variants import VARIANTS, Variant
from .report import Report, commit, write_json
from .traces import DATA_DIR, open_text

GSM8K = DATA_DIR / "gsm8k_test_32.jsonl.gz"
BENCH = "quantization"
GREEDY_PROMPTS, GREEDY_TOKENS = 8, 48


@dataclass(frozen=True)
class Texts:
    """What is scored, and what calibrates: other tokens."""

    token_ids: list[int]
    calibration: torch.Tensor
    problems: list[tuple[list[int], list[int]]]
    """Tokens of each GSM8K question and of its reference answer."""


@dataclass(frozen=True)
class Sizes:
    """How much is scored."""

    max_tokens: int = 20_000
    window: int = 1024
    stride: int = 512
    num_problems: int = 32
    calibration_texts: int = 16
    calibration_tokens: int = 512


def run(
    config: EngineConfig,
    text_path: Path,
    *,
    schemes: Sequence[str],
    sizes: Sizes,
    calibration_path: Path | None = None,
    json_path: Path | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """The JSON's tree. Raises ConfigError and CheckpointError."""
    unknown = [name for name in schemes if name not in VARIANTS]
    if unknown:
        raise ConfigError(f"--schemes: {unknown[0]!r} is not known; known are {', '.join(VARIANTS)}", field="schemes")
    source = resolve_model(config.model)
    shape = load_shape(source)
    texts = _texts(Tokenizer.load(source), text_path, calibration_path, sizes)
    workload = _workload(config, text_path, calibration_path, texts, sizes)
    tree = _measured_before(json_path, workload)

    def say(sentence: str) -> None:
        if console is not None:
            console.print(sentence, highlight=False)

    for name in ["baseline", *schemes]:
        kept = tree["baseline"] if name == "baseline" else tree["schemes"].get(name)
        if kept:
            say(f"{name}: measured before, perplexity {kept['perplexity']:.4f}")
            continue
        variant = VARIANTS.get(name, Variant())
        begin_s = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            chosen = config
            if variant.recipe is not None:
                say(f"{name}: quantizing")
                made = Path(folder) / name
                quantize_checkpoint(source, shape, variant.recipe, texts.calibration, made)
                chosen = with_overrides(config, {"model.model": str(made), "model.served_model_name": name})
            with LLM(with_overrides(chosen, variant.overrides)) as llm:
                if sizes.window + 1 > llm.engine.info.max_model_len:
                    raise ConfigError(f"window {sizes.window} does not fit the context", field="window")
                result = _measure(llm, texts, sizes) | _bytes(llm, shape, variant)
                described = describe_engine(config, llm.engine.info)
        result |= {"duration_s": round(time.monotonic() - begin_s, 1), "commit": commit()}
        if name == "baseline":
            tree |= {"model": described, "baseline": result}
        else:
            tree["schemes"][name] = result | _against(result, tree["baseline"])
        say(f"{name}: perplexity {result['perplexity']:.4f}, weights {result['weight_bytes'] / 1e6:.1f} MB")
        tree = _tree(tree, workload)
        if json_path is not None:  # what took long is kept, whatever becomes of the next scheme
            write_json(json_path, tree)
    if console is not None:
        console.print(_table(tree["baseline"], {name: tree["schemes"][name] for name in schemes}))
    return tree


def expected_weight_bytes(
    shape: ModelShape, config: QuantizationConfig | None, *, plain_bytes: int, has_own_head: bool
) -> int:
    """Of the whole model on one rank: products by the scheme's formula, everything else in `plain_bytes` an element."""
    hidden, inter = shape.hidden_size, shape.intermediate_size
    q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    products = [(q_size, hidden), (kv_size, hidden), (kv_size, hidden), (hidden, q_size)]
    products += [(inter, hidden), (inter, hidden), (hidden, inter)]
    if config is None:
        of_layer = sum(rows * columns for rows, columns in products) * plain_bytes
    else:
        scheme = SCHEMES[config.weights](config)
        of_layer = sum(scheme.num_bytes(rows, columns) for rows, columns in products)
    others = 2 * hidden + (2 * shape.head_dim if shape.qk_norm else 0)
    others += (q_size + 2 * kv_size) * shape.attention_bias + hidden * shape.output_bias
    others += (2 * inter + hidden) * shape.mlp_bias
    tables = shape.vocab_size * hidden * (2 if has_own_head else 1) + hidden
    return shape.num_layers * (of_layer + others * plain_bytes) + tables * plain_bytes


def shared_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens up to the first difference."""
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def _texts(tokenizer: Tokenizer, text_path: Path, calibration_path: Path | None, sizes: Sizes) -> Texts:
    def tokens_of(path: Path) -> list[int]:
        try:
            with open_text(path) as file:
                return tokenizer.encode(file.read(), add_special_tokens=False)
        except (OSError, UnicodeDecodeError, EOFError) as error:
            raise ConfigError(f"cannot read the text {path}: {error}", field="text") from None

    whole = tokens_of(text_path)
    rest = whole[sizes.max_tokens :] if calibration_path is None else tokens_of(calibration_path)
    length = sizes.calibration_tokens
    count = min(sizes.calibration_texts, len(rest) // length)
    if count == 0:
        raise ConfigError(
            f"no {length} tokens are left to calibrate with: name a text with --calibration, or score fewer tokens",
            field="calibration",
        )
    calibration = torch.tensor(rest[: count * length]).view(count, length)
    return Texts(whole[: sizes.max_tokens], calibration, _problems(tokenizer, sizes.num_problems))


def _problems(tokenizer: Tokenizer, count: int) -> list[tuple[list[int], list[int]]]:
    with gzip.open(GSM8K, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file][:count]
    encode = tokenizer.encode
    return [
        (
            encode(f"Question: {row['question']}\nAnswer:", add_special_tokens=False),
            encode(f" {row['answer']}", add_special_tokens=False),
        )
        for row in rows
    ]


def _measure(llm: LLM, texts: Texts, sizes: Sizes) -> dict[str, Any]:
    """The scheme's own figures, and its greedy tokens."""
    score = perplexity_of(llm, texts.token_ids, window=sizes.window, stride=sizes.stride)
    prompts = [question + answer for question, answer in texts.problems]
    scored = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))
    total, count = 0.0, 0
    for output, (question, answer) in zip(scored, texts.problems, strict=True):
        entries = output.prompt_logprobs or []
        total += sum(entry.logprob for entry in entries[len(question) :] if entry is not None)
        count += len(answer)
    questions = [question for question, _ in texts.problems[:GREEDY_PROMPTS]]
    params = SamplingParams(temperature=0.0, max_tokens=GREEDY_TOKENS, ignore_eos=True)
    greedy = [output.outputs[0].token_ids for output in llm.generate(questions, params)]
    return {
        "perplexity": score.perplexity,
        "scored_tokens": score.num_tokens,
        "gsm8k_log_likelihood_nats": total,
        "gsm8k_log_likelihood_per_token_nats": total / count,
        "greedy_token_ids": greedy,
    }


def _bytes(llm: LLM, shape: ModelShape, variant: Variant) -> dict[str, Any]:
    info = llm.engine.info
    ledger = info.memory_ledger_bytes
    is_fp32 = info.dtype == "float32"
    # On CPU the head is packed, which makes it a copy of a tied embedding.
    has_own_head = not shape.tie_word_embeddings or (is_fp32 and info.device == "cpu")
    formula = variant.formula
    return {
        "weight_bytes": ledger["weights"],
        "expected_bytes": expected_weight_bytes(
            shape, formula, plain_bytes=4 if is_fp32 else 2, has_own_head=has_own_head
        ),
        "kv_bytes_per_token": ledger["kv_cache"] / (info.num_blocks * info.block_size),
    }


def _against(result: Mapping[str, Any], baseline: Mapping[str, Any]) -> dict[str, Any]:
    greedy: Sequence[list[int]] = baseline["greedy_token_ids"]
    same = sum(shared_prefix(one, other) for one, other in zip(result["greedy_token_ids"], greedy, strict=True))
    return {
        "perplexity_change_percent": 100 * (result["perplexity"] / baseline["perplexity"] - 1),
        "gsm8k_log_likelihood_change_nats": result["gsm8k_log_likelihood_nats"] - baseline["gsm8k_log_likelihood_nats"],
        "greedy_agreement": same / sum(map(len, greedy)),
        "weight_bytes_of_baseline": result["weight_bytes"] / baseline["weight_bytes"],
    }


def _measured_before(json_path: Path | None, workload: Mapping[str, Any]) -> dict[str, Any]:
    """What an earlier call with the same settings left in the file; else nothing, and the file is written anew."""
    empty: dict[str, Any] = {"model": {}, "baseline": {}, "schemes": {}}
    if json_path is None or not json_path.is_file():
        return empty
    try:
        found = json.loads(json_path.read_text(encoding="utf-8"))
        is_same = found["bench"] == BENCH and found["workload"] == workload
        return {name: found[name] for name in empty} if is_same else empty
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{json_path} is not a result of this command: name another file", field="json") from None


def _tree(tree: Mapping[str, Any], workload: dict[str, Any]) -> dict[str, Any]:
    measured: dict[str, Any] = {"baseline": tree["baseline"], **tree["schemes"]}
    figures = {f"perplexity_{name}": one["perplexity"] for name, one in measured.items()}
    report = Report(BENCH, model=tree["model"], workload=workload, figures=figures)
    return {**report.tree(), "baseline": tree["baseline"], "schemes": tree["schemes"]}


def _workload(
    config: EngineConfig, text_path: Path, calibration_path: Path | None, texts: Texts, sizes: Sizes
) -> dict[str, Any]:
    """What two calls must share for their figures to stand beside each other."""
    settings = repr((config.model_dump(mode="json"), texts.token_ids, texts.calibration.tolist()))
    return {
        "text": text_path.name,
        "tokens": len(texts.token_ids),
        "window": sizes.window,
        "stride": sizes.stride,
        "calibration": "the text's tokens behind those" if calibration_path is None else calibration_path.name,
        "calibration_tokens": texts.calibration.numel(),
        "gsm8k_problems": len(texts.problems),
        "greedy_prompts": min(GREEDY_PROMPTS, len(texts.problems)),
        "greedy_tokens": GREEDY_TOKENS,
        "hash_of_settings_and_tokens": hashlib.blake2b(settings.encode(), digest_size=8).hexdigest(),
    }


def _table(baseline: Mapping[str, Any], found: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table()
    for title in (
        "scheme",
        "perplexity",
        "change %",
        "GSM8K nats/token",
        "greedy",
        "weights MB",
        "expected MB",
        "KV B/token",
    ):
        table.add_column(title, justify="left" if title == "scheme" else "right")
    for name, one in {"baseline": baseline, **found}.items():
        change, agreement = one.get("perplexity_change_percent", math.nan), one.get("greedy_agreement", math.nan)
        table.add_row(
            name,
            f"{one['perplexity']:.4f}",
            "" if name == "baseline" else f"{change:+.3f}",
            f"{one['gsm8k_log_likelihood_per_token_nats']:.4f}",
            "" if name == "baseline" else f"{agreement:.2f}",
            f"{one['weight_bytes'] / 1e6:.2f}",
            f"{one['expected_bytes'] / 1e6:.2f}" if one["expected_bytes"] else "",
            f"{one['kv_bytes_per_token']:.0f}",
        )
    return table

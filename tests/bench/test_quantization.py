"""`manta eval quantization` and `manta quantize`, from the command line on a tiny model with a real tokenizer."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from manta.bench import quantization
from manta.bench.quantization import Sizes, expected_weight_bytes, shared_prefix
from manta.bench.quantization_variants import VARIANTS
from manta.deploy import cli
from manta.engine.config import EngineConfig
from manta.engine.errors import ConfigError
from manta.engine.model_runner import build_model_runner
from manta.engine.model_source import ModelSource
from tests.engine.parallel.shards import random_shape
from tests.engine.runners import save_tiny
from tests.engine.tokenizer_files import unpacked

TEXT = Path(__file__).parents[2] / "README.md"
SMALL = ["--window", "96", "--stride", "48", "--max-tokens", "150", "--problems", "1", "--calibration-texts", "2"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
    save_tiny(folder, vocab_size=49152, tie_word_embeddings=True, max_position_embeddings=512, **sizes)
    unpacked("smollm2", folder)
    return folder


@pytest.fixture
def manta(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """Runs the command in this process; (exit code, stdout, stderr)."""
    monkeypatch.setenv("MANTA_HOME", str(tmp_path / "home"))

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["manta", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        output = capsys.readouterr()
        return int(caught.value.code or 0), output.out, output.err

    return run


def test_schemes_are_measured_beside_the_baseline(manta: Any, tiny: Path, tmp_path: Path):
    names = ["int8", "kv_int8", "int4_gptq"]
    file = tmp_path / "found.json"
    listed = ["--schemes", ",".join(names), *SMALL, "--json", file, "--set", "device=cpu"]
    code, _, error = manta("eval", "quantization", "--model", tiny, "--text", TEXT, *listed)
    assert code == 0, error
    found = json.loads(file.read_text())
    assert list(found["schemes"]) == names
    baseline = found["baseline"]
    assert baseline["scored_tokens"] == 149
    assert baseline["weight_bytes"] == baseline["expected_bytes"]
    for name, one in found["schemes"].items():
        assert one["weight_bytes"] == one["expected_bytes"], name
        assert 0 < abs(one["perplexity_change_percent"]) < (10 if name.startswith("int4") else 2), name
        assert 0 <= one["greedy_agreement"] <= 1
        assert one["gsm8k_log_likelihood_nats"] < 0
    assert found["schemes"]["int4_gptq"]["weight_bytes"] < found["schemes"]["int8"]["weight_bytes"]
    assert found["schemes"]["kv_int8"]["weight_bytes"] == baseline["weight_bytes"]
    heads = 2 * 2 * 2  # keys and values of two layers, two heads each
    assert found["schemes"]["kv_int8"]["kv_bytes_per_token"] == heads * (16 + 4)
    assert str(tmp_path) not in json.dumps({**found, "environment": None})


def measured(tiny: Path, file: Path, *schemes: str, max_tokens: int = 60) -> tuple[dict[str, Any], str]:
    """The tree of one evaluation, and what it said."""
    config = EngineConfig.build(str(tiny), device="cpu", cpu_cache_gib=0.05)
    sizes = Sizes(max_tokens, window=48, stride=24, num_problems=1, calibration_texts=1)
    said = Console(file=io.StringIO(), width=200)
    tree = quantization.run(config, TEXT, schemes=schemes, sizes=sizes, json_path=file, console=said)
    assert isinstance(said.file, io.StringIO)
    return tree, said.file.getvalue()


def test_a_second_call_measures_what_the_first_did_not(tiny: Path, tmp_path: Path):
    file = tmp_path / "found.json"
    first, _ = measured(tiny, file, "int8")
    second, said = measured(tiny, file, "int8", "kv_fp8")
    assert "int8: measured before" in said
    assert second["baseline"] == first["baseline"]
    assert second["schemes"]["int8"] == first["schemes"]["int8"]
    assert 0 <= second["schemes"]["kv_fp8"]["greedy_agreement"] <= 1
    other, said = measured(tiny, file, max_tokens=50)
    assert "measured before" not in said
    assert other["schemes"] == {}


def test_a_file_that_is_no_result_is_not_written_over(tiny: Path, tmp_path: Path):
    file = tmp_path / "found.json"
    file.write_text("notes")
    with pytest.raises(ConfigError, match="name another file"):
        measured(tiny, file, "int8")
    assert file.read_text() == "notes"


def test_an_unknown_scheme_is_refused_before_anything_is_loaded(manta: Any, tiny: Path):
    code, _, error = manta("eval", "quantization", "--model", tiny, "--text", TEXT, "--schemes", "int8,int3")
    assert code == 2
    assert "'int3' is not known; known are int8" in error


def test_a_text_without_tokens_left_to_calibrate_is_refused(manta: Any, tiny: Path, tmp_path: Path):
    short = tmp_path / "short.txt"
    short.write_text("a few words")
    code, _, error = manta("eval", "quantization", "--model", tiny, "--text", short, "--window", "96", "--stride", "48")
    assert code == 2
    assert "--calibration" in error


ROUNDED = [name for name, variant in VARIANTS.items() if variant.overrides and variant.formula is not None]


@pytest.mark.parametrize("name", ROUNDED)
def test_weights_take_the_bytes_of_the_formula(name: str):
    shape = random_shape(q=6, kv=3, hidden_size=96, intermediate_size=272, tie_word_embeddings=True)
    variant = VARIANTS[name]
    config = EngineConfig.build("random", device="cpu", cpu_cache_gib=0.02, **variant.overrides)
    built = build_model_runner(config, ModelSource("random", "dummy", Path(), None), shape)
    found = built.memory_ledger_bytes["weights"]
    built.runner.close()
    expected = expected_weight_bytes(shape, variant.formula, plain_bytes=4, has_own_head=True)
    # Fused products share codebooks and the indices of blocks, which the formula counts for each.
    shares = name in ("fp8_block", "nf4", "mxfp4", "nvfp4")
    assert found == pytest.approx(expected, rel=0.02 if shares else 0)


def test_agreement_ends_at_the_first_difference():
    assert shared_prefix([1, 2, 3, 4], [1, 2, 9, 4]) == 2
    assert shared_prefix([1, 2], [1, 2]) == 2


def test_quantize_writes_a_model_and_says_what_it_costs(manta: Any, tiny: Path, tmp_path: Path):
    out, file = tmp_path / "out", tmp_path / "found.json"
    common = ["--scheme", "awq", "--group-size", "32", "--calibration", TEXT, "--texts", "2", "--text-tokens", "48"]
    scored = ["--text", TEXT, "--max-tokens", "300", "--json", file, "--set", "device=cpu"]
    code, text, error = manta("quantize", tiny, "--output", out, *common, *scored)
    assert code == 0, error
    assert "layer 1: relative error qkv" in text
    figures = json.loads(file.read_text())["figures"]
    assert 0 < figures["error_down_mean"] < 0.2
    assert figures["perplexity_after"] == pytest.approx(figures["perplexity_before"], rel=0.1)
    assert json.loads((out / "config.json").read_text())["quantization_config"]["quant_method"] == "awq"
    assert (out / "tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scheme", "gptq"], "gptq needs texts"),
        (["--scheme", "quip"], "scheme 'quip' is not known"),
        (["--bits", "3"], "bits = 3"),
        (["--calibration", "missing.txt"], "cannot read the text missing.txt"),
    ],
)
def test_what_cannot_be_quantized_is_one_sentence(
    manta: Any, tiny: Path, tmp_path: Path, arguments: list[str], message: str
):
    code, _, error = manta("quantize", tiny, "--output", tmp_path / "out", *arguments)
    assert code == 2
    assert message in error

"""What a user may call a model, what is read from its files, and what a mistake is answered with."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from manta.engine.checkpoint_config import llama3_factors
from manta.engine.config import ModelConfig
from manta.engine.errors import CheckpointError
from manta.engine.model_shape import RopeScaling
from manta.engine.model_source import ModelSource, load_shape, resolve_model
from tests.engine.tokenizer_files import LLAMA_CONFIG, write_json


def model_folder(folder: Path, *, tokenizer: bool = True, weights: bool = True, **config: Any) -> Path:
    write_json(folder / "config.json", {**LLAMA_CONFIG, **config})
    if weights:
        (folder / "model.safetensors").write_bytes(b"")
    if tokenizer:
        (folder / "tokenizer.json").write_text("{}")
    return folder


def gguf_file(file: Path, tensors: dict[str, np.ndarray] | None = None, **metadata: Any) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(file, metadata.pop("architecture", "llama"))
    values: dict[str, Any] = {
        "llama.block_count": 2,
        "llama.context_length": 512,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 128,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 500000.0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **{key.replace("__", "."): value for key, value in metadata.items()},
    }
    for key, value in values.items():
        kind = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        kind(key, value)
    for name, tensor in (tensors or {"token_embd.weight": np.zeros((300, 64), np.float32)}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def resolve(model: Path | str, **config: Any) -> ModelSource:
    return resolve_model(ModelConfig(model=str(model), **config))


def test_a_folder(tmp_path: Path):
    folder = model_folder(tmp_path / "tiny")
    assert resolve(folder) == ModelSource("tiny", "safetensors", folder, folder)
    assert resolve(folder, load_format="dummy") == ModelSource("tiny", "dummy", folder, folder)
    assert resolve(folder, served_model_name="mine").name == "mine"


def test_a_config_alone_with_random_weights(tmp_path: Path):
    folder = model_folder(tmp_path / "tiny", tokenizer=False, weights=False)
    source = resolve(folder / "config.json", load_format="dummy")
    assert source == ModelSource("tiny", "dummy", folder / "config.json", None)
    assert load_shape(source) == load_shape(resolve(folder, load_format="dummy"))
    assert load_shape(source).num_layers == 2


def test_a_gguf_file(tmp_path: Path):
    file = gguf_file(tmp_path / "tiny.gguf")
    assert resolve(file) == ModelSource("tiny.gguf", "gguf", file, file)


def test_known_names_lie_in_the_models_folder(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"smollm2-135m is not on this machine.*manta fetch smollm2-135m"):
        resolve_model(ModelConfig(), models_dir=tmp_path)
    file = gguf_file(tmp_path / "smollm2-135m" / "SmolLM2-135M-Instruct.Q4_1.gguf")
    source = resolve_model(ModelConfig(), models_dir=tmp_path)
    assert source == ModelSource("smollm2-135m", "gguf", file, file)


def test_a_tokenizer_of_another_place(tmp_path: Path):
    file = gguf_file(tmp_path / "tiny.gguf")
    folder = model_folder(tmp_path / "tiny", tokenizer=False)
    assert resolve(folder, tokenizer=str(file)).tokenizer_path == file
    with pytest.raises(CheckpointError, match=r"holds no tokenizer\.json"):
        resolve(file, tokenizer=str(folder))


def test_mistakes_are_answered_with_advice(tmp_path: Path):
    folder = model_folder(tmp_path / "tiny")
    empty, adapter, torch_only, ggufs = (tmp_path / name for name in ("empty", "adapter", "bins", "ggufs"))
    empty.mkdir()
    write_json(adapter / "adapter_config.json", {})
    (model_folder(torch_only, weights=False) / "pytorch_model.bin").write_bytes(b"")
    gguf_file(ggufs / "tiny.gguf")
    (tmp_path / "fake.gguf").write_bytes(b"no")
    (tmp_path / "notes.txt").write_text("no")
    mistakes: list[tuple[Path | str, dict[str, Any], str]] = [
        (tmp_path / "tinny", {}, r"does not exist here \(did you mean '.*/tiny'\?\)"),
        ("smolm2-135", {}, r"did you mean 'smollm2-135m'\?"),
        ("gpt", {}, r"known name \(smollm2-135m\)"),
        (empty, {}, "empty has no config.json"),
        (adapter, {}, "holds an adapter"),
        (torch_only, {}, "no \\*.safetensors .*pytorch_model.bin.*convert.*load_format=dummy"),
        (ggufs, {}, r"name the file itself, such as .*/tiny\.gguf"),
        (tmp_path / "fake.gguf", {}, "is not a GGUF file"),
        (tmp_path / "notes.txt", {}, "neither a folder, a config.json nor a .gguf file"),
        (folder / "model.safetensors", {}, r"name its folder \(.*/tiny\)"),
        (folder / "config.json", {}, "configuration without weights.*load_format=dummy"),
        (folder, {"load_format": "gguf"}, "load_format=gguf needs a .gguf file"),
        (ggufs / "tiny.gguf", {"load_format": "safetensors"}, "load_format=safetensors contradicts"),
    ]
    for model, config, message in mistakes:
        with pytest.raises(CheckpointError, match=message):
            resolve(model, **config)


ASK = """
import sys
from manta.engine.config import ModelConfig
from manta.engine.errors import CheckpointError
from manta.engine.model_source import resolve_model
try:
    print(resolve_model(ModelConfig(model="someone/something")).path)
except CheckpointError as error:
    print(error)
sys.exit(3 if "torch" in sys.modules else 0)
"""


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE forbids"),
        ({"HF_ENDPOINT": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1"}, "http://127.0.0.1:9 cannot be reached"),
    ],
)
def test_without_a_network_an_id_is_refused_at_once(tmp_path: Path, environment: dict[str, str], message: str):
    start_s = time.monotonic()
    done = ask_for_an_id(tmp_path, environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert message in done.stdout
    assert time.monotonic() - start_s < 20


def test_offline_an_id_is_found_in_the_cache(tmp_path: Path):
    repository = tmp_path / "hub" / "models--someone--something"
    model_folder(repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    done = ask_for_an_id(tmp_path, {"HF_HUB_OFFLINE": "1"})
    assert (done.returncode, done.stdout.strip()) == (0, str(repository / "snapshots" / "abc")), done.stderr


def ask_for_an_id(home: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    variables |= {"HF_HOME": str(home), **environment}
    root = Path(__file__).parents[2]
    return subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, env=variables, cwd=root)


def shape_of(tmp_path: Path, **config: Any):
    return load_shape(resolve(model_folder(tmp_path / "m", **config)))


def test_shape_of_a_plain_config(tmp_path: Path):
    shape = shape_of(tmp_path, torch_dtype="float16", rope_theta=5e5, bos_token_id=1)
    assert (shape.architecture, shape.dtype, shape.head_dim, shape.num_kv_heads) == (
        "LlamaForCausalLM",
        "float16",
        16,
        2,
    )
    assert shape.rope == RopeScaling(theta=5e5)
    assert (shape.bos_token_id, shape.eos_token_ids, shape.tie_word_embeddings) == (1, (2,), False)
    assert (shape.attention_bias, shape.output_bias, shape.mlp_bias) == (False, False, False)


def test_shape_of_a_config_with_everything(tmp_path: Path):
    write_json(tmp_path / "m" / "generation_config.json", {"eos_token_id": [9, 2]})
    shape = shape_of(
        tmp_path,
        head_dim=32,
        num_key_value_heads=None,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        eos_token_id=[7, 8],
        dtype="float32",
    )
    assert (shape.head_dim, shape.num_kv_heads, shape.eos_token_ids, shape.dtype) == (32, 4, (7, 8, 9, 2), "float32")
    assert shape.attention_bias
    assert shape.output_bias
    assert shape.mlp_bias
    assert shape.tie_word_embeddings


def test_a_window_bounds_mistrals_context(tmp_path: Path):
    assert shape_of(tmp_path, architectures=["MistralForCausalLM"], sliding_window=128).max_position_embeddings == 128
    assert shape_of(tmp_path, architectures=["MistralForCausalLM"], sliding_window=None).max_position_embeddings == 512


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}


@pytest.mark.parametrize(
    ("scaling", "want"),
    [
        ({"rope_type": "llama3", **LLAMA3}, RopeScaling(5e5, "llama3", 8.0, 1.0, 4.0, 256)),
        ({"type": "linear", "factor": 2}, RopeScaling(5e5, "linear", 2.0)),
        ({"type": "yarn", "factor": 4.0, "beta_fast": 16}, RopeScaling(5e5, "yarn", 4.0, 1.0, 4.0, 512, 16.0)),
        ({"rope_type": "default"}, RopeScaling(5e5)),
    ],
)
def test_rope_has_two_spellings(tmp_path: Path, scaling: dict[str, Any], want: RopeScaling):
    assert shape_of(tmp_path, rope_theta=5e5, rope_scaling=scaling).rope == want
    assert shape_of(tmp_path, rope_parameters={"rope_theta": 5e5, **scaling}).rope == want


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"architectures": ["FancyForCausalLM"]},
            "'FancyForCausalLM' is not supported; supported are LlamaForCausalLM",
        ),
        ({"architectures": None, "model_type": "fancy"}, "architecture 'fancy' is not supported"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2}},
            "rope type 'dynamic' is not supported; supported are default",
        ),
        ({"rope_scaling": {"type": "linear"}}, "needs a factor"),
        ({"hidden_size": None}, "hidden_size must be a positive integer, not None"),
        ({"hidden_size": 65}, "hidden_size 65 is no multiple"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    ],
)
def test_an_unsupported_config_is_refused_by_name(tmp_path: Path, config: dict[str, Any], message: str):
    with pytest.raises(CheckpointError, match=message):
        shape_of(tmp_path, **config)


def test_a_broken_config_is_named(tmp_path: Path):
    folder = model_folder(tmp_path / "m")
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"m/config\.json cannot be read as JSON"):
        load_shape(resolve(folder))


def test_shape_of_a_gguf_file(tmp_path: Path):
    shape = load_shape(resolve(gguf_file(tmp_path / "a.gguf", tokenizer__ggml__eot_token_id=5)))
    assert (shape.num_layers, shape.hidden_size, shape.num_heads, shape.num_kv_heads) == (2, 64, 4, 2)
    assert (shape.head_dim, shape.intermediate_size, shape.vocab_size, shape.max_position_embeddings) == (
        16,
        128,
        300,
        512,
    )
    assert (shape.rms_norm_eps, shape.rope, shape.tie_word_embeddings) == (1e-5, RopeScaling(theta=5e5), True)
    assert (shape.bos_token_id, shape.eos_token_ids, shape.dtype) == (1, (2, 5), "bfloat16")


def test_rope_scaling_of_gguf_files(tmp_path: Path):
    def rope(tensors: dict[str, np.ndarray] | None = None, **metadata: Any) -> RopeScaling:
        keys = {f"llama.rope.scaling.{key}": value for key, value in metadata.items()}
        return load_shape(resolve(gguf_file(tmp_path / "a.gguf", tensors, **keys))).rope

    assert rope(type="linear", factor=4.0) == RopeScaling(5e5, "linear", 4.0)
    assert rope(type="yarn", factor=4.0, original_context_length=128) == RopeScaling(
        5e5, "yarn", 4.0, original_max_position=128
    )
    with pytest.raises(CheckpointError, match="rope scaling 'longrope' is not supported"):
        rope(type="longrope", factor=4.0)
    llama3 = RopeScaling(5e5, "llama3", 8.0, 1.0, 4.0, 8192)
    factors = np.array(llama3_factors(llama3, 128), np.float32)
    assert rope({"rope_freqs.weight": factors}) == llama3
    with pytest.raises(CheckpointError, match="not those of Llama 3"):
        rope({"rope_freqs.weight": factors[::-1].copy()})


def test_llama3_factors_are_those_of_transformers():
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3, "original_max_position_embeddings": 8192}
    config = LlamaConfig(hidden_size=512, num_attention_heads=4, head_dim=128, rope_parameters=parameters)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 5e5 ** (-np.arange(0, 128, 2) / 128)
    ours = llama3_factors(RopeScaling(5e5, "llama3", 8.0, 1.0, 4.0, 8192), 128)
    np.testing.assert_allclose(plain / scaled.numpy(), ours, rtol=1e-4)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"architecture": "mamba"}, "GGUF architecture 'mamba' is not supported"),
        ({"split__count": 3}, "one of 3 parts"),
        ({"llama__expert_count": 8}, "mixture-of-experts"),
        ({"llama__block_count": 0}, "llama.block_count must be a positive integer"),
    ],
)
def test_an_unsupported_gguf_file_is_refused_by_name(tmp_path: Path, metadata: dict[str, Any], message: str):
    with pytest.raises(CheckpointError, match=message):
        load_shape(resolve(gguf_file(tmp_path / "a.gguf", **metadata)))


@pytest.mark.model
def test_shape_of_the_demo_model():
    shape = load_shape(resolve_model(ModelConfig()))
    assert (shape.num_layers, shape.hidden_size, shape.num_heads, shape.num_kv_heads) == (30, 576, 9, 3)
    assert (shape.head_dim, shape.vocab_size, shape.tie_word_embeddings) == (64, 49152, True)
    assert (shape.rope, shape.eos_token_ids) == (RopeScaling(theta=100_000.0), (2,))

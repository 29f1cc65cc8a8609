"""Where configuration comes from and which source wins."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from manta.deploy.config import (
    CONFIGS_DIR,
    DeployConfig,
    bundled,
    config_file,
    load_config,
    parse_overrides,
    read_yaml,
)
from manta.deploy.traffic_config import default_tenant, tenant_keys
from manta.engine.errors import ConfigError


def write(file: Path, text: str) -> str:
    file.write_text(text)
    return str(file)


def test_defaults_are_the_demo_model_on_port_8000_here() -> None:
    config = load_config()
    assert config.engine.model.model == "smollm2-135m"
    assert (config.serving.host, config.serving.port) == ("127.0.0.1", 8000)


@pytest.mark.parametrize("target", ["smollm2-135m", "some/model", "./folder", "model.gguf"])
def test_a_target_that_is_not_yaml_is_the_model(target: str) -> None:
    assert load_config(target).engine.model.model == target


def test_later_sources_win(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", "engine: {device: cpu, cache: {block_size: 32}}\nserving: {port: 8001}\n")
    config = load_config(file, {"port": 8002}, defaults={"serving.port": 8003, "serving.num_edges": 3})
    assert config.serving.port == 8002  # override over file over defaults
    assert config.serving.num_edges == 3  # only the defaults say it
    assert config.engine.cache.block_size == 32
    assert config.engine.cache.enable_prefix_caching  # what the file's section does not name stays
    assert load_config(file, defaults={"serving.port": 8003}).serving.port == 8001


def test_values_of_overrides_are_yaml() -> None:
    parsed = parse_overrides(["a.b=1", "c=[x, y]", "d=null", "e=true", "f=text with = sign", "g=1e-3", "h=", "i=[1"])
    assert parsed == {
        "a.b": 1,
        "c": ["x", "y"],
        "d": None,
        "e": True,
        "f": "text with = sign",
        "g": 0.001,
        "h": None,
        "i": "[1",
    }


def test_a_name_may_be_a_leaf_a_suffix_or_whole() -> None:
    for name in ("block_size", "cache.block_size", "engine.cache.block_size"):
        assert load_config(None, {name: 64}).engine.cache.block_size == 64
    assert load_config(None, parse_overrides(["device=sim:h200"])).engine.device == "sim:h200"
    assert load_config(None, {"model": "x"}).engine.model.model == "x"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("blok_size=3", "unknown field 'blok_size'; did you mean 'engine.cache.block_size'?"),
        ("serving.prot=3", "did you mean 'serving.port'?"),
        ("block_size=17", "engine.cache.block_size = 17"),
        ("port=70000", "serving.port = 70000"),
        ("port", "write name=value"),
        ("=3", "write name=value"),
        ("api_keys=['']", "an API key must not be empty"),
    ],
)
def test_a_wrong_override_is_named(setting: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, parse_overrides([setting]))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("engine: {cache: {blok_size: 16}}", "did you mean 'engine.cache.block_size'?"),
        ("serving: [1, 2]", "serving"),
        ("- a\n- b\n", "must hold a mapping"),
        ("engine: {device: cpu\n", "is not valid YAML at line"),
        ("engine: {device: abacus}", "engine.device = 'abacus'"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path / "wrong.yaml", text))
    assert message in str(caught.value)


def test_a_missing_file_lists_the_bundled_ones() -> None:
    with pytest.raises(ConfigError, match="sim-h200"):
        load_config("nowhere.yaml")


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert load_config(write(tmp_path / "empty.yaml", "# nothing\nengine:\n")) == load_config()


def test_paths_in_a_file_are_relative_to_it(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", "engine: {model: {model: ./weights, tokenizer: some/name}}")
    model = load_config(file).engine.model
    assert model.model == str(tmp_path.resolve() / "weights")
    assert model.tokenizer == "some/name"


@pytest.mark.parametrize("name", bundled())
def test_bundled_files_load(name: str) -> None:
    file = config_file(name)
    assert file is not None
    tree = read_yaml(file)
    config = load_config(name)
    for leaf, value in tree["engine"]["model"].items():
        assert getattr(config.engine.model, leaf) == value
    if config.engine.model.load_format == "dummy":
        assert Path(config.engine.model.model).is_file()


def test_the_three_promised_files_are_bundled() -> None:
    assert {"smollm2", "llama-3.1-8b-dummy", "llama-3.1-70b-dummy", "sim-h200"} <= set(bundled())


def test_the_dummy_has_llama_3_1_8b_s_shape() -> None:
    shape = yaml.safe_load((CONFIGS_DIR / "llama_3_1_8b" / "config.json").read_text())
    expected = {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
    }
    assert {name: shape[name] for name in expected} == expected
    assert shape["rope_scaling"]["rope_type"] == "llama3"


def test_api_keys_do_not_show_in_the_configuration_s_text() -> None:
    assert "secret" not in repr(load_config(None, {"api_keys": ["secret"]}))


def tenants(*given: dict[str, object]) -> DeployConfig:
    return load_config(None, {"serving.tenants": list(given)})


def test_tenants_are_read_and_their_keys_do_not_show() -> None:
    config = tenants({"name": "research", "key": "secret", "weight": 3}, {"name": "default", "weight": 2})
    assert [(one.name, one.weight, one.tokens_per_s) for one in config.serving.tenants] == [
        ("research", 3.0, None),
        ("default", 2.0, None),
    ]
    assert "secret" not in repr(config)
    assert "secret" not in repr(tenant_keys(config.serving.tenants))
    assert [(known.key, known.tenant.name) for known in tenant_keys(config.serving.tenants)] == [("secret", "research")]
    assert default_tenant(config.serving.tenants).weight == 2.0
    assert default_tenant(()).name == "default"


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        ([{"name": "a"}], "tenant 'a' needs a key"),
        ([{"name": "default", "key": "x"}], "tenant 'default' has no key"),
        ([{"name": "a", "key": " "}], "must not be empty"),
        ([{"name": "a", "key": "x"}, {"name": "b", "key": "x"}], "equal keys"),
        ([{"name": "a", "key": "x"}, {"name": "a", "key": "y"}], "equal names"),
        ([{"name": "a b", "key": "x"}], "pattern"),
        ([{"name": "a", "key": "x", "weight": 0}], "greater than 0"),
    ],
)
def test_tenants_that_cannot_be_told_apart_are_refused(given: list[dict[str, object]], wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        tenants(*given)

"""Configuration: overrides by name, and sentences that name the field."""

import pytest

from manta.engine.config import EngineConfig, with_overrides
from manta.engine.errors import ConfigError


def test_a_field_is_overridden_by_leaf_or_by_dotted_name():
    assert EngineConfig.build("m", block_size=32) == EngineConfig.build("m", **{"cache.block_size": 32})


def test_overriding_leaves_the_original_alone():
    config = EngineConfig()
    changed = with_overrides(config, {"dtype": "float32"})
    assert (config.model.dtype, changed.model.dtype) == ("auto", "float32")


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("blok_size", 16, "unknown field 'blok_size'; did you mean 'cache.block_size'?"),
        ("cache.blocksize", 16, "unknown field 'cache.blocksize'; did you mean 'cache.block_size'?"),
        ("block_size", 7, "cache.block_size = 7: Input should be 16, 32 or 64"),
        ("device", "tpu", "device = 'tpu': must be auto, cpu, cuda, cuda:N or sim:GPU"),
        ("max_num_seqs", 0, "scheduler.max_num_seqs = 0: Input should be greater than or equal to 1"),
        ("tensor_parallel_size", 0, 'parallel.tensor_parallel_size = 0: must be a number of at least 1, or "auto"'),
        ("pipeline_parallel_size", "many", "parallel.pipeline_parallel_size = 'many': must be a number of at least 1"),
    ],
)
def test_a_mistake_is_answered_with_field_and_advice(name: str, value: object, sentence: str):
    with pytest.raises(ConfigError) as error:
        EngineConfig.build("m", **{name: value})
    assert str(error.value).startswith(sentence)

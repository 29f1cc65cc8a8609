"""Configuration of one engine: frozen, composed, validated once. Knows no environment, no torch and no Ray.

Fields can be overridden by dotted name (`cache.block_size`) or, where only one section has it, by leaf name
(`block_size`), as in `--set block_size=32` and `LLM(model, block_size=32)`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Any, ClassVar, Literal, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from .errors import ConfigError

DType = Literal["auto", "bfloat16", "float16", "float32"]
LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
WeightScheme = Literal[
    "auto",
    "plain",
    "keep",
    "int8",
    "int4",
    "fp8",
    "fp8_weight_only",
    "fp8_tensor",
    "fp8_block",
    "w8a8",
    "llm_int8",
    "nf4",
    "mxfp4",
    "nvfp4",
]
"""How weights are held; from "int8" on, names of schemes (engine/quant/schemes.py)."""


class Section(BaseModel):
    """Base of all sections: immutable, unknown fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, protected_namespaces=())

    full_names_only: ClassVar[bool] = False
    """Whether its fields are meant by their dotted names alone: a leaf's name means the field of another section."""
    main_field: ClassVar[str | None] = None
    """The field that is meant where the section's own name is given a plain value."""


S = TypeVar("S", bound=Section)


class ModelConfig(Section):
    """Which model, and how its weights and tokenizer are loaded."""

    model: str = Field(default="smollm2-135m", description="known name, folder, Hugging Face id or GGUF file")
    served_model_name: str | None = Field(default=None, description="name in the API; default: derived from `model`")
    tokenizer: str | None = Field(default=None, description="folder or Hugging Face id, when not beside the weights")
    chat_template: str | None = Field(default=None, description="Jinja text or a file, instead of the model's own")
    revision: str | None = Field(default=None, description="branch, tag or commit of a Hugging Face id")
    dtype: DType = Field(default="auto", description="auto: the checkpoint's own on CUDA, float32 on CPU")
    load_format: LoadFormat = "auto"
    max_model_len: int | None = Field(
        default=None, ge=2, description="tokens of prompt and output; default: the model's own"
    )
    seed: int = Field(default=0, ge=0, description="seed of dummy weights")


class CacheConfig(Section):
    """The paged KV cache."""

    block_size: Literal[16, 32, 64] | None = Field(
        default=None, description="tokens a block; default 64 on CUDA, else 16"
    )
    num_blocks: int | None = Field(default=None, ge=2, description="default: chosen from the memory that is left")
    memory_fraction: float = Field(default=0.9, gt=0, le=1, description="share of GPU memory that the engine may use")
    cpu_cache_gib: float = Field(default=1.0, gt=0, description="size of the KV cache on the CPU device, GiB")
    enable_prefix_caching: bool = True
    kv_transfer: bool = Field(
        default=False, description="KV may come from other engines and go to them: pools for prefill and decode need it"
    )
    kv_checksums: bool = Field(default=False, description="send a checksum with every block (slow, for tests)")
    kv_gpu_sharing: bool = Field(
        default=True, description="KV goes from GPU to GPU where both are in one node; off: always through host memory"
    )
    kv_lease_s: float = Field(
        default=30.0, gt=0, description="blocks that wait for KV of another engine are free again after so much silence"
    )
    kv_wait_s: float | None = Field(
        default=None,
        gt=0,
        description="a request waits at most so long for its KV before it is computed again; default 5, on CPU 30",
    )


class SchedulerConfig(Section):
    """The budget of one step and the bound of the queue."""

    max_num_seqs: int | None = Field(
        default=None, ge=1, description="requests that run at once; default 1024 on CUDA, else 256"
    )
    max_num_batched_tokens: int | None = Field(
        default=None, ge=1, description="tokens a step; default 8192 on CUDA, else 512"
    )
    max_mixed_prefill_tokens: int | None = Field(
        default=None, ge=1, description="prompt tokens of a step that also decodes; default: as many as fit"
    )
    max_num_waiting: int = Field(
        default=1024, ge=0, description="requests that may wait in the engine; more are refused"
    )
    tpot_target_ms: float | None = Field(
        default=None,
        gt=0,
        description="a step with decodes takes only so many prompt tokens that it is predicted to take no longer "
        "(but some always); default: as many as fit, for throughput",
    )
    step_profiles: str | None = Field(
        default=None, description="folder with profiles of `manta profile`, looked at before those of Manta itself"
    )


class ExecutionConfig(Section):
    """How steps run on the device."""

    cuda_graphs: bool = Field(
        default=True, description="run decodes and small prefills as captured CUDA graphs (CUDA only)"
    )
    deterministic: bool = Field(
        default=False,
        description="batch-invariant kernels: greedy tokens do not depend on batch, chunks or cached prefixes (slower)",
    )


class QuantizationConfig(Section):
    """Weights and KV cache in fewer bits. `--set quantization=int4` means `quantization.weights`."""

    main_field = "weights"

    weights: WeightScheme = Field(
        default="auto",
        description="auto: as the checkpoint has them (GGUF blocks dequantized); plain: dequantized; keep: GGUF blocks "
        "as they are; a scheme: rounded to the nearest when they are loaded",
    )
    group_size: Literal[32, 64, 128, "row"] = Field(
        default=128, description="of int4: columns that share a scale; row: all of them"
    )
    symmetric: bool = Field(default=True, description="of int8 and int4: no zero points")
    kv_cache: Literal["auto", "fp8", "int8"] = Field(
        default="auto", description="auto: the model's dtype; fp8, int8: with a scale for each token and head"
    )

    @field_validator("group_size", mode="before")
    @classmethod
    def number_or_row(cls, value: object) -> object:
        return int(value) if isinstance(value, str) and value.isdecimal() else value


class ParallelConfig(Section):
    """How one engine is split over devices."""

    tensor_parallel_size: int | Literal["auto"] = Field(
        default=1, description="devices that share every layer; auto: from the model, the GPUs and how they are joined"
    )
    pipeline_parallel_size: int | Literal["auto"] = Field(
        default=1, description="stages of consecutive layers, each on a device (or several) of its own; or auto"
    )

    @field_validator("tensor_parallel_size", "pipeline_parallel_size", mode="before")
    @classmethod
    def at_least_one_or_auto(cls, value: object) -> object:
        if value == "auto" or (not isinstance(value, bool) and str(value).isdecimal() and int(str(value)) >= 1):
            return value if value == "auto" else int(str(value))
        raise ValueError('must be a number of at least 1, or "auto"')

    @property
    def is_settled(self) -> bool:
        """Whether both sizes are numbers."""
        return "auto" not in (self.tensor_parallel_size, self.pipeline_parallel_size)

    @property
    def tp_size(self) -> int:
        """`tensor_parallel_size` once it is settled."""
        assert self.tensor_parallel_size != "auto", "auto is settled before"
        return self.tensor_parallel_size

    @property
    def pp_size(self) -> int:
        """`pipeline_parallel_size` once it is settled."""
        assert self.pipeline_parallel_size != "auto", "auto is settled before"
        return self.pipeline_parallel_size

    @property
    def num_ranks(self) -> int:
        """Devices of one engine."""
        return self.tp_size * self.pp_size


class EngineConfig(Section):
    """All that an engine needs to start."""

    device: str = Field(
        default="auto", description="auto, cpu, cuda, cuda:N, or sim:GPU for a simulated device (sim:h200)"
    )
    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    execution: ExecutionConfig = ExecutionConfig()
    parallel: ParallelConfig = ParallelConfig()
    quantization: QuantizationConfig = QuantizationConfig()

    @field_validator("device")
    @classmethod
    def known_device(cls, value: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?|sim(:[a-z0-9]+)?", value):
            raise ValueError("must be auto, cpu, cuda, cuda:N or sim:GPU (for example sim:h200)")
        return value

    @classmethod
    def build(cls, model: str | None = None, **overrides: Any) -> Self:
        """From a model and overrides by dotted or leaf name. Raises ConfigError naming field and value."""
        if model is not None:
            overrides = {"model.model": model, **overrides}
        return with_overrides(cls(), overrides)


def max_num_seqs_of(config: EngineConfig, device_type: str) -> int:
    """Requests that run at once: as configured, else 1024 on CUDA and 256 elsewhere, within a step's tokens.

    More rows a step cost nothing that fewer would save: weights are read once for all, the cache bounds admission
    anyway, and requests that start earlier leave no tail of small steps.
    """
    scheduler = config.scheduler
    if scheduler.max_num_seqs is not None:
        return scheduler.max_num_seqs
    usual = 1024 if device_type == "cuda" else 256
    return min(usual, scheduler.max_num_batched_tokens or usual)


def known_fields(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, bool]]:
    """Yield (dotted name, is_section) for every field below `section`."""
    for name in section.model_fields:
        inner = _section_of(section, name)
        yield prefix + name, inner is not None
        if inner is not None:
            yield from known_fields(inner, prefix + name + ".")


def _section_of(section: type[BaseModel], name: str) -> type[BaseModel] | None:
    """The section that a field is, or may be; None for a plain value."""
    annotation = section.model_fields[name].annotation
    choices = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    return next((one for one in choices if isinstance(one, type) and issubclass(one, BaseModel)), None)


def _needs_full_name(section: type[BaseModel], name: str) -> bool:
    """Whether a section on the way to this field takes dotted names only."""
    for part in name.split(".")[:-1]:
        inner = _section_of(section, part)
        assert inner is not None, name
        if issubclass(inner, Section) and inner.full_names_only:
            return True
        section = inner
    return False


def resolve_name(section: type[BaseModel], name: str) -> str:
    """Dotted name of the field that `name` means. Raises ConfigError with the nearest known name."""
    fields = dict(known_fields(section))
    if name in fields and not fields[name]:
        return name
    plain = [full for full, is_section in fields.items() if not is_section and not _needs_full_name(section, full)]
    leaves = [full for full in plain if full.split(".")[-1] == name]
    if not leaves:  # a suffix such as cache.block_size of engine.cache.block_size
        leaves = [full for full in plain if full.endswith("." + name)]
    if len(leaves) == 1:
        return leaves[0]
    if leaves:
        raise ConfigError(f"{name!r} is ambiguous; write one of {', '.join(sorted(leaves))}", field=name)
    if name in fields:
        return name
    raise ConfigError(f"unknown field {name!r}; {nearest(name, [f for f, s in fields.items() if not s])}", field=name)


def _main_field(section: type[BaseModel], name: str, prefix: str = "") -> str | None:
    """Dotted name of the field that a section means where its own name is given a plain value, or None."""
    for field in section.model_fields:
        inner, full = _section_of(section, field), prefix + field
        if inner is None:
            continue
        if issubclass(inner, Section) and inner.main_field is not None and name in (field, full):
            return f"{full}.{inner.main_field}"
        if (found := _main_field(inner, name, full + ".")) is not None:
            return found
    return None


def nearest(name: str, known: list[str]) -> str:
    """A hint such as "did you mean 'cache.block_size'?"."""
    by_leaf = {full.split(".")[-1]: full for full in known}
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    close = close or [by_leaf[c] for c in difflib.get_close_matches(name.split(".")[-1], list(by_leaf), n=1)]
    close = close or difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else "known fields: " + ", ".join(sorted(known))


def with_overrides(config: S, overrides: Mapping[str, Any]) -> S:
    """A copy with fields replaced by dotted or leaf name. Raises ConfigError naming field and value."""
    tree = config.model_dump()
    for name, value in overrides.items():
        if not isinstance(value, Mapping):
            name = _main_field(type(config), name) or name
        *path, leaf = resolve_name(type(config), name).split(".")
        node = tree
        for part in path:
            if node[part] is None:  # an optional section, present from now on
                node[part] = {}
            node = node[part]
        if isinstance(value, Mapping) and isinstance(node.get(leaf), Mapping):
            node[leaf] = {**node[leaf], **value}
        else:
            node[leaf] = value
    return validated(type(config), tree)


def validated(section: type[S], tree: Mapping[str, Any]) -> S:
    """`section` from nested dicts. Raises ConfigError naming the field, its value and what is wrong."""
    try:
        return section.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            leaves = [full for full, is_section in known_fields(section) if not is_section]
            raise ConfigError(f"unknown field {field!r}; {nearest(field, leaves)}", field=field) from None
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{field} = {first['input']!r}: {message}", field=field) from None

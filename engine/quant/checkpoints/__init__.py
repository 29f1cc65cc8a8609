"""Quantized checkpoints of Hugging Face's kind: what `quantization_config` says, and tensors under its format's names.

One file a format. What is not known, or contradicts itself or the tensors, is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from manta.engine.errors import CheckpointError
from manta.engine.model_source import ModelSource
from manta.engine.models.family import Family, Parameter
from manta.engine.quant.weight import PlainWeight, QuantizedWeight
from manta.engine.weights.safetensors_files import FolderTensors
from manta.engine.weights.slices import TensorSlice

from . import awq, bitsandbytes, compressed_tensors, fp8, gptq
from .settings import Settings


class Format(Protocol):
    """How a product's weight lies in a checkpoint."""

    @property
    def name(self) -> str:
        """For the operator."""
        ...

    def read(self, tensors: FolderTensors, module: str, shape: tuple[int, int]) -> QuantizedWeight | None:
        """The weight [out, in] of a module, or None where the checkpoint has it plain. Raises CheckpointError."""
        ...


FORMATS: dict[str, Callable[[Settings], Format]] = {
    "gptq": gptq.Gptq.of,
    "awq": awq.Awq.of,
    "fp8": fp8.Fp8.of,
    "fbgemm_fp8": fp8.Fp8.of_fbgemm,
    "compressed-tensors": compressed_tensors.CompressedTensors.of,
    "bitsandbytes": bitsandbytes.Bitsandbytes.of,
}
"""By `quant_method`."""


class CheckpointReader:
    """Products of a quantized checkpoint. A rank reads whole tensors, one at a time, and keeps its part."""

    def __init__(self, tensors: FolderTensors, family: Family, format: Format) -> None:
        self.name = format.name
        self._tensors = tensors
        self._family = family
        self._format = format

    def read(self, parameter: Parameter, part: TensorSlice) -> QuantizedWeight:
        """Raises CheckpointError naming the tensor that is missing or wrong."""
        name = self._family.hugging_face_name(parameter)
        num_rows, num_columns = part.full
        weight = self._format.read(self._tensors, name.removesuffix(".weight"), (num_rows, num_columns))
        if weight is None:
            weight = PlainWeight(self._tensors.get(name, part.full))
        if part.is_whole:
            return weight
        return weight.rows(slice(part.part.start, part.part.stop)) if part.dim == 0 else weight.columns(part.part)


def checkpoint_reader(
    source: ModelSource, family: Family, described: Mapping[str, Any], tensors: FolderTensors | None = None
) -> CheckpointReader:
    """For what config.json says; `tensors`: instead of all that the source has. Raises CheckpointError."""
    if not isinstance(described, Mapping):
        raise CheckpointError(f"{source.config_file}: quantization_config must be an object")
    settings = Settings(source.config_file, described)
    method = settings.text("quant_method")
    if method not in FORMATS:
        raise CheckpointError(
            f"{source.config_file}: quant_method {method!r} is not supported; supported are {', '.join(FORMATS)}"
        )
    format = FORMATS[method](settings)
    settings.refuse_unread()
    return CheckpointReader(FolderTensors(source.path) if tensors is None else tensors, family, format)

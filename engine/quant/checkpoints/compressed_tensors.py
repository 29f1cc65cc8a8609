"""compressed-tensors' checkpoints: groups of modules, each with how its weights and activations are quantized.

Read are packed int4 and int8 by group or row, int8 and FP8 (also by blocks), NVFP4 and MXFP4. Sparsity and quantized
outputs are not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from manta.engine.errors import CheckpointError
from manta.engine.quant.codebooks import E2M1, nvfp4_weight
from manta.engine.quant.fp8 import Activations
from manta.engine.quant.grouped import GroupedWeight, pack_nibbles, unpack_nibbles
from manta.engine.quant.int8 import Int8Weight
from manta.engine.quant.weight import QuantizedWeight
from manta.engine.weights.safetensors_files import FolderTensors

from .fp8 import blocked_fp8, scaled_fp8
from .packed_words import unpack_words
from .settings import Settings

FORMATS = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized"),
)


@dataclass(frozen=True)
class _Group:
    """How the modules that match `targets` are quantized."""

    targets: tuple[str, ...]
    format: str
    is_float: bool
    bits: int
    strategy: str
    symmetric: bool
    group_size: int | None
    block: tuple[int, int] | None
    has_order: bool
    activations: Activations


@dataclass(frozen=True)
class CompressedTensors:
    """What a checkpoint says of its products."""

    groups: tuple[_Group, ...]
    left_out: tuple[str, ...]

    @classmethod
    def of(cls, settings: Settings) -> CompressedTensors:
        settings.only("quantization_status", "compressed", "frozen")
        sparsity = settings.get("sparsity_config")
        if sparsity and sparsity.get("format", "dense") != "dense":
            raise settings.error("sparsity_config", sparsity, "is not supported: weights must be dense")
        settings.only("kv_cache_scheme")
        settings.ignore("quant_method", "version", "global_compression_ratio", "transform_config")
        settings.only("transform_config", {})
        usual = settings.get("format")
        listed = settings.inner("config_groups")
        if listed is None:
            raise settings.error("config_groups", None, "must say how modules are quantized")
        groups = []
        for name in listed.entries:
            inner = listed.inner(name)
            if inner is None:
                raise listed.error(name, None, "must be an object")
            groups.append(_group(inner, usual))
        return cls(tuple(groups), tuple(settings.names("ignore")))

    @property
    def name(self) -> str:
        kinds = sorted({f"{'fp' if g.is_float else 'int'}{g.bits} by {g.strategy}" for g in self.groups})
        return f"a compressed-tensors checkpoint ({', '.join(kinds)})"

    def read(self, tensors: FolderTensors, module: str, shape: tuple[int, int]) -> QuantizedWeight | None:
        if _matches(module, self.left_out):
            return None
        group = next((one for one in self.groups if _matches(module, one.targets)), None)
        if group is None:
            return None
        if group.format == "pack-quantized":
            return _packed(tensors, module, shape, group)
        if group.format in ("nvfp4-pack-quantized", "mxfp4-pack-quantized"):
            return _fp4(tensors, module, shape, group)
        if group.is_float:
            return _fp8(tensors, module, shape, group)
        return _int8(tensors, module, shape, group)


def _group(settings: Settings, usual: str | None) -> _Group:
    format = settings.one_of("format", FORMATS, usual)
    targets = settings.names("targets")
    settings.only("output_activations")
    weights, inputs = settings.inner("weights"), settings.inner("input_activations")
    settings.refuse_unread()
    if weights is None:
        raise settings.error("weights", None, "must say how weights are quantized")
    kind, bits = weights.one_of("type", ("int", "float")), weights.one_of("num_bits", (4, 8))
    strategy = weights.one_of("strategy", ("tensor", "channel", "group", "block", "tensor_group"), "tensor")
    weights.only("dynamic", False)
    order = weights.one_of("actorder", (None, "weight", "group", "static", "dynamic", False, True))
    block = weights.get("block_structure")
    group_size = weights.get("group_size")
    weights.ignore("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
    group = _Group(
        tuple(targets),
        format,
        kind == "float",
        bits,
        strategy,
        weights.flag("symmetric", True),
        group_size if strategy in ("group", "tensor_group") else None,
        None if block is None else (int(block[0]), int(block[1])),
        order in ("group", "dynamic", True),
        _activations(inputs, bits, strategy),
    )
    weights.refuse_unread()
    if strategy in ("group", "tensor_group") and not (isinstance(group_size, int) and group_size > 0):
        raise weights.error("group_size", group_size, f"contradicts the strategy {strategy!r}: it must be positive")
    if (strategy == "block") != (block is not None):
        raise weights.error("block_structure", block, f"contradicts the strategy {strategy!r}")
    return group


def _activations(inputs: Settings | None, weight_bits: int, strategy: str) -> Activations:
    """4-bit weights are used as they stand for, whatever their activations would be."""
    if inputs is None:
        return Activations.PLAIN
    bits, dynamic = inputs.one_of("num_bits", (4, 8, 16)), inputs.get("dynamic", False)
    kind = inputs.one_of("strategy", ("token", "tensor", "group", "tensor_group"), "tensor")
    inputs.flag("symmetric", True)
    inputs.ignore("type", "group_size", "observer", "observer_kwargs", "block_structure", "actorder")
    inputs.ignore("scale_dtype", "zp_dtype")
    inputs.refuse_unread()
    if bits == 16 or weight_bits == 4:
        return Activations.PLAIN
    if strategy == "block":
        return Activations.BLOCK
    if dynamic:
        return Activations.TOKEN
    if kind != "tensor":
        raise inputs.error("strategy", kind, "contradicts activations that are not dynamic")
    return Activations.STATIC


def _packed(tensors: FolderTensors, module: str, shape: tuple[int, int], group: _Group) -> GroupedWeight:
    num_rows, num_columns = shape
    per_word = 32 // group.bits
    stored = tensors.get(f"{module}.weight_shape", (2,)).tolist()
    if tuple(stored) != shape:
        raise CheckpointError(
            f"{tensors.folder}: tensor {module}.weight_shape is {stored}, the config asks for {shape}"
        )
    words = tensors.get(f"{module}.weight_packed", (num_rows, -(-num_columns // per_word)), torch.int32)
    size = group.group_size or num_columns
    num_groups = -(-num_columns // size)
    scales = _by_row(tensors.get(f"{module}.weight_scale"), num_rows, num_groups, tensors, f"{module}.weight_scale")
    codes = unpack_words(words, group.bits, 1)[:, :num_columns].contiguous()
    zeros = None
    if not group.symmetric:
        packed = tensors.get(f"{module}.weight_zero_point", (-(-num_rows // per_word), num_groups), torch.int32)
        zeros = unpack_words(packed, group.bits, 0)[:num_rows].contiguous()
    ids = None
    if group.has_order:
        ids = tensors.get(f"{module}.weight_g_idx", (num_columns,)).to(torch.int32)
        if int(ids.min()) < 0 or int(ids.max()) >= num_groups:
            raise CheckpointError(f"{tensors.folder}: tensor {module}.weight_g_idx names groups that are not there")
    return GroupedWeight(
        codes if group.bits == 8 else pack_nibbles(codes),
        scales,
        group.bits,
        size,
        num_columns,
        zeros=zeros,
        group_ids=ids,
    )


def _int8(tensors: FolderTensors, module: str, shape: tuple[int, int], group: _Group) -> QuantizedWeight:
    if group.bits != 8 or not group.symmetric:
        raise CheckpointError(f"{tensors.folder}: {module}: unpacked integers are read with 8 bits and symmetric alone")
    codes = tensors.get(f"{module}.weight", shape, torch.int8)
    name = f"{module}.weight_scale"
    size = group.group_size or shape[1]
    scales = _by_row(tensors.get(name), shape[0], -(-shape[1] // size), tensors, name)
    if group.activations is Activations.PLAIN or group.group_size is not None:
        if group.activations is not Activations.PLAIN:
            raise CheckpointError(f"{tensors.folder}: {module}: int8 activations go with a scale a row, not by group")
        return GroupedWeight(codes.view(torch.uint8) ^ 128, scales, 8, size, shape[1])
    input_scale = None
    if group.activations is Activations.STATIC:
        input_scale = tensors.get(f"{module}.input_scale").float().reshape(1)
    return Int8Weight(codes, scales.float().reshape(-1), None, input_scale)


def _fp8(tensors: FolderTensors, module: str, shape: tuple[int, int], group: _Group) -> QuantizedWeight:
    if group.bits != 8 or group.group_size is not None:
        raise CheckpointError(f"{tensors.folder}: {module}: floats are read with 8 bits, by tensor, channel or block")
    codes = tensors.get(f"{module}.weight", shape, torch.float8_e4m3fn)
    name = f"{module}.weight_scale"
    if group.block is not None:
        grid = -(-shape[0] // group.block[0]), -(-shape[1] // group.block[1])
        return blocked_fp8(codes, tensors.get(name, grid), group.block)
    input_scale = tensors.get(f"{module}.input_scale") if group.activations is Activations.STATIC else None
    return scaled_fp8(tensors, module, codes, name, group.activations, input_scale)


def _fp4(tensors: FolderTensors, module: str, shape: tuple[int, int], group: _Group) -> GroupedWeight:
    num_rows, num_columns = shape
    packed = tensors.get(f"{module}.weight_packed", (num_rows, num_columns // 2), torch.uint8)
    if group.format == "nvfp4-pack-quantized":
        scales = tensors.get(f"{module}.weight_scale", (num_rows, num_columns // 16), torch.float8_e4m3fn)
        # The stored one brings scales into FP8's range, so it divides.
        tensor_scale = 1 / tensors.get(f"{module}.weight_global_scale").float().reshape(())
        return nvfp4_weight(unpack_nibbles(packed), scales, tensor_scale)
    exponents = tensors.get(f"{module}.weight_scale", (num_rows, num_columns // 32), torch.uint8)
    scales = exponents.view(torch.float8_e8m0fnu)
    return GroupedWeight(packed, scales, 4, 32, num_columns, codebook=torch.tensor(E2M1))


def _by_row(scales: torch.Tensor, num_rows: int, num_groups: int, tensors: FolderTensors, name: str) -> torch.Tensor:
    """[out, groups], one of the tensor repeated."""
    if scales.numel() == 1 and num_rows * num_groups != 1:
        return scales.reshape(1, 1).expand(num_rows, num_groups).contiguous()
    if scales.numel() != num_rows * num_groups:
        raise CheckpointError(
            f"{tensors.folder}: tensor {name} has shape {tuple(scales.shape)}, not {(num_rows, num_groups)}"
        )
    return scales.reshape(num_rows, num_groups)


def _matches(module: str, patterns: Sequence[str]) -> bool:
    """Names, ends of names, `re:` patterns, and Linear for all products."""
    for pattern in patterns:
        if pattern.startswith("re:"):
            if re.match(pattern[3:], module):
                return True
        elif pattern in ("Linear", module) or module.endswith(f".{pattern}"):
            return True
    return False

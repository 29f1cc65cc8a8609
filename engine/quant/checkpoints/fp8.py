"""FP8 checkpoints: `weight` in e4m3 with `weight_scale` for the tensor or each row, or `weight_scale_inv` for blocks.

Both kinds of scale multiply, whatever they are called. Activations are quantized per token (per block of columns where
weights have blocks), or by the checkpoint's `input_scale` where the scheme is static.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from manta.engine.errors import CheckpointError
from manta.engine.quant.fp8 import Activations, Fp8Weight, block_ids
from manta.engine.weights.safetensors_files import FolderTensors

from .settings import Settings, is_listed


@dataclass(frozen=True)
class Fp8:
    """What an FP8 checkpoint says of all its products."""

    block: tuple[int, int] | None
    activations: Activations
    left_out: tuple[str, ...]

    @classmethod
    def of(cls, settings: Settings) -> Fp8:
        settings.one_of("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
        kind = settings.one_of("activation_scheme", ("dynamic", "static"), "dynamic")
        block = settings.get("weight_block_size")
        if block is not None and not (
            isinstance(block, list) and len(block) == 2 and all(isinstance(size, int) and size > 0 for size in block)
        ):
            raise settings.error("weight_block_size", block, "must be two positive numbers, rows and columns")
        if block is not None and kind == "static":
            raise settings.error(
                "activation_scheme", kind, "contradicts weight_block_size: blocks go with dynamic ones"
            )
        left_out = (*settings.names("ignored_layers"), *settings.names("modules_to_not_convert"))
        settings.ignore("quant_method", "kv_cache_scheme", "scale_fmt", "dequantize")
        activations = {"dynamic": Activations.TOKEN, "static": Activations.STATIC}[kind]
        if block is not None:
            return cls((block[0], block[1]), Activations.BLOCK, left_out)
        return cls(None, activations, left_out)

    @classmethod
    def of_fbgemm(cls, settings: Settings) -> Fp8:
        settings.ignore("quant_method", "activation_scale_ub")
        return cls(None, Activations.TOKEN, tuple(settings.names("modules_to_not_convert")))

    @property
    def name(self) -> str:
        scales = f"blocks of {self.block[0]} x {self.block[1]}" if self.block else "a scale a tensor or row"
        return f"an FP8 checkpoint ({scales}, activations by {self.activations})"

    def read(self, tensors: FolderTensors, module: str, shape: tuple[int, int]) -> Fp8Weight | None:
        name = f"{module}.weight"
        is_fp8 = tensors.dtype(name) == "F8_E4M3"
        if is_fp8 == is_listed(module, self.left_out):
            state = (
                "in FP8, though the config leaves it out" if is_fp8 else "not in FP8, though the config does not say so"
            )
            raise CheckpointError(f"{tensors.folder}: tensor {name} is {state}")
        if not is_fp8:
            return None
        codes = tensors.get(name, shape, torch.float8_e4m3fn)
        if self.block is None:
            input_scale = tensors.get(f"{module}.input_scale") if self.activations is Activations.STATIC else None
            return scaled_fp8(tensors, module, codes, f"{module}.weight_scale", self.activations, input_scale)
        rows, columns = self.block
        grid = -(-shape[0] // rows), -(-shape[1] // columns)
        return blocked_fp8(codes, tensors.get(f"{module}.weight_scale_inv", grid), self.block)


def scaled_fp8(
    tensors: FolderTensors,
    module: str,
    codes: torch.Tensor,
    scale_name: str,
    activations: Activations,
    input_scale: torch.Tensor | None,
) -> Fp8Weight:
    """With a scale for the tensor or one for each row. Raises CheckpointError."""
    scale = tensors.get(scale_name).float()
    num_rows = codes.shape[0]
    if scale.numel() == 1:
        ids = torch.zeros(num_rows, dtype=torch.int32)
        return Fp8Weight(codes, scale.reshape(1, 1), ids, None, activations, _one(tensors, module, input_scale))
    if tuple(scale.shape) not in ((num_rows,), (num_rows, 1)):
        raise CheckpointError(
            f"{tensors.folder}: tensor {scale_name} has shape {tuple(scale.shape)}, not one element or {num_rows} rows"
        )
    scales = scale.reshape(-1, 1)
    return Fp8Weight(codes, scales, None, None, activations, _one(tensors, module, input_scale))


def blocked_fp8(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> Fp8Weight:
    """With a scale for each block; activations by token and block of columns."""
    device = codes.device
    return Fp8Weight(
        codes,
        scales.float(),
        block_ids(codes.shape[0], block[0], device),
        block_ids(codes.shape[1], block[1], device),
        Activations.BLOCK,
    )


def _one(tensors: FolderTensors, module: str, scale: torch.Tensor | None) -> torch.Tensor | None:
    if scale is not None and scale.numel() != 1:
        raise CheckpointError(f"{tensors.folder}: tensor {module}.input_scale has {scale.numel()} elements, not one")
    return None if scale is None else scale.float().reshape(1)

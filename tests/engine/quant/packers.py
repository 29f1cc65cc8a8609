"""Packs plain weights as each checkpoint format has them, by the formats' descriptions and without the product's code.

Each packer takes W [out, in] and returns tensors by suffix and the weight that they stand for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.engine.runners import save_tiny

Packed = tuple[dict[str, torch.Tensor], torch.Tensor]
Packer = Callable[[torch.Tensor], Packed]
NF4 = [-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0]
NF4 += [0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0]


def words(values: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Whole numbers in words of 32 bits along `dim`, the first in the lowest bits."""
    per = 32 // bits
    moved = values.long().movedim(dim, 0).reshape(values.shape[dim] // per, per, -1)
    out = sum(moved[:, i] << (bits * i) for i in range(per))
    out = torch.where(out >= 2**31, out - 2**32, out).int()
    return out.movedim(0, dim).contiguous()


def gptq(weight: torch.Tensor, *, bits: int, group: int, act_order: bool, symmetric: bool, shift: int = 1) -> Packed:
    columns = weight.shape[1]
    size = columns if group == -1 else group
    order = torch.randperm(columns) if act_order else torch.arange(columns)
    ids = torch.empty(columns, dtype=torch.int32)
    ids[order] = (torch.arange(columns) // size).int()
    top, num_groups = 2**bits - 1, -(-columns // size)
    scales, zeros = torch.zeros(num_groups, weight.shape[0]), torch.zeros(num_groups, weight.shape[0])
    codes = torch.zeros(columns, weight.shape[0])
    for index in range(num_groups):
        rows = weight.t()[ids == index]
        low, high = rows.amin(0).clamp(max=0), rows.amax(0).clamp(min=0)
        if symmetric:
            high = torch.maximum(-low, high)
            low = -high
        scales[index] = ((high - low) / top).clamp(min=1e-6).half().float()
        zeros[index] = 2 ** (bits - 1) if symmetric else torch.round(-low / scales[index]).clamp(1, top)
        codes[ids == index] = (torch.round(rows / scales[index]) + zeros[index]).clamp(0, top)
    tensors = {
        "qweight": words(codes, bits, 0),
        "qzeros": words(zeros - shift, bits, 1),
        "scales": scales.half(),
        "g_idx": ids,
    }
    return tensors, ((codes - zeros[ids.long()]) * scales[ids.long()]).t()


def awq(weight: torch.Tensor, *, group: int) -> Packed:
    tensors, expected = gptq(weight, bits=4, group=group, act_order=False, symmetric=False, shift=0)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])

    def interleaved(values: torch.Tensor) -> torch.Tensor:
        return words(values.reshape(values.shape[0], -1, 8)[:, :, order].flatten(1), 4, 1)

    def plain(packed: torch.Tensor, dim: int) -> torch.Tensor:
        parts = torch.stack([packed >> (4 * i) & 15 for i in range(8)], dim + 1)
        return parts.flatten(dim, dim + 1)

    packed = {
        "qweight": interleaved(plain(tensors["qweight"], 0)),
        "qzeros": interleaved(plain(tensors["qzeros"], 1)),
        "scales": tensors["scales"],
    }
    return packed, expected


def fp8(weight: torch.Tensor, *, scale_shape: str, name: str = "weight_scale", static: bool = False) -> Packed:
    rows, columns = weight.shape
    if scale_shape == "block":
        grid = torch.nn.functional.pad(weight, (0, -columns % 128, 0, -rows % 128))
        blocks = grid.view(grid.shape[0] // 128, 128, -1, 128).abs().amax((1, 3)) / 448
        full = blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
        scale = blocks
    elif scale_shape == "row":
        scale = full = weight.abs().amax(1, keepdim=True) / 448
    else:
        scale = full = weight.abs().max() / 448
    codes = (weight / full).to(torch.float8_e4m3fn)
    tensors = {"weight": codes, name: scale}
    if static:
        tensors["input_scale"] = torch.tensor([8 / 448])
    return tensors, codes.float() * full


def ct_packed(weight: torch.Tensor, *, bits: int, group: int, symmetric: bool, act_order: bool = False) -> Packed:
    tensors, expected = gptq(weight, bits=bits, group=group, act_order=act_order, symmetric=symmetric, shift=0)

    def plain(packed: torch.Tensor, dim: int) -> torch.Tensor:
        parts = torch.stack([packed >> (bits * i) & (2**bits - 1) for i in range(32 // bits)], dim + 1)
        return parts.flatten(dim, dim + 1)

    packed = {
        "weight_packed": words(plain(tensors["qweight"], 0).t(), bits, 1),
        "weight_scale": tensors["scales"].t().contiguous(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        packed["weight_zero_point"] = words(plain(tensors["qzeros"], 1).t(), bits, 0)
    if act_order:
        packed["weight_g_idx"] = tensors["g_idx"]
    return packed, expected


def int8(weight: torch.Tensor, *, name: str = "weight_scale", unit: float = 1.0) -> Packed:
    scale = weight.abs().amax(1, keepdim=True) / 127
    codes = torch.round(weight / scale).to(torch.int8)
    stored = scale if unit == 1.0 else scale.flatten() * unit
    return {"weight": codes, name: stored}, codes.float() * scale


def bnb4(weight: torch.Tensor, *, nested: bool) -> Packed:
    book = torch.tensor(NF4)
    blocks = weight.reshape(-1, 64)
    absmax = blocks.abs().amax(1)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "shape": list(weight.shape), "dtype": "float16"}
    tensors = {"weight.quant_map": book}
    if nested:
        offset = float(absmax.mean())
        entries = torch.linspace(-1, 1, 256)
        outer = torch.nn.functional.pad(absmax - offset, (0, -len(absmax) % 256)).view(-1, 256).abs().amax(1)
        full = outer.repeat_interleave(256)[: len(absmax)]
        picks = ((absmax - offset) / full)[:, None].sub(entries).abs().argmin(1)
        absmax = entries[picks] * full + offset
        tensors |= {
            "weight.absmax": picks.to(torch.uint8),
            "weight.nested_absmax": outer,
            "weight.nested_quant_map": entries,
        }
        state |= {"nested_blocksize": 256, "nested_offset": offset}
    else:
        tensors["weight.absmax"] = absmax
    codes = (blocks / absmax[:, None])[..., None].sub(book).abs().argmin(-1)
    flat = codes.flatten().to(torch.uint8)
    tensors["weight"] = (flat[0::2] << 4 | flat[1::2])[:, None]
    text = json.dumps(state).encode()
    tensors["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
    return tensors, (book[codes] * absmax[:, None]).view(weight.shape)


def fp4(weight: torch.Tensor, *, kind: str) -> Packed:
    book = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    size = 16 if kind == "nvfp4" else 32
    blocks = weight.reshape(weight.shape[0], -1, size)
    largest = blocks.abs().amax(-1)
    tensors = {}
    if kind == "nvfp4":
        divisor = 448 * 6 / largest.max()
        stored = (largest / 6 * divisor).to(torch.float8_e4m3fn)
        scale = stored.float() / divisor
        tensors["weight_global_scale"] = divisor.reshape(1)
    else:
        power = torch.floor(torch.log2(largest)) - 2
        stored, scale = (power + 127).to(torch.uint8), 2.0**power
    codes = (blocks / scale[..., None])[..., None].sub(book).abs().argmin(-1)
    flat = codes.flatten(1).to(torch.uint8)
    tensors |= {"weight_packed": flat[:, 0::2] | flat[:, 1::2] << 4, "weight_scale": stored}
    return tensors, (book[codes] * scale[..., None]).flatten(1)


def save_packed(folder: Path, packer: Packer, described: dict[str, Any], **config: Any) -> tuple[Path, Path]:
    """A tiny Llama with its layers' products packed, and the same with what they stand for: two folders."""
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    packed, plain = folder / "packed", folder / "plain"
    for target in (packed, plain):
        save_tiny(target, **{**sizes, **config})
    tensors = load_file(plain / "model.safetensors")
    torch.manual_seed(0)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        parts, tensors[name] = packer(tensors[name])
        change = load_file(packed / "model.safetensors")
        del change[name]
        change |= {name.removesuffix("weight") + suffix: part.contiguous() for suffix, part in parts.items()}
        save_file(change, packed / "model.safetensors")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, plain / "model.safetensors")
    describe(packed, described)
    return packed, plain


def describe(folder: Path, described: dict[str, Any]) -> None:
    """Set what config.json says of the quantization."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": described}))


def ct_config(format: str, weights: dict[str, Any], activations: dict[str, Any] | None = None) -> dict[str, Any]:
    """compressed-tensors' `quantization_config` for all products."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
    }

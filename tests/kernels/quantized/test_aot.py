"""Quantized products compiled ahead of time for sm_90: no spills, room on a multiprocessor, matrix instructions.

The launchers compile themselves, on a driver that has a target only. MANTA_AOT=full (`make aot`) adds every candidate
that the tuner tries. Cannot share a process with the interpreter.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from manta.bench.kernel_linears import Layer, layers_of
from manta.bench.kernel_quantized import SCHEMES, QuantizedOperands, Scheme
from manta.bench.kernel_quantized_candidates import TUNED_ROWS, candidates, fallback
from manta.bench.kernel_quantized_tuning import variant
from manta.bench.kernel_timing import LLAMA_8B
from manta.kernels import (
    attention_decode,
    attention_prefill,
    attention_prefill_tiles,
    attention_shared_prefix,
    decode_schedule,
    merge_parts,
    rope,
    runtime,
)
from manta.kernels.compile_ahead import compiling_only
from manta.kernels.quantized import block_gemm_hopper, dequantize, eight_bit, library, quantize, weight_only
from manta.kernels.quantized import linear as quantized
from manta.kernels.quantized.block_gemm_plan import BlockTiles
from manta.kernels.quantized.kv_cache import CacheScales
from manta.kernels.quantized.layout import Format
from tests.kernels.quantized.inputs import random_weight
from tests.kernels.target_only import target_only
from tests.kernels.test_aot import SHARED_MEMORY_BYTES, Resources, resources_of
from tests.kernels.test_attention_prefill_aot import disassembled

pytestmark = pytest.mark.aot

FULL = os.environ.get("MANTA_AOT") == "full"
LAYERS = layers_of(LLAMA_8B)[:4]
KERNELS: list[Any] = [
    weight_only._weight_only_kernel,
    eight_bit._swapped_kernel,
    eight_bit._tiled_kernel,
    block_gemm_hopper._block_kernel,
    quantize._quantize_kernel,
    dequantize._dequantize_kernel,
    library._scale_kernel,
    rope._rope_and_store_kernel,
    attention_decode._attention_decode_kernel,
    attention_shared_prefix._shared_prefix_kernel,
    attention_prefill_tiles._attention_prefill_kernel,
    merge_parts._merge_kernel,
]


def cases() -> list[Any]:
    """The defaults for 16 rows, one layer a scheme; or all that a table or the tuner may choose for any."""
    found: dict[str, Any] = {}
    for index, scheme in enumerate(SCHEMES):
        for layer in LAYERS if FULL else [LAYERS[2 + index % 2]]:
            for rows in TUNED_ROWS if FULL else (16,):
                sizes = (layer.kind, layer.n_size, layer.k_size)
                tried = [quantized.plan(scheme.name, *sizes, scheme.group, torch.device("cpu")).tiles_for(rows)]
                if FULL:
                    tried += [tiles for each in candidates(scheme, layer, rows) for tiles in (each, fallback(each))]
                for tiles in tried:
                    if tiles is not None:
                        name = variant(scheme, layer, tiles)
                        found.setdefault(name, pytest.param(scheme, layer, rows, tiles, id=name))
    return list(found.values())


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Norms and quantizations are compiled once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def driver(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    monkeypatch.setattr(runtime, "use_triton", lambda tensor: True)
    monkeypatch.setattr(runtime, "has_inline_ptx", lambda tensor: True)
    for kernel in KERNELS:
        kernel.device_caches.clear()
    with target_only():
        yield


def compiled_kernels(directory: Path) -> dict[str, Resources]:
    """What the launches of this test compiled, by kernel."""
    found: dict[str, Resources] = {}
    for kernel in KERNELS:
        for cache in kernel.device_caches.values():
            for compiled in cache[0].values():
                compiled = compiled.result() if hasattr(compiled, "result") else compiled
                found[kernel.__name__] = resources_of(compiled, directory)
    return found


def assert_fits(resources: Resources) -> None:
    print(f"{resources.registers} registers, {resources.shared_bytes} B shared, {resources.stack_bytes} B stack")
    assert resources.stack_bytes == 0
    assert resources.instructions["LDL"] == resources.instructions["STL"] == 0
    assert resources.shared_bytes <= SHARED_MEMORY_BYTES[90]


@pytest.mark.parametrize(("scheme", "layer", "rows", "tiles"), cases())
def test_layers_compile_within_the_device(scheme: Scheme, layer: Layer, rows: int, tiles: Any, tmp_path: Path) -> None:
    small = Layer(layer.name, layer.kind, 2048, layer.k_size)
    operands = QuantizedOperands(scheme, small, rows, torch.device("cpu"), copies=1)
    with compiling_only(1):
        operands.calls(tiles, rows)[0]()
    found = compiled_kernels(tmp_path)
    for resources in found.values():
        assert_fits(resources)
    product = found[
        "_weight_only_kernel" if isinstance(tiles, weight_only.WeightOnlyTiles) else
        "_swapped_kernel" if isinstance(tiles, eight_bit.SwappedTiles) else
        "_block_kernel" if isinstance(tiles, BlockTiles) else "_tiled_kernel"
    ].instructions  # fmt: skip
    wanted = (
        "HGMMA"
        if isinstance(tiles, weight_only.WeightOnlyTiles)
        else "IGMMA"
        if scheme.format is Format.INT8
        else "QGMMA"
    )
    block_m, num_warps = getattr(tiles, "block_m", 128), getattr(tiles, "num_warps", 4)
    of_a_warp = block_m == 8 or num_warps < 4
    assert product[wanted] > 0 or (product["HMMA"] > 0 and of_a_warp)
    if isinstance(tiles, weight_only.WeightOnlyTiles) and tiles.inline_ptx:
        assert product["I2F"] == product["I2FP"] == 0, "numbers are unpacked by bit operations"


@pytest.mark.parametrize("bias", [False, True] if FULL else [False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16] if FULL else [torch.bfloat16])
@pytest.mark.parametrize("kind", ["plain", "gated", "add"])
@pytest.mark.parametrize("tiles", [BlockTiles(6), BlockTiles(4), BlockTiles(8, 64), BlockTiles(6, 64, 2)], ids=str)
def test_sums_of_blocks_are_added_up_while_the_next_ones_are_computed(
    tiles: BlockTiles, kind: str, dtype: torch.dtype, bias: bool, tmp_path: Path
) -> None:
    weight = random_weight(Format.FP8, 256, 1024, 128, torch.device("cpu"))
    rows = quantize.quantize_rows_reference(torch.zeros(16, 1024), Format.FP8, 128)
    residual = torch.zeros(16, 256, dtype=dtype) if kind == "add" else None
    with compiling_only(1):
        block_gemm_hopper.block_product(
            rows,
            replace(weight, uniform_rows=128),
            torch.zeros(256, dtype=dtype) if bias else None,
            dtype=dtype,
            tiles=tiles,
            gated=kind == "gated",
            residual=residual,
        )
    (resources,) = compiled_kernels(tmp_path).values()
    assert_fits(resources)
    sass = disassembled(tmp_path / "kernel.cubin")
    # Two groups of warps, each with a loop of two products and one for what is left over.
    starts = [index for index, line in enumerate(sass) if "QGMMA" in line and "RZ" in line]
    waits = [index for index, line in enumerate(sass) if "WARPGROUP.DEPBAR" in line]
    assert resources.instructions["QGMMA"] == 4 * len(starts)
    assert len(starts) == len(waits) == 2 * 3, "a product is four instructions and one wait"
    loops = [index for index in waits if sass[index].endswith("gsb0, 0x1")]
    assert len(loops) == 2
    for begin in loops:
        between = sass[begin : next(end for end in waits if end > begin)]
        assert sum("FFMA" in line for line in between) >= 3 * tiles.block_n // 8, "sums are added up between two waits"


@pytest.mark.parametrize(
    ("format", "group", "zeros", "dtype"),
    [
        (Format.INT4, 128, True, torch.bfloat16),
        (Format.INT4, 32, False, torch.float16),
        (Format.INT8, 0, True, torch.float16),
        *([(Format.FP8, 0, False, torch.float16), (Format.INT8, 0, True, torch.bfloat16)] if FULL else []),
    ],
)
def test_all_kinds_of_weights_compile(
    format: Format, group: int, zeros: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    weight = random_weight(format, 256, 1024, group or 1024, torch.device("cpu"), zeros=zeros)
    x = torch.zeros(16, 1024, dtype=dtype)
    with compiling_only(1):
        weight_only.weight_only_product(x, weight, tiles=quantized.DETERMINISTIC_WEIGHT_ONLY)
        dequantize.dequantized(weight, dtype)
        quantize.silu_and_mul_quantize(x, Format.FP8, 128)
    for resources in compiled_kernels(tmp_path).values():
        assert_fits(resources)


def test_the_librarys_epilogue_compiles(tmp_path: Path) -> None:
    weight = random_weight(Format.INT8, 2048, 256, 256, torch.device("cpu"))
    rows = quantize.quantize_rows_reference(torch.zeros(16, 256), Format.INT8)
    with compiling_only(1):
        library.scale_sums(torch.zeros(16, 2048).int(), rows, weight, None, dtype=torch.bfloat16, gated=True)
    found = compiled_kernels(tmp_path)
    assert set(found) == {"_scale_kernel"}
    for resources in found.values():
        assert_fits(resources)


ATTENTION: list[Any] = [
    # codes, queries, head_dim, block_size, kv_heads, group
    (torch.float8_e4m3fn, torch.bfloat16, 128, 64, 8, 4),
    (torch.int8, torch.bfloat16, 128, 64, 8, 4),
]
if FULL:
    ATTENTION += [
        (torch.float8_e4m3fn, torch.float16, 128, 64, 8, 4),
        (torch.int8, torch.float32, 128, 64, 8, 4),
        (torch.float8_e4m3fn, torch.bfloat16, 64, 16, 3, 3),
        (torch.int8, torch.bfloat16, 256, 64, 2, 8),
        (torch.float8_e4m3fn, torch.bfloat16, 128, 32, 1, 8),
    ]


@pytest.mark.parametrize("num_seqs", [1, 16, 256])
@pytest.mark.parametrize(("dtype", "wide", "dim", "page", "kv_heads", "group"), ATTENTION, ids=str)
def test_attention_over_codes_compiles(
    dtype: torch.dtype, wide: torch.dtype, dim: int, page: int, kv_heads: int, group: int, num_seqs: int,
    tmp_path: Path,
) -> None:  # fmt: skip
    heads, int32 = kv_heads * group, torch.int32
    q = torch.zeros(num_seqs, heads + 2 * kv_heads, dim, dtype=wide)
    q, k, v = q.split([heads, kv_heads, kv_heads], dim=1)
    keys, values = torch.zeros(2, 4, page, kv_heads, dim, dtype=dtype)
    scales = CacheScales(*torch.zeros(2, 4, kv_heads, page))
    table, rows = torch.zeros(num_seqs, 4, dtype=int32), torch.zeros(num_seqs, dtype=int32)
    workspace = decode_schedule.DecodeWorkspace.allocate(
        max_num_seqs=num_seqs, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, device=q.device
    )
    prefix = attention_shared_prefix.SharedPrefix(rows[:1], rows[:1], rows)
    around: dict[str, Any] = {"scales": scales, "max_seq_len": page, "table_rows": rows}
    starts, zeros = torch.zeros(num_seqs + 1, dtype=int32), torch.zeros(num_seqs, dtype=torch.int64)
    with compiling_only(1):
        rope.rope_and_store(q, k, v, zeros, torch.zeros(4, dim), keys, values, zeros, scales)
        attention_decode.attention_decode(q, keys, values, table, rows, 1.0, workspace=workspace, **around)
        attention_shared_prefix.attention_shared_prefix(
            q, keys, values, table, rows, 1.0, workspace=workspace, prefix=prefix, **around
        )
        attention_prefill.attention_prefill(q, keys, values, table, starts, rows, 1.0, max_query_len=1, **around)
    found = compiled_kernels(tmp_path)
    for name, resources in found.items():
        print(name, end=": ")
        assert_fits(resources)
    if wide != torch.float32:
        assert found["_attention_prefill_kernel"].instructions["HGMMA"] > 0
        assert found["_attention_decode_kernel"].instructions["HMMA"] > 0
        for name, resources in found.items():
            if "attention" in name:
                assert resources.instructions["LDGSTS"] > 0, f"{name} keeps codes in flight"

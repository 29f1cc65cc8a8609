"""Quantized products compiled ahead of time for sm_90: no spills, room on a multiprocessor, matrix instructions.

The launchers compile themselves, on a driver that has a target only. MANTA_AOT=full (`make aot`) adds every candidate
that the tuner tries. Cannot share a process with the interpreter.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from manta.bench.kernel_linears import Layer, layers_of
from manta.bench.kernel_quantized import SCHEMES, QuantizedOperands, Scheme
from manta.bench.kernel_quantized_candidates import TUNED_ROWS, candidates, fallback
from manta.bench.kernel_quantized_tuning import variant
from manta.bench.kernel_timing import LLAMA_8B
from manta.kernels import runtime
from manta.kernels.compile_ahead import compiling_only
from manta.kernels.quantized import dequantize, eight_bit, kv_cache, library, quantize, weight_only
from manta.kernels.quantized import linear as quantized
from manta.kernels.quantized.layout import Format
from tests.kernels.quantized.inputs import random_weight
from tests.kernels.target_only import target_only
from tests.kernels.test_aot import SHARED_MEMORY_BYTES, Resources, resources_of

pytestmark = pytest.mark.aot

FULL = os.environ.get("MANTA_AOT") == "full"
LAYERS = layers_of(LLAMA_8B)[:4]
KERNELS: list[Any] = [
    weight_only._weight_only_kernel,
    eight_bit._swapped_kernel,
    eight_bit._tiled_kernel,
    quantize._quantize_kernel,
    dequantize._dequantize_kernel,
    library._scale_kernel,
    kv_cache._store_kernel,
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
        "_weight_only_kernel" if scheme.activations is None else
        "_swapped_kernel" if isinstance(tiles, eight_bit.SwappedTiles) else "_tiled_kernel"
    ].instructions  # fmt: skip
    wanted = "HGMMA" if scheme.activations is None else "IGMMA" if scheme.format is Format.INT8 else "QGMMA"
    assert product[wanted] > 0 or (product["HMMA"] > 0 and tiles.block_m == 8)
    if isinstance(tiles, weight_only.WeightOnlyTiles) and tiles.inline_ptx:
        assert product["I2F"] == product["I2FP"] == 0, "numbers are unpacked by bit operations"


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


def test_the_librarys_epilogue_and_cache_stores_compile(tmp_path: Path) -> None:
    weight = random_weight(Format.INT8, 2048, 256, 256, torch.device("cpu"))
    rows = quantize.quantize_rows_reference(torch.zeros(16, 256), Format.INT8)
    with compiling_only(1):
        library.scale_sums(torch.zeros(16, 2048).int(), rows, weight, None, dtype=torch.bfloat16, gated=True)
        codes, scales = torch.zeros(1, 64, 8, 128, dtype=torch.float8_e4m3fn), torch.zeros(1, 64, 8)
        new = torch.zeros(4, 8, 128, dtype=torch.bfloat16)
        kv_cache.store_quantized(new, codes, scales, torch.zeros(4, dtype=torch.int64))
    found = compiled_kernels(tmp_path)
    assert set(found) == {"_scale_kernel", "_store_kernel"}
    for resources in found.values():
        assert_fits(resources)

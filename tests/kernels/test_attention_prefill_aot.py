"""Prefill attention compiled ahead of time for each plan: no spills, fits shared memory, expected instructions."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget

from manta.kernels import attention_prefill_tiles as tiles
from manta.kernels import runtime
from manta.kernels.attention_prefill_plan import BOX, PrefillPlan, default_plan, has_descriptors, has_specialized
from tests.kernels.test_aot import FULL, ITEM_SIZE, NO_CODES, SHARED_MEMORY_BYTES, Config, compile_for, resources_of

pytestmark = pytest.mark.aot

Shape = tuple[int, int, int, int]
"""head_dim, page size, heads, KV heads."""
LLAMA: Shape = (128, 64, 32, 8)
OTHERS: tuple[Shape, ...] = (
    (128, 16, 32, 8), (128, 32, 32, 8), (128, 64, 8, 1), (64, 16, 9, 3), (96, 64, 32, 32), (256, 64, 16, 2),
)  # fmt: skip
STACK_BYTES = 80
"""Of the Hopper kernel: Triton 3.9 keeps a few scalars in memory between items, none inside the loops over keys."""


def plans_of(shape: Shape, dtype: str, capability: int) -> list[PrefillPlan]:
    """The default and, where the device's table may choose otherwise, those and the candidates of measurements."""
    dim, page, heads, kv = shape
    known = {"head_dim": dim, "itemsize": ITEM_SIZE[dtype], "page_size": page, "capability": capability}
    plans = [default_plan(**known, group_size=heads // kv, has_codes=False)]
    if capability == 90 and dtype != "fp32":
        tables = runtime.tuned_tables("NVIDIA H200").get("attention_prefill", {})
        for key in (f"{dim}x{heads // kv}", f"{dim}x{heads // kv} deterministic"):
            for entry in tables.get(key, []):
                plan = PrefillPlan(**{name: value for name, value in entry.items() if name != "max_seq_len"})
                if plan.kernel != "descriptors" or has_descriptors(**known, tile=plan.tile):
                    plans.append(plan)
    return list(dict.fromkeys(plan for plan in plans if plan.kernel != "specialized"))


def config_of(plan: PrefillPlan, shape: Shape, dtype: str) -> Config:
    dim, page, heads, kv = shape
    kernel = tiles._attention_prefill_kernel
    descriptors = plan.kernel == "descriptors"
    box = f"tensordesc<{{dtype}}[{plan.tile},{dim}]>" if descriptors else "*{dtype}"
    types = dict.fromkeys(("q_ptr", "out_ptr"), "*{dtype}") | {"key_cache": box, "value_cache": box}
    types |= dict.fromkeys(("block_table_ptr", "table_rows_ptr", "query_start_ptr", "seq_lens_ptr"), "*i32")
    types |= {"scale_log2": "fp32"}
    not_divisible = ("num_kv_heads", "num_seqs", "scale_log2", *(("key_cache", "value_cache") if descriptors else ()))
    return Config(
        f"{plan.kernel}-{plan.block_m}x{plan.tile}-w{plan.num_warps}-s{plan.num_stages}.{plan.masked_stages}"
        f"-d{dim}-p{page}-g{heads // kv}",
        kernel,
        {name: types.get(name, "i32") for name in kernel.arg_names},
        {
            "GROUP": heads // kv, "HEAD_DIM": dim, "PAGE": page, "BLOCK_M": plan.block_m,
            "BLOCK_D": max(16, triton.next_power_of_2(dim)), "TILE": plan.tile, "STAGES": plan.num_stages,
            "MASKED_STAGES": plan.masked_stages, "HEADS_FIRST": plan.heads_first, "DESCRIPTORS": descriptors,
            "INLINE_PTX": True,
        } | NO_CODES,
        plan.num_warps,
        plan.num_stages,
        not_divisible,
        expects_wgmma=dtype != "fp32",
    )  # fmt: skip


def cases() -> list[Any]:
    found: dict[str, Any] = {}
    for capability in (90, 80, 100):
        for dtype in ("bf16", "fp32") if capability == 90 or FULL else ("bf16",):
            for shape in (LLAMA, *OTHERS) if FULL else (LLAMA,):
                for plan in plans_of(shape, dtype, capability):
                    config = config_of(plan, shape, dtype)
                    name = f"{config}-{dtype}-sm{capability}"
                    found[name] = pytest.param(config, dtype, capability, id=name)
    return list(found.values())


@pytest.mark.parametrize(("config", "dtype", "capability"), cases())
def test_compiles_within_the_device(config: Config, dtype: str, capability: int, tmp_path: Path) -> None:
    compiled, _ = compile_for(config, dtype, capability)
    resources = resources_of(compiled, tmp_path)
    print(f"{resources.registers} registers, {resources.shared_bytes} B shared, {resources.stack_bytes} B stack")
    assert resources.stack_bytes == 0
    assert resources.instructions["LDL"] == resources.instructions["STL"] == 0
    assert resources.shared_bytes <= SHARED_MEMORY_BYTES[capability]
    if dtype != "fp32" and capability == 90:
        assert resources.instructions["HGMMA"] > 0
    elif dtype != "fp32" and capability == 80:
        assert resources.instructions["HMMA"] > 0
    elif dtype != "fp32":
        assert "tcgen05.mma" in compiled.asm["ptx"]
    if capability == 90:
        assert (resources.instructions["UTMALDG"] > 0) == config.constants["DESCRIPTORS"]


HOPPER = PrefillPlan("specialized", 128, 128, 4, 2)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"] if FULL else ["bf16"])
@pytest.mark.parametrize(
    "shape", [shape for shape in (LLAMA, (64, 64, 9, 3), *OTHERS) if has_specialized(
        head_dim=shape[0], itemsize=2, page_size=shape[1], group_size=shape[2] // shape[3], capability=90
    )] if FULL else [LLAMA], ids=str,
)  # fmt: skip
@pytest.mark.parametrize(
    "plan",
    [HOPPER, replace(HOPPER, heads_first=False, persistent=True, pinned=True, turns=True)],
    ids=["plain", "turns"],
)
def test_hopper_kernel_compiles(plan: PrefillPlan, shape: Shape, dtype: str, tmp_path: Path) -> None:
    """And the exponentials of a step stand between its two waits, where the tensor cores multiply values."""
    compiled = compile_hopper(plan, shape, dtype)
    resources = resources_of(compiled, tmp_path)
    print(f"{resources.registers} registers, {resources.shared_bytes} B shared, {resources.stack_bytes} B stack")
    assert resources.stack_bytes <= STACK_BYTES
    assert resources.shared_bytes <= SHARED_MEMORY_BYTES[90]
    assert resources.instructions["UTMALDG"] > 0
    sass = disassembled(tmp_path / "kernel.cubin")
    waits = [index for index, line in enumerate(sass) if "WARPGROUP.DEPBAR" in line]
    steps = [
        sass[begin:end]
        for begin, end in pairwise(waits)
        if sass[begin].endswith("gsb0, 0x1") and sass[end].endswith("gsb0, 0x0")
    ]
    assert len(steps) == 4, "two groups of warps with two loops each"
    for step in steps:
        assert sum("MUFU.EX2" in line for line in step) >= 64 * HOPPER.tile // 128
        assert not any(re.search(r"\b(LDL|STL|HGMMA)\b", line) for line in step)


def disassembled(cubin: Path) -> list[str]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    listing = subprocess.run([tool, "-sass", cubin], capture_output=True, text=True, check=True).stdout
    return [
        found[1].strip() for line in listing.splitlines() if (found := re.search(r"/\*[0-9a-f]{4,}\*/(.*?);", line))
    ]


def compile_hopper(plan: PrefillPlan, shape: Shape, dtype: str) -> Any:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from manta.kernels.attention_prefill_hopper import _attention_prefill_hopper_kernel as kernel

    dim, page, heads, kv = shape
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    constants = {
        "Q_STRIDE": (heads + 2 * kv) * dim, "Q_HEAD_STRIDE": dim, "OUT_STRIDE": heads * dim, "OUT_HEAD_STRIDE": dim,
        "KV_HEADS": kv, "GROUP": heads // kv, "HEAD_DIM": dim, "PAGE": page, "TILE": plan.tile,
        "STAGES": plan.num_stages, "HEADS_FIRST": plan.heads_first,
        "PERSISTENT": plan.persistent, "PINNED": plan.pinned, "TURNS": plan.turns,
    }  # fmt: skip
    types = dict.fromkeys(("q_ptr", "out_ptr"), f"*{dtype}") | {"scale_log2": "fp32"}
    types |= dict.fromkeys(("key_descriptor", "value_descriptor"), f"tensordesc<{dtype}[{BOX},{BOX}],{layout!r}>")
    types |= dict.fromkeys(("block_table_ptr", "table_rows_ptr", "query_start_ptr", "seq_lens_ptr"), "*i32")
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    pointers = [name for name in names if name.endswith("_ptr")]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in pointers}
    source = GluonASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})

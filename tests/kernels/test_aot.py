"""Every kernel compiled ahead of time, without a GPU: no spills, fits shared memory, the expected matrix instructions.

sm_90 gets one 16-bit and one fp32 configuration a kernel, sm_80 and sm_100 the 16-bit one; MANTA_AOT=full (`make aot`)
adds page sizes, head sizes and fp32. Prefill attention has its own file. Cannot share a process with the interpreter.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from manta.kernels import (
    activation,
    all_reduce,
    attention_decode,
    attention_shared_prefix,
    decode_schedule,
    embedding,
    gemm,
    gemm_skinny,
    gemv,
    kv_cache,
    linear,
    merge_parts,
    rmsnorm,
    rope,
    runtime,
    sampling,
    sampling_rounds,
)
from manta.kernels.decode_schedule import DecodeConfig, DecodeShape

pytestmark = pytest.mark.aot

FULL = os.environ.get("MANTA_AOT") == "full"
SHARED_MEMORY_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
ITEM_SIZE = {"bf16": 2, "fp16": 2, "fp32": 4}
NO_CODES: dict[str, Any] = {"key_scales_ptr": None, "value_scales_ptr": None, "CODES_PTX": False}
"""Of caches in 8 bits tests/kernels/quantized knows."""


@dataclass(frozen=True)
class Config:
    """One compilation: `{dtype}` in a type stands for the tested dtype; multiples of 16 are told to the compiler."""

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    not_divisible: tuple[str, ...] = field(default=())
    expects_wgmma: bool = False

    def __str__(self) -> str:
        return self.name


def attention_types(names: str) -> dict[str, str]:
    values = "q key_cache value_cache out new_keys new_values"
    pointers = {f"{name}_ptr": "*{dtype}" for name in values.split()} | {"cos_sin_ptr": "*fp32"}
    int32 = "block_table table_rows table_row seq_lens query_start members num_shared records arrivals"
    pointers |= {f"{name}_ptr": "*i32" for name in int32.split()}
    pointers |= dict.fromkeys(("partial_ptr", "log_sum_ptr"), "*fp32") | {"scale_log2": "fp32"}
    pointers |= dict.fromkeys(("key_scales_ptr", "value_scales_ptr"), "*fp32")
    return {name: pointers.get(name, "i32") for name in names.split()}


def decode_shape(dtype: str, dim: int, page: int, heads: int, kv: int) -> DecodeShape:
    return DecodeShape(kv, heads // kv, dim, ITEM_SIZE[dtype], page)


def decode_config(
    shape: DecodeShape,
    num_seqs: int,
    config: DecodeConfig,
    *,
    capability: int,
    shares: bool = False,
    turns: bool = False,
) -> Config:
    kernel = attention_decode._attention_decode_kernel
    constants = {
        "KV_HEADS": shape.num_kv_heads, "GROUP": shape.group, "HEAD_DIM": shape.head_dim, "PAGE": shape.page,
        "BLOCK_SEQS": decode_schedule.block_seqs(num_seqs), "BLOCK_M": max(16, triton.next_power_of_2(shape.group)),
        "BLOCK_D": max(16, triton.next_power_of_2(shape.head_dim)), "TILE": config.tile, "SWAPPED": config.swapped,
        "INLINE_PTX": config.inline_ptx, "MERGES_APART": config.merges_apart or shares,
        "PDL": capability >= 90, "ROT_DIM": shape.head_dim if turns else 0,
    } | NO_CODES  # fmt: skip
    if not turns:
        constants |= dict.fromkeys(("new_keys_ptr", "new_values_ptr", "cos_sin_ptr"))
    if not shares:
        constants |= {"members_ptr": None, "num_shared_ptr": None}
    how = "-".join(name for name in ("swapped", "inline_ptx", "merges_apart") if getattr(config, name))
    return Config(
        f"decode-d{shape.head_dim}-p{shape.page}-g{shape.group}-b{num_seqs}-t{config.tile}-w{config.num_warps}"
        f"-s{config.num_stages}-{how}{'-shares' if shares else ''}{'-turns' if turns else ''}",
        kernel,
        attention_types(" ".join(kernel.arg_names)),
        constants,
        config.num_warps,
        config.num_stages,
        ("num_seqs", "fill", "percent", "table_stride", "table_rows_ptr", "seq_lens_ptr", "members_ptr", "scale_log2"),
    )


def decode_configs(
    dtype: str, capability: int, *, dim: int = 128, page: int = 64, heads: int = 32, kv: int = 8
) -> list[Config]:
    """Distinct ones of the defaults and, for the device that has tables, of those; with the shared prefix."""
    shape = decode_shape(dtype, dim, page, heads, kv)
    device_tables = runtime.tuned_tables("NVIDIA H200") if capability == 90 else {}
    entries = device_tables.get("attention_decode", {}).get(shape.key, [])
    chosen = [(entry.get("rows", 1024), decode_schedule.config_of(entry)) for entry in entries]
    chosen += [(rows, decode_schedule.default_config(rows, shape, 132)) for rows in (1, 16, 256)]
    configs = [decode_config(shape, rows, config, capability=capability, turns=True) for rows, config in chosen]
    configs.append(decode_config(shape, *chosen[0], capability=capability))
    configs.append(decode_config(shape, *chosen[-1], capability=capability, shares=True))
    tiles = decode_schedule.default_prefix_tiles(shape)
    prefix = attention_shared_prefix._shared_prefix_kernel
    configs.append(
        Config(
            f"shared-prefix-d{dim}-p{page}-g{heads // kv}",
            prefix,
            attention_types(" ".join(prefix.arg_names)),
            {
                "KV_HEADS": kv, "GROUP": shape.group, "HEAD_DIM": dim, "PAGE": page, "BLOCK_SEQS": 128,
                "BLOCK_GROUP": triton.next_power_of_2(shape.group), "BLOCK_M": tiles.block_m,
                "BLOCK_D": max(16, triton.next_power_of_2(dim)), "TILE": tiles.tile, "INLINE_PTX": True,
                "PDL": capability >= 90,
            } | NO_CODES,
            tiles.num_warps,
            tiles.num_stages,
            ("num_seqs", "num_slots", "prefix_begin", "table_stride", "seq_lens_ptr", "members_ptr", "scale_log2"),
            expects_wgmma=dtype != "fp32",
        )
    )  # fmt: skip
    return list({config.name: config for config in configs}.values())


def merge_configs(capability: int) -> list[Config]:
    kernel = merge_parts._merge_kernel
    sizes = {"GROUP": 4, "KV_HEADS": 8, "HEAD_DIM": 128, "BLOCK_D": 128, "BLOCK_PARTS": 16, "PDL": capability >= 90}
    none = {"members_ptr": None, "num_shared_ptr": None}
    types = attention_types(" ".join(kernel.arg_names))
    return [
        Config("merge_parts", kernel, types, sizes | none | {"PREFIX_ROWS": 0}, num_warps=1),
        Config("merge_parts-shares", kernel, types, sizes | {"PREFIX_ROWS": 64}, num_warps=1),
    ]


def small_configs(capability: int) -> list[Config]:
    """Everything but attention, at the shapes of Llama-3.1-8B."""
    chunks = {"vocab": "i32", "num_chunks": "i32", "logits_stride": "i32", "logits_ptr": "*{dtype}"}
    chunks |= dict.fromkeys(("temperature_ptr", "top_p_ptr", "min_p_ptr", "chunk_max_ptr", "floor_ptr"), "*fp32")
    chunks |= {
        "chunk_sum_ptr": "*fp32",
        "chunk_score_ptr": "*fp32",
        "chunk_drawn_ptr": "*i32",
        "candidate_ptr": "*{dtype}",
        "top_k_ptr": "*i32",
        "out_ptr": "*i64",
    }
    chunks |= dict.fromkeys(("chunk_id_ptr", "candidate_id_ptr", "chunk_count_ptr"), "*i32")
    chunks |= dict.fromkeys(("seeds_ptr", "positions_ptr", "slots_ptr", "by_slot_ptr"), "*i64")
    for prefix in ("", "new_"):
        chunks |= {f"{prefix}{name}_ptr": "*fp32" for name in ("score", "mass")}
        chunks |= {f"{prefix}{name}_ptr": "*i32" for name in ("drawn", "proposed", "settled")}

    def sampling_config(name: str, kernel: Any, num_warps: int, constants: dict[str, Any]) -> Config:
        types = {arg: chunks[arg] for arg in kernel.arg_names if arg in chunks}
        return Config(name, kernel, types, constants, num_warps, not_divisible=("num_chunks",))

    sizes = {"CHUNK": sampling._CHUNK, "PER_CHUNK": sampling._PER_CHUNK, "BLOCK_CHUNKS": 64}
    rope_types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "key_cache_ptr", "value_cache_ptr"), "*{dtype}")
    rope_types |= {"positions_ptr": "*i64", "slot_mapping_ptr": "*i64", "cos_sin_ptr": "*fp32"}
    rope_types |= {f"{name}_stride": "i32" for name in ("token", "q_head", "k_head", "v_head")}
    store_types = dict.fromkeys(("k_ptr", "v_ptr", "key_cache_ptr", "value_cache_ptr"), "*{dtype}")
    store_types |= dict.fromkeys(("k_stride", "v_stride", "k_head_stride", "v_head_stride", "row_size"), "i32")
    return [
        Config(
            "rms_norm", rmsnorm._rms_norm_kernel,
            {"x_ptr": "*{dtype}", "weight_ptr": "*{dtype}", "residual_ptr": "*{dtype}", "out_ptr": "*{dtype}",
             "x_stride": "i32", "residual_stride": "i32", "dim": "i32", "eps": "fp32"},
            {"HAS_RESIDUAL": True, "BLOCK": 4096, "PDL": capability >= 90}, not_divisible=("eps",),
        ),
        Config(
            "silu_and_mul", activation._silu_and_mul_kernel,
            {"gate_up_ptr": "*{dtype}", "out_ptr": "*{dtype}", "gate_up_stride": "i32", "inter": "i32"},
            {"INTERLEAVED": False, "BLOCK": 2048, "PDL": capability >= 90},
        ),
        Config(
            "silu_and_mul-interleaved", activation._silu_and_mul_kernel,
            {"gate_up_ptr": "*{dtype}", "out_ptr": "*{dtype}", "gate_up_stride": "i32", "inter": "i32"},
            {"INTERLEAVED": True, "BLOCK": 2048, "PDL": capability >= 90},
        ),
        Config(
            "rope_and_store", rope._rope_and_store_kernel,
            rope_types | {"num_tokens": "i32", "num_kv_heads": "i32"},
            {"GROUP": 4, "HEAD_DIM": 128, "ROT_DIM": 128, "TOKENS": 4, "BLOCK_GROUP": 4, "BLOCK_HALF": 64,
             "BLOCK_DIM": 128, "PAGE": 64, "LARGEST": 0.0, "key_scales_ptr": None, "value_scales_ptr": None,
             "PDL": capability >= 90},
            num_warps=4, not_divisible=("num_tokens", "num_kv_heads"),
        ),
        Config(
            "store_kv", kv_cache._store_kv_kernel, store_types | {"slot_mapping_ptr": "*i64"},
            {"HEAD_DIM": 128, "BLOCK": 1024},
        ),
        Config(
            "copy_blocks", kv_cache._copy_blocks_kernel,
            {"cache_ptr": "*{dtype}", "src_ids_ptr": "*i64", "dst_ids_ptr": "*i64", "block_elements": "i32"},
            {"BLOCK": 2048},
        ),
        Config(
            "embedding", embedding._embedding_kernel,
            {"token_ids_ptr": "*i64", "weight_ptr": "*{dtype}", "out_ptr": "*{dtype}", "hidden": "i32"},
            {"BLOCK": 1024, "PDL": capability >= 90},
        ),
        sampling_config(
            "chunk", sampling._chunk_kernel, 4, {"DRAWS": True, "CHUNK": sampling._CHUNK, "PDL": capability >= 90}
        ),
        sampling_config("argmax", sampling._argmax_kernel, 1, {"BLOCK_CHUNKS": 64, "PDL": capability >= 90}),
        sampling_config("candidates", sampling._candidate_kernel, 4, sizes),
        sampling_config(
            "round", sampling_rounds.round_kernel, 4, {"FIRST": False, "CHUNK": sampling._CHUNK, "BLOCK_CHUNKS": 64}
        ),
        sampling_config("draw", sampling._draw_kernel, 8, sizes | {"NEED_FILTER": False, "BLOCK": 2048}),
        sampling_config("draw-filtered", sampling._draw_kernel, 8, sizes | {"NEED_FILTER": True, "BLOCK": 2048}),
    ]  # fmt: skip


def all_reduce_configs() -> list[Config]:
    kernel = all_reduce._all_reduce_kernel
    types = {
        "x_ptr": "*{dtype}", "out_ptr": "*{dtype}", "addresses_ptr": "*i64", "epochs_ptr": "*i32",
        "num_elements": "i32", "slot_bytes": "i32",
    }  # fmt: skip
    tiles = all_reduce.SumTiles()
    return [
        Config(
            f"all_reduce-r{num_ranks}{'-adds' if adds else ''}", kernel, types,
            {"RANK": 1, "NUM_RANKS": num_ranks, "BLOCK_RANKS": num_ranks, "ADDS": adds, "BLOCK": tiles.block,
             "FLAGS_OFFSET": all_reduce.FLAGS_OFFSET, "SLOTS_OFFSET": all_reduce._slots_offset(num_ranks, tiles),
             "PHASE": int(all_reduce.Phase.ALL)},
            tiles.num_warps,
        )
        for num_ranks, adds in ((2, False), (2, True), (8, True))
    ]  # fmt: skip


def linear_types(kernel: Any) -> dict[str, str]:
    types = dict.fromkeys(("x_ptr", "weight_ptr", "norm_weight_ptr", "bias_ptr", "out_ptr"), "*{dtype}")
    types |= {"partial_ptr": "*fp32", "counter_ptr": "*i32", "eps": "fp32"}
    return {name: types.get(name, "i32") for name in kernel.arg_names}


def linear_configs(capability: int) -> list[Config]:
    """Each distinct configuration of the shipped tables and defaults; 16-bit types only."""
    device_tables = runtime.tuned_tables("NVIDIA H200")["linear"] if capability == 90 else {}
    plans = [(key, linear.parse_plan(entries)) for key, entries in device_tables.items()]
    plans += [(f"{kind} 4096x4096", linear.default_plan(4096, 4096, 132)) for kind in ("plain", "gated", "add")]
    if capability == 90:
        tiles = gemm.DETERMINISTIC_TILES
        plans += [(f"{kind} 4096x4096", linear.Plan((), (tiles,))) for kind in ("plain", "gated", "add")]
    configs: dict[str, Config] = {}
    for key, plan in plans:
        kind, _, size = key.partition(" ")
        for rows, tiles in zip((*plan.rows, 8192), plan.tiles, strict=True):
            config = linear_config(kind, rows, int(size.partition("x")[2]), tiles, pdl=capability >= 90)
            if config is not None:
                configs[config.name] = config
    return list(configs.values())


def linear_config(kind: str, rows: int, k_size: int, tiles: linear.Tiles | None, *, pdl: bool) -> Config | None:
    flags: dict[str, Any] = {"GATED": kind == "gated", "RESIDUAL": kind == "add"}
    if tiles is None:
        return None
    flags |= {"BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k, "bias_ptr": None}
    if isinstance(tiles, gemv.GemvTiles):
        flags |= {"EVEN_K": k_size % tiles.block_k == 0, "PDL": pdl}
        if kind == "add":
            flags["norm_weight_ptr"] = None
        name = f"gemv-{kind}-{tiles.block_n}x{tiles.block_k}-w{tiles.num_warps}"
        kernel = gemv._gemv_kernel
        return Config(name, kernel, linear_types(kernel), flags, tiles.num_warps, not_divisible=("eps",))
    flags["SPLITS"] = tiles.splits
    if tiles.splits == 1:
        flags |= {"partial_ptr": None, "counter_ptr": None}
    schedule = f"w{tiles.num_warps}-s{tiles.num_stages}-k{tiles.splits}"
    if isinstance(tiles, gemm_skinny.SkinnyTiles):
        block_m = gemm_skinny.padded_rows(rows)
        flags |= {"BLOCK_M": block_m, "EVEN_K": k_size % tiles.block_k == 0, "PDL": pdl}
        name = f"skinny-{kind}-m{block_m}-{tiles.block_n}x{tiles.block_k}-{schedule}"
        kernel = gemm_skinny._skinny_kernel
        types, not_divisible = linear_types(kernel), ("num_rows",)
    else:
        flags |= {"BLOCK_M": tiles.block_m, "GROUP_M": gemm._GROUP_M, "SUBTILES": tiles.subtiles, "PDL": pdl}
        width = tiles.block_n // tiles.subtiles // (2 if kind == "gated" else 1)
        name = f"gemm-{kind}-{tiles.block_m}x{tiles.block_n}x{tiles.block_k}-{schedule}-t{tiles.subtiles}"
        kernel = gemm._gemm_kernel
        blocks = {"x": (tiles.block_m, tiles.block_k), "weight": (tiles.block_n, tiles.block_k)}
        blocks["out"] = (tiles.block_m, width)
        descriptors = {f"{which}_desc": f"tensordesc<{{dtype}}[{m},{n}]>" for which, (m, n) in blocks.items()}
        types, not_divisible = linear_types(kernel) | descriptors, ("num_rows", "k_blocks_per_split", *descriptors)
        flags["out_desc" if tiles.splits > 1 else "out_ptr"] = None
    return Config(
        name, kernel, types, flags, tiles.num_warps, tiles.num_stages, not_divisible, expects_wgmma=True
    )  # fmt: skip


def matrix() -> list[Any]:
    cases: list[tuple[Config, str, int]] = []
    for capability in (90, 80, 100):
        for dtype in ("bf16", "fp32") if capability == 90 or FULL else ("bf16",):
            configs = decode_configs(dtype, capability)
            if dtype == "bf16" or capability == 90 or FULL:
                configs += small_configs(capability)
            if dtype == "bf16":
                configs += merge_configs(capability)
            if capability == 90:
                configs += all_reduce_configs()
            if dtype != "fp32":
                configs += linear_configs(capability)
            if FULL:
                for page, dim, heads, kv in ((16, 128, 32, 8), (32, 128, 32, 8), (16, 64, 9, 3), (64, 256, 16, 2)):
                    configs += decode_configs(dtype, capability, dim=dim, page=page, heads=heads, kv=kv)
            cases += [(config, dtype, capability) for config in configs]
    return [pytest.param(*case, id=f"{case[0]}-{case[1]}-sm{case[2]}") for case in cases]


@dataclass(frozen=True)
class Resources:
    registers: int
    stack_bytes: int
    shared_bytes: int
    instructions: Counter[str]


def compile_for(config: Config, dtype: str, capability: int) -> tuple[Any, dict[str, Any]]:
    assert not runtime.INTERPRETED, "ahead-of-time tests need a process without TRITON_INTERPRET"
    names = config.kernel.arg_names
    signature = {
        name: "constexpr" if name in config.constants else config.types[name].format(dtype=dtype) for name in names
    }
    divisible = [name for name in names if name not in config.constants and name not in config.not_divisible]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in divisible}
    source = ASTSource(fn=config.kernel, signature=signature, constexprs=dict(config.constants), attrs=attributes)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options), options


def resources_of(compiled: Any, directory: Path) -> Resources:
    """What the machine code takes, read with the tools that come with Triton."""
    cubin = directory / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

    def dump(what: str) -> str:
        return subprocess.run([tool, what, cubin], capture_output=True, text=True, check=True).stdout

    usage = re.search(r"REG:(\d+) STACK:(\d+)", dump("-res-usage"))
    assert usage is not None
    lines = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", dump("-sass"))
    return Resources(int(usage[1]), int(usage[2]), compiled.metadata.shared, Counter(lines))


@pytest.mark.parametrize(("config", "dtype", "capability"), matrix())
def test_compiles_within_the_device(config: Config, dtype: str, capability: int, tmp_path: Path) -> None:
    compiled, _ = compile_for(config, dtype, capability)
    resources = resources_of(compiled, tmp_path)
    print(f"{resources.registers} registers, {resources.shared_bytes} B shared, {resources.stack_bytes} B stack")
    assert resources.stack_bytes == 0
    assert resources.instructions["LDL"] == resources.instructions["STL"] == 0
    assert resources.shared_bytes <= SHARED_MEMORY_BYTES[capability]
    if config.expects_wgmma and capability == 90:
        assert resources.instructions["HGMMA"] > 0
    elif config.expects_wgmma and capability == 80:
        assert resources.instructions["HMMA"] > 0
    elif config.expects_wgmma:
        assert "tcgen05.mma" in compiled.asm["ptx"]

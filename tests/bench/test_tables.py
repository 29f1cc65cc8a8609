"""The tables of the documents are those that the results make."""

from __future__ import annotations

import json
import re
from pathlib import Path

from manta.bench import tables
from manta.bench.policies import Policy, run
from manta.bench.timeline import Kernel, Timeline
from manta.deploy.config import load_engine_config

ENGINE = {
    "workload": {"batch_sizes": [1, 256]},
    "figures": {
        "b256_device_step_ms": 11.5,
        "b256_exposed_host_ms": 0.12,
        "b256_exposed_host_p50_ms": 0.1,
        "b256_exposed_host_p99_ms": 0.3,
        "ready_cold_s": 12.0,
        "ready_cold_s_over_vllm": 0.1,
        "ready_warm_s": 7.0,
        "ready_cold_light_imports_s": 0.25,
        "ready_warm_light_imports_s": 0.2,
    },
    "details": {
        "headlines": [
            {"name": "b1_tpot_ms", "value": 4.2, "vllm": 4.9, "floor": 3.36},
            {"name": "b3_tpot_ms", "value": 4.2, "vllm": None, "floor": None},
            {"name": "d2_s", "value": 21.0, "vllm": 23.2, "floor": 14.6},
        ]
    },
}


def test_headlines_are_judged_by_their_goals() -> None:
    rows = tables.headlines(ENGINE)
    assert rows[1] == ["`b1_tpot_ms`", "4.2", "4.9", "0.8571", "3.36", "1.25", "4.3", "4", "target"]
    assert rows[2] == ["`b3_tpot_ms`", "4.2", "", "", "", "", "", "", ""]
    assert rows[3][-1] == "missed"
    stretched = tables.headlines({"details": {"headlines": [{"name": "d2_s", "value": 18, "vllm": 0, "floor": 0}]}})
    assert stretched[1][-1] == "stretch"


def test_rows_are_there_for_what_was_measured() -> None:
    assert tables.exposed(ENGINE)[1:] == [["b256", "11.5", "0.12", "0.1", "0.3", ""]]
    assert tables.ready(ENGINE)[1:] == [["light imports", "0.25", "0.2"], ["in all", "12", "7"]]


def test_errors_of_predicted_steps_stand_beside_what_was_measured() -> None:
    row = {"step": "5 decodes of 706", "measured_ms": 4.0, "peaks_ms": 3.0, "fitted_ms": 5.0, "profile_ms": 4.0}
    rows = tables.step_errors({"details": {"model.json": {"rows": [row]}}})
    assert rows[1] == ["5 decodes of 706", "4", "4 (+0.0%)", "5 (+25.0%)", "3 (-25.0%)"]


def test_a_trace_becomes_a_matrix_of_kinds() -> None:
    one = Timeline.of([Kernel("gemm_kernel", 0, 80), Kernel("norm_kernel", 90, 100)], num_steps=2)
    other = Timeline.of([Kernel("gemm_kernel", 0, 10)], num_steps=1)
    trace = {
        "figures": {**one.figures("decode_batch_64_"), **other.figures("b_"), "b_untraced_us_per_step": 9.5},
        "details": {"decode_batch_64": one.tree(), "b": other.tree()},
    }
    rows = {row[0]: row[1:] for row in tables.kinds(trace)}
    assert rows["us a step"] == ["decode batch 64", "b"]
    assert rows["linear"] == ["40", "10"]
    assert rows["norm"] == ["5", ""]
    assert rows["whole, untraced"] == ["", "9.5"]
    assert rows["idle, %"] == ["10", "0"]
    assert tables.kernels(trace, "decode_batch_64")[1] == ["`gemm_kernel`", "0.5", "40", "88.89"]


def test_tables_are_filled_in_place(tmp_path: Path) -> None:
    text = "# a\n<!-- table headlines -->\nold\n<!-- /table -->\nkept\n<!-- table policies -->\n<!-- /table -->\n"
    empty = tables.fill(text, tmp_path)
    assert "old" not in empty
    assert "kept" in empty
    assert empty.count("Not measured yet") == 2
    (tmp_path / tables.ENGINE).write_text(json.dumps(ENGINE))
    config = load_engine_config("sim-h200")
    run(config, policies=[Policy(8, 512)], num_requests=3, json_path=tmp_path / tables.SCHEDULE)
    full = tables.fill(empty, tmp_path)
    assert "| `b1_tpot_ms` | 4.2 |" in full
    assert "| seqs 8 tokens 512 |" in full
    assert tables.fill(full, tmp_path) == full


def test_the_document_s_tables_are_up_to_date() -> None:
    texts = [document.read_text(encoding="utf-8") for document in tables.DOCUMENTS]
    assert set(re.findall(r"<!-- table ([\w ]+) -->", "".join(texts))) == set(tables.TABLES)
    for text in texts:
        assert tables.fill(text, tables.RESULTS) == text, "run python -m manta.bench.tables"


def test_layers_are_summed_and_a_missing_part_leaves_a_gap() -> None:
    line = {"scheme": "linear_fp8", "rows": 16, "us": 10.0, "floor_us": 5.0, "bf16_us": 20.0, "torch_us": 15.0}
    products = {"product_us": 8.0, "library_product_us": 10.0}
    lines = [{**line, **products, "library_us": 12.0}, {**line, **products, "library_us": None}]
    assert tables.quantized_layers({"lines": lines})[1:] == [
        ["`fp8`", "16", "20.0", "0.50", "2.00", "1.50", "", "1.25"]
    ]


def test_a_quantized_engine_stands_beside_bf16_of_the_same_run() -> None:
    figures = {"b1_tpot_ms": 2.0, "bf16_b1_tpot_ms": 4.0, "bf16_b1_tpot_ms_over_vllm": 0.8, "startup_s": 3.0}
    assert tables.beside_bf16({"figures": figures})[1:] == [["`b1_tpot_ms`", "2", "4", "0.5"]]

"""Start-up's display, without a terminal and in one."""

from __future__ import annotations

import io
import json
import shlex

import pytest
from rich.console import Console

from manta.deploy.config import load_config
from manta.deploy.progress import Progress
from manta.deploy.serve import Server, curl_line, ledger_table, reason
from manta.engine.stats import EngineInfo


def text_of(is_terminal: bool, fail: bool = False) -> str:
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=100)
    try:
        with Progress(console) as progress:
            progress.begin("Ray", "in /tmp/x")
            progress.begin("engine")
            progress.detail("0/1")
            progress.note("weights", 1.25)
            if fail:
                raise ValueError
    except ValueError:
        pass
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_plain_lines_elsewhere() -> None:
    lines = text_of(False).splitlines()
    assert lines[0] == "Ray ... in /tmp/x"
    assert lines[1].startswith("Ray: 0.0 s")
    assert "weights: 1.2 s" in lines
    assert "\x1b" not in "".join(lines)


@pytest.mark.parametrize(("fail", "mark"), [(False, "✓"), (True, "✗")])
def test_the_terminal_shows_how_the_last_phase_ended(fail: bool, mark: str) -> None:
    last_frame = text_of(True, fail).rsplit("Ray", 1)[-1]
    assert mark in last_frame
    assert "weights" in last_frame


def test_the_reason_is_the_exception_s_sentence() -> None:
    message = (
        "The deployment failed to start 3 times in a row.\n"
        "Traceback (most recent call last):\n"
        '  File "shard.py", line 1, in load\n'
        "manta.engine.errors.CheckpointError: model-00002.safetensors is missing: download it again\n"
    )
    assert reason(["", message]) == "the engine did not start: model-00002.safetensors is missing: download it again"
    assert reason(["", "no CPU left"]) == "the application did not start: no CPU left"
    defect = "ray::EngineShard.run() (pid=1)\n  File 'a.py'\n    assert x\nAssertionError\n"
    assert "AssertionError without a sentence" in reason([defect])


def test_the_ledger_and_the_curl_line() -> None:
    console = Console(file=io.StringIO(), width=60)
    console.print(ledger_table({"weights": 2**20, "kv_cache": 3 * 2**20}))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "kv cache" in text
    assert "3.0" in text
    assert json.loads(shlex.split(curl_line("http://h:1", "m", has_key=False))[-1])["max_tokens"] == 32
    assert "Authorization" in curl_line("http://h:1", "m", has_key=True)
    assert "Authorization" not in curl_line("http://h:1", "m", has_key=False)


def test_the_announcement_ends_the_memory_with_the_engine_s_notes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    notes = ["5 blocks, as [cache].num_blocks says", "the context is clipped"]
    info = EngineInfo(
        model_name="m",
        max_model_len=80,
        vocab_size=100,
        block_size=16,
        num_blocks=5,
        max_num_seqs=4,
        max_num_waiting=8,
        device="cpu",
        dtype="float32",
        notes=notes,
    )
    monkeypatch.setattr(Server, "_call_all", lambda server, method: [info])
    Server(load_config("sim-h200"), None).announce(Console(soft_wrap=True), proxy="HAProxy", logs=None)
    lines = capsys.readouterr().out.splitlines()
    after = lines.index("m on cpu, float32: 5 blocks of 16 tokens, context 80")
    assert lines[after + 1 : after + 3] == [f"  {note}" for note in notes]
    assert lines[after + 3].startswith("READY: http://127.0.0.1:8000/v1")

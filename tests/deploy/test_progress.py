"""Start-up's display, without a terminal and in one."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from manta.deploy.progress import Progress
from manta.deploy.serve import curl_line, ledger_table, reason


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


def test_the_ledger_and_the_curl_line() -> None:
    console = Console(file=io.StringIO(), width=60)
    console.print(ledger_table({"weights": 2**20, "kv_cache": 3 * 2**20}))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "kv cache" in text
    assert "3.0" in text
    assert "Authorization" in curl_line("http://h:1", "m", has_key=True)
    assert "Authorization" not in curl_line("http://h:1", "m", has_key=False)

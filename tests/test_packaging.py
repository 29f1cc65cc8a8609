"""The symbolic links in manta/ become real files in wheel and sdist, and no module is loaded under two names."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("autoscaling", "bench", "cluster", "deploy", "engine", "kernels", "replicas")
PACKAGED = ("*.py", "*.yaml", "*.json", "py.typed")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist, built from a copy of the sources."""
    copy = tmp_path_factory.mktemp("source") / "project"
    ignored = shutil.ignore_patterns(".venv", ".git", "__pycache__", "*.egg-info", "build", "dist", ".*_cache")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=ignored)
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return out


def expected_files() -> set[str]:
    """Paths in the package of everything that should be installed."""
    files = {"manta/__init__.py", "manta/__main__.py", "manta/py.typed"}
    for folder in FOLDERS:
        for pattern in PACKAGED:
            files |= {f"manta/{f.relative_to(ROOT)}" for f in (ROOT / folder).rglob(pattern)}
    return {file for file in files if "/results/" not in file and "__pycache__" not in file}


def test_links_are_relative_and_lead_to_the_root_folders() -> None:
    for folder in FOLDERS:
        link = ROOT / "manta" / folder
        assert link.is_symlink()
        assert str(link.readlink()) == f"../{folder}"


def test_root_folders_are_not_packages() -> None:
    assert not [folder for folder in (*FOLDERS, "tests") if (ROOT / folder / "__init__.py").exists()]
    assert not (ROOT / "conftest.py").exists()


def test_folders_below_are_packages() -> None:
    for folder in FOLDERS:
        for file in (ROOT / folder).rglob("*.py"):
            if file.parent != ROOT / folder:
                assert (file.parent / "__init__.py").is_file(), file.parent


def test_wheel_holds_the_real_files(built: Path) -> None:
    (wheel,) = built.glob("manta_llm-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        assert expected_files() <= names
        assert archive.read("manta/engine/errors.py") == (ROOT / "engine" / "errors.py").read_bytes()
        assert not [info.filename for info in archive.infolist() if (info.external_attr >> 16) & 0o170000 == 0o120000]
        (entry_points,) = (name for name in names if name.endswith("entry_points.txt"))
        assert "manta = manta.deploy.cli:main" in archive.read(entry_points).decode()
    assert {name.split("/")[0] for name in names} == {"manta", wheel.name.rsplit("-", 3)[0] + ".dist-info"}


def test_sdist_holds_the_real_files(built: Path) -> None:
    (sdist,) = built.glob("manta_llm-*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = {member.name.split("/", 1)[-1]: member for member in archive.getmembers()}
        assert expected_files() <= set(members)
        assert not [name for name, member in members.items() if member.issym()]
        assert {"LICENSE", "README.md", "pyproject.toml"} <= set(members)


def test_an_installed_wheel_works_from_anywhere(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("manta_llm-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = (
        "import sys, manta, manta.engine.config, manta.deploy.config as config; "
        f"assert manta.__file__.startswith({str(tmp_path)!r}); "
        "print(config.load_config('sim-h200').engine.device)"
    )
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); {code}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.strip() == "sim:h200", done.stderr


def test_no_module_is_loaded_under_two_names() -> None:
    layers = ("engine", "replicas", "cluster", "autoscaling", "deploy")
    files = sorted(file for layer in layers for file in (ROOT / layer).rglob("*.py"))
    modules = [
        "manta." + str(file.relative_to(ROOT).with_suffix("")).replace("/", ".").removesuffix(".__init__")
        for file in files
    ]
    code = """
import collections, importlib, os, sys
modules = sys.argv[1:]
for name in modules:
    importlib.import_module(name)
names = collections.defaultdict(set)
for name, module in list(sys.modules.items()):
    file = os.path.realpath(getattr(module, "__file__", None) or "/")
    if file.startswith(os.getcwd() + os.sep) and "/.venv/" not in file:
        names[file].add(name)
assert len(names) >= len(modules), (len(names), len(modules))
print({file: sorted(found) for file, found in names.items() if len(found) > 1})
"""
    command = [sys.executable, "-W", "ignore", "-c", code, *modules]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1] == "{}"


def test_the_type_checker_is_told_every_folder() -> None:
    included = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]["include"]
    assert included == ["manta", *(f"manta/{folder}" for folder in FOLDERS)]

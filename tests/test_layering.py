"""Imports only point down, heavy libraries load late, and the environment has one reader: shown from the sources."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = ("kernels", "engine", "cluster", "replicas", "autoscaling", "bench", "deploy")

MAY_IMPORT = {
    "kernels": set(),
    "engine": {"kernels"},
    "cluster": {"engine"},
    "replicas": {"cluster", "engine"},
    "autoscaling": {"cluster", "engine"},
    "bench": {"kernels", "engine", "cluster", "replicas", "autoscaling", "deploy"},
    "deploy": {"kernels", "engine", "cluster", "replicas", "autoscaling", "bench"},
}

TORCH_FREE_ENGINE = {
    *("config", "request", "stats", "errors", "step_time", "plan", "model_shape", "block_pool", "prefix_cache"),
    *("scheduler", "core", "sim", "tokenizer", "detokenizer", "chat_template", "gguf_tokenizer", "model_source"),
    *("gguf_file", "checkpoint_config", "token_spelling", "step_profile", "step_budget", "step_costs", "cuda_context"),
    *("hardware", "precision", "step_fit"),
}

ENVIRONMENT_READERS = {
    # file: why it may touch the environment
    "deploy/settings.py": "the one place where settings come from the environment",
    "engine/parallel/nccl.py": "tells torch that its watchdog ends no process, which torch takes from nowhere else",
    "kernels/runtime.py": "writes a default that Triton takes from nowhere else, before Triton is used",
}

FORBIDDEN_LIBRARIES = {
    "kernels": {"ray", "fastapi", "transformers", "pydantic"},
    "engine": {"ray", "fastapi", "uvicorn"},
    "cluster": {"torch"},
    "autoscaling": {"torch", "transformers", "pydantic"},
}


def sources(layer: str) -> list[Path]:
    return sorted(file for file in (ROOT / layer).rglob("*.py") if "__pycache__" not in file.parts)


def all_sources() -> list[Path]:
    return [file for layer in LAYERS for file in sources(layer)]


def imported(file: Path, *, only_at_import: bool = False) -> Iterator[str]:
    """Absolute module names that a file imports; relative ones are resolved below `manta`."""
    tree = ast.parse(file.read_text(), filename=str(file))
    for node in _at_import(tree) if only_at_import else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = ["manta", *file.relative_to(ROOT).parent.parts]
                base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run when the module is imported: no function bodies, no `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from _at_import(node)


def relative(file: Path) -> str:
    return str(file.relative_to(ROOT))


def test_the_walk_finds_the_layers() -> None:
    assert len(all_sources()) > 20
    assert "manta.engine.errors" in set(imported(ROOT / "deploy" / "config.py"))
    assert "manta.engine.errors" in set(imported(ROOT / "engine" / "config.py"))  # written as a relative import


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_point_down(layer: str) -> None:
    wrong = [
        f"{relative(file)} imports {name}"
        for file in sources(layer)
        for name in imported(file)
        if name.startswith("manta.")
        and name.split(".")[1] in LAYERS
        and name.split(".")[1] not in {layer, *MAY_IMPORT[layer]}
    ]
    assert not wrong


@pytest.mark.parametrize("layer", LAYERS)
def test_other_layers_are_imported_absolutely_and_by_their_full_name(layer: str) -> None:
    wrong = [
        f"{relative(file)} imports {name}"
        for file in sources(layer)
        for name in imported(file)
        if name.split(".")[0] in LAYERS
    ]
    assert not wrong


@pytest.mark.parametrize("layer", sorted(FORBIDDEN_LIBRARIES))
def test_libraries_stay_in_their_layers(layer: str) -> None:
    wrong = [
        f"{relative(file)} imports {name}"
        for file in sources(layer)
        for name in imported(file)
        if name.split(".")[0] in FORBIDDEN_LIBRARIES[layer]
    ]
    assert not wrong


def test_bench_is_imported_by_the_command_line_only_and_late() -> None:
    for layer in set(LAYERS) - {"bench"}:
        for file in sources(layer):
            if any(name.startswith("manta.bench") for name in imported(file)):
                assert layer == "deploy", relative(file)
                assert file.stem.endswith("_cli"), relative(file)
            assert not any(name.startswith("manta.bench") for name in imported(file, only_at_import=True))


def test_cluster_s_routing_and_placement_are_pure() -> None:
    for file in sources("cluster"):
        if "routing" in file.parts or file.stem in ("spec", "topology", "placement"):
            heads = {name.split(".")[0] for name in imported(file)}
            assert not heads & {"ray", "torch", "time", "random", "asyncio", "threading"}, relative(file)


def test_the_simulator_has_no_clock_but_its_own() -> None:
    for file in sources("autoscaling"):
        if "simulator" in file.parts:
            heads = {name.split(".")[0] for name in imported(file)}
            assert not heads & {"ray", "time", "asyncio", "threading"}, relative(file)


@pytest.mark.parametrize("name", ["block_pool", "prefix_cache", "scheduler"])
def test_the_pure_core_knows_no_clock_and_no_chance(name: str) -> None:
    heads = {imported_name.split(".")[0] for imported_name in imported(ROOT / "engine" / f"{name}.py")}
    assert not heads & {"ray", "torch", "time", "random", "asyncio", "threading", "secrets"}


def test_torch_free_parts_of_the_engine_do_not_import_torch() -> None:
    wrong = [
        f"{relative(file)} imports {name}"
        for file in sources("engine")
        if file.parent.name == "engine" and file.stem in TORCH_FREE_ENGINE
        for name in imported(file)
        if name.split(".")[0] in ("torch", "triton", "transformers") or name.startswith("manta.kernels")
    ]
    assert not wrong


def test_the_environment_is_read_in_settings_only() -> None:
    readers = {relative(file) for file in all_sources() if _touches_environment(file)}
    assert readers - set(ENVIRONMENT_READERS) == set()
    assert "deploy/settings.py" in readers


def _touches_environment(file: Path) -> bool:
    ways = {"environ", "getenv", "putenv", "environb"}
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute) and node.attr in ways:
            return True
        if isinstance(node, ast.ImportFrom) and node.module == "os" and ways & {alias.name for alias in node.names}:
            return True
    return False


@pytest.mark.parametrize(
    "module",
    [
        "manta",
        *(f"manta.engine.{name}" for name in sorted(TORCH_FREE_ENGINE) if (ROOT / "engine" / f"{name}.py").exists()),
        "manta.engine.startup",
        "manta.deploy.cli",
        "manta.deploy.config",
        "manta.deploy.serve",
        "manta.replicas.protocol",
        "manta.replicas.edge.app",
        "manta.autoscaling.simulator.router",
    ],
)
def test_importing_it_leaves_torch_out(module: str) -> None:
    code = f"import sys, {module}; sys.exit(any(name in sys.modules for name in ('torch', 'triton', 'transformers')))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{module} loads torch, triton or transformers\n{done.stderr}"


def test_importing_the_command_line_leaves_ray_and_pydantic_out() -> None:
    code = "import sys, manta.deploy.cli; print([n for n in ('ray', 'pydantic', 'httpx', 'numpy') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

"""What README.md names exists: files, commands with their options, configuration fields, make targets, endpoints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from manta.deploy.cli import app
from manta.deploy.config import DeployConfig, load_config, parse_overrides
from manta.engine.config import known_fields
from manta.replicas.edge import app as edge_app

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()
CODE = "\n".join(re.findall(r"```bash\n(.*?)```", README, re.DOTALL))
COMMANDS = [
    line.split("| manta ", 1)[-1] if "| manta " in line else line.removeprefix("manta ")
    for line in CODE.replace("\\\n", " ").splitlines()
    if line.startswith("manta ") or "| manta " in line
]


def parse(command: str) -> None:
    """Let the argument parser, but not the command, see it. Raises what the parser raises."""
    arguments = shlex.split(command, comments=True)
    group = typer.main.get_command(app)
    context = group.make_context("manta", arguments, resilient_parsing=False)
    while hasattr(group, "commands"):
        name, group, arguments = group.resolve_command(context, [*context._protected_args, *context.args])
        assert group is not None, name
        context = group.make_context(name, arguments, parent=context)


def test_there_are_examples() -> None:
    assert len(COMMANDS) > 15


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_parse(command: str) -> None:
    parse(command)


def test_an_unknown_option_would_be_seen() -> None:
    with pytest.raises(Exception, match="No such option"):
        parse("serve --no-such-option")


@pytest.mark.parametrize("command", [command for command in COMMANDS if "--set" in command])
def test_overrides_are_accepted(command: str) -> None:
    words = shlex.split(command, comments=True)
    settings = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
    load_config(None, parse_overrides(settings))


def test_every_field_in_the_table_exists_and_every_serving_field_is_in_it() -> None:
    table = re.findall(r"^\| (`(?:engine|serving)\..*?) \|", README, re.MULTILINE)
    named = {name for cell in table for name in re.findall(r"`([a-z_.]+)`", cell)}
    fields = {name for name, is_section in known_fields(DeployConfig) if not is_section}
    assert named <= fields
    assert {name for name in fields if name.startswith("serving.")} - named == {"serving.startup_timeout_s"}


def test_files_named_exist() -> None:
    paths = set(re.findall(r"\]\(([A-Za-z][\w./-]+)\)", README))
    paths |= set(re.findall(r"`((?:engine|replicas|deploy|bench|cluster)/[\w./-]+\.\w+)`", README))
    assert len(paths) > 15
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z-]+)", CODE))
    assert {"install", "serve", "test", "check", "clean"} <= named | {"install"}
    assert named <= targets


def test_endpoints_exist() -> None:
    source = (ROOT / "replicas" / "edge" / "app.py").read_text()
    routes = re.findall(r'Route\("?([^",]+)"?,', source)
    served = {getattr(edge_app, route) if route.endswith("_PATH") else route for route in routes}
    shown = {path.rstrip("'\"") for path in re.findall(r"127\.0\.0\.1:8000(/[\w/.-]+)", CODE)}
    known = {path for path in served if "{" not in path}
    assert known <= shown
    assert {path for path in shown - known if not path.startswith(("/v1/models/", "/explain/"))} == set()

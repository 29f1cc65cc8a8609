"""Options that measuring commands share, and how their texts are read; measures nothing and registers no command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from manta.engine.config import EngineConfig

T = TypeVar("T", int, float)

Model = Annotated[str, typer.Option("--model", help="Known name, folder, Hugging Face id, GGUF or YAML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Override a field, e.g. --set block_size=32. May be repeated."),
]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the results as JSON.")]
Plot = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Draw the results as PNG (needs matplotlib).")
]


def engine_config(model: str, overrides: list[str] | None) -> EngineConfig:
    """The engine of what the user named, its model's files found."""
    from .checks import locate_model, locate_profiles
    from .config import load_config, parse_overrides
    from .settings import Settings

    settings = Settings.from_environment()
    config = load_config(model, parse_overrides(overrides or []))
    return locate_model(locate_profiles(config, settings.profiles_dir), settings.models_dir).engine


def names(text: str) -> list[str]:
    """`decode,prefill` as names."""
    return [name.strip() for name in text.split(",") if name.strip()]


def numbers(option: str, text: str | None, kind: Callable[[str], T]) -> list[T] | None:
    """`1,8,32` as numbers. Raises ConfigError."""
    from manta.engine.errors import ConfigError

    if text is None:
        return None
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option} {text!r}: write numbers with commas between, as in 1,8,32", field=option) from None


def console() -> Console:
    """Where results are shown; it breaks no lines, so that a pipe gets them whole."""
    from rich.console import Console

    return Console(soft_wrap=True)

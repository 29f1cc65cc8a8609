"""What needs the packages of the extra `observability`, and a clear word where they are missing. Knows nothing else."""

from __future__ import annotations

import importlib

from manta.engine.errors import ConfigError


def require(command: str, *modules: str) -> None:
    """Raise ConfigError unless all these modules can be imported; `command` is what needs them."""
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError:
            raise ConfigError(
                f"{command} needs {name.split('.')[0].replace('_', '-')}, which is not installed: "
                "pip install 'manta-llm[observability]'"
            ) from None

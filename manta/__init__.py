"""Manta's public Python API: names are imported on first use, so that `import manta` stays light (no torch)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manta.engine.llm import LLM, CompletionOutput, RequestOutput
    from manta.engine.request import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__"]

_HOME = {
    "LLM": "manta.engine.llm",
    "CompletionOutput": "manta.engine.llm",
    "RequestOutput": "manta.engine.llm",
    "SamplingParams": "manta.engine.request",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'manta' has no attribute {name!r}")

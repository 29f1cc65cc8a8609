"""The one dict of architectures: the name in a checkpoint's config to what its family states."""

from __future__ import annotations

from manta.engine.errors import CheckpointError

from .family import Family
from .llama import LLAMA
from .qwen3 import QWEN3

ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": LLAMA,
    "Qwen3ForCausalLM": QWEN3,
}


def family_of(architecture: str) -> Family:
    """Raises CheckpointError for an unknown architecture."""
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise CheckpointError(f"architecture {architecture!r} is not supported; supported are {known}")
    return ARCHITECTURES[architecture]

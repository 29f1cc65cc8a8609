"""What a family of checkpoints states about itself: the names of its tensors and how its files store them.

A part is a tensor of the decoder under our own name: embedding, head, final_norm, and in each layer input_norm, q, k,
v, q_norm, k_norm, output, post_norm, gate, up, down. Knows no file format's bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Parameter(NamedTuple):
    """One tensor of a checkpoint: the part, its layer (None outside the layers), weight or bias."""

    part: str
    layer: int | None
    kind: str


@dataclass(frozen=True)
class Family:
    """`hugging_face` and `gguf` name each part, with {layer} in the place of the layer's number."""

    hugging_face: Mapping[str, str]
    gguf: Mapping[str, str]
    gguf_interleaves_rotary: bool = False
    """Whether GGUF files hold the rows of each q and k head as pairs (i, i + dim / 2), side by side."""

    def hugging_face_name(self, parameter: Parameter) -> str:
        return f"{self.hugging_face[parameter.part].format(layer=parameter.layer)}.{parameter.kind}"

    def gguf_name(self, parameter: Parameter) -> str:
        return f"{self.gguf[parameter.part].format(layer=parameter.layer)}.{parameter.kind}"

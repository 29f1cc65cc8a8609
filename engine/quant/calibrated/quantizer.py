"""`manta quantize`: a plain checkpoint becomes a quantized one, layer by layer, a file a layer.

In memory are one layer in fp32, the second moments of its inputs and the residual stream of the calibration texts. An
output that was begun is gone on with: layers whose files are there are not made again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from manta.engine.errors import CheckpointError, ConfigError
from manta.engine.layers.rope import build_cos_sin
from manta.engine.model_shape import ModelShape
from manta.engine.model_source import ModelSource
from manta.engine.models.architectures import family_of
from manta.engine.models.family import Parameter
from manta.engine.parallel.layout import ShardLayout
from manta.engine.quant.checkpoints import checkpoint_reader
from manta.engine.quant.checkpoints.write import config_of, tensors_of
from manta.engine.weights.load import plain_fill
from manta.engine.weights.safetensors_files import FolderTensors
from manta.engine.weights.slices import slices

from .layer_pass import GROUPS, InputStats, LayerTensors, layer_parameters, run_layer
from .model_folder import write_model_folder
from .recipe import QuantizedLayer, Recipe, quantize_layer

JOURNAL = "quantize.json"
"""In the output: what is made of what, and the errors of the layers that are done."""


@dataclass
class LayerErrors:
    """Of one layer: relative error of each group of products."""

    layer: int
    errors: dict[str, float] = field(default_factory=dict)


def quantize_checkpoint(
    source: ModelSource,
    shape: ModelShape,
    recipe: Recipe,
    texts: torch.Tensor | None,
    output: Path,
    *,
    memory_gib: float = 8.0,
    on_layer: Callable[[LayerErrors], None] = lambda errors: None,
) -> list[LayerErrors]:
    """Write the quantized model to the folder `output`; `texts` [texts, tokens] int64 calibrate it.

    `on_layer` is called for every layer, also for those that an earlier call made. Raises ConfigError and
    CheckpointError.
    """
    return _Job(source, shape, recipe, texts, output, memory_gib).run(on_layer)


class _Job:
    def __init__(
        self,
        source: ModelSource,
        shape: ModelShape,
        recipe: Recipe,
        texts: torch.Tensor | None,
        output: Path,
        memory_gib: float,
    ) -> None:
        if recipe.needs_calibration and texts is None:
            raise ConfigError(f"{recipe.method} needs texts: name a file with --calibration", field="scheme")
        self._source, self._shape, self._recipe, self._output = source, shape, recipe, output
        self._texts = texts if recipe.needs_calibration else None
        self._fill = plain_fill(source, shape, 0)
        self._family = family_of(shape.architecture)
        self._slice_of = slices(shape, ShardLayout.whole(shape))
        self._dtype: torch.dtype = getattr(torch, shape.dtype)
        self._num_files = shape.num_layers + 1
        _check_memory(shape, self._texts, memory_gib)
        self._done = self._open()

    @torch.inference_mode()
    def run(self, on_layer: Callable[[LayerErrors], None]) -> list[LayerErrors]:
        hidden = None if self._texts is None else self._embedded(self._texts)
        length = 1 if self._texts is None else self._texts.shape[1]
        cos_sin = build_cos_sin(self._shape.rope, self._shape.head_dim, length, torch.device("cpu"))
        for index in range(self._shape.num_layers):
            if index < len(self._done):
                tensors = None if hidden is None else self._made(index)
            else:
                tensors = self._make(index, hidden, cos_sin)
            if hidden is not None and tensors is not None:
                for text in range(hidden.shape[0]):
                    hidden[text] = run_layer(tensors, hidden[text], self._shape, cos_sin)
            on_layer(self._done[index])
        self._finish()
        return self._done

    def _make(self, index: int, hidden: torch.Tensor | None, cos_sin: torch.Tensor) -> LayerTensors:
        """Quantize a layer and write it. Returns it as it will compute."""
        tensors = self._plain_layer(index)
        stats: dict[str, InputStats] | None = None
        if hidden is not None:
            stats = {group: InputStats.empty(tensors[parts[0], "weight"].shape[1]) for group, parts in GROUPS.items()}
            held = stats
            for text in range(hidden.shape[0]):
                run_layer(tensors, hidden[text], self._shape, cos_sin, lambda group, *given: held[group].add(*given))
        layer = quantize_layer(self._recipe, tensors, stats, self._shape)
        self._write_layer(index, layer)
        self._done.append(LayerErrors(index, layer.errors))
        self._write_journal()
        return layer.dequantized()

    def _write_layer(self, index: int, layer: QuantizedLayer) -> None:
        found: dict[str, torch.Tensor] = {}
        for (part, kind), tensor in layer.others.items():
            found[self._family.hugging_face_name(Parameter(part, index, kind))] = tensor.to(self._dtype)
        for part, weight in layer.products.items():
            module = self._family.hugging_face_name(Parameter(part, index, "weight")).removesuffix(".weight")
            try:
                packed = tensors_of(weight, self._recipe)
            except ValueError as error:
                raise ConfigError(f"{module}: {error}", field="format") from None
            found |= {f"{module}.{suffix}": tensor for suffix, tensor in packed.items()}
        self._save(index, found)

    def _made(self, index: int) -> LayerTensors:
        """A layer that is there already, as it computes."""
        tensors = FolderTensors(self._output, [self._file(index)])
        reader = checkpoint_reader(self._source, self._family, config_of(self._recipe), tensors)
        found: LayerTensors = {}
        for parameter in layer_parameters(self._shape, index):
            is_product = parameter.kind == "weight" and any(parameter.part in parts for parts in GROUPS.values())
            if is_product:
                value = reader.read(parameter, self._slice_of(parameter)).dequantize()
            else:
                value = tensors.get(self._family.hugging_face_name(parameter)).float()
            found[parameter.part, parameter.kind] = value
        return found

    def _plain_layer(self, index: int) -> LayerTensors:
        views = {p: torch.empty(self._slice_of(p).shape) for p in layer_parameters(self._shape, index)}
        self._fill(views, self._slice_of)
        return {(parameter.part, parameter.kind): view for parameter, view in views.items()}

    def _plain(self, part: str) -> torch.Tensor:
        parameter = Parameter(part, None, "weight")
        view = torch.empty(self._slice_of(parameter).shape)
        self._fill({parameter: view}, self._slice_of)
        return view

    def _embedded(self, texts: torch.Tensor) -> torch.Tensor:
        """[texts, tokens, hidden] fp32."""
        return torch.nn.functional.embedding(texts, self._plain("embedding"))

    def _finish(self) -> None:
        """The tensors outside layers, then the index and the config, which make the folder a model."""
        parts = ["embedding", "final_norm"] + ([] if self._shape.tie_word_embeddings else ["head"])
        names = {part: self._family.hugging_face_name(Parameter(part, None, "weight")) for part in parts}
        self._save(self._shape.num_layers, {names[part]: self._plain(part).to(self._dtype) for part in parts})
        files = [self._file(number) for number in range(self._num_files)]
        write_model_folder(self._source, self._shape, self._output, files, config_of(self._recipe))

    def _file(self, number: int) -> str:
        return f"model-{number + 1:05d}-of-{self._num_files:05d}.safetensors"

    def _save(self, number: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """A file appears whole or not at all."""
        partial = self._output / f".{self._file(number)}.partial"
        own = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
        save_file(own, partial, {"format": "pt"})
        os.replace(partial, self._output / self._file(number))

    def _open(self) -> list[LayerErrors]:
        """Begin the output, or find what an earlier call left of the same work."""
        journal = self._output / JOURNAL
        if not journal.is_file():
            if self._output.exists() and any(self._output.iterdir()):
                raise ConfigError(
                    f"{self._output} is not empty, and nothing there says that it was begun by "
                    "`manta quantize`: name another folder",
                    field="output",
                )
            self._output.mkdir(parents=True, exist_ok=True)
            return []
        try:
            found = json.loads(journal.read_text(encoding="utf-8"))
            layers = [LayerErrors(entry["layer"], entry["errors"]) for entry in found["layers"]]
        except (ValueError, KeyError, TypeError):
            raise CheckpointError(f"{journal} is damaged: remove {self._output} and begin anew") from None
        if found.get("work") != self._work():
            raise ConfigError(
                f"{self._output} was begun with another model, scheme or calibration: name another folder",
                field="output",
            )
        while layers and not (self._output / self._file(len(layers) - 1)).is_file():
            layers.pop()
        return layers

    def _work(self) -> dict[str, Any]:
        """What makes two calls the same work."""
        texts = None
        if self._texts is not None:
            texts = hashlib.sha256(self._texts.contiguous().numpy().tobytes()).hexdigest()[:16]
        size = sum(file.stat().st_size for file in _files(self._source.path))
        recipe = {**asdict(self._recipe), "target": self._recipe.format}
        return {"model": self._source.name, "model_bytes": size, "recipe": recipe, "calibration": texts}

    def _write_journal(self) -> None:
        partial = self._output / f".{JOURNAL}.partial"
        content = {"work": self._work(), "layers": [asdict(entry) for entry in self._done]}
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, self._output / JOURNAL)


def needed_bytes(shape: ModelShape, num_tokens: int) -> int:
    """What is held at once at most: the stream, three copies of a layer, moments and their inverses."""
    hidden, inter = shape.hidden_size, shape.intermediate_size
    heads = shape.num_heads * shape.head_dim
    layer = hidden * shape.head_dim * 2 * (shape.num_heads + shape.num_kv_heads) + 3 * hidden * inter
    moments = 2 * hidden**2 + heads**2 + 4 * inter**2
    return 4 * (num_tokens * hidden + 3 * layer + moments + shape.vocab_size * hidden)


def _check_memory(shape: ModelShape, texts: torch.Tensor | None, memory_gib: float) -> None:
    needed = needed_bytes(shape, 0 if texts is None else texts.numel())
    if needed > memory_gib * (1 << 30):
        raise ConfigError(
            f"memory_gib = {memory_gib:g}: a layer at a time takes about {needed / (1 << 30):.1f} GiB with these "
            "calibration texts; allow more, or calibrate with fewer tokens",
            field="memory_gib",
        )


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(path.glob("*.safetensors"))

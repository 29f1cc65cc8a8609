"""`manta quantize`: arguments in, a progress bar, each layer's error and the perplexity before and after out.

Quantizes nothing itself (engine/quant/calibrated/ does).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from .bench_options import Json, Overrides, engine_config

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from manta.engine.config import EngineConfig
    from manta.engine.quant.calibrated.quantizer import LayerErrors
    from manta.engine.quant.calibrated.recipe import Recipe

ONE_GROUP = -1


def quantize_command(
    model: Annotated[str, typer.Argument(help="Known name, folder, Hugging Face id or GGUF file: plain weights.")],
    output: Annotated[Path, typer.Option("--output", metavar="FOLDER", help="Where the quantized model goes.")],
    scheme: Annotated[str, typer.Option(help="rtn, gptq, awq, smoothquant (W8A8), fp8 or fp8_gptq.")] = "gptq",
    calibration: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Text, .gz allowed; all but rtn and fp8 need it.")
    ] = None,
    bits: Annotated[int, typer.Option(help="4 or 8; of rtn, gptq and awq.")] = 4,
    group_size: Annotated[int, typer.Option(help="Columns that share a scale; -1: all of a row.")] = 128,
    symmetric: Annotated[bool, typer.Option("--symmetric/--asymmetric", help="Without or with zero points.")] = True,
    act_order: Annotated[bool, typer.Option("--act-order", help="Of gptq: columns with large inputs first.")] = False,
    weight_only: Annotated[
        bool, typer.Option("--weight-only", help="Of fp8 and fp8_gptq: activations stay as they are.")
    ] = False,
    target: Annotated[
        str | None, typer.Option("--format", help="compressed-tensors, gptq or awq; default: the scheme's own.")
    ] = None,
    texts: Annotated[int, typer.Option(min=1, help="Pieces of the calibration text.")] = 64,
    text_tokens: Annotated[int, typer.Option(min=16, help="Tokens of each.")] = 512,
    memory_gib: Annotated[float, typer.Option(help="What a layer at a time may take.")] = 8.0,
    text: Annotated[
        Path | None, typer.Option("--text", metavar="FILE", help="Perplexity of this, before and after.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Of --text.")] = 4096,
    overrides: Overrides = None,
    json: Json = None,
) -> None:
    """Quantize a model's weights into a checkpoint that Manta and others load. An output broken off is gone on with."""
    config = engine_config(model, overrides)

    from manta.engine.quant.calibrated.recipe import Recipe

    recipe = Recipe(
        cast(Any, scheme),
        bits=bits,
        group_size=None if group_size == ONE_GROUP else group_size,
        symmetric=symmetric,
        act_order=act_order,
        weight_only=weight_only,
        target=cast(Any, target),
    )
    from rich.console import Console

    console = Console(soft_wrap=True)
    layers = _quantize(config, recipe, output, calibration, (texts, text_tokens), memory_gib, console)
    figures = {f"error_{group}_mean": value for group, value in mean_errors(layers).items()}
    listed = ", ".join(f"{group} {value:.4f}" for group, value in mean_errors(layers).items())
    console.print(f"mean relative error: {listed}", highlight=False)
    if text is not None:
        figures |= _perplexities(config, output, text, max_tokens, console)
    console.print(f"written to {output}: serve it with `manta serve {output}`", markup=False, highlight=False)
    if json is not None:
        from dataclasses import asdict

        from manta.bench.report import environment, write_json

        details = {"recipe": {**asdict(recipe), "target": recipe.format}, "layers": [asdict(entry) for entry in layers]}
        write_json(json, {"bench": "quantize", "figures": figures, "details": details, "environment": environment()})


def mean_errors(layers: list[LayerErrors]) -> dict[str, float]:
    """By group of products, over layers."""
    groups = layers[0].errors
    return {group: sum(entry.errors[group] for entry in layers) / len(layers) for group in groups}


def _quantize(
    config: EngineConfig,
    recipe: Recipe,
    output: Path,
    calibration: Path | None,
    sizes: tuple[int, int],
    memory_gib: float,
    console: Console,
) -> list[LayerErrors]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from manta.engine.model_source import load_shape, resolve_model
    from manta.engine.quant.calibrated.quantizer import quantize_checkpoint

    source = resolve_model(config.model)
    shape = load_shape(source)
    pieces = None
    if recipe.needs_calibration and calibration is not None:
        pieces = _pieces(config, calibration, *sizes)
        console.print(f"calibrating with {pieces.shape[0]} texts of {pieces.shape[1]} tokens", highlight=False)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("layers", total=shape.num_layers)

        def on_layer(entry: LayerErrors) -> None:
            errors = ", ".join(f"{group} {error:.4f}" for group, error in entry.errors.items())
            progress.console.print(f"layer {entry.layer}: relative error {errors}", highlight=False)
            progress.advance(task)

        return quantize_checkpoint(source, shape, recipe, pieces, output, memory_gib=memory_gib, on_layer=on_layer)


def _pieces(config: EngineConfig, path: Path, count: int, length: int) -> torch.Tensor:
    """[texts, tokens]: the beginning of the calibration text, in pieces. Raises ConfigError."""
    import torch

    from manta.bench.traces import open_text
    from manta.engine.errors import ConfigError
    from manta.engine.model_source import resolve_model
    from manta.engine.tokenizer import Tokenizer

    try:
        with open_text(path) as file:
            token_ids = Tokenizer.load(resolve_model(config.model)).encode(file.read(), add_special_tokens=False)
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise ConfigError(f"cannot read the text {path}: {error}", field="calibration") from None
    count = min(count, len(token_ids) // length)
    if count == 0:
        raise ConfigError(f"{path} has {len(token_ids)} tokens, and one text takes {length}", field="calibration")
    return torch.tensor(token_ids[: count * length]).view(count, length)


def _perplexities(
    config: EngineConfig, output: Path, text: Path, max_tokens: int, console: Console
) -> dict[str, float]:
    """Before and after, in windows of 1024 tokens or half the model's context."""
    from manta.bench import perplexity
    from manta.engine.config import with_overrides
    from manta.engine.model_source import load_shape, resolve_model

    found: dict[str, float] = {}
    window = min(1024, load_shape(resolve_model(config.model)).max_position_embeddings // 2)
    after = with_overrides(config, {"model.model": str(output), "model.tokenizer": None})
    for name, chosen in (("before", config), ("after", after)):
        report = perplexity.run(chosen, text, max_tokens=max_tokens, window=window, stride=window // 2)
        found[f"perplexity_{name}"] = report.figures["perplexity"]
        console.print(f"perplexity {name}: {report.figures['perplexity']:.4f}", highlight=False)
    return found

"""`manta eval`: commands that measure a model's quality."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .bench_options import Json, Model, Overrides, console, engine_config, names

eval_app = typer.Typer(help="Measure a model's quality.", no_args_is_help=True)


@eval_app.command("perplexity")
def perplexity_command(
    text: Annotated[Path, typer.Option("--text", metavar="FILE", help="Plain text, .gz allowed.")],
    model: Model = "smollm2-135m",
    max_tokens: Annotated[int | None, typer.Option(help="Only the first so many tokens.")] = None,
    window: Annotated[int, typer.Option(help="Tokens of context at most.")] = 1024,
    stride: Annotated[int, typer.Option(help="Tokens by which the window moves.")] = 512,
    overrides: Overrides = None,
    json: Json = None,
) -> None:
    """Perplexity of a text."""
    config = engine_config(model, overrides)

    from manta.bench import perplexity

    perplexity.run(config, text, max_tokens=max_tokens, window=window, stride=stride, json_path=json, console=console())


@eval_app.command("quantization")
def quantization_command(
    text: Annotated[Path, typer.Option("--text", metavar="FILE", help="Plain text, .gz allowed.")],
    model: Model = "smollm2-135m",
    schemes: Annotated[
        str, typer.Option(metavar="NAME,NAME,...", help="int8, fp8, int4_gptq, kv_fp8 ...; see docs/quantization.md.")
    ] = "int8,fp8,kv_fp8,kv_int8,int4_rtn,int4_gptq,int4_awq",
    max_tokens: Annotated[int, typer.Option(min=2, help="Of the text, scored.")] = 20_000,
    window: Annotated[int, typer.Option(help="Tokens of context at most.")] = 1024,
    stride: Annotated[int, typer.Option(help="Tokens by which the window moves.")] = 512,
    problems: Annotated[int, typer.Option(min=1, max=32, help="Of GSM8K.")] = 32,
    calibration: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Text to calibrate with; default: the text's next tokens.")
    ] = None,
    calibration_texts: Annotated[int, typer.Option(min=1, help="Of 512 tokens each.")] = 16,
    overrides: Overrides = None,
    json: Json = None,
) -> None:
    """What quantization schemes cost in quality and save in bytes, beside the model as it is."""
    config = engine_config(model, overrides)

    from manta.bench import quantization

    sizes = quantization.Sizes(
        max_tokens=max_tokens,
        window=window,
        stride=stride,
        num_problems=problems,
        calibration_texts=calibration_texts,
    )
    quantization.run(
        config,
        text,
        schemes=names(schemes),
        sizes=sizes,
        calibration_path=calibration,
        json_path=json,
        console=console(),
    )

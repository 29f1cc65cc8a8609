"""`manta bench` and `profile`: commands that measure kernels, an engine and its ranks in processes of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .bench_options import Json, Model, Overrides, Plot, console, engine_config, names, numbers


def kernels_command(
    sections: Annotated[
        str | None,
        typer.Option(help="Of elementwise, decode, prefill, linears, quantized, sampling; default: all."),
    ] = None,
    tune: Annotated[
        str | None,
        typer.Option(
            help="Find configurations instead: linear, attention_decode, attention_shared_prefix, attention_prefill, "
            "attention_decode_codes; linear_ranks, attention_decode_ranks (of ranks); linear_w4a16, ... (of a scheme)."
        ),
    ] = None,
    write: Annotated[Path | None, typer.Option(metavar="FILE", help="Where --tune enters what it found.")] = None,
    json: Json = None,
) -> None:
    """Time each kernel beside its floor and a library, or tune kernels. Needs a CUDA GPU."""
    from manta.bench import kernels
    from manta.engine.errors import ConfigError

    if (tune is None) != (write is None):
        raise ConfigError("--tune and --write belong together: what to tune and the file for it", field="tune")
    if tune is not None and write is not None:
        kernels.tune(names(tune), write)
    else:
        kernels.run(json, sections=names(sections) if sections is not None else None)


def quantized_command(
    write: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to enter the configurations that were found.")
    ] = None,
    time_limit_s: Annotated[float, typer.Option(help="Layers that would begin later are left out.")] = 150.0,
    json: Json = None,
) -> None:
    """Tune and time layers with quantized weights beside 16-bit ones and the library. Needs a CUDA GPU."""
    import torch

    from manta.bench import kernel_quantized_tuning
    from manta.engine.errors import ConfigError

    if not torch.cuda.is_available():
        raise ConfigError("Kernel timings need a CUDA GPU and torch sees none: run this on a GPU machine.")
    kernel_quantized_tuning.run(write, json, time_limit_s=time_limit_s)


def all_reduce_command(
    num_gpus: Annotated[int | None, typer.Option(help="GPUs of this machine to sum over; default: all.")] = None,
    write: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Tables in which to enter the sizes that our kernel takes.")
    ] = None,
    json: Json = None,
) -> None:
    """Time sums over GPUs, our one-shot kernel beside NCCL, from 8 KiB to 64 MiB. Needs two GPUs."""
    from manta.bench import all_reduce

    all_reduce.run(num_gpus=num_gpus, json_path=json, table=write, console=console())


def engine_command(
    model: Model = "smollm2-135m",
    workloads: Annotated[
        str, typer.Option(help="Of decode, prefill, d1, d2, prefix, startup.")
    ] = "decode,prefill,d1,d2,prefix",
    batch_sizes: Annotated[str | None, typer.Option(metavar="N,N,...", help="Of decode.")] = None,
    prefill_lens: Annotated[str | None, typer.Option(metavar="N,N,...", help="Prompt lengths, tokens.")] = None,
    num_requests: Annotated[int | None, typer.Option(help="At most so many in d1, d2 and prefix.")] = None,
    repeats: Annotated[int | None, typer.Option(help="Repetitions of each setting.")] = None,
    against: Annotated[
        str | None, typer.Option(metavar="NAME", help="Measure the model as bf16 (or as another scheme) too, before.")
    ] = None,
    overrides: Overrides = None,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Measure an engine in this process: decode, prefill and mixed workloads."""
    config = engine_config(model, overrides)

    from manta.bench import engine

    engine.run(
        config,
        workloads=names(workloads),
        batch_sizes=numbers("--batch-sizes", batch_sizes, int),
        prefill_lens=numbers("--prefill-lens", prefill_lens, int),
        num_requests=num_requests,
        repeats=repeats,
        against=against,
        json_path=json,
        plot_path=plot,
        console=console(),
    )


def trace_command(
    model: Model = "smollm2-135m",
    batch_sizes: Annotated[str, typer.Option(metavar="N,N,...", help="Of decode.")] = "1,64,256",
    prefill_lens: Annotated[str, typer.Option(metavar="N,N,...", help="Prompt lengths, tokens.")] = "2048,8192",
    num_requests: Annotated[int, typer.Option(min=0, help="Of d2, of which stretches are traced; 0 for none.")] = 1000,
    chrome: Annotated[
        Path | None, typer.Option("--chrome", metavar="FOLDER", help="Also write the raw traces there.")
    ] = None,
    overrides: Overrides = None,
    json: Json = None,
) -> None:
    """Show which kernels a step consists of and where the GPU waits. Needs a CUDA GPU."""
    config = engine_config(model, overrides)

    from manta.bench import trace

    trace.run(
        config,
        batch_sizes=numbers("--batch-sizes", batch_sizes, int) or (),
        prefill_lens=numbers("--prefill-lens", prefill_lens, int) or (),
        num_requests=num_requests,
        chrome_dir=chrome,
        json_path=json,
        console=console(),
    )


def schedule_command(
    model: Model = "smollm2-135m",
    gpu: Annotated[str, typer.Option(help="Whose step times are used; none is needed here.")] = "h200",
    num_requests: Annotated[int, typer.Option(min=1, help="Of d2.")] = 1000,
    overrides: Overrides = None,
    json: Json = None,
) -> None:
    """Compare scheduling policies by simulation with the step-time model."""
    config = engine_config(model, overrides)

    from manta.bench import policies

    policies.run(config, gpu=gpu, num_requests=num_requests, json_path=json, console=console())


def handoff_command(
    model: Model = "smollm2-135m",
    parts: Annotated[str, typer.Option(help="Of transfer, ttft, itl.")] = "transfer,ttft,itl",
    prompt_lens: Annotated[str | None, typer.Option(metavar="N,N,...", help="Of transfer and ttft, tokens.")] = None,
    duration: Annotated[float | None, typer.Option(help="Of itl: seconds for which long prompts arrive.")] = None,
    repeats: Annotated[int | None, typer.Option(help="Of transfer and ttft.")] = None,
    devices: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Of prefill and decode, as cuda:0,cuda:1; default: one for both."),
    ] = None,
    overrides: Overrides = None,
    json: Json = None,
) -> None:
    """Prefill in one engine, decode in another: what the hand-over costs, how decodes fare."""
    config = engine_config(model, overrides)

    from manta.bench import handoff

    handoff.run(
        config,
        parts=names(parts),
        prompt_lens=numbers("--prompt-lens", prompt_lens, int),
        duration_s=duration,
        repeats=repeats,
        devices=None if devices is None else names(devices),
        json_path=json,
        console=console(),
    )


def step_plan_command(
    tp: Annotated[int, typer.Option("--tp", help="Ranks, each a process of this machine.")] = 2,
    num_requests: Annotated[int, typer.Option("--requests", min=1, help="Running requests, which all decode.")] = 256,
    num_steps: Annotated[int, typer.Option("--steps", min=1)] = 500,
    num_nodes: Annotated[
        int, typer.Option("--nodes", min=1, help="Nodes that the ranks stand for; others are reached as by network.")
    ] = 1,
    looks: Annotated[
        bool, typer.Option("--look/--no-look", help="Whether followers with cores to spare look before they sleep.")
    ] = True,
    json: Json = None,
) -> None:
    """Measure how long a step's plan takes from rank 0's scheduler to the other ranks. Needs no GPU."""
    from manta.bench import step_plan

    step_plan.run(
        num_ranks=tp,
        num_requests=num_requests,
        num_steps=num_steps,
        num_nodes=num_nodes,
        looks=looks,
        json_path=json,
        console=console(),
    )


def reference_command(
    model: Model = "smollm2-135m",
    repeats: Annotated[int, typer.Option(help="Repetitions of each measurement.")] = 5,
    overrides: Overrides = None,
    json: Json = None,
) -> None:
    """Compare the engine with transformers' generate in this process: decode, prefill, concurrency."""
    config = engine_config(model, overrides)

    from manta.bench import reference

    reference.run(config, sizes=reference.Sizes(repeats=repeats), json_path=json, console=console())


def profile_command(
    model: Model = "smollm2-135m",
    overrides: Overrides = None,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Default: $MANTA_HOME/profiles/<gpu>/<model>.json.")
    ] = None,
) -> None:
    """Measure step times of a model on this GPU and keep them for the step-time model."""
    from .settings import Settings

    config = engine_config(model, overrides)

    from manta.bench import step_times

    step_times.run(config, folder=Settings.from_environment().profiles_dir, path=json, console=console())

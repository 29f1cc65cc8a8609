"""Commands that measure (`manta bench`, `eval`, `profile`): their options; bench/ is imported when they run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from manta.engine.config import EngineConfig

T = TypeVar("T", int, float)

bench_app = typer.Typer(help="Measure kernels, the engine or a running server.", no_args_is_help=True)
eval_app = typer.Typer(help="Measure a model's quality.", no_args_is_help=True)

Model = Annotated[str, typer.Option("--model", help="Known name, folder, Hugging Face id, GGUF or YAML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Override a field, e.g. --set block_size=32. May be repeated."),
]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the results as JSON.")]
Plot = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Draw the results as PNG (needs matplotlib).")
]


@bench_app.command("kernels")
def kernels_command(
    sections: Annotated[
        str | None, typer.Option(help="Of elementwise, linear, decode, prefill, sampling; default: all.")
    ] = None,
    tune: Annotated[
        str | None,
        typer.Option(help="Instead, find configurations of linear, attention_decode, attention_prefill."),
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
        kernels.tune(_names(tune), write)
    else:
        kernels.run(json, sections=_names(sections) if sections is not None else None)


@bench_app.command("quantized")
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


@bench_app.command("all-reduce")
def all_reduce_command(
    num_gpus: Annotated[int | None, typer.Option(help="GPUs of this machine to sum over; default: all.")] = None,
    write: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Tables in which to enter the sizes that our kernel takes.")
    ] = None,
    json: Json = None,
) -> None:
    """Time sums over GPUs, our one-shot kernel beside NCCL, from 8 KiB to 64 MiB. Needs two GPUs."""
    from manta.bench import all_reduce

    all_reduce.run(num_gpus=num_gpus, json_path=json, table=write, console=_console())


@bench_app.command("engine")
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
        workloads=[name.strip() for name in workloads.split(",") if name.strip()],
        batch_sizes=_numbers("--batch-sizes", batch_sizes, int),
        prefill_lens=_numbers("--prefill-lens", prefill_lens, int),
        num_requests=num_requests,
        repeats=repeats,
        against=against,
        json_path=json,
        plot_path=plot,
        console=_console(),
    )


@bench_app.command("trace")
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
        batch_sizes=_numbers("--batch-sizes", batch_sizes, int) or (),
        prefill_lens=_numbers("--prefill-lens", prefill_lens, int) or (),
        num_requests=num_requests,
        chrome_dir=chrome,
        json_path=json,
        console=_console(),
    )


@bench_app.command("schedule")
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

    policies.run(config, gpu=gpu, num_requests=num_requests, json_path=json, console=_console())


@bench_app.command("handoff")
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
        parts=_names(parts),
        prompt_lens=_numbers("--prompt-lens", prompt_lens, int),
        duration_s=duration,
        repeats=repeats,
        devices=None if devices is None else _names(devices),
        json_path=json,
        console=_console(),
    )


@bench_app.command("routing")
def routing_command(
    trace: Annotated[str, typer.Option(metavar="FILE", help="A trace: a file or a name; `zipf` for a hot prefix.")],
    replicas: Annotated[int, typer.Option(min=1)] = 8,
    model: Model = "sim-h200",
    gpu: Annotated[str, typer.Option(help="Whose step times are used; none is needed here.")] = "h200",
    loads: Annotated[str, typer.Option(metavar="N,N,...", help="Shares of the fleet's capacity.")] = "0.7,0.95",
    policies: Annotated[str | None, typer.Option(metavar="NAME,NAME,...", help="Default: all.")] = None,
    num_requests: Annotated[
        int | None, typer.Option("--requests", min=100, help="The first so many; `zipf` has as many as are wanted.")
    ] = None,
    kv_room: Annotated[
        int | None, typer.Option(min=1, help="Tokens of KV of a replica; default: what the GPU's memory leaves.")
    ] = None,
    edges: Annotated[int, typer.Option(min=1, help="Edges, each with a router of its own.")] = 1,
    processes: Annotated[int, typer.Option(min=1, help="Simulations at once.")] = 1,
    like: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A result of the same load: its capacity a replica and its parameters."),
    ] = None,
    overrides: Overrides = None,
    json: Json = None,
) -> None:
    """Compare routing policies on a simulated fleet: real scheduler and caches, a clock of its own."""
    config = engine_config(model, overrides)

    from manta.bench import routing

    routing.run(
        config,
        trace=trace,
        num_replicas=replicas,
        gpu=gpu,
        loads=_numbers("--loads", loads, float) or (),
        policies=routing.POLICIES if policies is None else _names(policies),
        num_requests=num_requests,
        kv_room_tokens=kv_room,
        num_edges=edges,
        num_processes=processes,
        like=like,
        json_path=json,
        console=_console(),
    )


@bench_app.command("pools")
def pools_command(
    trace: Annotated[str, typer.Option(metavar="FILE", help="A trace: a file or a name.")],
    gpus: Annotated[int, typer.Option(min=2, help="One replica on each.")] = 8,
    model: Model = "sim-h200",
    gpu: Annotated[str, typer.Option(help="Whose step times are used; none is needed here.")] = "h200",
    shares: Annotated[
        str, typer.Option(metavar="N,N,...", help="Rates, as shares of what one pool completes.")
    ] = "0.25,0.5,0.75,1.0",
    slo: Annotated[str, typer.Option(metavar="TTFT:TPOT,...", help="Pairs of limits, seconds.")] = "0.5:0.015,0.5:0.05",
    link: Annotated[float, typer.Option(help="GB/s of KV out of a replica, and into one.")] = 50.0,
    num_requests: Annotated[int | None, typer.Option("--requests", min=100, help="The first so many.")] = None,
    processes: Annotated[int, typer.Option(min=1, help="Simulations at once.")] = 1,
    overrides: Overrides = None,
    json: Json = None,
) -> None:
    """Compare one pool with prefill and decode pools at equal GPUs, on a simulated fleet."""
    config = engine_config(model, overrides)

    from manta.bench import pools

    pools.run(
        config,
        trace=trace,
        num_gpus=gpus,
        gpu=gpu,
        shares=_numbers("--shares", shares, float) or (),
        slos=pools.Slo.parse(slo),
        link_gb_s=link,
        num_requests=num_requests,
        num_processes=processes,
        json_path=json,
        console=_console(),
    )


@bench_app.command("routing-cost")
def routing_cost_command(
    num_replicas: Annotated[int, typer.Option("--replicas", min=4, help="Among which is decided.")] = 64,
    repeats: Annotated[int, typer.Option(min=20, help="Decisions of each kind; of long prompts a tenth.")] = 300,
    json: Json = None,
) -> None:
    """Measure what a routing decision costs an edge, and the memory of its prefix index. Needs no GPU."""
    from manta.bench import routing_cost

    routing_cost.run(num_replicas=num_replicas, repeats=repeats, json_path=json, console=_console())


@bench_app.command("step-plan")
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
        console=_console(),
    )


@bench_app.command("serving")
def serving_command(
    url: Annotated[str | None, typer.Option("--url", help="Address of the server; default: $MANTA_URL.")] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", help="Bearer token; default: $MANTA_API_KEY.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Served model; default: the first one.")] = None,
    rates: Annotated[str | None, typer.Option(metavar="N,N,...", help="Open loop: requests a second.")] = None,
    concurrency: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Closed loop: requests in flight (default 1,2,4,8).")
    ] = None,
    knee: Annotated[bool, typer.Option("--knee", help="Search the largest rate that keeps --slo at p95.")] = False,
    slo: Annotated[str | None, typer.Option(metavar="ttft=S,tpot=S", help="Limits, seconds; gives goodput.")] = None,
    prompt_lens: Annotated[str | None, typer.Option(help="512, uniform:128:1024 or lognormal:220:1.0:4:2000.")] = None,
    output_lens: Annotated[str | None, typer.Option(help="The same for the answers.")] = None,
    trace: Annotated[str | None, typer.Option(help="Lengths (and times) from a trace: a file or a name.")] = None,
    arrivals: Annotated[str, typer.Option(help="poisson, constant or trace.")] = "poisson",
    duration: Annotated[float, typer.Option(help="Seconds of arrivals at each rate.")] = 30.0,
    num_requests: Annotated[int | None, typer.Option(help="Requests at each setting.")] = None,
    seed: Annotated[int, typer.Option()] = 0,
    workload: Annotated[
        str | None, typer.Option(help="d2: all requests at once from several processes, instead of a sweep.")
    ] = None,
    serve: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Of --workload: start `manta serve MODEL` for it, with --set.")
    ] = None,
    overrides: Overrides = None,
    clients: Annotated[int, typer.Option(help="Of --workload: processes that send.")] = 8,
    repeats: Annotated[int, typer.Option(help="Of --workload, after a warm-up.")] = 3,
    length_divisor: Annotated[int, typer.Option(help="Of --workload: shorter requests, for small machines.")] = 1,
    server_pid: Annotated[
        int | None, typer.Option(help="Of --workload without --serve: the `manta serve` process, for its CPU.")
    ] = None,
    in_process: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Of --workload: JSON of `manta bench engine`, for the ratio.")
    ] = None,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Load a server over HTTP: a sweep over rates or concurrencies, or a whole workload at once."""
    from manta.engine.errors import ConfigError

    from .settings import Settings

    settings = Settings.from_environment()
    if arrivals not in ("poisson", "constant", "trace"):
        raise ConfigError(f"--arrivals {arrivals!r}: must be poisson, constant or trace", field="arrivals")
    url = (url or settings.url).rstrip("/").removesuffix("/v1")
    if workload is not None:
        from manta.bench import burst

        burst.run(
            burst.Server(url, api_key or settings.api_key, model, server_pid) if serve is None else None,
            burst.Burst(workload, num_requests or 1000, length_divisor, clients, repeats, seed=seed),
            serve=serve,
            overrides=overrides or (),
            in_process=in_process,
            json_path=json,
            console=_console(),
        )
        return
    if serve is not None or overrides:
        raise ConfigError("--serve and --set go with --workload; a sweep needs a server that runs", field="--serve")
    open_rates = _numbers("--rates", rates, float)
    in_flight = _numbers("--concurrency", concurrency, int)

    from manta.bench import serving

    defaults = serving.Requests()
    serving.run(
        url,
        model=model,
        api_key=api_key or settings.api_key,
        rates=open_rates,
        concurrency=in_flight,
        knee=knee,
        slo=slo,
        requests=serving.Requests(
            prompt_lens=prompt_lens or defaults.prompt_lens,
            output_lens=output_lens or defaults.output_lens,
            trace=trace,
            arrivals=arrivals,
            duration_s=duration,
            num_requests=num_requests,
            seed=seed,
        ),
        json_path=json,
        plot_path=plot,
        console=_console(),
    )


@bench_app.command("reference")
def reference_command(
    model: Model = "smollm2-135m",
    repeats: Annotated[int, typer.Option(help="Repetitions of each measurement.")] = 5,
    overrides: Overrides = None,
    json: Json = None,
) -> None:
    """Compare the engine with transformers' generate in this process: decode, prefill, concurrency."""
    config = engine_config(model, overrides)

    from manta.bench import reference

    reference.run(config, sizes=reference.Sizes(repeats=repeats), json_path=json, console=_console())


@bench_app.command("overhead")
def overhead_command(
    model: Model = "smollm2-135m",
    proxies: Annotated[str, typer.Option(help="Of haproxy, serve.")] = "haproxy,serve",
    streams: Annotated[int, typer.Option(help="At once.")] = 64,
    json: Json = None,
) -> None:
    """What serving adds to a simulated engine: time to first token, lag and CPU per token, beside a bare server."""
    config = engine_config(model, None)

    from manta.bench import overhead

    overhead.run(
        config,
        target=model,
        proxies=[name.strip() for name in proxies.split(",") if name.strip()],
        sizes=overhead.Sizes(num_streams=streams),
        json_path=json,
        console=_console(),
    )


@bench_app.command("routing-live")
def routing_live_command(
    replicas: Annotated[int, typer.Option(min=1)] = 4,
    edges: Annotated[int, typer.Option(min=1)] = 2,
    num_requests: Annotated[int, typer.Option("--requests", min=50, help="That share prefixes.")] = 400,
    rate: Annotated[float, typer.Option(help="Of them a second.")] = 12.0,
    json: Json = None,
) -> None:
    """Prefix hits over HTTP beside the simulator's for the same load, and what routing adds to the first token."""
    from manta.bench import routing_live

    routing_live.run(
        served=routing_live.Served(num_replicas=replicas, num_edges=edges),
        load=routing_live.PrefixLoad(num_requests=num_requests, rate_per_s=rate),
        json_path=json,
        console=_console(),
    )


@bench_app.command("overload")
def overload_command(
    loads: Annotated[str, typer.Option(metavar="N,N,...", help="Shares of the capacity.")] = "0.5,0.8,1.0,1.5,3.0",
    duration: Annotated[float, typer.Option(help="Seconds of each load.")] = 20.0,
    deadline: Annotated[float, typer.Option(help="Seconds to the first token.")] = 1.5,
    replicas: Annotated[int, typer.Option(min=1)] = 4,
    edges: Annotated[int, typer.Option(min=1)] = 2,
    json: Json = None,
) -> None:
    """Goodput around and far beyond the capacity of simulated replicas, and how quickly the rest is refused."""
    from manta.bench import overload

    sizes = overload.Sizes(
        num_replicas=replicas,
        num_edges=edges,
        deadline_s=deadline,
        loads=tuple(_numbers("--loads", loads, float) or ()),
        duration_s=duration,
    )
    overload.run(sizes=sizes, json_path=json, console=_console())


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

    step_times.run(config, folder=Settings.from_environment().profiles_dir, path=json, console=_console())


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

    perplexity.run(
        config, text, max_tokens=max_tokens, window=window, stride=stride, json_path=json, console=_console()
    )


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
        schemes=_names(schemes),
        sizes=sizes,
        calibration_path=calibration,
        json_path=json,
        console=_console(),
    )


def engine_config(model: str, overrides: list[str] | None) -> EngineConfig:
    """The engine of what the user named, its model's files found."""
    from .checks import locate_model, locate_profiles
    from .config import load_config, parse_overrides
    from .settings import Settings

    settings = Settings.from_environment()
    config = load_config(model, parse_overrides(overrides or []))
    return locate_model(locate_profiles(config, settings.profiles_dir), settings.models_dir).engine


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _numbers(option: str, text: str | None, kind: Callable[[str], T]) -> list[T] | None:
    """`1,8,32` as numbers. Raises ConfigError."""
    from manta.engine.errors import ConfigError

    if text is None:
        return None
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option} {text!r}: write numbers with commas between, as in 1,8,32", field=option) from None


def _console() -> Console:
    from rich.console import Console

    return Console(soft_wrap=True)

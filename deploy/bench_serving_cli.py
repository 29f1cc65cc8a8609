"""`manta bench`: commands that measure several replicas, simulated or over HTTP: routing, pools, load, overload."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .bench_options import Json, Model, Overrides, Plot, console, engine_config, names, numbers


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
        loads=numbers("--loads", loads, float) or (),
        policies=routing.POLICIES if policies is None else names(policies),
        num_requests=num_requests,
        kv_room_tokens=kv_room,
        num_edges=edges,
        num_processes=processes,
        like=like,
        json_path=json,
        console=console(),
    )


def routing_cost_command(
    num_replicas: Annotated[int, typer.Option("--replicas", min=4, help="Among which is decided.")] = 64,
    repeats: Annotated[int, typer.Option(min=20, help="Decisions of each kind; of long prompts a tenth.")] = 300,
    json: Json = None,
) -> None:
    """Measure what a routing decision costs an edge, and the memory of its prefix index. Needs no GPU."""
    from manta.bench import routing_cost

    routing_cost.run(num_replicas=num_replicas, repeats=repeats, json_path=json, console=console())


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
        console=console(),
    )


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
        shares=numbers("--shares", shares, float) or (),
        slos=pools.Slo.parse(slo),
        link_gb_s=link,
        num_requests=num_requests,
        num_processes=processes,
        json_path=json,
        console=console(),
    )


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
            console=console(),
        )
        return
    if serve is not None or overrides:
        raise ConfigError("--serve and --set go with --workload; a sweep needs a server that runs", field="--serve")
    open_rates = numbers("--rates", rates, float)
    in_flight = numbers("--concurrency", concurrency, int)

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
        console=console(),
    )


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
        proxies=names(proxies),
        sizes=overhead.Sizes(num_streams=streams),
        json_path=json,
        console=console(),
    )


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
        loads=tuple(numbers("--loads", loads, float) or ()),
        duration_s=duration,
    )
    overload.run(sizes=sizes, json_path=json, console=console())

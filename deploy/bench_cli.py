"""`manta bench`: which commands it has, in the order of its help.

They stand in files by subject; bench/ is imported when one runs.
"""

import typer

from . import bench_engine_cli, bench_serving_cli, observe_cli, plan_cli, spike_cli

bench_app = typer.Typer(help="Measure kernels, the engine or a running server.", no_args_is_help=True)
bench_app.command("kernels")(bench_engine_cli.kernels_command)
bench_app.command("quantized")(bench_engine_cli.quantized_command)
bench_app.command("all-reduce")(bench_engine_cli.all_reduce_command)
bench_app.command("engine")(bench_engine_cli.engine_command)
bench_app.command("trace")(bench_engine_cli.trace_command)
bench_app.command("schedule")(bench_engine_cli.schedule_command)
bench_app.command("handoff")(bench_engine_cli.handoff_command)
bench_app.command("routing")(bench_serving_cli.routing_command)
bench_app.command("pools")(bench_serving_cli.pools_command)
bench_app.command("routing-cost")(bench_serving_cli.routing_cost_command)
bench_app.command("step-plan")(bench_engine_cli.step_plan_command)
bench_app.command("serving")(bench_serving_cli.serving_command)
bench_app.command("reference")(bench_engine_cli.reference_command)
bench_app.command("overhead")(bench_serving_cli.overhead_command)
bench_app.command("routing-live")(bench_serving_cli.routing_live_command)
bench_app.command("overload")(bench_serving_cli.overload_command)
bench_app.command("plan-live")(plan_cli.plan_live_command)
bench_app.command("step-errors")(plan_cli.step_errors_command)
bench_app.command("plot-spike")(observe_cli.plot_spike_command)
bench_app.command("spike")(spike_cli.spike_command)

"""The `manta cluster` commands: a thin wrapper of `ray start` for each machine. What they do is in ray_node.py."""

from __future__ import annotations

from typing import Annotated

import typer

cluster_app = typer.Typer(help="Make machines into a cluster.", no_args_is_help=True)


@cluster_app.callback()
def cluster() -> None:
    """Make machines into a cluster."""


@cluster_app.command("start", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def start_command(
    context: typer.Context,
    head: Annotated[bool, typer.Option("--head", help="This machine is the head.")] = False,
    address: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Join the head at this address.")] = None,
    port: Annotated[int | None, typer.Option(help="Port of the head; default 6379.")] = None,
    node_ip: Annotated[str | None, typer.Option(help="This node's address, when it has several.")] = None,
    num_cpus: Annotated[int | None, typer.Option(help="CPUs to offer; default: all.")] = None,
    num_gpus: Annotated[int | None, typer.Option(help="GPUs to offer; default: all.")] = None,
    label: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A label of this node, beside those of its GPUs.")
    ] = None,
    block: Annotated[bool, typer.Option("--block", help="Stay in the foreground (for a service manager).")] = False,
    temp_dir: Annotated[str | None, typer.Option(help="Folder for Ray's logs and sockets.")] = None,
) -> None:
    """Start this machine's part of a Ray cluster, with token authentication. Other options go to `ray start`."""
    from manta.engine.errors import ConfigError

    from . import ray_node

    if head == (address is not None):
        raise ConfigError("say --head on the first machine and --address HOST:PORT, its address, on all others")
    if port is not None and not head:
        raise ConfigError("--port is the head's; give it with --head, or as part of --address", field="port")
    labels = {**ray_node.own_labels(), **_labels(label or [])}
    if note := ray_node.check_token(is_head=head):
        print(note, flush=True)
    ray_node.start(
        ray_node.NodeOptions(
            address=address,
            port=port or ray_node.DEFAULT_PORT,
            node_ip=node_ip,
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            labels=labels,
            block=block,
            temp_dir=temp_dir,
            more=tuple(context.args),
        )
    )


def _labels(texts: list[str]) -> dict[str, str]:
    from manta.engine.errors import ConfigError

    labels = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise ConfigError(f"--label {text!r}: write NAME=VALUE, for example --label rack=r7", field="label")
        labels[name] = value
    return labels

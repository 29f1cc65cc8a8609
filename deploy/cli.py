"""The `manta` command: arguments in, one clear sentence out when something is wrong. Work is done elsewhere.

Nothing heavy is imported before a command runs, so that `manta --help` answers at once.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from .advise_cli import advise_command
from .bench_cli import bench_app
from .bench_engine_cli import profile_command
from .bench_options import Overrides
from .chaos_cli import chaos_command
from .cluster_cli import cluster_app
from .eval_cli import eval_app
from .observe_cli import dashboards_app, top_command
from .plan_cli import plan_command
from .quantize_cli import quantize_command
from .simulate_cli import simulate_command

if TYPE_CHECKING:
    from .chat import ServerClient
    from .config import DeployConfig
    from .settings import Settings

USAGE_ERROR = 2
FAILURE = 1

app = typer.Typer(
    name="manta",
    help="Serve large language models on Ray with Manta's own engine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(bench_app, name="bench")
app.add_typer(eval_app, name="eval")
app.add_typer(cluster_app, name="cluster")
app.add_typer(dashboards_app, name="dashboards")

Target = Annotated[
    str | None,
    typer.Argument(help="Known name, folder, Hugging Face id, GGUF file or YAML file. Default: smollm2-135m."),
]
Url = Annotated[str | None, typer.Option("--url", help="Address of the server; default: $MANTA_URL or port 8000 here.")]
ApiKey = Annotated[str | None, typer.Option("--api-key", help="Bearer token; default: $MANTA_API_KEY.")]


def main() -> NoReturn:
    """Entry point. Exit code 0, 1 (it failed) or 2 (the input cannot work); one sentence on stderr, no traceback."""
    from manta.engine.errors import CheckpointError, ConfigError, InvalidRequest, MantaError

    try:
        code = app(standalone_mode=False)
    except (ConfigError, CheckpointError, InvalidRequest) as error:
        _complain(error)
        code = USAGE_ERROR
    except MantaError as error:
        _complain(error)
        code = FAILURE
    except typer.Exit as error:
        code = error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except Exception as error:
        if not _is_usage_error(error):
            raise
        code = USAGE_ERROR
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error, file=sys.stderr)
        else:
            print(f"manta: {_usage_sentence(error)}", file=sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)


@app.command("serve")
def serve_command(
    target: Target = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.")] = None,
    metrics_aliases: Annotated[
        str | None, typer.Option(help="vllm: /metrics shows vLLM's names, too, for dashboards that know them.")
    ] = None,
    overrides: Overrides = None,
) -> int:
    """Serve a model over HTTP (OpenAI's API) on Ray Serve, until Ctrl-C."""
    options = {"serving.host": host, "serving.port": port, "observability.metrics_aliases": metrics_aliases}
    config, settings = _deploy_config(target, overrides, options)

    from rich.console import Console

    from .serve import serve

    return serve(config, settings, Console(soft_wrap=True))


@app.command("chat")
def chat_command(
    model: Annotated[str | None, typer.Option("--model", help="Served model; default: the first one.")] = None,
    url: Url = None,
    api_key: ApiKey = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer.")] = None,
) -> int:
    """Chat with a running server in the terminal."""
    from .chat import HELP, Chat, ServerError

    client = _client(url, api_key)
    served = client.models()
    if not served:
        raise ServerError(f"{client.base_url} serves no model yet; wait until `manta serve` says READY")
    options: dict[str, Any] = {"temperature": temperature, "max_tokens": max_tokens}
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401  (history and line editing for input())

        print(f"{model or served[0]} at {client.base_url}. {HELP}")

    def write(text: str) -> None:
        print(text, end="", flush=True)

    chat = Chat(
        client=client,
        model=model or served[0],
        read=lambda: input("> " if interactive else ""),
        write=write,
        options={name: value for name, value in options.items() if value is not None},
        system=system,
    )
    chat.run()
    return FAILURE if chat.has_failed and not interactive else 0


@app.command("status")
def status_command(
    url: Url = None,
    api_key: ApiKey = None,
    json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
) -> int:
    """Say whether a server is ready; show its replicas with queue and cache, nodes, gangs, ranks and their start-up."""
    from .status_view import ServerStatus, print_status

    client = _client(url, api_key)
    code, body = client.ready()
    status = ServerStatus(client.base_url, code, body, client.cluster(), client.models())
    if json:
        import json as json_library

        print(json_library.dumps(status.as_tree(), indent=2))
    else:
        from rich.console import Console

        print_status(Console(soft_wrap=True), status)
    return 0 if status.is_ready else FAILURE


@app.command("role")
def role_command(
    replica: Annotated[str, typer.Argument(help="Id of a replica, as `manta status` shows it.")],
    role: Annotated[str, typer.Argument(help="prefill, decode or mixed.")],
    url: Url = None,
    api_key: ApiKey = None,
    wait_s: Annotated[float, typer.Option("--wait", help="Seconds to wait until it has the role; 0: do not.")] = 120.0,
) -> int:
    """Give a replica another role. It drains first: what it is working on ends or moves, and nothing is loaded anew."""
    import time

    from .chat import ServerError

    client = _client(url, api_key)
    client.set_role(replica, role)
    print(f"replica {replica} drains, then it will be {role}", flush=True)
    until_s = time.monotonic() + wait_s
    while wait_s:
        (found,) = [one for one in client.ready()[1].get("replicas", []) if one["replica_id"] == replica] or [None]
        if found is None:
            raise ServerError(f"replica {replica} has left; a replacement begins with its pool's role")
        if found["ready"] and found["role"] == role:
            print(f"replica {replica} is {role}")
            break
        if time.monotonic() > until_s:
            raise ServerError(f"replica {replica} still works on what it had, after {wait_s:g} s; it goes on draining")
        time.sleep(0.1)
    return 0


@app.command("explain")
def explain_command(
    request_id: Annotated[str, typer.Argument(help="Id of a response (cmpl-...), or of one of its choices.")],
    url: Url = None,
    api_key: ApiKey = None,
    json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
) -> None:
    """Show how a request was routed: every candidate with its cost in seconds, and what came of the choice."""
    from .explain_view import print_explanation

    found = _client(url, api_key).explain(request_id)
    if json:
        import json as json_library

        print(json_library.dumps(found, indent=2))
    else:
        from rich.console import Console

        print_explanation(Console(soft_wrap=True), found)


@app.command("logs")
def logs_command(
    replica: Annotated[str | None, typer.Argument(help="Id of a replica or its beginning; none: list them.")] = None,
    rank: Annotated[int | None, typer.Option(help="Of this rank only; default: of all ranks.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is written, until Ctrl-C.")] = False,
    tail: Annotated[int, typer.Option(help="So many of the last lines of each rank.")] = 100,
    address: Annotated[
        str | None, typer.Option(help="A Ray cluster (`auto` or HOST:PORT); default: `manta serve` on this machine.")
    ] = None,
) -> None:
    """Show what the ranks of a replica wrote, also of those that ended."""
    from .rank_logs import open_logs, show

    show(open_logs(address), replica, rank=rank, follow=follow, tail=tail, write=lambda text: print(text, flush=True))


@app.command("fetch")
def fetch_command(
    name: Annotated[str, typer.Argument(help="Name of the model; there is smollm2-135m.")] = "smollm2-135m",
) -> None:
    """Fetch the demo model."""
    from manta.engine.errors import ConfigError

    from . import demo_model
    from .settings import Settings

    if name != demo_model.NAME:
        raise ConfigError(f"unknown model {name!r}; `manta fetch` knows {demo_model.NAME} only", field="name")
    demo_model.fetch_demo_model(Settings.from_environment().models_dir, report=lambda text: print(text, flush=True))


@app.command("version")
def version_command() -> None:
    """Print the versions of Manta and of what it stands on."""
    from importlib.metadata import PackageNotFoundError, version

    import manta

    print(f"manta {manta.__version__}, Python {sys.version.split()[0]}")
    for package in ("torch", "triton", "ray"):
        try:
            print(f"{package} {version(package)}")
        except PackageNotFoundError:
            print(f"{package} is not installed")


app.command("profile")(profile_command)
app.command("quantize")(quantize_command)
app.command("chaos")(chaos_command)
app.command("top")(top_command)
app.command("advise")(advise_command)
app.command("plan")(plan_command)
app.command("simulate")(simulate_command)


def _deploy_config(
    target: str | None, overrides: list[str] | None, options: dict[str, Any]
) -> tuple[DeployConfig, Settings]:
    """Configuration from all its sources; `options` are flags of their own, the strongest when given."""
    from .config import load_config, parse_overrides
    from .settings import Settings

    settings = Settings.from_environment()
    defaults = {"serving.api_keys": [settings.api_key]} if settings.api_key else {}
    given = {name: value for name, value in options.items() if value is not None}
    return load_config(target, {**parse_overrides(overrides or []), **given}, defaults=defaults), settings


def _client(url: str | None, api_key: str | None) -> ServerClient:
    from .chat import ServerClient
    from .settings import Settings

    settings = Settings.from_environment()
    base_url = (url or settings.url).rstrip("/").removesuffix("/v1")
    return ServerClient(base_url, api_key or settings.api_key)


def _complain(error: Exception) -> None:
    print(f"manta: {' '.join(str(error).split())}", file=sys.stderr)


def _is_usage_error(error: Exception) -> bool:
    """Whether it is the argument parser's own complaint (typer may carry its own copy of click)."""
    return any(kind.__name__ == "ClickException" for kind in type(error).__mro__)


def _usage_sentence(error: Exception) -> str:
    sentence = getattr(error, "format_message", lambda: str(error))()
    context = getattr(error, "ctx", None)
    return f"{sentence} (see `{context.command_path if context else 'manta'} --help`)"

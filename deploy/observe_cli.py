"""`manta dashboards ...` and `manta top`: arguments in, one clear sentence out. Work is done elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

dashboards_app = typer.Typer(
    name="dashboards", help="Grafana: dashboards, alert rules and scaling decisions.", no_args_is_help=True
)

Grafana = Annotated[str, typer.Option("--grafana", help="Grafana's address, as http://127.0.0.1:3000.")]
Token = Annotated[
    str | None, typer.Option("--token", help="Token of a service account; default: $MANTA_GRAFANA_TOKEN.")
]


@dashboards_app.command("push")
def push_command(
    grafana: Grafana,
    token: Token = None,
    prometheus: Annotated[
        str, typer.Option("--prometheus", help="Prometheus, as Grafana's own machine reaches it.")
    ] = "http://127.0.0.1:9000",
    datasource: Annotated[
        str | None, typer.Option("--datasource", help="Uid of a data source that is there; default: make one.")
    ] = None,
    folder: Annotated[str, typer.Option("--folder", help="Title of the folder.")] = "Manta",
) -> None:
    """Bring folder, data source, dashboards and alert rules into a Grafana; what is there already is replaced."""
    _require("manta dashboards push")
    from .observability.grafana import DATASOURCE_UID, FOLDER_UID, alert_rules, dashboards
    from .observability.grafana import datasource as source
    from .observability.push import Pusher

    pusher = Pusher(grafana, token or _token())
    print(f"Grafana {pusher.check()} at {pusher.shown_url}")
    pushed = [pusher.folder(FOLDER_UID, folder)]
    uid = datasource or DATASOURCE_UID
    if datasource is None:
        pushed.append(pusher.datasource(source(_checked_url("--prometheus", prometheus))))
    else:
        pusher.check_datasource(uid)
    for one in pushed:
        print(f"  {one.what}: {one.how}")
    for board in dashboards(uid):
        one = pusher.dashboard(board)
        print(f"  {one.what}: {one.how}, {pusher.shown_url}/d/{board['uid']}")
    one = pusher.alert_rules(alert_rules(uid))
    print(f"  {one.what}: {one.how}")


@dashboards_app.command("annotate")
def annotate_command(
    grafana: Grafana,
    token: Token = None,
    url: Annotated[str | None, typer.Option("--url", help="The server; default: $MANTA_URL or port 8000 here.")] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", help="Bearer token; default: $MANTA_API_KEY.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new ones, until Ctrl-C.")] = False,
) -> None:
    """Write a server's scaling decisions, in words, as annotations into a Grafana; each of them once."""
    _require("manta dashboards annotate")
    import time

    from .chat import ServerClient
    from .observability.push import Pusher
    from .settings import Settings

    settings = Settings.from_environment()
    pusher = Pusher(grafana, token or settings.grafana_token)
    pusher.check()
    client = ServerClient((url or settings.url).rstrip("/").removesuffix("/v1"), api_key or settings.api_key)
    while True:
        num_new = pusher.decisions((client.autoscaling() or {}).get("decided", []))
        if num_new or not follow:
            print(f"{num_new} new decisions", flush=True)
        if not follow:
            return
        time.sleep(5.0)


@dashboards_app.command("write")
def write_command(
    folder: Annotated[Path, typer.Argument(help="Folder, which is made; files in it are replaced.")],
    url: Annotated[str, typer.Option("--url", help="The server, as Prometheus reaches it.")] = "http://127.0.0.1:8000",
    prometheus: Annotated[
        str, typer.Option("--prometheus", help="Prometheus, as Grafana reaches it.")
    ] = "http://127.0.0.1:9000",
) -> None:
    """Write the files with which Prometheus and Grafana are provisioned, for those who mount them."""
    _require("manta dashboards write")
    from .observability.files import provisioning, write

    files = provisioning(_checked_url("--url", url), _checked_url("--prometheus", prometheus))
    try:
        write(folder, files)
    except OSError as error:
        from manta.engine.errors import ConfigError

        raise ConfigError(f"{folder} cannot be written: {error.strerror or error}") from None
    for name in files:
        print(folder / name)


def top_command(
    url: Annotated[str | None, typer.Option("--url", help="The server; default: $MANTA_URL or port 8000 here.")] = None,
    interval_s: Annotated[float, typer.Option("--interval", help="Seconds between two looks.", min=0.2)] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look twice, print once, and end.")] = False,
) -> None:
    """Watch a server: load, latencies, objective, replicas and scaling, live in the terminal."""
    from rich.console import Console

    from .settings import Settings
    from .top import watch

    base_url = (url or Settings.from_environment().url).rstrip("/").removesuffix("/v1")
    watch(base_url, Console(), interval_s=interval_s, once=once)


def plot_spike_command(
    plot: Annotated[Path, typer.Option("--plot", metavar="FILE", help="Picture to draw: PNG or SVG.")],
    prometheus: Annotated[str | None, typer.Option("--prometheus", help="Address, as `manta serve` prints it.")] = None,
    minutes: Annotated[float, typer.Option("--minutes", help="How far back.", min=0.1)] = 10.0,
    job: Annotated[str, typer.Option("--job", help="The deployment's job in Prometheus.")] = "manta",
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Keep what was read.")] = None,
    source: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="Draw what --json kept, without Prometheus.")
    ] = None,
    title: Annotated[str, typer.Option("--title", help="Over the picture.")] = "From Prometheus",
) -> None:
    """Draw how a deployment scaled, from its Prometheus: load, replicas, latency, outcomes, decisions."""
    import json as json_library
    import time

    from manta.bench.prometheus_plot import draw, load_course, read_course
    from manta.bench.report import check_plot
    from manta.engine.errors import ConfigError

    check_plot()
    if (prometheus is None) == (source is None):
        raise ConfigError("give --prometheus URL, or --from FILE with what --json kept")
    if source is not None:
        course = load_course(source)
    else:
        assert prometheus is not None
        end_s = time.time()
        url = _checked_url("--prometheus", prometheus)
        course = read_course(url, begin_s=end_s - minutes * 60, end_s=end_s, job=job)
        if json is not None:
            json.write_text(json_library.dumps(course.tree()) + "\n", encoding="utf-8")
    draw(course, plot, title=title)
    print(f"{plot}: {len(course.series)} lines, {len(course.decisions)} decisions")


def _require(command: str) -> None:
    from .observability.extras import require

    require(command, "grafana_foundation_sdk", "grafana_client")


def _token() -> str | None:
    from .settings import Settings

    return Settings.from_environment().grafana_token


def _checked_url(option: str, url: str) -> str:
    from urllib.parse import urlsplit

    from manta.engine.errors import ConfigError

    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise ConfigError(f"{option} {url!r}: give an address like http://127.0.0.1:9000", field=option)
    return url.rstrip("/")

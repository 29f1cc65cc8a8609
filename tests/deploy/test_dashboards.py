"""What goes into a Grafana, how often, and what is said when it does not take it."""

from __future__ import annotations

import builtins
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.models.dashboard import Dashboard

from manta.deploy.observability.extras import require
from manta.deploy.observability.files import provisioning
from manta.deploy.observability.grafana import alert_rules, dashboards, datasource
from manta.deploy.observability.metrics_page import metrics_page
from manta.deploy.observability.panels import BOARDS
from manta.deploy.observability.push import Pusher
from manta.engine.errors import ConfigError, MantaError, Unavailable
from tests.deploy.grafana_double import ADMIN, VIEWER, GrafanaDouble, grafana_double

ROOT = Path(__file__).parent.parent.parent
DECIDED = {
    "time_s": 1764460800.25, "pool": "decode", "before": 1, "after": 2, "reason": "forecast",
    "sentence": "12 req/s are expected.",
}  # fmt: skip


@pytest.fixture
def grafana() -> Iterator[GrafanaDouble]:
    with grafana_double() as double:
        yield double


def push_all(pusher: Pusher) -> list[str]:
    pushed = [pusher.folder(), pusher.datasource(datasource("http://prometheus:9090"))]
    pushed += [pusher.dashboard(board) for board in dashboards()]
    return [one.how for one in [*pushed, pusher.alert_rules(alert_rules())]]


def test_everything_is_made_once_and_left_alone_after_that(grafana: GrafanaDouble) -> None:
    pusher = Pusher(grafana.url, ADMIN)
    assert push_all(pusher) == ["created"] * 8
    num_changes = len(grafana.changes)
    assert push_all(pusher) == ["unchanged"] * 8
    assert len(grafana.changes) == num_changes
    assert grafana.dashboards.keys() == {board.uid for board in BOARDS}
    assert len(grafana.rule_groups["manta", "manta"]["rules"]) == 9


def test_what_was_changed_by_hand_is_replaced_and_what_is_not_ours_stays(grafana: GrafanaDouble) -> None:
    pusher = Pusher(grafana.url, ADMIN)
    push_all(pusher)
    grafana.dashboards["manta-engine"]["panels"].pop()
    grafana.dashboards["of-others"] = {"uid": "of-others", "title": "theirs"}
    grafana.datasources["manta-prometheus"]["url"] = "http://old:9090"
    grafana.rule_groups["manta", "manta"]["rules"].pop()
    hows = push_all(pusher)
    assert hows == ["unchanged", "replaced", "unchanged", "unchanged", "replaced", "unchanged", "unchanged", "replaced"]
    assert grafana.datasources["manta-prometheus"]["url"] == "http://prometheus:9090"
    assert grafana.dashboards["of-others"]["title"] == "theirs"


def test_a_data_source_from_a_file_is_left_alone(grafana: GrafanaDouble) -> None:
    pusher = Pusher(grafana.url, ADMIN)
    pusher.datasource(datasource("http://one:9090"))
    grafana.datasources["manta-prometheus"]["readOnly"] = True
    assert pusher.datasource(datasource("http://two:9090")).how == "unchanged"


def test_decisions_become_annotations_once(grafana: GrafanaDouble) -> None:
    pusher = Pusher(grafana.url, ADMIN)
    assert pusher.decisions([]) == 0
    assert pusher.decisions([DECIDED]) == 1
    later = {**DECIDED, "time_s": 1764460900.0, "before": 2, "after": 1, "reason": "quiet"}
    assert pusher.decisions([DECIDED, later]) == 1
    assert [one["text"].split(".")[0] for one in grafana.annotations] == [
        "decode: 1 to 2 (forecast)",
        "decode: 2 to 1 (quiet)",
    ]
    assert grafana.annotations[0]["time"] == 1764460800250
    assert set(grafana.annotations[0]["tags"]) == {"manta-decision", "decode", "forecast"}


@pytest.mark.parametrize(
    ("url", "token", "kind", "words"),
    [
        (None, "glsa_stale", ConfigError, "does not accept the token"),
        (None, VIEWER, ConfigError, "may not make a folder .* It needs folders:create"),
        (None, "glsa_editor", ConfigError, "may not make a data source .* datasources:create"),
        (None, None, ConfigError, "a token is needed"),
        ("127.0.0.1:3000", ADMIN, ConfigError, "give an address like"),
        ("http://127.0.0.1:9", ADMIN, Unavailable, "no Grafana answers at http://127.0.0.1:9"),
    ],
)
def test_what_people_get_wrong_is_said_in_a_sentence(
    grafana: GrafanaDouble, url: str | None, token: str | None, kind: type[MantaError], words: str
) -> None:
    with pytest.raises(kind, match=words):
        push_all(Pusher(url or grafana.url, token))
    assert not grafana.dashboards


def test_a_grafana_that_fails_says_so_and_what_failed(grafana: GrafanaDouble) -> None:
    grafana.is_broken = True
    with pytest.raises(MantaError, match="failed to make a folder: database is locked"):
        Pusher(grafana.url, ADMIN).folder()


def test_a_password_in_the_address_is_never_shown() -> None:
    pusher = Pusher("http://admin:secret@127.0.0.1:9/grafana", None)
    assert pusher.url == "http://admin:secret@127.0.0.1:9/grafana/"
    assert pusher.shown_url == "http://127.0.0.1:9/grafana"


def test_the_command_pushes_and_says_where(grafana: GrafanaDouble) -> None:
    command = [sys.executable, "-m", "manta", "dashboards", "push", "--grafana", grafana.url, "--token", ADMIN]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert f"dashboard Manta: overview: created, {grafana.url}/d/manta-overview" in done.stdout
    wrong = subprocess.run([*command[:-1], "nonsense"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("manta: Grafana at ")
    assert "Traceback" not in wrong.stderr


def test_a_missing_package_is_named_with_the_extra_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **fields: Any) -> Any:
        if name.startswith("no_such"):
            raise ImportError(name)
        return real(name, *args, **fields)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"needs no-such, which is not installed: pip install 'manta-llm\[observ"):
        require("manta dashboards push", "no_such.part")


def test_dashboards_are_what_the_sdk_reads_and_their_panels_do_not_overlap() -> None:
    for tree in dashboards():
        read = Dashboard.from_json(tree)
        assert read.uid == tree["uid"]
        taken: set[tuple[int, int]] = set()
        for panel in tree["panels"]:
            place = panel["gridPos"]
            cells = {
                (x, y)
                for x in range(place["x"], place["x"] + place["w"])
                for y in range(place["y"], place["y"] + place["h"])
            }
            assert not cells & taken, (tree["uid"], panel["title"])
            assert place["x"] + place["w"] <= 24
            taken |= cells
        assert [one["name"] for one in tree["annotations"]["list"]] == [
            "Scaling decisions",
            "Scaling decisions in words",
        ]


def test_docs_and_files_that_are_made_from_the_table_are_up_to_date() -> None:
    advice = "run tools/metrics_docs.py"
    assert (ROOT / "docs/metrics.md").read_text() == metrics_page(), advice
    for name, text in provisioning().items():
        assert (ROOT / "deploy" / name).read_text() == text, f"{name}: {advice}"


def test_provisioning_files_hold_what_is_pushed() -> None:
    files = provisioning("http://manta:8000", "http://prometheus:9090")
    (source,) = yaml.safe_load(files["grafana/provisioning/datasources/manta.yaml"])["datasources"]
    assert source == datasource("http://prometheus:9090")
    (group,) = yaml.safe_load(files["grafana/provisioning/alerting/manta.yaml"])["groups"]
    assert [rule["uid"] for rule in group["rules"]] == [rule["uid"] for rule in alert_rules()["rules"]]
    assert json.loads(files["grafana/dashboards/manta-pools.json"])["title"] == "Manta: prefill and decode pools"
    (job,) = yaml.safe_load(files["prometheus/prometheus.yaml"])["scrape_configs"]
    assert job["http_sd_configs"][0]["url"] == "http://manta:8000/metrics/targets"

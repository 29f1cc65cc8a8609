"""Files for Prometheus and Grafana: how Prometheus finds a deployment, and what Grafana is provisioned with.

Pure but for `write`. Prometheus asks the public port where the edges are (HTTP discovery), so that it follows them as
they come and go; where it cannot reach their own ports, it asks the public port for everything instead.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from .rules import prometheus_rules

JOB = "manta"
RULES_FILE = "rules.yaml"
CONFIG_FILE = "prometheus.yaml"
REFRESH_S = 5
"""How often Prometheus asks where the edges are."""
NOTE = "# Written by `manta dashboards write`; do not edit here.\n"


def prometheus_config(url: str, *, scrape_interval_s: float = 5.0, own_address: str | None = None) -> dict[str, Any]:
    """Prometheus's configuration for the deployment whose public port is `url`. `own_address` (host:port): it watches
    itself, too."""
    interval = f"{scrape_interval_s * 1000:.0f}ms"
    jobs: list[dict[str, Any]] = [
        {"job_name": JOB, "http_sd_configs": [{"url": f"{url}/metrics/targets", "refresh_interval": f"{REFRESH_S}s"}]}
    ]
    if own_address is not None:
        jobs.append({"job_name": "prometheus", "static_configs": [{"targets": [own_address]}]})
    return {
        "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": "15s"},
        "rule_files": [RULES_FILE],
        "scrape_configs": jobs,
    }


def provisioning(url: str = "http://127.0.0.1:8000", prometheus_url: str = "http://127.0.0.1:9000") -> dict[str, str]:
    """All files by their paths below a folder. Needs grafana-foundation-sdk."""
    from .grafana import FOLDER_TITLE, FOLDER_UID, alert_rules, dashboards, datasource

    source = datasource(prometheus_url)
    rules = alert_rules()
    files = {
        f"prometheus/{CONFIG_FILE}": _yaml(prometheus_config(url)),
        f"prometheus/{RULES_FILE}": _yaml(prometheus_rules()),
        "grafana/provisioning/datasources/manta.yaml": _yaml({"apiVersion": 1, "datasources": [source]}),
        "grafana/provisioning/dashboards/manta.yaml": _yaml(
            {
                "apiVersion": 1,
                "providers": [
                    {
                        "name": "manta",
                        "folder": FOLDER_TITLE,
                        "folderUid": FOLDER_UID,
                        "type": "file",
                        "options": {"path": "/var/lib/grafana/dashboards/manta"},
                    }
                ],
            }
        ),
        "grafana/provisioning/alerting/manta.yaml": _yaml(
            {
                "apiVersion": 1,
                "groups": [
                    {
                        "orgId": 1,
                        "name": rules["title"],
                        "folder": FOLDER_TITLE,
                        "interval": f"{rules['interval']}s",
                        "rules": [_without(rule, "folderUID", "ruleGroup", "orgID") for rule in rules["rules"]],
                    }
                ],
            }
        ),
    }
    for board in dashboards():
        files[f"grafana/dashboards/{board['uid']}.json"] = json.dumps(board, indent=1) + "\n"
    return files


def write(folder: Path, files: dict[str, str]) -> None:
    """Write them all."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _yaml(tree: dict[str, Any]) -> str:
    return NOTE + yaml.safe_dump(tree, sort_keys=False, width=120, allow_unicode=True)


def _without(tree: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in tree.items() if name not in names}

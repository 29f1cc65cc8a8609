"""Writes docs/metrics.md from the table of metrics, and what Prometheus and Grafana are provisioned with in deploy/.

.venv/bin/python tools/metrics_docs.py
"""

from __future__ import annotations

from pathlib import Path

from manta.deploy.observability.files import provisioning, write
from manta.deploy.observability.metrics_page import metrics_page

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    (ROOT / "docs/metrics.md").write_text(metrics_page(), encoding="utf-8")
    write(ROOT / "deploy", provisioning())


if __name__ == "__main__":
    main()

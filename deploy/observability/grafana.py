"""Dashboards and alert rules as Grafana has them, with the types of grafana-foundation-sdk. Sends nothing anywhere."""

from __future__ import annotations

import json
from typing import Any

from grafana_foundation_sdk.builders import alerting, dashboard, expr, prometheus, stat, timeseries
from grafana_foundation_sdk.builders.common import (
    ReduceDataOptions,
    StackingConfig,
    VizLegendOptions,
    VizTooltipOptions,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models.alerting import RelativeTimeRange
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    VariableRefresh,
    VariableSort,
)

from manta.replicas.metrics_table import Unit

from .panels import BOARDS, DECISIONS, Board, Panel
from .rules import ALERTS, GROUP, INTERVAL_S, Alert

DATASOURCE_UID = "manta-prometheus"
FOLDER_UID, FOLDER_TITLE = "manta", "Manta"
DECISION_TAG = "manta-decision"
"""Of annotations that hold the autoscaler's own sentences."""
PANEL_HEIGHT = 8
STAT_HEIGHT = 4

_UNITS = {
    Unit.SECONDS: "s",
    Unit.BYTES: "bytes",
    Unit.RATIO: "percentunit",
    Unit.DOLLARS: "currencyUSD",
    Unit.REQUESTS_PER_SECOND: "reqps",
}
"""Grafana's names of units; other things are counted."""


def datasource(url: str, uid: str = DATASOURCE_UID) -> dict[str, Any]:
    """A Prometheus that Grafana's server reaches at `url`."""
    return {
        "uid": uid,
        "name": "Manta Prometheus" if uid == DATASOURCE_UID else uid,
        "type": "prometheus",
        "access": "proxy",
        "url": url,
        "jsonData": {"httpMethod": "POST", "timeInterval": "5s"},
    }


def dashboards(datasource_uid: str = DATASOURCE_UID) -> list[dict[str, Any]]:
    """All of them as JSON trees."""
    return [_board(board, datasource_uid) for board in BOARDS]


def alert_rules(datasource_uid: str = DATASOURCE_UID, folder_uid: str = FOLDER_UID) -> dict[str, Any]:
    """The group of alert rules, as Grafana's provisioning API takes it."""
    rules = [_tree(_rule(alert, datasource_uid, folder_uid).build()) for alert in ALERTS]
    return {"title": GROUP, "folderUid": folder_uid, "interval": INTERVAL_S, "rules": rules}


def _board(board: Board, datasource_uid: str) -> dict[str, Any]:
    source = _source(datasource_uid)
    builder = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.description)
        .tags(["manta"])
        .editable()
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .refresh("10s")
        .time("now-30m", "now")
        .with_variable(
            dashboard.QueryVariable("job")
            .label("Deployment")
            .query({"query": "label_values(manta_slo_target_ratio, job)", "refId": "job"})
            .datasource(source)
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(VariableSort.ALPHABETICAL_ASC)
        )
        .link(
            dashboard.DashboardLink("Manta")
            .type(DashboardLinkType.DASHBOARDS)
            .tags(["manta"])
            .as_dropdown(True)
            .keep_time(True)
        )
    )
    for row in board.rows:
        builder = builder.with_row(dashboard.Row(row.title))
        for panel in row.panels:
            builder = builder.with_panel(_panel(panel, source))
    tree = _tree(builder.build())
    tree["annotations"] = {"list": _annotations(datasource_uid)}
    for number, panel in enumerate(tree["panels"], start=1):
        panel["id"] = number
    return tree


def _panel(panel: Panel, source: DataSourceRef) -> Any:
    unit = _UNITS.get(panel.unit, "short") if isinstance(panel.unit, Unit) else panel.unit
    if panel.form == "stat":
        built: Any = (
            stat.Panel()
            .reduce_options(ReduceDataOptions().calcs(["lastNotNull"]).values(False))
            .graph_mode(common.BigValueGraphMode.NONE)
            .height(STAT_HEIGHT)
        )
    else:
        built = (
            timeseries.Panel()
            .legend(
                VizLegendOptions()
                .display_mode(common.LegendDisplayMode.LIST)
                .placement(common.LegendPlacement.BOTTOM)
                .show_legend(True)
            )
            .tooltip(VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI).sort(common.SortOrder.DESCENDING))
            .line_width(1)
            .height(PANEL_HEIGHT)
        )
        if panel.form == "bars":
            built = (
                built.draw_style(common.GraphDrawStyle.BARS)
                .fill_opacity(60)
                .stacking(StackingConfig().mode(common.StackingMode.NORMAL))
            )
        else:
            built = built.fill_opacity(5).show_points(common.VisibilityMode.NEVER)
    built = built.title(panel.title).description(panel.description).unit(unit).datasource(source).span(panel.width)
    for index, query in enumerate(panel.queries):
        target = prometheus.Dataquery().expr(query.expression).legend_format(query.legend).ref_id(chr(ord("A") + index))
        built = built.with_target(target.datasource(source).range())
    return built


def _annotations(datasource_uid: str) -> list[dict[str, Any]]:
    """Scaling decisions: their codes from Prometheus, their sentences where `manta dashboards annotate` wrote them."""
    codes = (
        dashboard.AnnotationQuery()
        .name("Scaling decisions")
        .datasource(_source(datasource_uid))
        .enable(True)
        .icon_color("orange")
        .expr(DECISIONS)
    )
    sentences = (
        dashboard.AnnotationQuery()
        .name("Scaling decisions in words")
        .datasource(DataSourceRef("grafana", "-- Grafana --"))
        .enable(True)
        .icon_color("blue")
        .target(dashboard.AnnotationTarget().type("tags").tags([DECISION_TAG]).match_any(False).limit(100))
    )
    # The Prometheus data source reads these three beside the SDK's fields.
    words = {"titleFormat": "{{pool}}: {{reason}}", "tagKeys": "pool,reason", "step": "10s"}
    return [{**_tree(codes.build()), **words}, _tree(sentences.build())]


def _rule(alert: Alert, datasource_uid: str, folder_uid: str) -> alerting.Rule:
    expression = alert.expression.replace("$job", ".+")
    window = RelativeTimeRange(from_val=600, to=0)
    value = (
        alerting.Query("A")
        .datasource_uid(datasource_uid)
        .relative_time_range(window)
        .model(prometheus.Dataquery().expr(expression).ref_id("A").datasource(_source(datasource_uid)).instant())
    )
    threshold = (
        alerting.Query("B")
        .datasource_uid("__expr__")
        .relative_time_range(window)
        .model(
            expr.TypeThreshold()
            .ref_id("B")
            .expression("A")
            .conditions(
                [
                    expr.ExprTypeThresholdConditions().evaluator(
                        expr.ExprTypeThresholdConditionsEvaluator()
                        .params([alert.limit])
                        .type("gt" if alert.comparison == ">" else "lt")
                    )
                ]
            )
        )
    )
    return (
        alerting.Rule(alert.title)
        .uid(alert.uid)
        .folder_uid(folder_uid)
        .rule_group(GROUP)
        .queries([value, threshold])
        .condition("B")
        .for_val(f"{alert.for_s}s")
        .no_data_state("OK")
        .exec_err_state("Error")
        .labels({"severity": alert.severity})
        .annotations({"summary": alert.summary, "description": alert.advice})
    )


def _source(uid: str) -> DataSourceRef:
    return DataSourceRef("prometheus", uid)


def _tree(built: Any) -> Any:
    return json.loads(JSONEncoder().encode(built))

"""What is read from Prometheus for the picture of a spike, and that it can be drawn again without Prometheus."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from manta.bench.prometheus_plot import Course, draw, load_course, read_course
from manta.engine.errors import ConfigError, Unavailable

BEGIN_S, END_S = 1000.0, 1060.0


def prometheus(request: httpx.Request) -> httpx.Response:
    """Desired replicas that rise, and counts of decisions, of which one begins anew."""
    query = request.url.params["query"]
    assert "$" not in query, "no variable of Grafana's is left"
    result = []
    if "manta_scaling_desired_replicas" in query:
        values = [[1000, "2"], [1030, "6"], [1060, "NaN"]]
        result = [{"metric": {"pool": "engine"}, "values": values}]
    elif "manta_scaling_decisions_total" in query:
        forecast = [[1028, "0"], [1029, "1"], [1030, "1"], [1031, "2"], [1050, "4"]]
        quiet = [[1028, "7"], [1040, "7"], [1041, "1"]]
        result = [
            {"metric": {"pool": "engine", "reason": "forecast"}, "values": forecast},
            {"metric": {"pool": "engine", "reason": "quiet"}, "values": quiet},
        ]
    return httpx.Response(200, json={"status": "success", "data": {"resultType": "matrix", "result": result}})


def read(answer=prometheus) -> Course:
    return read_course("http://p", begin_s=BEGIN_S, end_s=END_S, transport=httpx.MockTransport(answer))


def test_lines_carry_their_labels_and_every_decision_the_moment_it_was_first_seen() -> None:
    course = read()
    (one,) = course.series
    assert (one.panel, one.legend) == ("replicas", "engine desired")
    assert one.points == ((1000.0, 2.0), (1030.0, 6.0))
    forecasts = [1029.0, 1031.0, 1050.0, 1050.0]
    expected = [*((at, "engine: forecast") for at in forecasts), (1041.0, "engine: quiet")]
    assert list(course.decisions) == sorted(expected)


def test_what_was_kept_is_drawn_as_what_was_read(tmp_path: Path) -> None:
    course = read()
    kept = tmp_path / "kept.json"
    kept.write_text(json.dumps(course.tree()))
    assert load_course(kept) == course
    draw(course, tmp_path / "spike.png", title="2 to 6")
    assert (tmp_path / "spike.png").read_bytes()[:4] == b"\x89PNG"
    kept.write_text('{"series": 3}')
    with pytest.raises(ConfigError, match="not what `manta bench plot-spike --json` wrote"):
        load_course(kept)


def test_a_prometheus_that_knows_nothing_or_is_silent_is_said_so() -> None:
    empty = {"status": "success", "data": {"result": []}}
    with pytest.raises(ConfigError, match="knows nothing of the job 'manta' in that time"):
        read(lambda request: httpx.Response(200, json=empty))
    with pytest.raises(ConfigError, match="does not answer as Prometheus does"):
        read(lambda request: httpx.Response(200, text="<html>"))
    with pytest.raises(ConfigError, match=r"refused .*: parse error"):
        read(lambda request: httpx.Response(400, json={"error": "parse error"}))
    with pytest.raises(Unavailable, match=r"no Prometheus answers at http://127\.0\.0\.1:9"):
        read_course("http://127.0.0.1:9", begin_s=BEGIN_S, end_s=END_S)

"""A Grafana that keeps what it is sent and refuses what the real one refuses, as its HTTP API's documentation says. For
tests only.

It checks tokens, rights, required fields, uids and versions; dashboards must be readable by grafana-foundation-sdk.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from grafana_foundation_sdk.models.alerting import Rule
from grafana_foundation_sdk.models.dashboard import Dashboard

ADMIN = "glsa_admin"
VIEWER = "glsa_viewer"
RIGHTS = {
    ADMIN: {"folders", "datasources", "dashboards", "alert", "annotations"},
    VIEWER: {"read"},
    "glsa_editor": {"folders", "dashboards", "annotations"},
}
UID = re.compile(r"^[a-zA-Z0-9_-]{1,40}$")


class Refused(Exception):
    """An answer with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class GrafanaDouble:
    """What it holds, and every request that changed something."""

    def __init__(self) -> None:
        self.folders: dict[str, dict[str, Any]] = {}
        self.datasources: dict[str, dict[str, Any]] = {}
        self.dashboards: dict[str, dict[str, Any]] = {}
        self.rule_groups: dict[tuple[str, str], dict[str, Any]] = {}
        self.annotations: list[dict[str, Any]] = []
        self.changes: list[str] = []
        self.is_broken = False
        self.url = ""

    def answer(self, method: str, target: str, token: str | None, body: Any) -> tuple[int, Any]:
        """Status and JSON."""
        parts = urlsplit(target)
        path, query = parts.path.removeprefix("/api"), parse_qs(parts.query)
        if path == "/health":
            return 200, {"database": "ok", "version": "11.2.0", "commit": "x"}
        if self.is_broken:
            raise Refused(500, "database is locked")
        rights = RIGHTS.get(token or "")
        if rights is None:
            raise Refused(401, "Invalid API key")
        for pattern, right, handle in (
            (r"/folders/([^/]+)$", "folders", self._folder),
            (r"/folders$", "folders", self._new_folder),
            (r"/datasources/uid/([^/]+)$", "datasources", self._datasource),
            (r"/datasources$", "datasources", self._new_datasource),
            (r"/dashboards/uid/([^/]+)$", "dashboards", self._dashboard),
            (r"/dashboards/db$", "dashboards", self._save_dashboard),
            (r"/v1/provisioning/folder/([^/]+)/rule-groups/([^/]+)$", "alert", self._rule_group),
            (r"/annotations$", "annotations", self._annotations),
        ):
            found = re.match(pattern, path)
            if found is None:
                continue
            is_reading = method == "GET"
            if right not in rights and not (is_reading and right != "datasources"):
                raise Refused(
                    403, f"You'll need additional permissions to perform this action. Permissions needed: {right}"
                )
            answer = handle(method, *found.groups(), body=body, query=query)
            if not is_reading:
                self.changes.append(f"{method} {path}")
            return answer
        raise Refused(404, "Not found")

    def _folder(self, method: str, uid: str, **_: Any) -> tuple[int, Any]:
        if uid not in self.folders:
            raise Refused(404, "folder not found")
        return 200, self.folders[uid]

    def _new_folder(self, method: str, *, body: Any, **_: Any) -> tuple[int, Any]:
        _want(body, "title", str)
        uid = _checked_uid(body.get("uid"))
        if uid in self.folders:
            raise Refused(412, "the folder has been changed by someone else")
        self.folders[uid] = {"id": len(self.folders) + 1, "uid": uid, "title": body["title"], "version": 1}
        return 200, self.folders[uid]

    def _datasource(self, method: str, uid: str, *, body: Any, **_: Any) -> tuple[int, Any]:
        if uid not in self.datasources:
            raise Refused(404, "Data source not found")
        if method == "PUT":
            self._check_datasource(body)
            known = self.datasources[uid]
            self.datasources[uid] = {**known, **body, "version": known["version"] + 1}
        return 200, self.datasources[uid]

    def _new_datasource(self, method: str, *, body: Any, **_: Any) -> tuple[int, Any]:
        self._check_datasource(body)
        if any(body["name"] == one["name"] for one in self.datasources.values()):
            raise Refused(409, "data source with the same name already exists")
        uid = _checked_uid(body["uid"])
        self.datasources[uid] = {"id": 1, "orgId": 1, "readOnly": False, "version": 1, **body}
        return 200, {"datasource": self.datasources[uid], "message": "Datasource added"}

    def _check_datasource(self, body: Any) -> None:
        for name in ("name", "type", "access", "url", "uid"):
            _want(body, name, str)
        if body["access"] not in ("proxy", "direct"):
            raise Refused(400, "bad request data")

    def _dashboard(self, method: str, uid: str, **_: Any) -> tuple[int, Any]:
        if uid not in self.dashboards:
            raise Refused(404, "Dashboard not found")
        return 200, {"dashboard": self.dashboards[uid], "meta": {"folderUid": "manta"}}

    def _save_dashboard(self, method: str, *, body: Any, **_: Any) -> tuple[int, Any]:
        board = body.get("dashboard")
        if not isinstance(board, dict) or not board.get("title"):
            raise Refused(400, "Dashboard title cannot be empty")
        if body.get("folderUid") not in self.folders:
            raise Refused(400, "folder not found")
        uid = _checked_uid(board.get("uid"))
        if uid in self.dashboards and not body.get("overwrite"):
            raise Refused(412, "A dashboard with the same uid already exists")
        if board.get("id") is not None:
            raise Refused(404, "Dashboard not found")
        read = Dashboard.from_json(board)
        ids = [panel.id_val for panel in read.panels or []]
        if len(set(ids)) != len(ids):
            raise Refused(400, "panels must have ids of their own")
        sources = {target["datasource"]["uid"] for panel in board["panels"] for target in panel.get("targets", [])}
        if unknown := sources - self.datasources.keys():
            raise Refused(400, f"no data source {unknown}")
        version = self.dashboards.get(uid, {}).get("version", 0) + 1
        self.dashboards[uid] = {**board, "id": len(self.dashboards) + 1, "version": version}
        return 200, {"uid": uid, "status": "success", "version": version, "url": f"/d/{uid}"}

    def _rule_group(self, method: str, folder: str, group: str, *, body: Any, **_: Any) -> tuple[int, Any]:
        if method == "GET":
            if (folder, group) not in self.rule_groups:
                raise Refused(404, "rule group does not exist")
            return 200, self.rule_groups[folder, group]
        if folder not in self.folders:
            raise Refused(400, "folder does not exist")
        _want(body, "interval", int)
        if body["interval"] % 10:
            raise Refused(400, "interval should be a multiple of the base interval of 10 seconds")
        kept = []
        for rule in body["rules"]:
            read = Rule.from_json(rule)
            if read.folder_uid != folder or read.rule_group != group or not 1 <= len(read.title) <= 190:
                raise Refused(400, "invalid alert rule")
            refs = {query.ref_id for query in read.data}
            if read.condition not in refs:
                raise Refused(400, f"condition {read.condition} does not exist, must be one of {refs}")
            for query in read.data:
                if query.datasource_uid != "__expr__" and query.datasource_uid not in self.datasources:
                    raise Refused(400, "data source not found")
            _checked_uid(read.uid)
            kept.append({**rule, "orgID": 1, "for": _as_go(rule["for"]), "updated": "2026-01-01T00:00:00Z"})
        self.rule_groups[folder, group] = {**body, "rules": kept}
        return 200, self.rule_groups[folder, group]

    def _annotations(self, method: str, *, body: Any, query: dict[str, list[str]], **_: Any) -> tuple[int, Any]:
        if method == "GET":
            begin, end = int(query["from"][0]), int(query["to"][0])
            tags = set(query.get("tags", []))
            found = [one for one in self.annotations if begin <= one["time"] <= end and tags <= set(one["tags"])]
            return 200, found[: int(query.get("limit", ["100"])[0])]
        _want(body, "text", str)
        self.annotations.append({"id": len(self.annotations) + 1, **body})
        return 200, {"message": "Annotation added", "id": len(self.annotations)}


@contextmanager
def grafana_double() -> Iterator[GrafanaDouble]:
    """One on a free port."""
    double = GrafanaDouble()

    class Handler(BaseHTTPRequestHandler):
        def _serve(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            raw = self.rfile.read(size)
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
            try:
                status, tree = double.answer(self.command, self.path, token, json.loads(raw) if raw else None)
            except Refused as refused:
                status, tree = refused.status, {"message": refused.message}
            answer = json.dumps(tree).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_POST = do_PUT = _serve  # noqa: N815

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    double.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield double
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _want(body: Any, name: str, kind: type) -> None:
    if not isinstance(body, dict) or not isinstance(body.get(name), kind) or not body[name]:
        raise Refused(400, f"bad request data: {name}")


def _checked_uid(uid: Any) -> str:
    if not isinstance(uid, str) or not UID.match(uid):
        raise Refused(400, f"uid {uid!r} contains illegal characters or is too long")
    return uid


def _as_go(text: str) -> str:
    """Grafana writes a duration as Go does: 120s is 2m, 900s is 15m."""
    seconds = int(text.removesuffix("s"))
    return f"{seconds // 60}m" if seconds and not seconds % 60 else f"{seconds}s"

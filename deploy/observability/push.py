"""Brings folder, data source, dashboards, alert rules and scaling decisions into a Grafana. May be repeated at will.

Knows grafana-client and what Grafana answers; everything it sends is made elsewhere. What is there already under our
uids is replaced, everything else is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import requests
from grafana_client import GrafanaApi
from grafana_client.client import GrafanaClientError, GrafanaException, GrafanaServerError, GrafanaUnauthorizedError

from manta.engine.errors import ConfigError, MantaError, Unavailable

from .grafana import DECISION_TAG, FOLDER_TITLE, FOLDER_UID

TIMEOUT_S = 10.0
NOT_FOUND, FORBIDDEN = 404, 403


class GrafanaFailed(MantaError):
    """Grafana did not do what it was asked; the sentence says what and why."""


@dataclass(frozen=True)
class Pushed:
    """What became of one thing."""

    what: str
    how: str
    """created, replaced, or unchanged."""


class Pusher:
    """One Grafana. Methods raise ConfigError for a wrong address, token or right, Unavailable for a silent one."""

    def __init__(self, url: str, token: str | None) -> None:
        """`url` may hold user and password, and a path where Grafana lies below one."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--grafana {url!r}: give an address like http://127.0.0.1:3000", field="--grafana")
        path = parts.path.strip("/")
        self.url = f"{parts.scheme}://{parts.netloc}/{path + '/' if path else ''}"
        query = f"?{parts.query}" if parts.query else ""
        if token is None and not parts.username:
            raise ConfigError(
                f"--grafana {self.shown_url}: a token is needed; make one for a service account with the role Admin "
                "(Administration > Users and access > Service accounts), then set MANTA_GRAFANA_TOKEN or give --token",
                field="--token",
            )
        credential: Any = token  # None is user and password of the address, though it is not declared
        self._api = GrafanaApi.from_url(self.url + query, credential, timeout=TIMEOUT_S)

    @property
    def shown_url(self) -> str:
        """The address without a password."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}".rstrip("/")

    def check(self) -> str:
        """Grafana's version."""
        with self._plain_errors("read its version"):
            answer = self._api.health.check()
        if not isinstance(answer, dict) or "version" not in answer:
            raise ConfigError(f"{self.shown_url} answers, but not as Grafana does; is the address right?")
        return str(answer["version"])

    def folder(self, uid: str = FOLDER_UID, title: str = FOLDER_TITLE) -> Pushed:
        """The folder in which everything lies."""
        with self._plain_errors("make a folder", right="folders:create"):
            if self._found(lambda: self._api.folder.get_folder(uid)) is not None:
                return Pushed(f"folder {title}", "unchanged")
            self._api.folder.create_folder(title, uid=uid)
        return Pushed(f"folder {title}", "created")

    def datasource(self, source: Mapping[str, Any]) -> Pushed:
        """A data source, as datasource() of grafana.py has it."""
        what = f"data source {source['name']}"
        with self._plain_errors("make a data source", right="datasources:create and datasources:write"):
            there = self._found(lambda: self._api.datasource.get_datasource_by_uid(source["uid"]))
            if there is None:
                self._api.datasource.create_datasource(dict(source))
                return Pushed(what, "created")
            if there.get("readOnly"):
                return Pushed(what, "unchanged")  # it was provisioned from a file, which nobody may change from here
            if _contains(there, source):
                return Pushed(what, "unchanged")
            self._api.datasource.update_datasource_by_uid(source["uid"], {**there, **source})
        return Pushed(what, "replaced")

    def check_datasource(self, uid: str) -> None:
        """Raise ConfigError unless there is a data source of that uid."""
        with self._plain_errors("read data sources", right="datasources:read"):
            if self._found(lambda: self._api.datasource.get_datasource_by_uid(uid)) is None:
                raise ConfigError(f"--datasource {uid!r}: Grafana has no data source of that uid", field="--datasource")

    def dashboard(self, board: Mapping[str, Any], folder_uid: str = FOLDER_UID) -> Pushed:
        """A dashboard, under its uid; one that differs in nothing stays as it is."""
        what = f"dashboard {board['title']}"
        with self._plain_errors("save a dashboard", right="dashboards:create and dashboards:write"):
            there = self._found(lambda: self._api.dashboard.get_dashboard(board["uid"]))
            if there is not None and _contains(there.get("dashboard", {}), board):
                return Pushed(what, "unchanged")
            self._api.dashboard.update_dashboard(
                {
                    "dashboard": {**board, "id": None},
                    "folderUid": folder_uid,
                    "overwrite": True,
                    "message": "manta dashboards push",
                }
            )
        return Pushed(what, "created" if there is None else "replaced")

    def alert_rules(self, group: Mapping[str, Any]) -> Pushed:
        """The whole group of rules; rules of it that are no more in ours go. They stay editable in Grafana."""
        what = f"{len(group['rules'])} alert rules"
        with self._plain_errors("save alert rules", right="alert.provisioning:write"):
            rules = self._api.alertingprovisioning
            there = self._found(lambda: rules.get_rule_group(group["folderUid"], group["title"]))
            if there is not None and _same_rules(there, group):
                return Pushed(what, "unchanged")
            rules.update_rule_group(group["folderUid"], group["title"], dict(group), disable_provenance=True)
        return Pushed(what, "created" if there is None else "replaced")

    def decisions(self, decided: Iterable[Mapping[str, Any]]) -> int:
        """Scaling decisions (as GET /autoscaling has them) as annotations; how many were new."""
        wanted = list(decided)
        if not wanted:
            return 0
        times_ms = [int(one["time_s"] * 1000) for one in wanted]
        with self._plain_errors("write annotations", right="annotations:create"):
            there = self._api.annotations.get_annotation(
                time_from=min(times_ms), time_to=max(times_ms), tags=[DECISION_TAG], limit=5000
            )
            known = {(one["time"], one["text"]) for one in there}
            new = [
                (time_ms, one)
                for time_ms, one in zip(times_ms, wanted, strict=True)
                if (time_ms, _text(one)) not in known
            ]
            for time_ms, one in new:
                self._api.annotations.add_annotation(
                    time_from=time_ms, tags=[DECISION_TAG, str(one["pool"]), str(one["reason"])], text=_text(one)
                )
        return len(new)

    def _found(self, ask: Callable[[], Any]) -> Any:
        """What is there; None when Grafana says that nothing is."""
        try:
            return ask()
        except GrafanaClientError as error:
            if error.status_code == NOT_FOUND:
                return None
            raise

    @contextmanager
    def _plain_errors(self, doing: str, *, right: str | None = None) -> Iterator[None]:
        """Turns what grafana-client raises into a sentence."""
        try:
            yield
        except GrafanaUnauthorizedError:
            raise ConfigError(
                f"Grafana at {self.shown_url} does not accept the token: it is wrong, expired or of another Grafana; "
                "make a new one for a service account and set MANTA_GRAFANA_TOKEN",
                field="--token",
            ) from None
        except GrafanaException as error:
            raise self._explained(error, doing, right) from None
        except requests.exceptions.SSLError as error:
            raise ConfigError(
                f"the certificate of {self.shown_url} is not trusted ({error}); ?verify=false behind the address "
                "turns the check off"
            ) from None
        except requests.exceptions.Timeout:
            raise Unavailable(f"Grafana at {self.shown_url} is silent for {TIMEOUT_S:g} s", retry_after_s=5.0) from None
        except requests.exceptions.RequestException:
            raise Unavailable(
                f"no Grafana answers at {self.shown_url}: start it, or name its address with --grafana",
                retry_after_s=5.0,
            ) from None
        except ValueError:  # no JSON
            raise ConfigError(f"{self.shown_url} answers, but not as Grafana does; is the address right?") from None

    def _explained(self, error: GrafanaException, doing: str, right: str | None) -> MantaError:
        detail = error.response.get("message", error.message) if isinstance(error.response, dict) else error.message
        if error.status_code == FORBIDDEN:
            needed = "" if right is None else f" It needs {right}; a service account of the role Admin has all of them."
            return ConfigError(f"the token may not {doing} in Grafana at {self.shown_url}: {detail}.{needed}")
        if error.status_code == NOT_FOUND:
            return ConfigError(f"{self.shown_url} has no such address ({doing}); is it Grafana, version 10 or newer?")
        if isinstance(error, GrafanaServerError):
            return GrafanaFailed(f"Grafana at {self.shown_url} failed to {doing}: {detail}; look at its log")
        return GrafanaFailed(f"Grafana at {self.shown_url} refused to {doing}: {detail}")


def _text(decided: Mapping[str, Any]) -> str:
    return f"{decided['pool']}: {decided['before']} to {decided['after']} ({decided['reason']}). {decided['sentence']}"


def _contains(there: Any, wanted: Any) -> bool:
    """Whether all of `wanted` is in `there`, which may hold more: what Grafana fills in by itself."""
    if isinstance(wanted, Mapping):
        return isinstance(there, Mapping) and all(
            name in there and _contains(there[name], wanted[name]) for name in wanted
        )
    if isinstance(wanted, list):
        return isinstance(there, list) and len(there) == len(wanted) and all(map(_contains, there, wanted))
    return there == wanted


def _same_rules(there: Mapping[str, Any], group: Mapping[str, Any]) -> bool:
    """Rules by uid; Grafana writes times as 2m where we say 120s, and fills in its organization."""
    if there.get("interval") != group["interval"]:
        return False
    known = {rule["uid"]: rule for rule in there.get("rules", [])}
    if known.keys() != {rule["uid"] for rule in group["rules"]}:
        return False
    names = ("title", "condition", "data", "labels", "annotations", "noDataState", "execErrState")
    return all(
        _contains(known[rule["uid"]], {name: rule[name] for name in names})
        and _seconds(known[rule["uid"]].get("for", "0s")) == _seconds(rule["for"])
        for rule in group["rules"]
    )


def _seconds(text: str) -> float:
    """Of a duration as Go writes it: 1h2m3s."""
    total, number = 0.0, ""
    for letter in text:
        if letter.isdigit() or letter == ".":
            number += letter
        else:
            total += float(number or 0) * {"h": 3600, "m": 60, "s": 1, "d": 86400}[letter]
            number = ""
    return total

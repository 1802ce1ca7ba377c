"""The Grafana dashboard and the alerts of deploy/helm/monitoring, as a Prometheus sees them.

Without a Grafana this answers what matters about a dashboard: which series its expressions name,
and whether a Prometheus has data for each of them.
"""

import json
import re
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MONITORING = Path(__file__).parent / "helm" / "monitoring"
DASHBOARD = MONITORING / "dashboard.json"
ALERTS = MONITORING / "alerts.yaml"
# What Grafana puts in the place of its variables, where all values are chosen.
VARIABLES = {"$model": ".*", "$instance": ".*"}


@dataclass(frozen=True)
class Query:
    """An expression of a panel. legend: how its series are called; instant: of now alone."""

    panel: str
    expression: str
    legend: str
    instant: bool


@dataclass(frozen=True)
class Series:
    """labels of one series, its times in seconds since the epoch, and its values there."""

    labels: Mapping[str, str]
    times: tuple[float, ...]
    values: tuple[float, ...]


def panels(dashboard: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The panels that show something; rows are none."""
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            yield from panel["panels"]
        else:
            yield panel


def queries(dashboard: Mapping[str, Any]) -> list[Query]:
    """All expressions of a dashboard, in its order."""
    return [
        Query(
            panel["title"],
            target["expr"],
            target.get("legendFormat", ""),
            bool(target.get("instant")),
        )
        for panel in panels(dashboard)
        for target in panel["targets"]
    ]


def load() -> dict[str, Any]:
    """The dashboard of this checkout."""
    return json.loads(DASHBOARD.read_text(encoding="utf-8"))


def filled(expression: str, interval: str) -> str:
    """An expression with Grafana's variables replaced. interval: such as "1m"."""
    expression = expression.replace("$__rate_interval", interval)
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    if left := re.findall(r"\$\w+", expression):
        raise ValueError(f"{expression} has variables that nobody fills: {', '.join(left)}")
    return expression


class Prometheus:
    """A Prometheus server, by its HTTP API."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def get(self, path: str, **parameters: str | float) -> Any:
        """The data of an answer.

        Raises:
            urllib.error.URLError: no server, or an answer that is an error.
        """
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=30) as answer:
            return json.load(answer)["data"]

    def range(self, expression: str, seconds: float, step: float) -> list[Series]:
        """An expression's series over the last `seconds`, a value every `step` seconds."""
        now = time.time()
        data = self.get("query_range", query=expression, start=now - seconds, end=now, step=step)
        return [_series(each["metric"], each["values"]) for each in data["result"]]

    def instant(self, expression: str) -> list[Series]:
        """An expression's series now."""
        data = self.get("query", query=expression)
        return [_series(each["metric"], [each["value"]]) for each in data["result"]]


def _series(labels: dict[str, str], values: list[tuple[float, str]]) -> Series:
    times, numbers = zip(*((float(at), float(value)) for at, value in values), strict=True)
    return Series(labels, times, numbers)


def ask(server: Prometheus, query: Query, seconds: float, interval: str) -> list[Series]:
    """What a panel would show of a query; series without a single number are left out."""
    expression = filled(query.expression, interval)
    if query.instant:
        return server.instant(expression)
    found = server.range(expression, seconds, max(seconds / 120, 1.0))
    return [each for each in found if any(value == value for value in each.values)]


def name_of(series: Series, legend: str) -> str:
    """A series' name, by Grafana's pattern for legends."""
    if not legend:
        return ", ".join(f"{k}={v}" for k, v in sorted(series.labels.items()) if k != "__name__")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: series.labels.get(match[1], ""), legend)

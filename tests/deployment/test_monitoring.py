"""The dashboard and the alerts name only what a server exports, and Prometheus takes them."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from deploy import dashboard
from vllm_kvx.server import metrics
from vllm_kvx.server.refusal_reasons import Reason

ROOT = Path(__file__).parents[2]
HELM = ROOT / "deploy" / "helm"
# Labels that come from whoever scrapes.
SCRAPED = {"instance", "job", "namespace", "pod"}
# vLLM's own metrics that are shown here, and their labels.
OF_VLLM = {
    "vllm:num_requests_running": {"model_name", "engine"},
    "vllm:num_requests_waiting": {"model_name", "engine"},
    "vllm:num_preemptions_total": {"model_name", "engine"},
}


def exported() -> dict[str, set[str]]:
    """Every series' name and labels."""
    counters = {f"{metrics.PREFIX}{m.name}_total": set(m.labels) for m in metrics.ALL_COUNTERS}
    gauges = {f"{metrics.PREFIX}{m.name}": set(m.labels) for m in metrics.ALL_GAUGES}
    return counters | gauges | OF_VLLM


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(dashboard.ALERTS.read_text())["groups"]
    return group["rules"]


def adapter() -> Iterator[str]:
    """The expressions of prometheus-adapter's rules, its placeholders filled."""
    rules = yaml.safe_load((HELM / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    for rule in rules:
        yield rule["seriesQuery"]
        text = rule["metricsQuery"].replace("<<.LabelMatchers>>", 'pod="a"')
        yield text.replace("<<.GroupBy>>", "pod")


def expressions() -> dict[str, str]:
    """All that is asked of Prometheus, by where it stands."""
    board = dashboard.load()
    found = {
        f"{i} {query.panel}": dashboard.filled(query.expression, "1m")
        for i, query in enumerate(dashboard.queries(board))
    }
    found |= {rule["alert"]: rule["expr"] for rule in alerts()}
    found |= {f"adapter {i}": text for i, text in enumerate(adapter())}
    for each in board["annotations"]["list"]:
        found["annotation"] = each["expr"]
    return found


def selectors(expression: Any) -> Iterator[tuple[str, set[str]]]:
    """Names of the series that a parsed expression reads, and the labels that it matches."""
    kind = type(expression).__name__
    if kind == "VectorSelector":
        yield expression.name, {m.name for m in expression.matchers.matchers}
    elif kind == "MatrixSelector":
        yield from selectors(expression.vector_selector)
    elif kind == "BinaryExpr":
        yield from selectors(expression.lhs)
        yield from selectors(expression.rhs)
    elif kind == "Call":
        for argument in expression.args:
            yield from selectors(argument)
    elif kind in ("AggregateExpr", "ParenExpr", "UnaryExpr", "SubqueryExpr"):
        yield from selectors(expression.expr)
    else:
        assert kind in ("NumberLiteral", "StringLiteral"), kind


@pytest.mark.parametrize("where", expressions())
def test_expressions_read_what_is_exported(where: str) -> None:
    names = exported()
    found = list(selectors(promql_parser.parse(expressions()[where])))
    assert found
    for name, labels in found:
        if name == "ALERTS":
            continue
        assert name in names, f"{where} reads {name}, which no server exports"
        assert labels <= names[name] | SCRAPED, f"{where}: {name} has no labels {labels}"


@pytest.mark.parametrize("where", expressions())
def test_grouped_labels_exist(where: str) -> None:
    expression = expressions()[where]
    names = exported()
    labels = set().union(
        *(names.get(name, set()) for name in re.findall(r"vllm\w*:\w+", expression))
    )
    for group in re.findall(r"\b(?:by|without|ignoring|on) \(([^)]*)\)", expression):
        assert set(re.findall(r"\w+", group)) <= labels | SCRAPED, (where, group)


def test_legends_name_labels_that_are_left() -> None:
    for query in dashboard.queries(dashboard.load()):
        wanted = set(re.findall(r"\{\{(\w+)\}\}", query.legend))
        grouped = re.search(r"by \(([^)]*)\)", query.expression)
        assert wanted <= set(re.findall(r"\w+", grouped[1])) if grouped else not wanted, query


def test_what_an_operator_asks_for_is_shown() -> None:
    text = json.dumps(dashboard.load())
    for name in (
        *("kv_blocks_saved", "layer_tokens_skipped", "kv_pool_blocks", "stash_wait_seconds"),
        *("retrieval_recall", "retrieval_dense_fallbacks", "requests_run_in_full"),
        *("first_token_bucket", "per_token_bucket", "policy_evaluated", "requests_refused"),
    ):
        assert f"vllm_kvx:{name}" in text
    names = {rule["alert"] for rule in alerts()}
    assert {"KVRetrievalOnTriton", "KVPolicyNotEvaluated", "KVStashIsFull"} <= names


def test_where_savings_may_be_negative_it_is_said() -> None:
    board = dashboard.load()
    showing = [panel for panel in dashboard.panels(board) if "kv_blocks_saved" in str(panel)]
    assert len(showing) == 2
    said = [panel["description"] for panel in showing]
    said += [metrics.GAUGES["blocks_saved"].text]
    assert all("Negative" in text and "shares in all layers" in text for text in said)


def test_panels_have_their_places() -> None:
    """No two overlap, every id is one panel's, and all ask the datasource that is chosen."""
    board = dashboard.load()
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken and max(x for x, _ in cells) < 24
        taken |= cells
    for panel in dashboard.panels(board):
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["title"] and panel["targets"]


def test_alerts_say_what_to_do() -> None:
    reasons = set(Reason)
    for rule in alerts():
        assert set(rule["annotations"]) == {"summary", "description"}
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        for named in re.findall(r'reason=~"([^"]*)"', rule["expr"]):
            assert set(named.split("|")) <= reasons


def test_the_page_has_every_alert() -> None:
    page = (ROOT / "docs" / "operate" / "operations.md").read_text()
    assert set(re.findall(r"\| `(KV\w+)` \|", page)) == {rule["alert"] for rule in alerts()}


def test_every_alert_is_tested() -> None:
    """promtool, where it is installed, says whether they fire as these cases have it."""
    cases = yaml.safe_load((HELM / "monitoring" / "alerts_test.yaml").read_text())["tests"]
    fires = {
        case["alertname"]
        for group in cases
        for case in group["alert_rule_test"]
        if case["exp_alerts"]
    }
    assert fires == {rule["alert"] for rule in alerts()}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_the_alerts() -> None:
    for command in (("check", "rules", "alerts.yaml"), ("test", "rules", "alerts_test.yaml")):
        done = subprocess.run(
            ["promtool", *command], cwd=HELM / "monitoring", capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr

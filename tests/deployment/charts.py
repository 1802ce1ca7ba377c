"""The Helm chart, rendered by Helm's own engine, and what its objects hold."""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from helm_python.chart import Chart

CHART = Path(__file__).parents[2] / "deploy" / "helm"
# The oldest release that Chart.yaml allows and whose schema is at hand, and a new one.
KUBERNETES = ("1.27", "1.34")
# Of the Prometheus operator: not Kubernetes' own.
CUSTOM = {"PodMonitor", "PrometheusRule"}
KINDS = {"PersistentVolumeClaim", "Deployment", "Service", "Job", "ConfigMap", *CUSTOM}
ROUTER = {"ServiceAccount", "Role", "RoleBinding"}


def merged(into: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """As `helm --values` lays one file over another."""
    for key, value in values.items():
        both = isinstance(value, dict) and isinstance(into.get(key), dict)
        into[key] = merged(into[key], value) if both else value
    return into


def render(*files: str, release: str = "kvx", **values: Any) -> list[dict[str, Any]]:
    """The objects of a release in the namespace llm."""
    total: dict[str, Any] = {}
    for file in files:
        merged(total, yaml.safe_load((CHART / file).read_text()))
    merged(total, values)
    texts = Chart.load(CHART).render(total, name=release, namespace="llm")
    manifests = [text for path, text in texts.items() if path.endswith(".yaml")]
    return [each for text in manifests for each in yaml.safe_load_all(text) if each]


def one(objects: list[dict[str, Any]], kind: str, name: str = "kvx") -> dict[str, Any]:
    (found,) = (o for o in objects if o["kind"] == kind and o["metadata"]["name"].startswith(name))
    return found


def server(objects: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The server's pod and its container."""
    (deployment,) = (
        o for o in objects if o["kind"] == "Deployment" and o["metadata"]["name"] == "kvx"
    )
    pod = deployment["spec"]["template"]["spec"]
    return pod, pod["containers"][0]


def commands(script: str) -> Iterator[list[str]]:
    for line in script.replace("\\\n", " ").splitlines():
        if line.strip():
            yield shlex.split(line.replace('"$MODEL"', "org/model"))

"""The Helm chart's objects: valid for Kubernetes, and right for vLLM."""

import json
from typing import Any

import kubernetes_validate
import pytest
import yaml
from helm_python.chart import lint

from deployment.charts import CHART, CUSTOM, KINDS, KUBERNETES, ROUTER, one, render, server

SETS = {
    "defaults": ((), KINDS),
    "a100": (("values-a100.yaml",), KINDS),
    "h100": (("values-h100.yaml",), KINDS),
    "replicas": (
        ("values-h100.yaml", "values-replicas.yaml"),
        KINDS | ROUTER | {"HorizontalPodAutoscaler"},
    ),
}


def test_helm_finds_nothing_to_mend() -> None:
    report = lint(CHART, strict=True)
    assert report["errors"] == []
    assert [m for m in report["messages"] if m["severity"] >= 2] == []


@pytest.mark.parametrize("name", SETS)
def test_objects_are_valid(name: str) -> None:
    files, kinds = SETS[name]
    objects = render(*files)
    assert {each["kind"] for each in objects} == kinds
    for each in objects:
        assert each["metadata"]["namespace"] == "llm"
        for version in KUBERNETES:
            if each["kind"] not in CUSTOM:
                kubernetes_validate.validate(each, version, strict=True)
    keys = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert len(set(keys)) == len(keys)


def scraped(monitor: dict[str, Any]) -> list[str]:
    """The ports that a PodMonitor has Prometheus ask for /metrics."""
    assert {each["path"] for each in monitor["podMetricsEndpoints"]} == {"/metrics"}
    return [each["port"] for each in monitor["podMetricsEndpoints"]]


@pytest.mark.parametrize("name", SETS)
def test_names_meet(name: str) -> None:
    """What objects say of each other: labels, ports, volumes, claims."""
    objects = render(*SETS[name][0])
    pods = {
        each["metadata"]["name"]: each["spec"]["template"]
        for each in objects
        if each["kind"] in ("Deployment", "Job")
    }

    def selected(labels: dict[str, str]) -> list[dict[str, Any]]:
        return [
            p["spec"] for p in pods.values() if labels.items() <= p["metadata"]["labels"].items()
        ]

    def ports(pod: dict[str, Any]) -> set[str]:
        return {port["name"] for c in pod["containers"] for port in c.get("ports", ())}

    service = one(objects, "Service")["spec"]
    (behind,) = selected(service["selector"])
    assert service["ports"][0]["targetPort"] in ports(behind)
    is_routed = "router" in behind["containers"][0]["name"]
    assert is_routed == (name == "replicas")
    monitors = {o["metadata"]["name"]: o["spec"] for o in objects if o["kind"] == "PodMonitor"}
    assert set(monitors) == ({"kvx", "kvx-router"} if is_routed else {"kvx"})
    (watched,) = selected(monitors["kvx"]["selector"]["matchLabels"])
    assert scraped(monitors["kvx"]) == ["http"] and "http" in ports(watched)
    for deployment in (each for each in objects if each["kind"] == "Deployment"):
        assert len(selected(deployment["spec"]["selector"]["matchLabels"])) == 1
    claim = one(objects, "PersistentVolumeClaim")["metadata"]["name"]
    for pod in (pod["spec"] for pod in pods.values()):
        volumes = {v["name"]: v for v in pod.get("volumes", ())}
        mounts = [m for c in pod["containers"] for m in c.get("volumeMounts", ())]
        assert {m["name"] for m in mounts} == set(volumes)
        if volumes:
            assert volumes["cache"]["persistentVolumeClaim"]["claimName"] == claim
            assert {m["mountPath"] for m in mounts} == {"/cache", "/dev/shm"}
        assert pod["securityContext"]["runAsNonRoot"] is True
        for container in pod["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
    if is_routed:
        (routes,) = selected(monitors["kvx-router"]["selector"]["matchLabels"])
        assert routes is behind and scraped(monitors["kvx-router"]) == ["metrics"]
        args = behind["containers"][0]["args"]
        labels = dict(arg.split("=") for arg in args[args.index("--selector") + 1 :])
        assert len(selected(labels)) == 1 and selected(labels)[0] is watched
        scaled = one(objects, "HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]["name"]
        assert pods[scaled]["spec"] is watched


def test_a_server_has_its_flags() -> None:
    objects = render(
        "values-h100.yaml",
        model="org/model",
        policy="snapkv:kv_rate=0.2",
        layout=["speed-24", "fier-2048"],
        additionalConfig={"kv_share": "off"},
        tensorParallelSize=4,
        revision="v1",
        extraArgs=["--kv-cache-dtype=fp8"],
        prepare={"engineArgs": {"kv_cache_dtype": "fp8"}},
        huggingfaceToken={"name": "hub", "key": "token"},
    )
    pod, container = server(objects)
    args = container["args"]
    assert args[0] == "org/model" and args[-1] == "--kv-cache-dtype=fp8"
    assert {"--kv-policy=snapkv:kv_rate=0.2", "--tensor-parallel-size=4"} <= set(args)
    assert "--revision=v1" in args
    (config,) = (a.partition("=")[2] for a in args if a.startswith("--additional-config="))
    assert json.loads(config) == {"kv_share": "off", "kv_layout": ["speed-24", "fier-2048"]}
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert container["resources"]["requests"]["nvidia.com/gpu"] == 4
    env = {each["name"]: each for each in container["env"]}
    assert env["KVX_CACHE_ROOT"]["value"].startswith("/cache/")
    assert env["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "hub", "key": "token"}
    (term,) = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ][0]["matchExpressions"]
    assert all("H100" in p or "H200" in p for p in term["values"])


@pytest.mark.parametrize("release", ["kvx", "vllm"])
def test_no_service_sets_variables(release: str) -> None:
    """Of a service called vllm Kubernetes would make VLLM_PORT, at which vLLM ends."""
    objects = render("values-replicas.yaml", release=release, model="org/model")
    specs = [o["spec"]["template"]["spec"] for o in objects if o["kind"] in ("Deployment", "Job")]
    assert len(specs) == 3 and all(spec["enableServiceLinks"] is False for spec in specs)


def test_large_numbers_are_written_out() -> None:
    prepare = {"lengths": [4096, 1000000], "deadlineSeconds": 2000000, "evaluate": ["fier-2048"]}
    objects = render(model="org/model", maxModelLen=2097152, prepare=prepare)
    assert "--max-model-len=2097152" in server(objects)[1]["args"]
    job = one(objects, "Job")
    assert job["spec"]["activeDeadlineSeconds"] == 2000000
    (script,) = job["spec"]["template"]["spec"]["containers"][0]["args"]
    assert "--lengths 4096,1000000 --samples" in script


def test_the_startup_probe_has_time() -> None:
    """A server may take the seconds it is given, and those of a measurement besides."""
    for limit, seconds in ((0, 900), (1800, 2700), (5, 905)):
        pod, container = server(render(calibrationLimit=limit))
        probe = container["startupProbe"]
        assert 0 <= probe["periodSeconds"] * probe["failureThreshold"] - seconds < 10
        assert pod["restartPolicy"] == "Always"
        env = {each["name"]: each.get("value") for each in container["env"]}
        assert env["KVX_CALIBRATION_LIMIT"] == str(limit)


@pytest.mark.parametrize("values", [{}, {"drainSeconds": 600}, {"drainSeconds": 0}])
def test_servers_answer_what_they_have_before_they_end(values: dict[str, Any]) -> None:
    """Kubernetes counts its seconds from preStop on, and kills what has not ended by then."""
    pod, container = server(render(**values))
    (flag,) = (each for each in container["args"] if each.startswith("--shutdown-timeout"))
    drain = int(flag.partition("=")[2])
    assert drain == values.get("drainSeconds", 90)
    before = container["lifecycle"]["preStop"]["exec"]["command"]
    assert before[0] == "sleep"
    assert pod["terminationGracePeriodSeconds"] - int(before[1]) - drain >= 15
    assert "command" not in container, "the image's entry point is vllm itself, which gets SIGTERM"


def test_several_copies_have_one_api_server() -> None:
    """vLLM starts one for each copy, and of several none waits for its answers."""
    for values, count in (
        ({"dataParallelSize": 2}, 1),
        ({"dataParallelSize": 2, "drainSeconds": 0}, 0),
        ({"dataParallelSize": 1}, 0),
    ):
        args = server(render(**values))[1]["args"]
        assert args.count("--api-server-count=1") == count
    flag = "--api-server-count=2"
    args = server(render(dataParallelSize=2, drainSeconds=0, extraArgs=[flag]))[1]["args"]
    assert [arg for arg in args if "api-server-count" in arg] == [flag]


def test_one_replica_may_have_a_volume_of_its_own() -> None:
    objects = render(prepare={"enabled": False}, cache={"accessModes": ["ReadWriteOnce"]})
    claim = one(objects, "PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]


@pytest.mark.parametrize("is_routed", [False, True])
def test_custom_objects(is_routed: bool) -> None:
    """Kubernetes has no schema of these: the fields that the Prometheus operator documents."""
    objects = render(
        monitoring={"labels": {"release": "prometheus"}}, router={"enabled": is_routed}
    )
    monitors = [each for each in objects if each["kind"] == "PodMonitor"]
    rule = one(objects, "PrometheusRule")
    for each in (*monitors, rule):
        assert each["apiVersion"] == "monitoring.coreos.com/v1"
        assert each["metadata"]["labels"]["release"] == "prometheus"
    for monitor in monitors:
        assert set(monitor["spec"]) == {"selector", "podMetricsEndpoints"}
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["interval"] == "15s"
        assert set(endpoint) == {"port", "path", "interval"}
    assert rule["spec"] == yaml.safe_load((CHART / "monitoring" / "alerts.yaml").read_text())
    board = one(objects, "ConfigMap")["data"]["vllm-kvx.json"]
    assert json.loads(board) == json.loads((CHART / "monitoring" / "dashboard.json").read_text())


def test_the_routers_metrics_are_scraped() -> None:
    """At the port that it is told to serve them at, of every address; or not at all."""
    objects = render("values-replicas.yaml")
    (pod,) = (
        each["spec"]["template"]["spec"]
        for each in objects
        if each["kind"] == "Deployment" and each["metadata"]["name"] == "kvx-router"
    )
    (container,) = pod["containers"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    args = dict(arg.partition("=")[::2] for arg in container["args"])
    assert args["--prometheus-port"] == str(ports["metrics"]) != args["--port"]
    assert args["--prometheus-host"] == "0.0.0.0"
    for values in ({"monitoring": {"podMonitor": False}}, {"router": {"enabled": False}}):
        names = [
            each["metadata"]["name"]
            for each in render("values-replicas.yaml", **values)
            if each["kind"] == "PodMonitor"
        ]
        assert names == ([] if "monitoring" in values else ["kvx"])


def test_servers_without_our_metrics_are_not_scaled_by_them() -> None:
    """What cannot be read keeps Kubernetes from scaling down."""
    for policy, layout, count in (
        ("full", [], 1),
        ("full", ["full"], 1),
        ("full", ["snapkv:kv_rate=0.2"], 3),
    ):
        objects = render("values-replicas.yaml", policy=policy, layout=layout)
        scaler = one(objects, "HorizontalPodAutoscaler")
        assert len(scaler["spec"]["metrics"]) == count


def test_the_autoscalers_metrics_are_the_adapters() -> None:
    rules = yaml.safe_load((CHART / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    scaler = one(render("values-replicas.yaml"), "HorizontalPodAutoscaler")
    asked = {each["pods"]["metric"]["name"] for each in scaler["spec"]["metrics"]}
    assert asked == {rule["name"]["as"] for rule in rules}

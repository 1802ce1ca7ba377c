"""The Helm chart, rendered by Helm's own engine: valid for Kubernetes, and right for vLLM."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from helm_python.chart import Chart, lint
from helm_python.errors import HelmError

from deploy import schema
from vllm_kvx import cli
from vllm_kvx.policy.axes import Retrieve
from vllm_kvx.policy.methods.table import METHODS
from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.server.measured_layers import calibrate_arguments
from vllm_kvx.tools.calibrate.options import CALIBRATE

CHART = Path(__file__).parents[2] / "deploy" / "helm"
# The oldest release that Chart.yaml allows and whose schema is at hand, and a new one.
KUBERNETES = ("1.27", "1.34")
# Of the Prometheus operator: not Kubernetes' own.
CUSTOM = {"PodMonitor", "PrometheusRule"}
KINDS = {"PersistentVolumeClaim", "Deployment", "Service", "Job", "ConfigMap", *CUSTOM}
ROUTER = {"ServiceAccount", "Role", "RoleBinding"}
SETS = {
    "defaults": ((), KINDS),
    "a100": (("values-a100.yaml",), KINDS),
    "h100": (("values-h100.yaml",), KINDS),
    "replicas": (
        ("values-h100.yaml", "values-replicas.yaml"),
        KINDS | ROUTER | {"HorizontalPodAutoscaler"},
    ),
}


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


def test_the_job_measures_what_the_servers_run() -> None:
    objects = render(
        prepare={"calibrate": ["fastkv"], "evaluate": ["fastkv", "snapkv:kv_rate=0.2"]}
    )
    job = one(objects, "Job")
    pod = job["spec"]["template"]["spec"]
    script = pod["containers"][0]["args"][0]
    assert pod["restartPolicy"] == "OnFailure"
    assert 'vllm-kvx calibrate "$MODEL" --method fastkv' in script
    assert "--policies 'fastkv' 'snapkv:kv_rate=0.2'" in script and "--save" in script
    _, container = server(objects)
    assert pod["containers"][0]["image"] == container["image"]
    names = {o["metadata"]["name"] for o in render() + objects if o["kind"] == "Job"}
    assert len(names) == 2, "other work is another job: a job's template cannot change"
    assert not [o for o in render(prepare={"enabled": False}) if o["kind"] == "Job"]


@pytest.mark.parametrize(
    ("values", "parts", "evaluated"),
    [
        ({"policy": "fier-2048"}, [], ["fier-2048"]),
        ({"policy": "fastkv:kv_rate=0.4"}, ["fastkv"], ["fastkv:kv_rate=0.4"]),
        (
            {
                "policy": "fastkv:tsp_rate=0.3,window=16+fier-2048",
                "layout": ["full", "structkv:kv_rate=0.4"],
            },
            ["fastkv:tsp_rate=0.3,window=16", "structkv"],
            ["fastkv:tsp_rate=0.3,window=16+fier-2048", "structkv:kv_rate=0.4"],
        ),
        (
            {
                "policy": "structkv:pivot=online",
                "layout": ["structkv:pivot=3", "fastkv:tsp_rate=1"],
            },
            [],
            ["structkv:pivot=online", "structkv:pivot=3", "fastkv:tsp_rate=1"],
        ),
        (
            {
                "policy": "speed-24+structkv:decay=0.8,pivot=calibrated,struct_reduction=max",
                "layout": ["fastkv:tsp_layer=auto", "fastkv:tsp_layer=15", "fastkv:kv_rate=1"],
                "prepare": {"evaluate": []},
            },
            ["structkv:decay=0.8,struct_reduction=max", "fastkv"],
            [],
        ),
        ({"policy": "fastkv:kv_rate=0.4", "calibrationLimit": 1800}, [], ["fastkv:kv_rate=0.4"]),
        # Against `full` over a KV cache that is not quantized.
        (
            {"policy": "fier-2048", "layout": ["full"], "extraArgs": ["--kv-cache-dtype", "fp8"]},
            [],
            ["fier-2048@fp8", "full@fp8"],
        ),
        (
            {"policy": "fier-2048", "extraArgs": ["--seed=1", "--kv_cache_dtype=fp8_e5m2"]},
            [],
            ["fier-2048@fp8_e5m2"],
        ),
        ({"policy": "fier-2048", "extraArgs": ["--kv-cache-dtype=auto"]}, [], ["fier-2048"]),
        (
            {
                "policy": "fier-2048",
                "extraArgs": ["--kv-cache-dtype=fp8"],
                "prepare": {"engineArgs": {"kv_cache_dtype": "fp8"}},
            },
            [],
            ["fier-2048"],
        ),
        ({"policy": "full", "prepare": {"evaluate": ["full@fp8"]}}, [], ["full@fp8"]),
        # A checkpoint that brings its own: `full` is asked over another.
        (
            {
                "policy": "fier-2048",
                "extraArgs": ["--kv-cache-dtype=fp8"],
                "prepare": {"engineArgs": {"kv_cache_dtype": "bfloat16"}},
            },
            [],
            ["fier-2048@fp8"],
        ),
        (
            {"policy": "full", "extraArgs": ["--kv-cache-dtype=int8_per_token_head"]},
            [],
            ["full@int8_per_token_head"],
        ),
        (
            {"policy": "fastkv:kv_rate=0.4", "prepare": {"calibrate": []}},
            [],
            ["fastkv:kv_rate=0.4"],
        ),
        (
            {
                "policy": "fastkv:kv_rate=0.4",
                "additionalConfig": {"kv_measured": {"tsp_layer": 15}},
            },
            [],
            ["fastkv:kv_rate=0.4"],
        ),
    ],
)
def test_the_job_measures_what_is_left_to_it(
    values: dict[str, Any], parts: list[str], evaluated: list[str]
) -> None:
    """By the parameters that a server looks for: else none would ever start."""
    jobs = [each for each in render(**values) if each["kind"] == "Job"]
    if not parts and not evaluated:
        assert not jobs
        return
    script = jobs[0]["spec"]["template"]["spec"]["containers"][0]["args"][0]
    parsed = [cli.parser().parse_args(words[1:]) for words in commands(script)]
    for asked, name in zip(parsed, parts, strict=False):
        (part,) = parse_policy(name).parts
        wanted = cli.parser().parse_args(calibrate_arguments(part, "org/model", None))
        settings = {**vars(wanted), "no_plot": True}
        for parameter, option in CALIBRATE.items():
            if vars(asked)[parameter] is None:
                setattr(asked, parameter, option.default)
            if settings[parameter] is None:
                settings[parameter] = option.default
        assert vars(asked) == settings
    assert [each.policies for each in parsed[len(parts) :]] == [evaluated] * bool(evaluated)


def commands(script: str) -> Iterator[list[str]]:
    for line in script.replace("\\\n", " ").splitlines():
        if line.strip():
            yield shlex.split(line.replace('"$MODEL"', "org/model"))


def test_the_jobs_engine_is_the_servers() -> None:
    """One of them, on the same weights, with what answers depend on."""
    settings = {"kv_measured": {"tsp_layer": 15}, "kv_share": "off"}
    values = {"policy": "fastkv:kv_rate=0.4", "additionalConfig": settings, "revision": "v1"}
    values |= {"tensorParallelSize": 2, "dataParallelSize": 4, "extraArgs": ["--dtype=float16"]}
    job = one(render(**values, prepare={"engineArgs": {"dtype": "float16"}}), "Job")
    container = job["spec"]["template"]["spec"]["containers"][0]
    words = shlex.split(container["args"][0])
    assert json.loads(words[words.index("--engine-args") + 1]) == {
        "tensor_parallel_size": 2,
        "max_model_len": 32768,
        "additional_config": settings,
        "dtype": "float16",
    }
    assert words[words.index("--revision") + 1] == "v1"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 2
    _, servers = server(render(**values, prepare={"enabled": False}))
    assert servers["resources"]["limits"]["nvidia.com/gpu"] == 8
    job = one(render(gpu={"count": 0}), "Job")
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert "nvidia.com/gpu" not in container["resources"]["limits"]


def test_the_jobs_commands_parse() -> None:
    """By the parser of `vllm-kvx` itself."""
    job = one(render(prepare={"calibrate": ["fastkv", "structkv"]}), "Job")
    script = job["spec"]["template"]["spec"]["containers"][0]["args"][0]
    parsed = [cli.parser().parse_args(words[1:]) for words in commands(script)]
    assert [each.model for each in parsed] == ["org/model"] * 3


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"polcy": "full"}, "polcy"),
        ({"policy": "Speed 24"}, "policy"),
        ({"tensorParallelSize": 0}, "tensorParallelSize"),
        ({"replicas": 2, "cache": {"accessModes": ["ReadWriteOnce"]}}, "ReadWriteMany"),
        ({"additionalConfig": {"kv_layout": ["full"]}}, "set `policy` and `layout`"),
        ({"autoscaling": {"enabled": True, "minReplicas": 9}}, "minReplicas is greater"),
        ({"huggingfaceToken": {"name": "hub"}}, "key"),
        # Without a name there would be no key at all.
        ({"apiKey": {"key": "token"}}, "name"),
        # What YAML makes of off without quotes.
        ({"additionalConfig": {"kv_request_policies": False}}, "'off', 'layout', 'list'"),
        ({"additionalConfig": {"kv_share": False}}, "'on', 'off'"),
        ({"additionalConfig": {"kv_calibration": 1}}, "kv_calibration"),
        ({"extraArgs": ["--port=9000"]}, "--port is the chart's own"),
        ({"extraArgs": ["--additional_config.kv_share=off"]}, "is the chart's own"),
        ({"extraArgs": ["-tp=4"]}, "-tp is the chart's own"),
        ({"extraArgs": ["--max-model-len=100"]}, "--max-model-len is the chart's own"),
        ({"extraArgs": ["--quantization=fp8"]}, "set prepare.engineArgs.quantization too"),
        ({"maxModelLen": 16384}, "prepare.lengths: prompts of 16384 tokens"),
        ({"router": {"policy": "sessions"}}, "router"),
        # What a server would refuse at its start, or Kubernetes when it is applied.
        ({"policy": "snapvk"}, "'snapvk' does not match"),
        ({"policy": "auto"}, "'auto' does not match"),
        ({"policy": "snapkv:kv_rate=0"}, "'snapkv:kv_rate=0' does not match"),
        ({"policy": "snapkv:kv_rate=0,2"}, "'snapkv:kv_rate=0,2' does not match"),
        ({"policy": "fier-16"}, "'fier-16' does not match"),
        ({"policy": "speed"}, "'speed' does not match"),
        ({"policy": "gemfilter"}, "'gemfilter' does not match"),
        (
            {"policy": "snapkv:rate=0.2"},
            "(kv_rate|kv_budget|kv_floor|window|kernel|score|after|lookahead)",
        ),
        ({"policy": "full@fp8"}, "'full@fp8' does not match"),
        ({"layout": ["full", "sped-16"]}, "'/layout/1': 'sped-16' does not match"),
        ({"prepare": {"evaluate": ["snapvk@fp8"]}}, "'snapvk@fp8' does not match"),
        ({"additionalConfig": {"kv-policy": "full"}}, "invalid propertyName 'kv-policy'"),
        ({"additionalConfig": {"KV_LAYOUT": []}}, "invalid propertyName 'KV_LAYOUT'"),
        ({"additionalConfig": {"kvShare": "off"}}, "invalid propertyName 'kvShare'"),
        ({"additionalConfig": {"kv_debug": "yes"}}, "want boolean"),
        ({"additionalConfig": {"kv_measured": {"tsp_layer": -1}}}, "got -1, want 0"),
        ({"additionalConfig": {"kv_recall_every": 1.5}}, "kv_recall_every"),
        ({"additionalConfig": {"kv_stash_tokens": 4096}}, "is less than maxModelLen=32768"),
        ({"additionalConfig": {"kv_stash_tokens": 65536}}, "kv_stash_tokens has no effect"),
        (
            {"policy": "snapkv:kv_rate=0.2", "additionalConfig": {"kv_recall_every": 10}},
            "kv_recall_every has no effect",
        ),
        *(
            ({"policy": f"fier-64+{name}"}, "does not say how much stays")
            for name, method in METHODS.items()
            if method.served_as and not method.number
        ),
        ({"layout": ["snapkv"]}, "snapkv does not say how much stays"),
        ({"replicas": 0}, "got 0, want 1"),
        ({"drainSeconds": -1}, "got -1, want 0"),
        ({"extraArgs": ["--shutdown-timeout=5"]}, "--shutdown-timeout is the chart's own"),
        ({"extraArgs": ["--shutdown_timeout", "5"]}, "--shutdown-timeout is the chart's own"),
        ({"extraArgs": ["--api-server-count=4"]}, "whatever drainSeconds is"),
        ({"extraArgs": ["-asc", "4"]}, "whatever drainSeconds is"),
        ({"extraArgs": [""]}, "extraArgs/0"),
        ({"model": " "}, "model"),
        ({"model": "--help"}, "model"),
        ({"image": {"tag": "a b"}}, "tag"),
        ({"env": [{"name": "A", "value": 1}]}, "got number, want string"),
        ({"env": [{"name": "A B", "value": "1"}]}, "env/0/name"),
        ({"env": [{"name": "KVX_CACHE_ROOT", "value": "/x"}]}, "env/0/name"),
        (
            {"env": [{"name": "HF_TOKEN"}], "huggingfaceToken": {"name": "hub", "key": "token"}},
            "HF_TOKEN is given by a Secret",
        ),
        ({"apiKey": {"name": "clients", "key": ""}}, "apiKey/key"),
        ({"resources": {"limits": {"memory": "-1Gi"}}}, "limits/memory"),
        ({"resources": {"limits": {"nvidia.com/gpu": 2}}}, "set gpu.count"),
        ({"tensorParallelSize": 4, "gpu": {"count": 2}}, "gpu.count=2 is less than the 4 GPUs"),
        ({"nodeSelector": {"spot": True}}, "got boolean, want string"),
        ({"tolerations": [{"key": 5}]}, "tolerations/0/key"),
        ({"cache": {"size": "0"}}, "cache/size"),
        ({"autoscaling": {"poolUsed": "0"}}, "poolUsed"),
        ({"monitoring": {"interval": "0s"}}, "interval"),
        ({"monitoring": {"labels": {"a": 1}}}, "got number, want string"),
        ({"router": {"extraArgs": ["--port=1"]}}, "router.extraArgs: --port is the chart's own"),
    ],
)
def test_bad_values_are_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(HelmError, match=re.escape(says)):
        Chart.load(CHART).validate_schema(values)
        render(**values)


@pytest.mark.parametrize(
    "values",
    [
        {
            "policy": "fastkv:tsp_rate=0.3,window=16+fier-2048",
            "layout": ["full", "structkv:kv_rate=0.4"],
        },
        {"additionalConfig": {"kv_recall_every": 10, "kv_share": "off", "cache_policy": "theirs"}},
        {"policy": "fastkv:kv_rate=0.4", "additionalConfig": {"kv_stash_tokens": 65536}},
        {"servedModelName": "My model: the best", "model": "/cache/models/a"},
        {"resources": {"requests": {"cpu": 8, "memory": "1e3"}}, "sharedMemory": "0.5Gi"},
        {"gpu": {"count": 0}, "tensorParallelSize": 2},
        {"env": [{"name": "A"}, {"name": "B", "value": "1"}, {"name": "C", "valueFrom": {}}]},
        {"prepare": {"evaluate": ["full@int8_per_token_head", "snapkv:kv_rate=0.2@fp8"]}},
        {"tolerations": [], "nodeSelector": {"spot": "true"}, "apiKey": {}},
    ],
)
def test_good_values_are_taken(values: dict[str, Any]) -> None:
    Chart.load(CHART).validate_schema(values)
    container = server(render(**values))[1]
    if "servedModelName" in values:
        assert f"--served-model-name={values['servedModelName']}" in container["args"]


def test_the_schema_is_made_from_the_code() -> None:
    assert schema.text() == schema.PATH.read_text(), (
        "policies or keys have changed: run `python -m deploy.schema`"
    )


def test_the_chart_knows_what_selects_and_what_retrieves() -> None:
    """By name, for the keys that have no effect without such a policy."""
    text = (CHART / "templates" / "_helpers.tpl").read_text()
    for key, has in (
        ("kv_stash_tokens", lambda m: m.to_measure is not None),
        ("kv_recall_every", lambda m: issubclass(m, Retrieve)),
    ):
        before = text[: text.index(f"additionalConfig.{key} has no effect")].splitlines()[-2]
        names = {name for name, method in METHODS.items() if has(method)}
        assert set(re.findall(r'has "(\w+)" \$names', before)) == names


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


def test_values_for_production_stack() -> None:
    """Keys that its chart requires of a model, and flags that are ours."""
    path = CHART.parent / "production-stack" / "values.yaml"
    values = yaml.safe_load(path.read_text())
    (model,) = values["servingEngineSpec"]["modelSpec"]
    required = "name repository tag modelURL replicaCount requestCPU requestMemory requestGPU"
    assert {*required.split(), "pvcStorage"} <= set(model)
    assert {"pvcAccessMode": ["ReadWriteMany"]}.items() <= model.items()
    (flag,) = (a for a in model["vllmConfig"]["extraArgs"] if a.startswith("--kv-policy="))
    parse_policy(flag.partition("=")[2])
    # That chart has no value for the 30 seconds that Kubernetes gives by default.
    (drain,) = (a for a in model["vllmConfig"]["extraArgs"] if a.startswith("--shutdown-timeout="))
    assert 0 < int(drain.partition("=")[2]) <= 20
    assert model["vllmConfig"]["enablePrefixCaching"] is True
    env = {each["name"]: each["value"] for each in model["env"]}
    assert env["KVX_CACHE_ROOT"].startswith("/data/"), "the chart mounts its volume at /data"
    router = values["routerSpec"]["serviceMonitor"]
    assert values["servingEngineSpec"]["serviceMonitor"]["enabled"] and router["enabled"]
    (dropped,) = router["metricRelabelings"]
    assert dropped["action"] == "drop" and dropped["sourceLabels"] == ["__name__"]
    board = (CHART / "monitoring" / "dashboard.json").read_text()
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting"):
        assert re.fullmatch(dropped["regex"], name) and name in board


def test_policies_of_the_values_are_policies() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for name in (values["policy"], *values["layout"]):
        parse_policy(name)


def test_the_schema_knows_every_key() -> None:
    """Of `additional_config`, as its page has them in a table."""
    values = json.loads((CHART / "values.schema.json").read_text())
    known = values["definitions"]["additionalConfig"]["propertyNames"]["anyOf"][0]["enum"]
    page = (CHART.parents[1] / "docs" / "use" / "configuration.md").read_text()
    named = {name for row in re.findall(r"^\| (`kv_.*?) \|", page, re.M) for name in row.split("`")}
    assert {name for name in named if name.startswith("kv_")} == set(known)

"""Values of the Helm chart: which are taken, and what its schema and templates know of policies."""

import json
import re
from typing import Any

import pytest
import yaml
from helm_python.chart import Chart
from helm_python.errors import HelmError

from deploy import schema
from deployment.charts import CHART, render, server
from vllm_kvx.policy.axes import Retrieve
from vllm_kvx.policy.methods.table import METHODS
from vllm_kvx.policy.spec import parse_policy


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
        (
            {"extraArgs": ["--kv-cache-dtype=fp8", "--kv-cache-dtype-skip-layers", "0"]},
            "set prepare.engineArgs.kv_cache_dtype_skip_layers too",
        ),
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
            (
                {"policy": f"fier-64+{name}{':layer=3' * bool(method.mandatory())}"},
                "does not say how much stays",
            )
            for name, method in METHODS.items()
            if method.served_as and not method.number
        ),
        ({"layout": ["snapkv"]}, "snapkv does not say how much stays"),
        ({"policy": "fier-64+snapkv:window=8"}, "snapkv:window=8 does not say how much stays"),
        ({"layout": ["streamingllm:sinks=8"]}, "give kv_rate, as in streamingllm:kv_rate=0.4"),
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
            "policy": "fastkv:tsp_rate=0.3,window=16,kv_rate=0.4+fier-2048",
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

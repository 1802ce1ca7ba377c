"""The Helm chart's job, which measures before servers start: what, and by which commands."""

import json
import shlex
from typing import Any

import pytest

from deployment.charts import commands, one, render, server
from vllm_kvx import cli
from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.server.measured_layers import calibrate_arguments
from vllm_kvx.tools.calibrate.options import CALIBRATE


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
                "policy": "fastkv:tsp_rate=0.3,window=16,kv_rate=0.4+fier-2048",
                "layout": ["full", "structkv:kv_rate=0.4"],
            },
            ["fastkv:tsp_rate=0.3,window=16", "structkv"],
            ["fastkv:tsp_rate=0.3,window=16,kv_rate=0.4+fier-2048", "structkv:kv_rate=0.4"],
        ),
        (
            {
                "policy": "structkv:pivot=online,kv_rate=0.1",
                "layout": ["structkv:pivot=3,kv_rate=0.1", "fastkv:tsp_rate=1,kv_rate=0.1"],
            },
            [],
            [
                "structkv:pivot=online,kv_rate=0.1",
                "structkv:pivot=3,kv_rate=0.1",
                "fastkv:tsp_rate=1,kv_rate=0.1",
            ],
        ),
        (
            {
                "policy": "speed-24+structkv:"
                "decay=0.8,pivot=calibrated,struct_reduction=max,kv_rate=0.4",
                "layout": [
                    "fastkv:tsp_layer=auto,kv_rate=0.4",
                    "fastkv:tsp_layer=15,kv_rate=0.4",
                    "fastkv:kv_rate=1",
                ],
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

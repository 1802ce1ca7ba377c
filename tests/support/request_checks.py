"""Checks of one request, as vLLM's front end makes them, on servers of several policies."""

from typing import Any

from vllm import SamplingParams
from vllm.v1.worker.gpu.sample.logits_processor import (
    build_custom_logits_processors_params_validator,
)

from vllm_kvx.config.settings import KVSettings
from vllm_kvx.server.request_check import class_path

MODEL = "checked"


def settings_of(policy: str, *layout: str, requests: str = "layout") -> KVSettings:
    config = {"kv_policy": policy, "kv_layout": list(layout), "kv_request_policies": requests}
    return KVSettings.of(config, num_layers=8)


def validator(policy: str, *layout: str, requests: str = "layout") -> Any:
    """What vLLM's front end calls for each request."""
    return build_custom_logits_processors_params_validator(
        [class_path(settings_of(policy, *layout, requests=requests), MODEL)]
    )


def params(policy: Any = None, **kwargs: Any) -> SamplingParams:
    extra_args = None if policy is None else {"kv_policy": policy}
    return SamplingParams(extra_args=extra_args, **kwargs)

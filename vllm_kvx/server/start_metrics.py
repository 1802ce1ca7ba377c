"""Metrics that are known when a server starts, and stay as they are."""

from collections.abc import Mapping
from typing import Any

from vllm_kvx.server.metrics import AUTO_INFO, BUILD_INFO, EVALUATED, gauge


def export_build_info(model_name: str, server_policy: str, layout: str) -> None:
    """Says for good what this server is. layout: what it has room for, in words."""
    import torch
    import vllm

    from vllm_kvx import __version__

    versions = (__version__, vllm.__version__, torch.__version__)
    gauge(BUILD_INFO, model_name, server_policy, *map(str, versions), layout).set(1)


def export_evaluated(model_name: str, policy: str, evaluated: bool) -> None:
    """Says for good whether a server's policy was evaluated on its weights."""
    gauge(EVALUATED, model_name, policy).set(evaluated)


def export_auto(model_name: str, choice: Mapping[str, Any]) -> None:
    """Says for good what a server chose for `auto`; `choice` as ``additional_config`` has it."""
    labels = (choice["policy"], choice["named"], choice["source"].replace(" ", "_"))
    gauge(AUTO_INFO, model_name, *labels).set(1)

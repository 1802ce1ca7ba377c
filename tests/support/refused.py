"""Configurations that are asked why they are refused: what they are, with one thing changed."""

from types import SimpleNamespace
from typing import Any


class Changed:
    """`base` with some attributes replaced; vLLM's own objects would check the values."""

    def __init__(self, base: Any, **changes: Any) -> None:
        self._base = base
        self.__dict__.update(changes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)


def changed(config: Any, path: str, value: Any) -> Any:
    """`config` with one attribute replaced, of itself or of what it holds: ``a.b.c``."""
    head, _, rest = path.partition(".")
    return Changed(config, **{head: changed(getattr(config, head), rest, value) if rest else value})


class Connector:
    """A configuration of a connector that nobody knows, or of events."""

    kv_connector = ec_connector = "SomeConnector"
    enable_kv_cache_events = True
    kv_buffer_device = "cuda"

    def __init__(self, **extra: Any) -> None:
        self.get_from_extra_config = extra.get


class ThroughHost(Connector):
    """One that copies KV through the host's memory."""

    kv_connector, kv_buffer_device = "NixlConnector", "cpu"


class OfExample(Connector):
    """vLLM's example."""

    kv_connector = "ExampleConnector"


class OfLMCache(Connector):
    """LMCache's, whose settings have dots in their names."""

    kv_connector = "LMCacheMPConnector"


def several_engines(config: Any, backend: str) -> Any:
    """Two engines behind one server."""
    config = changed(config, "parallel_config.data_parallel_size", 2)
    return changed(config, "parallel_config.data_parallel_backend", backend)


def drafted_by(method: str, form: str = "", accepts: str = "standard") -> SimpleNamespace:
    """What vLLM says of a drafter, of a form in which none was tried, and how it accepts drafts."""
    return SimpleNamespace(
        method=method,
        rejection_sample_method=accepts,
        parallel_drafting=form == "parallel_drafting",
        enable_adaptive_verification=form == "enable_adaptive_verification",
        use_multi_module_mtp=lambda: form == "several layers",
        use_gemma4_mtp=lambda: form == "shared layers",
    )


def lines_of(make_config: Any, policy: str, **settings: Any) -> list[str]:
    """What such a server is refused for."""
    try:
        make_config(policy, dtype="float32", **settings)
    except ValueError as error:
        return [line for line in str(error).splitlines() if line.startswith("  - ")]
    return []

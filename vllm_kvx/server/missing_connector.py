"""What a server with policies says of a KV connector that vLLM cannot import."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vllm_kvx.config.connectors import LMCACHE
from vllm_kvx.config.settings import POLICY_KEY
from vllm_kvx.config.wording import worded
from vllm_kvx.errors import refusing
from vllm_kvx.server.connector_checks import not_imported
from vllm_kvx.server.validate import cannot_run, is_full_alone, named_policies


@contextmanager
def connector_needed(engine_args: Any, in_python: bool) -> Iterator[None]:
    """Within, the lack of a package that the KV connector of `engine_args` needs is refused.

    vLLM imports a connector while it makes its configuration, before other refusals are looked
    for. A connector that policies refuse anyway is refused as such, so that nobody installs its
    package in vain.

    engine_args: vLLM's EngineArgs. in_python: whether who reads the message gives no flags.

    Raises:
        ValueError: the connector cannot be imported; the message says what to change.
    """
    try:
        yield
    except ImportError as error:
        name, config = _asked_connector(engine_args), engine_args.additional_config
        if name is None or is_full_alone(config):
            raise
        whole = all(policy.keeps_prompts for policy in named_policies(config))
        if (reason := not_imported(name, whole)) is None:
            raise
        with refusing(), worded(in_python):
            raise cannot_run(config[POLICY_KEY], [reason]) from error


def _asked_connector(args: Any) -> str | None:
    """As ``start_refusal.asked_connector``, of arguments that no configuration was made of."""
    if args.kv_offloading_size is not None and args.kv_offloading_backend == "lmcache":
        return LMCACHE
    config = args.kv_transfer_config
    name = config.get("kv_connector") if isinstance(config, Mapping) else None
    return name or getattr(config, "kv_connector", None)

"""vllm-kvx: KV policies for long prompts inside stock vLLM.

In Python a policy is a name or made of methods, whose `str` is the name:

    LLM(MODEL, additional_config={"kv_policy": str(SnapKV(kv_rate=0.2))})
    str(KVPolicy.of([Speed(24), FIER(2048)]))  # "speed-24+fier-2048"

`parse_policy` reads a name. Both raise `PolicyError` for what is outside its limits.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_kvx.policy.methods.baselines.gemfilter import GemFilter
    from vllm_kvx.policy.methods.baselines.knorm import Knorm
    from vllm_kvx.policy.methods.baselines.pyramidkv import PyramidKV
    from vllm_kvx.policy.methods.baselines.quest import Quest
    from vllm_kvx.policy.methods.baselines.selfonly import SelfOnly
    from vllm_kvx.policy.methods.baselines.streamingllm import StreamingLLM
    from vllm_kvx.policy.methods.baselines.swiftkv import SwiftKV
    from vllm_kvx.policy.methods.criticalkv import CriticalKV
    from vllm_kvx.policy.methods.fastkv import FastKV
    from vllm_kvx.policy.methods.fier import FIER
    from vllm_kvx.policy.methods.snapkv import SnapKV
    from vllm_kvx.policy.methods.speed import Speed
    from vllm_kvx.policy.methods.structkv import StructKV
    from vllm_kvx.policy.parameters import PolicyError
    from vllm_kvx.policy.policy import KVPolicy
    from vllm_kvx.policy.spec import parse_policy

__version__ = "0.1.0"

__all__ = [
    "FIER",
    "CriticalKV",
    "FastKV",
    "GemFilter",
    "KVPolicy",
    "Knorm",
    "PolicyError",
    "PyramidKV",
    "Quest",
    "SelfOnly",
    "SnapKV",
    "Speed",
    "StreamingLLM",
    "StructKV",
    "SwiftKV",
    "__version__",
    "parse_policy",
]

_MODULES = {"PolicyError": "parameters", "KVPolicy": "policy", "parse_policy": "spec"}
_BASELINES = ("GemFilter", "Knorm", "PyramidKV", "Quest", "SelfOnly", "StreamingLLM", "SwiftKV")


def __getattr__(name: str) -> Any:
    # Not before it is asked for: a stock server loads the plugin, and nothing of policies.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    folder = "methods.baselines" if name in _BASELINES else "methods"
    module = _MODULES.get(name, f"{folder}.{name.lower()}")
    return getattr(import_module(f"{__name__}.policy.{module}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Every method. A new one is its file and a row here."""

from vllm_kvx.policy.axes import Method
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

# Messages list them in this order.
_TABLE: tuple[type[Method], ...] = (
    Speed,
    FastKV,
    StructKV,
    SnapKV,
    PyramidKV,
    CriticalKV,
    Knorm,
    StreamingLLM,
    GemFilter,
    SwiftKV,
    SelfOnly,
    FIER,
    Quest,
)
METHODS: dict[str, type[Method]] = {method.name: method for method in _TABLE}

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

# Each with whether this version serves it; messages list them in this order.
_TABLE: tuple[tuple[type[Method], bool], ...] = (
    (Speed, True),
    (FastKV, True),
    (StructKV, True),
    (SnapKV, True),
    (PyramidKV, True),
    (CriticalKV, True),
    (Knorm, True),
    (StreamingLLM, True),
    (GemFilter, True),
    (SwiftKV, True),
    (SelfOnly, True),
    (FIER, True),
    (Quest, True),
)
METHODS: dict[str, type[Method]] = {method.name: method for method, _ in _TABLE}
AVAILABLE: frozenset[str] = frozenset({"full", *(m.name for m, served in _TABLE if served)})

"""What a server says of its policies' answers: what an evaluation found, or that there was none."""

from collections.abc import Sequence
from typing import Any

from vllm_kvx.policy.cache_dtype import at_dtype, dtype_name
from vllm_kvx.policy.policy import KVPolicy
from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.records import evaluation as records
from vllm_kvx.records import recommendation
from vllm_kvx.records.model_key import ModelIdentity


class EvaluationNotice:
    """What evaluations found of policies on one model, whose key is `model_key`."""

    def __init__(self, identity: ModelIdentity) -> None:
        self._model, self._dtype = identity.path, identity.kv_cache_dtype
        self.model_key = identity.key_at_start
        self._recommendation = recommendation.load(self.model_key, dtype_name(self._dtype))

    def lines(self, policies: Sequence[KVPolicy]) -> list[tuple[str, bool]]:
        """A line for the log on each policy that may lose answers, and whether it was measured.

        `full` is among them only over a quantized KV cache.
        """
        lossy = [policy for policy in dict.fromkeys(policies) if self.is_lossy(policy)]
        found = [(policy, self._load(policy)) for policy in lossy]
        return [(self._line(policy, record), record is not None) for policy, record in found]

    def is_lossy(self, policy: KVPolicy) -> bool:
        """Whether answers under the policy may differ from the model's own."""
        return not policy.is_full or bool(at_dtype(self._dtype))

    def name(self, policy: KVPolicy) -> str:
        """What `vllm-kvx evaluate --policies` calls it: with the KV cache dtype."""
        return f"{policy}{at_dtype(self._dtype)}"

    def as_json(self, policy: KVPolicy) -> dict[str, Any]:
        """What ``GET /v1/kv_policy`` says of a policy: its record, and the sentence of the log."""
        found = self._load(policy)
        return {
            "measured": found is not None,
            "says": self._line(policy, found),
            **(found or {}),
        }

    def _load(self, policy: KVPolicy) -> dict[str, Any] | None:
        return records.load(self.model_key, policy, self._dtype) or self._recommended(policy)

    def _recommended(self, policy: KVPolicy) -> dict[str, Any] | None:
        """What `vllm-kvx recommend` found of a policy, as an evaluation's record has it."""
        record = self._recommendation
        if record is None:
            return None
        for row in record.rows:
            if records.canonical(parse_policy(row.policy)) == records.canonical(policy):
                facts = {"n": row.n, "lengths": {}, "tasks": list(record.tasks)}
                full = row.right / row.n
                return {"of_full": list(row.kept), "full": full, "date": record.date, **facts}
        return None

    def _line(self, policy: KVPolicy, found: dict[str, Any] | None) -> str:
        return records.line(policy, self._model, found, self._dtype)

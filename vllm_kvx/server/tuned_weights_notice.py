"""What a server says of its weights: for which policy they were tuned, and whether it runs that."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from vllm_kvx.errors import ToolError
from vllm_kvx.policy.axes import Propagate
from vllm_kvx.policy.policy import KVPolicy
from vllm_kvx.policy.spec import servable
from vllm_kvx.records.model_key import ModelIdentity
from vllm_kvx.records.tuned_weights import FILE, TunedRecord, read


class TunedWeightsNotice:
    """The record of a model's weights, as far as it lies beside them; nothing is downloaded."""

    def __init__(self, identity: ModelIdentity, num_layers: int) -> None:
        """num_layers: the model's decoder layers."""
        self._model, self._revision = identity.path, identity.revision
        self._layers = num_layers
        self.record: TunedRecord | None = None
        # Why a record that is there says nothing.
        self._problem = ""
        directory = identity.directory
        if directory is None:
            return
        try:
            record = read(directory)
        except ToolError as error:
            self._problem = str(error)
            return
        if record is not None and record.layers != self._layers:
            self._problem = (
                f"{directory / FILE} is of a model of {record.layers} layers, and this one has "
                f"{self._layers}: delete it, or serve the model that it came with"
            )
            return
        self.record = record

    def lines(self, policies: Sequence[KVPolicy]) -> list[tuple[str, bool]]:
        """Lines for the log, and whether each says that all is well; `policies` is not empty."""
        found: list[tuple[str, bool]] = []
        served, record = policies[0], self.record
        if self._problem:
            problem = f"ignoring what these weights were tuned for: {self._problem}."
            found.append((f"{served}: {problem}", False))
        # Policies that propagate alike share a line.
        methods: dict[Propagate, KVPolicy] = {}
        for policy in policies:
            if (method := self._tunable(policy)) is not None:
                methods.setdefault(method, policy)
        found += [self._line(policy, method) for method, policy in methods.items()]
        if record is not None and not methods:
            tuned = f"these weights were tuned for {record.policy} ({record.says()})"
            found.append((f"{served}: {tuned}: --kv-policy {record.policy} serves them so.", True))
        return found

    def as_json(self) -> dict[str, Any] | None:
        """What ``GET /v1/kv_policy`` says of the weights: their record in short, or None."""
        if self.record is None:
            return None
        names = ("policy", "original", "method", "loss", "agreement", "date")
        return {name: getattr(self.record, name) for name in names}

    def matches(self, policies: Iterable[KVPolicy]) -> dict[str, bool]:
        """Whether the weights were tuned for just that, by name of the policies that need it."""
        methods = {str(policy): self._tunable(policy) for policy in policies}
        return {
            name: self._untuned(method) is None
            for name, method in methods.items()
            if method is not None
        }

    def _tunable(self, policy: KVPolicy) -> Propagate | None:
        """The method of `policy` that needs tuned weights; None if any weights do."""
        method = policy.propagate
        return method if method is not None and method.untuned(self._layers) else None

    def _untuned(self, method: Propagate) -> str | None:
        tuned = None if self.record is None else self.record.propagate
        return method.untuned(self._layers, tuned)

    def _line(self, policy: KVPolicy, method: Propagate) -> tuple[str, bool]:
        reason, record = self._untuned(method), self.record
        if record is not None and reason is None:
            return f"{policy}: weights tuned for {record.policy} ({record.says()}).", True
        command = f"`{self._command(method)}`, then `vllm serve DIR --kv-policy {servable(policy)}`"
        if record is not None:
            return (
                f"{policy}: weights tuned for {record.policy}, not for {method}: {reason}. Answers "
                f"can be lost. Use {record.policy} in the place of {method}, or tune for it: "
                f"{command}.",
                False,
            )
        return f"{policy}: {reason}.{self._elsewhere()} Tune them: {command}.", False

    def _command(self, method: Propagate) -> str:
        """The command that tunes the model for `method`."""
        defaults = type(method)(**{key: getattr(method, key) for key in method.mandatory()})
        options = [
            f"--{key} {value}"
            for key, value in method.parameters().items()
            if key == method.number or value != defaults.parameters().get(key)
        ]
        return f"vllm-kvx tune-{method.name} {self._model} {' '.join(options)} --out DIR"

    def _elsewhere(self) -> str:
        """Where else a record may be: vLLM downloads weights, and no record."""
        if self._problem or Path(self._model).is_dir():
            return ""
        revision = f" --revision {self._revision}" if self._revision else ""
        return (
            f" If these were tuned, fetch their record: `hf download {self._model} {FILE}"
            f"{revision}`."
        )

"""The record of a tuned checkpoint: for which policy its weights were tuned, and how well it went.

It lies beside the weights, so it goes where they go, and servers read it at start.
"""

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from vllm_kvx.errors import ToolError
from vllm_kvx.policy.axes import Propagate
from vllm_kvx.policy.parameters import PolicyError
from vllm_kvx.policy.spec import parse_policy

FILE = "kvx_tuned.json"


class Agreement(TypedDict):
    """How like the full-depth original a model under the policy predicts held-out answers.

    kl: nats per answer token, from the original's distribution. greedy: share of answer tokens, 0
    to 1, for which both have the same likeliest token. tokens: answer tokens that were compared.
    """

    kl: float
    greedy: float
    tokens: int


class Agreements(TypedDict):
    """The agreement of the original weights, and of the tuned ones; `full_depth` is the tuned ones'
    without the cut, which older records lack."""

    before: Agreement
    after: Agreement
    full_depth: NotRequired[Agreement]


@dataclass(frozen=True)
class TunedRecord:
    """What ``kvx_tuned.json`` holds.

    policy: the policy that the weights were tuned for, which propagates by position; it becomes its
        canonical name.
    original: the model that was tuned, a name or a directory.
    layers: its decoder layers.
    method: which weights were tuned: `lora` or `full`.
    loss: what was minimised, in words that complete "tuned by ...": `self-distillation`.
    data, training: the examples and the settings of the run.
    agreement: on examples held out from the run.
    versions: of the packages, by name.
    command, date: the command line, and when it ended, as ISO 8601.

    Raises ToolError for a field that is not so.
    """

    policy: str
    original: str
    layers: int
    method: str
    loss: str
    data: Mapping[str, Any]
    training: Mapping[str, Any]
    agreement: Agreements
    versions: Mapping[str, str]
    command: str
    date: str

    def __post_init__(self) -> None:
        for name in ("policy", "original", "method", "loss", "command", "date"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ToolError(f"{name} must be a text, got {getattr(self, name)!r}")
        for name in ("data", "training", "agreement", "versions"):
            if not isinstance(getattr(self, name), Mapping):
                raise ToolError(f"{name} must be a JSON object, got {getattr(self, name)!r}")
        if type(self.layers) is not int:
            raise ToolError(f"layers must be a number of layers, got {self.layers!r}")
        _check_agreement(self.agreement)
        object.__setattr__(self, "policy", str(_tunable(self.policy, self.layers)))

    @property
    def propagate(self) -> Propagate:
        """The method that the weights were tuned for."""
        return _tunable(self.policy, self.layers)

    def says(self) -> str:
        """How the weights were tuned and how well that went, in a few words for a log."""
        after = self.agreement["after"]
        return (
            f"by {self.loss} of {self.original}, held-out agreement {100 * after['greedy']:.1f}% "
            f"of tokens, KL {after['kl']:.2g}"
        )

    def write(self, directory: Path | str) -> Path:
        """Stores the record in a checkpoint's directory, which is made; returns its file.

        Raises:
            ToolError: it cannot be written, or `data` or `training` hold what JSON does not.
        """
        path = Path(directory) / FILE
        try:
            text = json.dumps(dataclasses.asdict(self), indent=2, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ToolError(f"{FILE} cannot hold this record: {error}") from error
        # Renamed when complete: a server that starts meanwhile reads no half of it.
        partial = path.with_suffix(f".{os.getpid()}.partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(text + "\n", encoding="utf-8")
            partial.replace(path)
        except OSError as error:
            raise ToolError(f"cannot write {path}: {error.strerror}") from error
        return path


def read(directory: Path | str) -> TunedRecord | None:
    """The record of the checkpoint in `directory`; None if there is none.

    Fields that a later version may have added are left out.

    Raises:
        ToolError: there is one, and it cannot be read.
    """
    path = Path(directory) / FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ToolError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(found, dict):
        raise _damaged(path, "it is not a JSON object")
    names = [field.name for field in dataclasses.fields(TunedRecord)]
    if missing := [name for name in names if name not in found]:
        raise _damaged(path, f"it has no {', '.join(missing)}")
    try:
        return TunedRecord(**{name: found[name] for name in names})
    except ToolError as error:
        raise _damaged(path, str(error)) from error


def _tunable(name: str, layers: int) -> Propagate:
    """The one method of the policy `name`, for which weights of so many layers can be tuned."""
    try:
        policy = parse_policy(name)
        policy.check_model(layers)
    except PolicyError as error:
        raise ToolError(f"policy: {error}") from error
    propagate = policy.propagate
    if propagate is None or policy.parts != (propagate,) or propagate.untuned(layers) is None:
        raise ToolError(f"policy: weights are tuned for speed-K alone, got {policy}")
    return propagate


def _check_agreement(agreement: Mapping[str, Any]) -> None:
    for when in ("before", "after"):
        found = agreement.get(when)
        if not isinstance(found, Mapping):
            raise ToolError(f"agreement must have before and after, got {agreement!r}")
        for name in ("kl", "greedy"):
            value: Any = found.get(name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not math.isfinite(value):
                raise ToolError(f"agreement: {name} {when} must be a number, got {value!r}")
        if not 0 <= found["greedy"] <= 1:
            raise ToolError(f"agreement: greedy {when} must be a share, got {found['greedy']!r}")
        tokens = found.get("tokens")
        if type(tokens) is not int or tokens < 1:
            raise ToolError(f"agreement: tokens {when} must be a count, got {tokens!r}")


def _damaged(path: Path, problem: str) -> ToolError:
    return ToolError(
        f"{path} is damaged: {problem}. Copy it again from where the weights came from, tune "
        "again, or delete it; without it the weights count as not tuned"
    )

"""A policy: at most one answer on each axis."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from vllm_kvx.policy.axes import (
    AXES,
    Method,
    Propagate,
    Retain,
    Retrieve,
    ScoreSpec,
    Selection,
    SharedPrefix,
)
from vllm_kvx.policy.parameters import PolicyError, Value
from vllm_kvx.policy.windows import Windows


@dataclass(frozen=True)
class KVPolicy:
    """At most one answer to each question about prompt tokens; with none it is `full`.

    A method that answers two axes is the same object on both. `str(policy)` is the canonical name,
    which parses back to an equal policy. Raises PolicyError where a method stands on an axis that
    it does not answer, or is missing from one that it does.

    windows: of the model that it runs on, whatever the policy's name; None where no layer slides.
    """

    propagate: Propagate | None = None
    retain: Retain | None = None
    retrieve: Retrieve | None = None
    windows: Windows | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for axis in AXES:
            part = getattr(self, axis)
            if part is not None and axis not in part.axes:
                raise PolicyError(f"{part} does not answer {axis}")
        _check_once(self.parts)
        for part in self.parts:
            for axis in part.axes:
                if getattr(self, axis) != part:
                    raise PolicyError(f"{part} answers {axis} too: give it there as well")

    @classmethod
    def of(cls, parts: Iterable[Method]) -> "KVPolicy":
        """The policy made of `parts`; PolicyError if two answer one axis or are one method.

        A part whose rates are all 1 answers none and leaves no trace: it is `full`.
        """
        answers: dict[str, Method] = {}
        parts = tuple(parts)
        for part in parts:
            for axis in part.axes:
                if axis in answers:
                    raise PolicyError(
                        f"two answers on the {axis} axis, {answers[axis]} and {part}: keep one"
                    )
                answers[axis] = part
        _check_once(parts)
        return cls(**answers)  # type: ignore[arg-type]

    @property
    def parts(self) -> tuple[Method, ...]:
        """The methods in the order of their axes, each one once."""
        return tuple(dict.fromkeys(m for a in AXES if (m := getattr(self, a)) is not None))

    @property
    def is_full(self) -> bool:
        """True if nothing is spent less: stock vLLM."""
        return not self.parts

    @property
    def is_lossy_decode(self) -> bool:
        """True if decode tokens attend to less than what prefill computed (retain, retrieve)."""
        return self.retain is not None or self.retrieve is not None

    @property
    def keeps_prompts(self) -> bool:
        """True if a prompt has the entries of all its tokens, in all layers, to the end."""
        return self.retain is None and self.propagate is None

    def __str__(self) -> str:
        return self._name

    @cached_property
    def _name(self) -> str:
        # Written once: the scheduler counts by name, under drafts each request in each step.
        return "+".join(map(str, self.parts)) or "full"

    def parameters(self) -> dict[str, dict[str, Value]]:
        """The method's name and every parameter, by answered axis; fit for JSON."""
        answers = {axis: getattr(self, axis) for axis in AXES}
        return {a: {"method": m.name, **m.parameters()} for a, m in answers.items() if m}

    def check_model(self, num_layers: int) -> None:
        """Raise PolicyError, with the values to use, if a model of `num_layers` cannot run it."""
        for part in self.parts:
            part.check_model(num_layers)

    def check_length(self, prompt_len: int, max_model_len: int) -> None:
        """Raise PolicyError unless what is drafted behind a prompt fits into the context, too."""
        drafted = self.num_drafted(prompt_len)
        if drafted and prompt_len + drafted > max_model_len:
            raise PolicyError(
                f"{self} drafts {drafted} tokens behind a prompt, and this one of {prompt_len} "
                f"leaves room for {max_model_len - prompt_len} (max_model_len {max_model_len}): "
                f"shorten the prompt to {max_model_len - drafted} tokens, or leave out lookahead="
            )

    def check_composition(self) -> None:
        """Raise PolicyError if its methods cannot work together."""
        propagate, retain = self.propagate, self.retain
        for part in self.parts:
            if getattr(part, "after", 0) and "retain" not in part.axes:
                raise PolicyError(
                    f"{part} retains all, and after= says what retention waits for: write after= "
                    "in the method that retains, lower kv_rate, or leave it out"
                )
        beside: Method | None = None
        if self.num_generated and propagate is not None and not propagate.selects_early:
            beside, does, key = propagate, "waits for generated tokens", "after="
        if self.lookahead and len(self.parts) > 1:
            beside = next(part for part in self.parts if part is not retain)
            does, key = "drafts tokens", "lookahead="
        if beside is not None:
            raise PolicyError(
                f"{retain} {does}, and was never tested beside {beside}: leave out {key}, or "
                "the other method"
            )
        if self.retrieve is not None and self.retrieve.reuse_layers > 1 and len(self.parts) > 1:
            raise PolicyError(
                f"{self.retrieve} reads in a layer what another one chose, and beside another "
                "method layers may hold other tokens: leave out reuse_layers=, or the other method"
            )
        if propagate is None:
            return
        if retain is not None:
            other: Method = retain
            if other is not propagate:
                propagate.check_retain(retain)
        if self.retrieve is not None:
            propagate.check_retrieve(self.retrieve)

    @property
    def projects_from(self) -> int | None:
        """The first layer whose prompt entries are projected from below; None if there is none."""
        return None if self.propagate is None else self.propagate.projects_from

    @property
    def shared_prefix(self) -> SharedPrefix | None:
        """How requests that skip layers by position share a prefix; None if they cannot."""
        return None if self.propagate is None else self.propagate.shared_prefix

    @property
    def num_generated(self) -> int:
        """Generated tokens that retention waits for; 0 where entries go when the prompt is in."""
        by = None if self.retain is None else self.retain.keeps_by
        return by.generated if isinstance(by, ScoreSpec) else 0

    @property
    def lookahead(self) -> int:
        """Tokens that retention drafts behind a prompt of which it drops entries."""
        by = None if self.retain is None else self.retain.keeps_by
        return by.drafted if isinstance(by, ScoreSpec) else 0

    def num_drafted(self, prompt_len: int) -> int:
        """The same behind a prompt of `prompt_len` tokens; 0 where all of it stays."""
        return 0 if self.retain is None else self.retain.num_drafted(prompt_len)

    def selection(self, prompt_len: int, num_layers: int) -> Selection | None:
        """Which tokens of such a prompt are chosen by score; None if it is not by score."""
        if self.propagate is None:
            return None
        found = self.propagate.selection(prompt_len, num_layers)
        if found is None or self.windows is None:
            return found
        return self.windows.widened(found, prompt_len)


def _check_once(parts: Sequence[Method]) -> None:
    names = [part.name for part in parts]
    for name in names:
        if names.count(name) > 1:
            raise PolicyError(f"{name} is given twice: put all its parameters in one place")


def with_retrieval(policy: KVPolicy) -> KVPolicy:
    """`policy` with retrieval on at every length, where it is left to the machine.

    An evaluation asks what retrieval keeps, not from where on it pays.
    """
    part = policy.retrieve
    if part is None or part.dense_below != "auto":
        return policy
    always = type(part)(**{**part.parameters(), "dense_below": 0})
    return KVPolicy.of([always if p is part else p for p in policy.parts])

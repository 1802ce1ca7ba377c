"""What was measured for a server's model, as ``additional_config`` carries it: layers, mostly."""

from dataclasses import dataclass, replace
from typing import Any

from vllm_kvx.policy.axes import WINDOW_REDUCTIONS, Method
from vllm_kvx.policy.measurement import Measurement
from vllm_kvx.policy.methods.table import METHODS
from vllm_kvx.policy.parameters import allows

MEASURED_KEY = "kv_measured"
# The layers that methods leave to measurement.
MEASUREMENTS: tuple[Measurement, ...] = tuple(
    method.to_measure for method in METHODS.values() if method.to_measure is not None
)


@dataclass(frozen=True)
class Measured:
    """Layers that stand for words in a policy's name, as far as they are known for this model.

    layers: by the parameter whose word a layer stands for.
    reductions: by parameter, what was measured to be better there than the method's default.
    rates: by parameter, the share of the tokens that a layer was measured with, if not the usual.
    """

    layers: tuple[tuple[str, int], ...] = ()
    reductions: tuple[tuple[str, str], ...] = ()
    rates: tuple[tuple[str, float], ...] = ()

    def put_into(self, part: Method) -> Method:
        """`part` with the layer in the place of the word, if it is known.

        With it come the reduction that it was measured with, in the place of the default, and the
        rate, where none is given.
        """
        wanted = part.to_measure
        if wanted is None or getattr(part, wanted.parameter) != wanted.word:
            return part
        layer = dict(self.layers).get(wanted.parameter)
        if layer is None:
            return part
        found: dict[str, Any] = {wanted.parameter: layer}
        reduction = dict(self.reductions).get(wanted.reduction)
        if reduction is not None and wanted.chooses_reduction(part):
            found[wanted.reduction] = reduction
        rate = dict(self.rates).get(wanted.rate)
        if rate is not None and wanted.leaves_rate(part):
            found[wanted.rate] = rate
        return replace(part, **found)

    def as_dict(self) -> dict[str, int | None]:
        """The layer of every parameter that can be measured; None where it is not known."""
        return {m.parameter: dict(self.layers).get(m.parameter) for m in MEASUREMENTS}

    def as_config(self) -> dict[str, dict[str, int | float | str]]:
        """The keys of ``additional_config`` that `of` makes this from."""
        values: dict[str, int | float | str] = {
            **dict(self.layers),
            **dict(self.reductions),
            **dict(self.rates),
        }
        return {MEASURED_KEY: values} if values else {}

    def as_status(self) -> dict[str, int | float | str]:
        """What ``GET /v1/kv_policy`` calls ``measured_config``: flat, each name after ``kv_``."""
        values = self.as_config().get(MEASURED_KEY, {})
        return {f"kv_{name}": value for name, value in values.items()}

    @classmethod
    def of_status(cls, status: dict[str, Any]) -> "Measured":
        """What `as_status` told; raises ValueError as `of` does."""
        return cls.of({MEASURED_KEY: {k.removeprefix("kv_"): v for k, v in status.items()}})

    @classmethod
    def of(cls, config: dict[str, Any]) -> "Measured":
        """What ``additional_config`` says was measured.

        Raises:
            ValueError: a layer that is no number, or a parameter that nothing is measured for.
        """
        values = config.get(MEASURED_KEY)
        if values is None:
            return cls()
        layers = {m.parameter for m in MEASUREMENTS}
        reductions = {m.reduction for m in MEASUREMENTS if m.reduction}
        rates = {m.rate: method for method in METHODS.values() if (m := method.to_measure)}
        names = layers | reductions | {name for name in rates if name}
        known = f"an object of {', '.join(sorted(names))}, which the server sets"
        if not isinstance(values, dict) or not set(values) <= names:
            raise ValueError(f"{MEASURED_KEY} must be {known}, got {values!r}")
        for name, value in values.items():
            if name in layers and (type(value) is not int or value < 0):
                raise ValueError(f"{MEASURED_KEY}: {name} must be a layer's number, got {value!r}")
            if name in reductions and value not in WINDOW_REDUCTIONS:
                raise ValueError(
                    f"{MEASURED_KEY}: {name} must be one of {', '.join(WINDOW_REDUCTIONS)}, "
                    f"got {value!r}"
                )
            if name in rates and not allows(rates[name], name, value):
                raise ValueError(f"{MEASURED_KEY}: {name} must be in (0, 1], got {value!r}")
        return cls(
            tuple((name, values[name]) for name in sorted(layers & set(values))),
            tuple((name, values[name]) for name in sorted(reductions & set(values))),
            tuple((name, values[name]) for name in sorted(rates.keys() & set(values))),
        )

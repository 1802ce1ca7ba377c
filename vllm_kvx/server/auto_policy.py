"""Chooses the policy of a server that was started with `--kv-policy auto`.

The choice is made once, where the server's configuration is finished. It goes into
``additional_config`` in the place of `auto`, so that everything behind it reads a plain name, and
what was asked for and why goes beside it, under ``kv_auto``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_kvx.config.settings import AUTO_KEY, LAYOUT_KEY
from vllm_kvx.config.spelling import POLICY_KEY
from vllm_kvx.policy.auto import AUTO, DEFAULT_KEEP, FALLBACK, Auto, is_auto, parse_auto
from vllm_kvx.policy.cache_dtype import FULL, dtype_name
from vllm_kvx.policy.parameters import PolicyError
from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.records.model_key import ModelIdentity, model_name
from vllm_kvx.records.recommendation import Recommendation, Row, load

MEASURED, NOT_MEASURED = "measured", "not measured"

# Why a policy cannot run in a server's configuration; None if it can.
WhyNot = Callable[[str], str | None]


@dataclass(frozen=True)
class Choice:
    """What a server runs for `auto`.

    named: what was asked for. policy: what is served. source: `measured`, or `not measured` where
    the policy stands in for a measurement. says: why, in a sentence for the log.
    keep: the share of answers that was asked for. kept: the share that the policy kept of `full`'s
    right answers, and the ends of its interval; None where that is not known. date: of the record.
    """

    named: str
    policy: str
    source: str
    says: str
    keep: float
    kept: tuple[float, float, float] | None = None
    date: str | None = None

    def as_json(self) -> dict[str, Any]:
        """What ``additional_config`` and ``GET /v1/kv_policy`` have of it."""
        kept = None if self.kept is None else list(self.kept)
        facts = {"named": self.named, "policy": self.policy, "source": self.source}
        return {**facts, "keep": self.keep, "kept": kept, "date": self.date, "says": self.says}


def asks_for_auto(config: Any) -> bool:
    """Whether the policy in ``additional_config`` is `auto`, for which none was chosen yet."""
    return isinstance(config, Mapping) and is_auto(config.get(POLICY_KEY))


def with_choice(config: Mapping[str, Any], identity: ModelIdentity, why_not: WhyNot) -> Any:
    """`config` with the chosen policy in the place of `auto`, and the choice beside it.

    Raises:
        PolicyError: `auto` is malformed.
    """
    chosen = choose(parse_auto(config[POLICY_KEY]), identity, why_not)
    return {**config, POLICY_KEY: chosen.policy, AUTO_KEY: chosen.as_json()}


def check_choice(config: Mapping[str, Any]) -> None:
    """Raise ValueError if ``kv_auto`` in ``additional_config`` is not as `with_choice` makes it."""
    choice = config.get(AUTO_KEY)
    if choice is None:
        return
    known = Choice.__dataclass_fields__
    if (
        not isinstance(choice, dict)
        or set(choice) != set(known)
        or (choice["policy"] != config.get(POLICY_KEY))
    ):
        raise ValueError(
            f"{AUTO_KEY} is what a server sets where its policy is {AUTO}: remove it, and set "
            f"{POLICY_KEY} to {AUTO}"
        )


def as_judged(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """`config` as a candidate is judged by: without what `kv_layout` leaves to measurement.

    Whether such a layer can be found is seen once the policy is chosen.
    """
    judged = {**config, POLICY_KEY: name}
    layout = config.get(LAYOUT_KEY)
    if isinstance(layout, list | tuple):
        judged[LAYOUT_KEY] = [each for each in layout if not _left_to_measurement(each)]
    return judged


def _left_to_measurement(name: Any) -> bool:
    try:
        return any(part.unmeasured is not None for part in parse_policy(name).parts)
    except (PolicyError, TypeError):
        return False


def choose(auto: Auto, identity: ModelIdentity, why_not: WhyNot) -> Choice:
    """The policy for a model: the best that was measured and can run, else `FALLBACK`, else `full`.

    The best is the one that gains most, of those that were shown to keep the share that `auto`
    names, or that the record was made for.
    """
    key = identity.key_at_start
    record = load(key, dtype_name(identity.kv_cache_dtype))
    if record is not None and key == identity.config_key and not _is_of(record, identity):
        # Without weights a key is that of every model of this shape.
        record = None
    keep = auto.keep or (record.keep if record is not None else DEFAULT_KEEP)
    if record is None:
        return _stand_in(auto, keep, _not_measured(identity, auto, key), why_not)
    passed_over: list[str] = []
    for row in record.that_keep(keep):
        problem = why_not(row.policy)
        if problem is None:
            says = _of_row(row, record)
            if passed_over:
                says += f". Passed over, since this server cannot run it: {'; '.join(passed_over)}"
            return Choice(str(auto), row.policy, MEASURED, says, keep, row.kept, str(record.date))
        passed_over.append(f"{row.policy} ({problem})")
    why = f"no policy was shown to keep {keep:.1%} of this model's answers ({record.date[:10]})"
    if passed_over:
        why = f"this server cannot run what was shown to keep {keep:.1%}: {'; '.join(passed_over)}"
    return _stand_in(auto, keep, why, why_not)


def _stand_in(auto: Auto, keep: float, why: str, why_not: WhyNot) -> Choice:
    problem = why_not(FALLBACK)
    if problem is None:
        return Choice(str(auto), FALLBACK, NOT_MEASURED, why, keep)
    says = f"{why}; and this server cannot run {FALLBACK} ({problem})"
    return Choice(str(auto), FULL, NOT_MEASURED, says, keep)


def _of_row(row: Row, record: Recommendation) -> str:
    value, low, high = (100 * share for share in row.kept)
    return (
        f"kept {value:.1f}% [{low:.1f}-{high:.1f}] of this model's right answers ({row.n} prompts, "
        f"{record.date[:10]}), and gains {row.gains['requests']:.2f}x in requests/s for "
        f"{record.workload['input']:,} tokens in and {record.workload['output']:,} out, by count"
    )


def _is_of(record: Recommendation, identity: ModelIdentity) -> bool:
    """Whether a record is of the model of that name."""
    return record.model == model_name(identity.path)


def _not_measured(identity: ModelIdentity, auto: Auto, key: str) -> str:
    over = dtype_name(identity.kv_cache_dtype)
    what = f"this model over a KV cache of {over}" if over else "this model"
    command = _command(identity, auto)
    if key == identity.config_key:
        # A hub's model before its first start: a record goes by the weights.
        return f"nothing was measured of {what}, or its weights are not here yet: {command}"
    return f"nothing was measured of {what}: {command}"


def _command(identity: ModelIdentity, auto: Auto) -> str:
    """The command that measures, between backticks, which the log and doctor show."""
    keep = "" if auto.keep is None else f" --keep {auto.keep:g}"
    return f"`vllm-kvx recommend {identity.path}{keep}`"


def line_of(choice: Mapping[str, Any]) -> str:
    """A choice in a line for the log; as ``additional_config`` has it."""
    return f"KV policy {choice['named']}: serving {choice['policy']}: {choice['says']}."

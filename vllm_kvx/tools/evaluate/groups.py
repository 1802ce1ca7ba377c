"""Which policies one engine can answer for: its layout is fixed when it starts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import get_args

from vllm_kvx.policy.cache_dtype import (
    KV_CACHE_DTYPES,
    SLIDING_WINDOW,
    dtype_name,
    is_dtype_name,
    split_dtype,
    split_skipped,
    why_not_over,
    with_skipped,
)
from vllm_kvx.policy.layout import layout_of
from vllm_kvx.policy.parameters import PolicyError
from vllm_kvx.policy.policy import KVPolicy
from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.server.measured_layers import check_alike
from vllm_kvx.tools.evaluate.rows import FULL_ROW, Row

# Each stage has block tables of its own: many of them fit no KV group size well.
MAX_STAGES = 4


def read_policies(
    names: Sequence[str], num_layers: int, slides: bool = False
) -> dict[Row, KVPolicy]:
    """The policies, by the rows that the user's names mean; `full` first, given or not.

    A name may end in a KV cache dtype, `fier-512@fp8`, which the policy here is without.
    slides: whether some of the model's layers slide over a window.

    Raises:
        PolicyError: one does not parse, is not served or cannot run on such a model or KV cache.
    """
    policies = {FULL_ROW: KVPolicy()}
    for name in names:
        plain, dtype = split_dtype(name)
        policy = parse_policy(plain)
        policy.check_composition()
        policy.check_model(num_layers)
        if "@" in name:
            _check_dtype(name, policy, dtype)
            _check_skipped(name, policy, num_layers, slides)
        row = Row(plain, dtype and (dtype_name(dtype) or dtype))
        policies.setdefault(row, policy)
    return policies


def _check_dtype(name: str, policy: KVPolicy, dtype: str | None) -> None:
    """Raise PolicyError unless the policy runs over such a KV cache; `full` does over vLLM's."""
    taken: tuple[str, ...] = KV_CACHE_DTYPES
    if dtype is not None and is_dtype_name(dtype):
        dtype, skipped = split_skipped(dtype)
        if skipped and not dtype_name(dtype):
            raise PolicyError(
                f"{name!r}: layers skip a quantized KV cache alone: write fp8 in the place of "
                f"{dtype}, or leave {'-'.join(skipped)} out"
            )
    if policy.is_full and dtype not in taken:
        from vllm.config.cache import CacheDType

        taken = get_args(CacheDType)
    taken = tuple(each for each in taken if each != "auto")
    if dtype not in taken:
        raise PolicyError(
            f"{name!r}: behind the @ stands a KV cache dtype of vLLM over which {policy} runs: "
            f"write one of {', '.join(taken)}, or one with the layers that it leaves as they are, "
            "such as fp8-skip-0-1"
        )
    if (why := why_not_over(dtype, policy)) is not None:
        raise PolicyError(f"{name!r}: {policy} {why}: write {split_dtype(name)[0]}@fp8")


def _check_skipped(name: str, policy: KVPolicy, num_layers: int, slides: bool) -> None:
    """Raise PolicyError unless the layers that a name's KV cache skips are the model's, each once.

    vLLM compares numbers as they are written: by `99` or `01` nothing is skipped. A server refuses
    the policies that are refused here, but only where its engine starts.
    """
    plain, dtype = split_dtype(name)
    quantized, skipped = split_skipped(dtype or "")
    if not skipped:
        return
    takes_windows = slides and policy.is_full
    numbers = {str(int(layer)) for layer in skipped if layer.isdigit() and int(layer) < num_layers}
    windows = {SLIDING_WINDOW} & set(skipped) if takes_windows else set()
    meant = numbers | windows
    if len(skipped) != len(meant) or set(skipped) != meant:
        more = f", or {SLIDING_WINDOW}" if takes_windows else ""
        raise PolicyError(
            f"{name!r}: behind skip- stand layers of this model, 0 to {num_layers - 1}{more}, each "
            f"once and without zeros before it: write {plain}@{with_skipped(quantized, meant)}"
        )
    layout = layout_of([_with_layers(policy, num_layers)], num_layers)
    if len(layout.stage_starts) > 1:
        why = "cuts layers into stages, whose pages must have one size"
    elif layout.lookahead:
        why = "has lookahead=, which was never tried over layers of two KV cache types"
    else:
        return
    raise PolicyError(f"{name!r}: {policy} {why}: write {plain}@{quantized}")


def grouped(policies: Mapping[Row, KVPolicy], num_layers: int) -> list[list[Row]]:
    """The rows, in groups that one engine serves; as few as make sense, in the order given."""
    groups: list[tuple[list[Row], list[KVPolicy]]] = []
    for row, policy in policies.items():
        for rows, members in groups:
            alike = rows[0].cache_dtype == row.cache_dtype
            if alike and _fit_together([*members, policy], num_layers):
                rows.append(row)
                members.append(policy)
                break
        else:
            groups.append(([row], [policy]))
    return [rows for rows, _ in groups]


def _measured_alike(policy: KVPolicy, other: KVPolicy) -> bool:
    """Whether one layer can stand for what both leave to measurement."""
    for part in policy.parts:
        for second in other.parts:
            wanted = part.unmeasured
            if wanted is None or type(second) is not type(part) or second.unmeasured is None:
                continue
            try:
                check_alike(part, second, wanted)
            except PolicyError:
                return False
    return True


def _fit_together(policies: Sequence[KVPolicy], num_layers: int) -> bool:
    *before, last = policies
    if not all(_measured_alike(last, policy) for policy in before):
        return False
    policies = [_with_layers(policy, num_layers) for policy in policies]
    try:
        layout = layout_of(policies, num_layers)
    except PolicyError:
        return False
    if len(layout.stage_starts) <= MAX_STAGES:
        return True
    # Those that need more share an engine with their like.
    return all(
        layout_of([policy], num_layers).stage_starts == layout.stage_starts for policy in policies
    )


def _with_layers(policy: KVPolicy, num_layers: int) -> KVPolicy:
    """`policy` with some layer where it is yet to be measured: only who shares it matters here."""
    parts = [
        part
        if (wanted := part.unmeasured) is None
        else replace(part, **{wanted.parameter: num_layers // 2})
        for part in policy.parts
    ]
    return KVPolicy.of(parts)

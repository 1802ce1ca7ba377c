"""Names of what is measured: `stock`, a policy, and either with a KV cache dtype, `stock@fp8`."""

from collections.abc import Iterable

from vllm_kvx.policy.spec import parse_policy, servable

STOCK = "stock"


def split_name(name: str) -> tuple[str | None, str | None]:
    """Policy and KV cache dtype of a name; None is stock's own.

    Raises:
        ValueError: a part is missing.
    """
    policy, at, dtype = name.partition("@")
    if not policy or (at and not dtype):
        raise ValueError(f"{name!r}: write {STOCK} or a policy, and maybe @ and a KV cache dtype")
    return (None if policy == STOCK else policy), (dtype or None)


def served(policy: str) -> str:
    """The name by which a server takes `policy`: a bare one's rates are written out."""
    return servable(parse_policy(policy))


def baseline_of(engines: Iterable[str]) -> str | None:
    """What gains of a file are over: `stock`, or the only stock there is; None without any."""
    stocks = [name for name in engines if split_name(name)[0] is None]
    return STOCK if STOCK in stocks else stocks[0] if len(stocks) == 1 else None


def parts_of(name: str) -> list[str]:
    """The names that a composed one is the product of; none if it is a single thing.

    `speed-24+fier-2048@fp8` is `speed-24`, `fier-2048` and `stock@fp8`.
    """
    policy, dtype = split_name(name)
    parts = policy.split("+") if policy else []
    if dtype:
        parts.append(f"{STOCK}@{dtype}")
    return parts if len(parts) > 1 else []


def file_name(name: str) -> str:
    """The name as a part of a file's name."""
    return name.replace(":", "_").replace("/", "_")

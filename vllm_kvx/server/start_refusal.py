"""A setting that a server refuses at start, and which of several are told."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# What several rows are about, whose ways out would overlap: see `told`.
NO_POLICY, MODEL, RANGES = "no policy runs", "model", "ranges of layers"
BACKEND, CACHE_DTYPE, RAY = "--attention-backend", "--kv-cache-dtype", "ray"
CONNECTOR, DRAFTS = "--kv-transfer-config", "--speculative-config"

# Attention backends of GPUs that run every policy.
ON_GPUS = "FLASH_ATTN, TRITON_ATTN"


class Refusal(NamedTuple):
    """A row of a table.

    applies: whether the configuration asks for it. reason: what it is and what to change.
    about: of rows about the same thing only one is told; empty for those by themselves.
    """

    applies: Callable[["VllmConfig"], Any]
    reason: str
    about: str = ""


def applying(table: Iterable[Refusal], vllm_config: "VllmConfig") -> list[Refusal]:
    """The rows of `table` that apply to a configuration."""
    return [row for row in table if row.applies(vllm_config)]


def told(rows: Sequence[Refusal]) -> list[str]:
    """The reasons of `rows`, so that one start shows them all, and none that another makes vain.

    Where no policy runs at all, nothing else is worth changing. Of rows about one setting the last
    is told: those of the narrower tables, which come later, leave fewer values.
    """
    if found := [row.reason for row in rows if row.about == NO_POLICY]:
        return found
    last = {row.about: row for row in rows}
    return [row.reason for row in rows if row.about in ("", MODEL) or last[row.about] is row]


def reasons(table: Iterable[Refusal], vllm_config: "VllmConfig") -> list[str]:
    """What is `told` of the rows of `table` that apply."""
    return told(applying(table, vllm_config))


def asked_backend(vllm_config: "VllmConfig") -> str | None:
    """The attention backend that was asked for, for full attention; None leaves it to vLLM."""
    config = vllm_config.attention_config
    backend = getattr(config, "backend_per_kind", {}).get("full_attention", config.backend)
    return None if backend is None else backend.name


def asked_connector(vllm_config: "VllmConfig") -> str | None:
    """The KV connector that was asked for, by `--kv-offloading-size` too."""
    transfer = vllm_config.kv_transfer_config
    return transfer.kv_connector if transfer else None

"""Operators: how they tile and copy, and their torch references in their place."""

from typing import Any

import pytest
import torch
from torch import Tensor


def copy_blocks_of(monkeypatch: pytest.MonkeyPatch, bytes_at_a_time: int) -> None:
    """Blocks are copied in pieces of this size."""
    from vllm_kvx.ops.prompt import move

    monkeypatch.setattr(move, "_COPY_BYTES", bytes_at_a_time)


def copy_states_of(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """Hidden states are copied in pieces of so many tokens."""
    from vllm_kvx.worker.prefill import prefix_states

    monkeypatch.setattr(prefix_states, "MOST_TOKENS", tokens)


def use_dense_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores and selects by the kernels' torch references: the engine around them is tested.

    Interpreted, the kernels take a second per prompt; tests/ops compares them, and engine tests
    without this run them.
    """
    from vllm_kvx.ops.prompt import attention_metrics as metrics
    from vllm_kvx.ops.prompt import key_norms, move, pool, saliency, select, two_stages, value_norms
    from vllm_kvx.scores import key_norm, value_weighted_attention, window_attention
    from vllm_kvx.worker.prefill import centrality, score_and_move

    def window_saliency(*args: Any, **options: Any) -> Tensor:
        sizes, scale = args[:-3], args[-1]
        return saliency.window_saliency_reference(*sizes, scale, **options)  # type: ignore[call-arg]

    def pool_per_kv_head(*args: Any) -> Tensor:
        *sizes, kernels, _, unpooled, reduction = args
        if unpooled is not None:
            ones = torch.ones_like(kernels)
            reduced = pool.pool_per_kv_head_reference(*sizes, ones, reduction)
            unpooled[:, : reduced.shape[1]] = reduced
        return pool.pool_per_kv_head_reference(*sizes, kernels, reduction)

    def select_kept(scores: Tensor, *args: Any, unpooled: Tensor | None = None) -> Tensor:
        kept = select.select_kept_reference(scores, *args[:4], unpooled)
        return torch.cat(kept, dim=1).int()

    def select_moves(
        scores: Tensor, *args: Any, unpooled: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        *sizes, offsets, total = args
        moves = select.select_moves_reference(scores, *sizes, unpooled)
        sources = torch.zeros(scores.shape[0], total, dtype=torch.int32)
        targets, counts = torch.zeros_like(sources), sources.new_zeros(len(scores), len(moves))
        for f, rows in enumerate(moves):
            for head, (source, target) in enumerate(rows):
                columns = slice(int(offsets[f]), int(offsets[f]) + len(source))
                sources[head, columns], targets[head, columns] = source.int(), target.int()
                counts[head, f] = len(source)
        return sources, targets, counts

    def move_entries(
        paged: Any,
        tables: Tensor,
        sources: Tensor,
        targets: Tensor,
        counts: Tensor,
        offsets: Tensor,
        _: int,
        target_tables: Tensor | None = None,
    ) -> None:
        moves = [
            [
                (sources[head, first : first + n].long(), targets[head, first : first + n].long())
                for head, n in enumerate(counts[:, f].tolist())
            ]
            for f, first in enumerate(offsets[: counts.shape[1]].tolist())
        ]
        move.move_entries_reference(paged, tables, moves, target_tables)

    def window_metrics(
        queries: Tensor,
        paged: Any,
        tables: Tensor,
        num_keys: Tensor,
        windows: Tensor,
        _: int,
        scale: float,
        **options: Any,
    ) -> Tensor:
        return metrics.window_metrics_reference(
            queries, paged, tables, num_keys, windows, scale, **options
        )

    def norms_of_values(*args: Any) -> Tensor:
        return value_norms.value_norms_reference(*args[:5])

    norms_of_values.__name__ = "value_norms"

    def key_scores(*args: Any) -> Tensor:
        return key_norms.key_scores_reference(*args[:4])

    def two_stage_scores(*args: Any, group: int) -> Tensor:
        return two_stages.two_stage_scores_reference(*args, group)

    kernels = (
        norms_of_values,
        key_scores,
        two_stage_scores,
        window_saliency,
        window_metrics,
        pool_per_kv_head,
        select_kept,
        select_moves,
        move_entries,
    )
    for replacement in kernels:
        for module in (
            window_attention,
            value_weighted_attention,
            key_norm,
            score_and_move,
            centrality,
        ):
            if hasattr(module, replacement.__name__):
                monkeypatch.setattr(module, replacement.__name__, replacement)


def tile_keys(monkeypatch: pytest.MonkeyPatch, keys: int, splits: int) -> None:
    """Window kernels take so many keys at once, in so many splits at the least and the most."""
    from vllm_kvx.ops.prompt import window_tiles

    monkeypatch.setattr(window_tiles, "_BLOCK_KEYS", {"cpu": keys, "cuda": keys})
    monkeypatch.setattr(window_tiles, "_SPLITS", (splits, splits))


def tile_window_rows(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """A tile of the window kernels has so many rows at most."""
    from vllm_kvx.ops.prompt import window_tiles

    monkeypatch.setattr(window_tiles, "_MAX_ROWS", rows)


def tile_metrics(monkeypatch: pytest.MonkeyPatch, keys: int) -> None:
    """The kernel that measures a row takes so many keys at once."""
    from vllm_kvx.ops.prompt import attention_metrics

    monkeypatch.setattr(attention_metrics, "_ROW_BLOCK", keys)


def tile_pool(monkeypatch: pytest.MonkeyPatch, keys: int) -> None:
    """The kernel that pools takes so many keys at once."""
    from vllm_kvx.ops.prompt import pool

    monkeypatch.setattr(pool, "_POOL_BLOCK", {"cpu": keys, "cuda": keys})


def tile_norms(monkeypatch: pytest.MonkeyPatch, keys: int) -> None:
    """The kernel that scores by key norms takes so many keys at once."""
    from vllm_kvx.ops.prompt import key_norms

    monkeypatch.setattr(key_norms, "_BLOCK_KEYS", {"cpu": keys, "cuda": keys})


def tile_value_norms(monkeypatch: pytest.MonkeyPatch, keys: int, out_bytes: int) -> None:
    """The kernel that measures values takes so many keys and bytes of a factor's rows."""
    from vllm_kvx.ops.prompt import value_norms

    monkeypatch.setattr(value_norms, "_BLOCK_KEYS", {"cpu": keys, "cuda": keys})
    monkeypatch.setattr(value_norms, "_BLOCK_OUT_BYTES", out_bytes)


def slice_chosen_rows(monkeypatch: pytest.MonkeyPatch, scores: int) -> None:
    """Attention of chosen rows in plain torch holds so many scores at once."""
    from vllm_kvx.ops.prompt import chosen_rows

    monkeypatch.setattr(chosen_rows, "_MOST_SCORES", scores)


def bound_metrics_scratch(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> list[int]:
    """The measured logits may take so many bytes; grows by requests x heads of each launch."""
    from vllm_kvx.ops.prompt import attention_metrics, metrics_scratch

    sizes: list[int] = []
    launch = attention_metrics._rows_metrics

    def counted(turn: Any, queries: Tensor, *rest: Any) -> None:
        sizes.append(queries.shape[0] * queries.shape[2])
        launch(turn, queries, *rest)

    monkeypatch.setattr(attention_metrics, "_rows_metrics", counted)
    monkeypatch.setattr(metrics_scratch, "SCRATCH_BYTES", num_bytes)
    return sizes


def retention_kernels() -> tuple[Any, ...]:
    """The Triton kernels that a retaining prompt launches."""
    from vllm_kvx.ops.prompt import key_norms, move, pool, saliency, select, window_tiles

    return (
        window_tiles.row_sums_kernel,
        saliency._window_sums_kernel,
        key_norms._key_scores_kernel,
        pool._pool_kernel,
        select._select_kernel,
        move._move_kernel,
    )


def find_nvcc() -> str:
    """The compiler that builds the CUDA operators."""
    from vllm_kvx.ops import build

    return build._find_nvcc()

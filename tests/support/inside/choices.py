"""Rules of choice, broken on purpose. They need the dense ops, whose scores may have any sign."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor


def keep_lowest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lowest scores are chosen in the place of the highest."""
    _change_scores(monkeypatch, _lowest_first)


def shift_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every KV head chooses by the scores of the head before it."""
    _change_scores(monkeypatch, lambda scores: scores.roll(1, dims=0))


def _lowest_first(scores: Tensor) -> Tensor:
    # What is read always has infinity, and has it still.
    return torch.where(scores.isinf(), scores, -scores)


def _change_scores(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor]) -> None:
    """Everything is chosen by `change` of its scores, (heads, n)."""

    def changed(select: Callable[..., Any]) -> Callable[..., Any]:
        def by_others(scores: Tensor, *args: Any, **further: Any) -> Any:
            # Further scores may break ties.
            others = {name: None if s is None else change(s) for name, s in further.items()}
            return select(change(scores), *args, **others)

        return by_others

    def changed_blocks(top_blocks: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda sums, **sizes: top_blocks(change(sums[None])[0], **sizes)

    _wrap_choices(monkeypatch, changed, changed_blocks)
    _wrap_retrieval(monkeypatch, change)


def drop_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt's last tokens go first, where they stay always; so does what is newest in decode."""
    from vllm_kvx.worker.prefill import score_and_move

    def last(scores: Tensor, ends: list[int], windows: list[int]) -> Tensor:
        scores = scores.clone()
        for end, window in zip(ends, windows, strict=True):
            scores[..., end - window : end] = -1.0
        return scores

    def without(select: Callable[..., Any]) -> Callable[..., Any]:
        def no_window(
            scores: Tensor,
            num_keys: Tensor,
            windows: Tensor,
            caps: Tensor,
            offsets: Tensor,
            *args: Any,
            **further: Any,
        ) -> Any:
            ends = (offsets[: len(num_keys)] + num_keys).tolist()
            worst = [
                None if s is None else last(s, ends, windows.tolist())
                for s in (scores, *further.values())
            ]
            return select(
                worst[0],
                num_keys,
                torch.zeros_like(windows),
                caps,
                offsets,
                *args,
                **dict(zip(further, worst[1:], strict=True)),
            )

        return no_window

    def blocks_without(top_blocks: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def no_window(sums: Tensor, *, window: int, **sizes: int) -> Tensor:
            return top_blocks(last(sums, [len(sums)], [window]), window=0, **sizes)

        return no_window

    _wrap_choices(monkeypatch, without, blocks_without)
    _wrap_retrieval(monkeypatch, lambda scores: torch.where(scores.isinf(), -scores, scores))
    # Without moves the first entries stay, in the place of the last.
    monkeypatch.setattr(score_and_move.PassWork, "_moves_of", lambda *_: None)


Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


def _wrap_choices(monkeypatch: pytest.MonkeyPatch, of_keys: Wrapper, of_blocks: Wrapper) -> None:
    """Wraps what chooses tokens and entries, and what chooses blocks."""
    from vllm_kvx.worker.prefill import centrality, score_and_move

    monkeypatch.setattr(score_and_move, "select_kept", of_keys(score_and_move.select_kept))
    monkeypatch.setattr(score_and_move, "select_moves", of_keys(score_and_move.select_moves))
    monkeypatch.setattr(centrality, "select_kept", of_keys(centrality.select_kept))
    monkeypatch.setattr(centrality, "top_blocks", of_blocks(centrality.top_blocks))


def _wrap_retrieval(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor]) -> None:
    """A decode step reads by `change` of its scores, (heads, units)."""
    from vllm_kvx.indexes.table import INDEXES

    def changed(score: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args: change(score(*args))

    for index in INDEXES.values():
        monkeypatch.setattr(index, "score_in_torch", changed(index.score_in_torch))

"""What scores the keys of prompts that are in: one launch for all prompts of a family in a layer.

F prompts, H query heads, G KV heads, D channels, W the longest window of the server.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from vllm_kvx.equations.saliency import per_kv_head
from vllm_kvx.ops.paged import PagedKV


@dataclass(frozen=True)
class LayerView:
    """One layer's attention in the pass that scores its keys.

    Attributes:
        query: (N, H, D) of the pass's rows, the model's dtype.
        early_queries: (slots, W, H, D), window queries that ran in earlier chunks.
        paged: keys and values.
        scale: factor of query times key before the softmax. key_scale: what a stored key is
            multiplied with to get the key, for an fp8 cache.
        soft_cap: of the scaled products, sinks: (H,), as ``equations.softmax`` has them; None
            where the model's attention has none.
        value_factors: (H, D, D) as `value_norms` takes them; None where the layout has no room.
    """

    query: Tensor
    early_queries: Tensor
    paged: PagedKV
    scale: float
    key_scale: float
    soft_cap: float | None = None
    sinks: Tensor | None = None
    value_factors: Tensor | None = None


@dataclass(frozen=True)
class ScoredPrompts:
    """The prompts whose keys one family scores in a layer; everything of them on the device.

    Attributes:
        block_tables: (F, max_blocks) int32 of the layer's KV group.
        num_keys, windows, kernels, caps: (F,) int32, parameters of each prompt; caps are the
            entries that stay by these scores, the window included.
        offsets: (F + 1,) int64, where each prompt's keys begin in the scores.
        max_num_keys, total_keys, max_window: on the host. pools: whether any kernel is above 1.
        window_rows: (F * W,) int64 rows of the pass that hold the window's queries.
        early: prompts, (n,) int64, whose window's queries are all in `early_queries`, and their
            slots there, (n,) int64; None if there are none.
    """

    block_tables: Tensor
    num_keys: Tensor
    windows: Tensor
    kernels: Tensor
    caps: Tensor
    offsets: Tensor
    max_num_keys: int
    total_keys: int
    max_window: int
    pools: bool
    window_rows: Tensor
    early: tuple[Tensor, Tensor] | None

    def window_queries(self, layer: LayerView) -> Tensor:
        """(F, W, H, D) queries of the windows in order; rows past a window hold anything."""
        queries = layer.query.index_select(0, self.window_rows)
        queries = queries.view(len(self.num_keys), self.max_window, *layer.query.shape[1:])
        if self.early is not None:
            prompts, slots = self.early
            queries[prompts] = layer.early_queries[slots, : self.max_window]
        return queries


class KeyScores(NamedTuple):
    """Scores of every key.

    Attributes:
        scores: (G, total_keys) float32, at least 0; larger stays.
        unpooled: (G, total_keys) float32, what decides among equal scores: the scores before
            pooling. None where nothing is pooled; the order of the keys then decides.
        weighted: (G, total_keys) float32, what ranks the keys that `scores` do not choose, until
            `Score.settled` makes one score of both. None in a family that has one already.
    """

    scores: Tensor
    unpooled: Tensor | None = None
    weighted: Tensor | None = None


class Score(ABC):
    """A family of scores; ``ScoreSpec.family`` names it. It has no state."""

    @abstractmethod
    def score(self, prompts: ScoredPrompts, layer: LayerView) -> KeyScores:
        """Scores of every key by each KV head.

        What a prompt gets does not depend on the others. Columns of window keys are not read.
        """

    def over_heads(self, scores: Tensor) -> Tensor:
        """Makes scores of every KV head one for all.

        scores: (G, n) float32, the heads of all ranks in their order. Returns: (1, n) float32.
        """
        return per_kv_head(scores, 1)

    def settled(self, total: KeyScores, prompts: ScoredPrompts) -> KeyScores:
        """The scores for all heads as they choose; total: each part after `over_heads`."""
        return total

    def carry(self, before: Tensor | None, now: Tensor, decay: float) -> Tensor:
        """The sum over layers, (n,): `decay` times what it was plus `now` (StructKV Eq. 3).

        before: changed in place; None in the first layer.
        """
        return now.clone() if before is None else before.mul_(decay).add_(now)

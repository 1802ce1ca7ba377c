"""States of cached prompts in the KV cache's blocks: copied into the stash, and out of it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.kv_cache_interface import KVCacheConfig

from vllm_kvx.cache.messages import StateBlocks
from vllm_kvx.cache.pool_capacity import policy_groups
from vllm_kvx.cache.states import StateRows
from vllm_kvx.worker.layer_hooks import LayerHooks
from vllm_kvx.worker.prefill.stash import Stash

# Tokens whose states are copied at a time.
MOST_TOKENS = 8192


class HasCache(Protocol):
    """An attention layer, of which vLLM may bind the cache anew."""

    kv_cache: Tensor


class PrefixStates:
    """What a server with a stash reads and fills of the blocks of ``cache/states``.

    in_step: by request id, what the step reads and fills; set before it begins.
    """

    def __init__(self, stash: Stash | None, rows: StateRows, layers: Sequence[HasCache]) -> None:
        """layers: of one KV group; their caches are (num_blocks, ...), any strides."""
        self.in_step: Mapping[str, StateBlocks] = {}
        self._stash, self._rows, self._layers = stash, rows, layers
        self._to_save: list[tuple[np.ndarray, tuple[int, ...]]] = []

    @classmethod
    def of(
        cls,
        stash: Stash | None,
        kv_cache_config: KVCacheConfig,
        vllm_config: VllmConfig,
        hooks: LayerHooks,
    ) -> "PrefixStates":
        """Over the cache that vLLM has just given to the layers."""
        rows = StateRows.of(kv_cache_config, vllm_config)
        names = max((group.layer_names for group in policy_groups(kv_cache_config)), key=len)
        layers = [hook.layer for hook in hooks.layers if hook.layer.layer_name in set(names)]
        return cls(stash, rows, layers)

    def restore(self) -> None:
        """Fills the stash with states that requests take from the cache, before the forward pass.

        Where the step's own states will lie is read here too: pages may have another owner on the
        host by the time they are saved.
        """
        size, in_step, self._to_save = self._rows.tokens, self.in_step, []
        for req_id, blocks in in_step.items():
            stash = self._stash
            assert stash is not None
            if blocks.read:
                self.copy_in(stash.rows(req_id, 0, len(blocks.read) * size), blocks.read)
            if blocks.write:
                spans = [stash.rows(req_id, i * size, (i + 1) * size) for i in blocks.places]
                self._to_save.append((np.concatenate(spans), blocks.write))

    def save(self) -> None:
        """Copies the states that the forward pass completed into their blocks, after it."""
        to_save, self._to_save = self._to_save, []
        for rows, blocks in to_save:
            self.copy_out(rows, blocks)

    # Not above: in most steps there is nothing to copy, and entering it takes host time.
    @torch.inference_mode()
    def copy_in(self, rows: np.ndarray, blocks: Sequence[int]) -> None:
        """Copies the states of whole blocks to rows of the stash, (n * tokens,)."""
        states = self._states
        for ids, at in self._slices(rows, blocks):
            pages = [
                layer.kv_cache.index_select(0, ids).view(len(ids), -1) for layer in self._layers
            ]
            used = [page.view(torch.uint8)[:, : self._page_bytes] for page in pages]
            found = torch.stack(used, dim=1).view(states.dtype).view(len(ids), -1, states.shape[1])
            states.index_copy_(0, at, found[:, : self._rows.tokens].reshape(len(at), -1))

    @torch.inference_mode()
    def copy_out(self, rows: np.ndarray, blocks: Sequence[int]) -> None:
        """Copies rows of the stash, (n * tokens,), to whole blocks."""
        states, room = self._states, self._rows.per_page * self._rows.pages
        for ids, at in self._slices(rows, blocks):
            found = states.new_zeros(len(ids), room, states.shape[1])
            taken = states.index_select(0, at).view(len(ids), -1, states.shape[1])
            found[:, : self._rows.tokens] = taken
            by_page = found.view(len(ids), self._rows.pages, -1).view(torch.uint8)
            for number, layer in enumerate(self._layers):
                page = layer.kv_cache.index_select(0, ids)
                page.view(len(ids), -1).view(torch.uint8)[:, : self._page_bytes] = by_page[
                    :, number
                ]
                layer.kv_cache.index_copy_(0, ids, page)

    def _slices(self, rows: np.ndarray, blocks: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """Block ids and rows, a bounded number at a time: the copies take memory for a moment."""
        size, step = self._rows.tokens, max(MOST_TOKENS // self._rows.tokens, 1)
        for first in range(0, len(blocks), step):
            some = blocks[first : first + step]
            at = rows[first * size : (first + len(some)) * size]
            yield self._ints(some), self._ints(at)

    @property
    def _states(self) -> Tensor:
        assert self._stash is not None
        return self._stash.states

    @property
    def _page_bytes(self) -> int:
        """Of a page, those that hold states."""
        states = self._states
        return self._rows.per_page * states.shape[1] * states.element_size()

    def _ints(self, values: Sequence[int] | np.ndarray) -> Tensor:
        array = np.asarray(values, dtype=np.int64)
        return async_tensor_h2d(array, device=self._states.device)

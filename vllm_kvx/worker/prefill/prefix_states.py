"""States of cached prompts in the KV cache's blocks: copied into the stash, and out of it."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.kv_cache_interface import KVCacheConfig

from vllm_kvx.cache.states import StateBlocks, StateRows
from vllm_kvx.worker.layer_hooks import LayerHooks
from vllm_kvx.worker.prefill.stash import Stash


class PrefixStates:
    """What a server with a stash reads and fills of the blocks of ``cache/states``.

    in_step: by request id, what the step reads and fills; set before it begins.
    """

    def __init__(self, stash: Stash | None, rows: StateRows, caches: Sequence[Tensor]) -> None:
        """caches: the layers' of one KV group, (num_blocks, ...) each, any strides."""
        self.in_step: Mapping[str, StateBlocks] = {}
        self._stash, self._rows, self._caches = stash, rows, caches
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
        names = max((group.layer_names for group in kv_cache_config.kv_cache_groups), key=len)
        layers = [hook.layer for hook in hooks.layers if hook.layer.layer_name in set(names)]
        return cls(stash, rows, [layer.kv_cache for layer in layers])

    def restore(self) -> None:
        """Before the forward pass: the stash holds what requests took from the cache.

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
        """After the forward pass: what it completed goes into blocks."""
        to_save, self._to_save = self._to_save, []
        for rows, blocks in to_save:
            self.copy_out(rows, blocks)

    def copy_in(self, rows: np.ndarray, blocks: Sequence[int]) -> None:
        """Copies the states of whole blocks to rows of the stash, (n * tokens,)."""
        states, ids = self._states, self._ints(blocks)
        pages = [cache.index_select(0, ids) for cache in self._caches]
        flat = torch.stack([page.reshape(len(blocks), -1) for page in pages], dim=1)
        flat = flat.view(torch.uint8)[:, :, : self._page_bytes].contiguous().view(states.dtype)
        found = flat.view(len(blocks), -1, states.shape[1])[:, : self._rows.tokens]
        states.index_copy_(0, self._ints(rows), found.reshape(len(rows), -1))

    def copy_out(self, rows: np.ndarray, blocks: Sequence[int]) -> None:
        """Copies rows of the stash, (n * tokens,), to whole blocks."""
        states, ids = self._states, self._ints(blocks)
        count, room = len(blocks), self._rows.per_page * self._rows.pages
        found = states.new_zeros(count, room, states.shape[1])
        found[:, : self._rows.tokens] = states.index_select(0, self._ints(rows)).view(
            count, -1, states.shape[1]
        )
        by_page = found.view(count, self._rows.pages, -1).view(torch.uint8)
        for number, cache in enumerate(self._caches):
            page = cache.index_select(0, ids)
            held = page.view(count, -1).view(torch.uint8)
            held[:, : self._page_bytes] = by_page[:, number]
            cache.index_copy_(0, ids, page)

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
